#!lua flags=allow-oom
-- Takes the lease if it is free or already ours, and raises the epoch (a repeat after a lost reply raises it again).
-- KEYS[1] lease  KEYS[2] epoch  KEYS[3] state   ARGV[1] owner  ARGV[2] milliseconds
-- Answers {'leader', epoch} or {'standby', owner of the lease, milliseconds left}.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return {'standby', owner, redis.call('PTTL', KEYS[1])}
end
redis.call('HINCRBY', KEYS[3], 'epoch', 1)
local epoch = redis.call('HGET', KEYS[3], 'epoch')
redis.call('SET', KEYS[2], epoch .. ':' .. ARGV[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'leader', epoch}
