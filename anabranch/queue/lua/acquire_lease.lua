#!lua flags=allow-oom
-- Takes the lease if it is free or already ours, and raises the epoch (a repeat after a lost reply raises it again).
-- KEYS[1] lease  KEYS[2] epoch  KEYS[3] state   ARGV[1] owner  ARGV[2] milliseconds
-- Answers {'leader', epoch} or {'standby', owner of the lease, milliseconds left}.
-- The epoch is in two places: whichever is damaged, it never falls.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return {'standby', owner, redis.call('PTTL', KEYS[1])}
end

local function kind_of(key)
  local reply = redis.call('TYPE', key)
  return type(reply) == 'table' and reply.ok or reply
end

local function number(text, pattern)
  local digits = text and string.match(text, pattern)
  return digits and #digits <= 15 and tonumber(digits) or 0
end

local epoch, kind = 0, kind_of(KEYS[3])
if kind == 'hash' then epoch = number(redis.call('HGET', KEYS[3], 'epoch'), '^(%d+)$') end
if kind_of(KEYS[2]) == 'string' then epoch = math.max(epoch, number(redis.call('GET', KEYS[2]), '^(%d+):')) end
local raised = string.format('%.0f', epoch + 1)
if kind == 'hash' or kind == 'none' then redis.call('HSET', KEYS[3], 'epoch', raised) end
redis.call('SET', KEYS[2], raised .. ':' .. ARGV[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'leader', raised}
