#!lua flags=allow-oom
-- Renews (milliseconds > 0) or releases (0) the lease of the epoch's holder.
-- KEYS[1] lease  KEYS[2] epoch   ARGV[1] `epoch:owner`  ARGV[2] owner  ARGV[3] milliseconds
-- Answers {'ok'} or {'fenced', current holder}.
local holder = redis.call('GET', KEYS[2])
local owner = redis.call('GET', KEYS[1])
if holder ~= ARGV[1] or (owner and owner ~= ARGV[2]) then
  return {'fenced', holder or ''}
end
if ARGV[3] == '0' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return {'ok'}
