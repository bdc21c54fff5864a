#!lua flags=allow-oom
-- One write of the leader: fence, deduplicate, check everything, then only writes that cannot fail.
-- (Lua does not roll back. `allow-oom`: these writes are small and many of them free memory, so they are what
-- makes room again on a full server; and memory cannot run out between two of them.)
--
-- KEYS[1] epoch    KEYS[2] state    KEYS[3] broadcast    KEYS[4..] keys the operations name by index
-- ARGV[1] `epoch:owner` of the writer, ARGV[2] epoch, ARGV[3] number of this write within the epoch
-- ARGV[4..] operations, each: name, index into KEYS, count of arguments, arguments
-- Answers {'ok' | 'already', last broadcast number}, {'fenced', current holder}, {'lost', what} (this server lacks
-- writes that it acknowledged) or {'failed', what}.

local holder = redis.call('GET', KEYS[1])
if holder ~= ARGV[1] then
  return {'fenced', holder or ''}
end

local function kind_of(key)
  local reply = redis.call('TYPE', key)
  return type(reply) == 'table' and reply.ok or reply
end

if kind_of(KEYS[2]) ~= 'hash' and kind_of(KEYS[2]) ~= 'none' then
  return {'failed', 'state is not a hash'}
end

local epoch, number = ARGV[2], tonumber(ARGV[3])
local last = redis.call('HGET', KEYS[2], 'write')
local last_number = 0
if last then
  local e, n = string.match(last, '^(%d+):(%d+)$')
  if e == epoch then last_number = tonumber(n) end
end
if number <= last_number then
  return {'already', redis.call('HGET', KEYS[2], 'broadcast') or '0'}
end
if number ~= last_number + 1 then
  return {'lost', 'write ' .. number .. ' would follow ' .. last_number}
end

local broadcast = redis.call('HGET', KEYS[2], 'broadcast') or '0'
if not string.match(broadcast, '^%d+$') then
  return {'failed', 'state broadcast is not a number'}
end

local TYPES = {
  hset = 'hash', hincrby = 'hash', hdel = 'hash', absent = 'hash',
  xadd = 'stream', xdel = 'stream', trim = 'stream', drop_if_empty = 'stream', broadcast = 'stream',
  set = 'string', persist = 'string', expire = 'string', exists = 'string',
}

-- These touch keys that members write: whatever they made of them must not stop a commit.
local BY_OTHERS = {unlink = true, xdel = true, drop_if_empty = true}

-- First pass: checks only.
local operations = {}
local at = 4
while at <= #ARGV do
  local name, key, count = ARGV[at], KEYS[tonumber(ARGV[at + 1])], tonumber(ARGV[at + 2])
  local arguments = {}
  for i = 1, count do arguments[i] = ARGV[at + 2 + i] end
  at = at + 3 + count
  local kind, wanted = kind_of(key), TYPES[name]
  if not BY_OTHERS[name] then
    if not wanted then return {'failed', 'unknown operation ' .. name} end
    if kind ~= 'none' and kind ~= wanted then
      return {'failed', key .. ' is a ' .. kind .. ', expected ' .. wanted}
    end
  end
  if name == 'exists' and kind == 'none' then
    return {'failed', 'missing ' .. key}
  elseif name == 'absent' and redis.call('HEXISTS', key, arguments[1]) == 1 then
    return {'failed', key .. ' already has ' .. arguments[1]}
  elseif name == 'hincrby' then
    local value = redis.call('HGET', key, arguments[1])
    if value and not string.match(value, '^-?%d+$') then
      return {'failed', key .. ' ' .. arguments[1] .. ' is not an integer'}
    end
  end
  if not (BY_OTHERS[name] and name ~= 'unlink' and kind ~= 'stream') then
    operations[#operations + 1] = {name, key, arguments}
  end
end

-- Second pass: writes only.
for _, operation in ipairs(operations) do
  local name, key, a = operation[1], operation[2], operation[3]
  if name == 'hset' then
    redis.call('HSET', key, unpack(a))
  elseif name == 'hincrby' then
    -- Amounts have at most 16 digits: a figure stops growing at 10^17 instead of overflowing.
    if #(redis.call('HGET', key, a[1]) or '') < 18 then redis.call('HINCRBY', key, a[1], a[2]) end
  elseif name == 'hdel' then
    redis.call('HDEL', key, unpack(a))
  elseif name == 'broadcast' then
    redis.call('HINCRBY', KEYS[2], 'broadcast', 1)
    broadcast = redis.call('HGET', KEYS[2], 'broadcast')
    redis.call('XADD', key, 'MAXLEN', '~', a[1], '*', 'n', broadcast, 'm', a[2])
  elseif name == 'xadd' then
    redis.call('XADD', key, '*', unpack(a))
  elseif name == 'xdel' then
    redis.call('XDEL', key, unpack(a))
  elseif name == 'trim' then
    redis.call('XTRIM', key, 'MAXLEN', '~', a[1])
  elseif name == 'drop_if_empty' then
    if redis.call('XLEN', key) == 0 then redis.call('UNLINK', key) end
  elseif name == 'set' then
    redis.call('SET', key, a[1])
  elseif name == 'persist' then
    redis.call('PERSIST', key)
  elseif name == 'expire' then
    redis.call('PEXPIRE', key, a[1])
  elseif name == 'unlink' then
    redis.call('UNLINK', key)
  end
end
redis.call('HSET', KEYS[2], 'write', epoch .. ':' .. ARGV[3])
return {'ok', broadcast}
