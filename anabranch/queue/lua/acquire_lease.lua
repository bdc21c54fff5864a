#!lua
-- Takes the lease if it is free (or already ours) and raises the epoch.
-- KEYS[1] lease  KEYS[2] epoch  KEYS[3] state   ARGV[1] owner  ARGV[2] milliseconds
-- Answers {'leader', epoch} or {'standby', owner of the lease}.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return {'standby', owner}
end
local epoch, holder = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+):(.*)$')
if not (owner and holder == ARGV[1]) then -- else: a repeat after a lost reply
  redis.call('HINCRBY', KEYS[3], 'epoch', 1)
  epoch = redis.call('HGET', KEYS[3], 'epoch')
  redis.call('SET', KEYS[2], epoch .. ':' .. ARGV[1])
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'leader', epoch}
