#!lua flags=allow-oom
-- Renames keys that cannot be read, so that a copy can take their place and people can still look at them.
-- KEYS[1] epoch  KEYS[2..] pairs of a key and its other name   ARGV[1] `epoch:owner` of the writer
-- Answers {'ok'} or {'fenced', current holder}.
local holder = redis.call('GET', KEYS[1])
if holder ~= ARGV[1] then
  return {'fenced', holder or ''}
end
for i = 2, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i]) == 1 then redis.call('RENAME', KEYS[i], KEYS[i + 1]) end
end
return {'ok'}
