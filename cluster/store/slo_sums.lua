-- The sums of one program's turns, in one hash. ARGV[1] is the operation.
local key = KEYS[1]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local SUMS = {'turns', 'late', 'failed', 'unfinished', 'tokens', 'us'}

local operations = {}

-- ARGV: expiry in ms, ms since the earliest of these turns arrived, and the sums. Answers whether this is all that is known
-- of the program.
function operations.add()
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', key) end
  local arrived, known = now_ms - tonumber(ARGV[3]), tonumber(redis.call('HGET', key, 'arrived'))
  local first = known and 0 or 1
  if not known or arrived < known then redis.call('HSET', key, 'arrived', string.format('%.0f', arrived)) end
  for i, field in ipairs(SUMS) do redis.call('HINCRBY', key, field, ARGV[i + 3]) end
  redis.call('HSET', key, 'seen', string.format('%.0f', now_ms))
  redis.call('PEXPIRE', key, ARGV[2])
  return first
end

-- ARGV: ms for which the program must have been idle (0: it has ended), ms to remember that it is judged (0: forget it).
-- Answers 0 nothing to judge, 1 judge it, 2 nothing is known of it; and how long it was seen, in ms, with the sums.
function operations.judge()
  if redis.call('TYPE', key).ok ~= 'hash' then return {2, {}} end
  local judged, seen, arrived = unpack(redis.call('HMGET', key, 'judged', 'seen', 'arrived'))
  local values = redis.call('HMGET', key, unpack(SUMS))
  seen = tonumber(seen or 0)
  if tonumber(ARGV[2]) > 0 and now_ms - seen < tonumber(ARGV[2]) then return {0, {}} end
  if ARGV[3] == '0' then
    redis.call('DEL', key)
  else
    redis.call('HSET', key, 'judged', '1')
    redis.call('PEXPIRE', key, ARGV[3])
  end
  if judged then return {0, {}} end
  local answer = {math.max(0, seen - tonumber(arrived or seen))}
  for i = 1, #SUMS do answer[i + 1] = tonumber(values[i] or 0) end
  return {1, answer}
end

return operations[ARGV[1]]()
