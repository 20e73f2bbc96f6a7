-- Reads and writes the parts of `cluster.store.parts` in one step: nobody sees half a part, and a reader's memory is
-- bounded before anything is sent.
--
-- KEYS: writers (zset: each writer by the time of its last exchange), the own part (hash).
-- ARGV: own name, prefix of the parts' keys, expiry in ms, most writers, most fields of a part, most bytes of a value,
--   most bytes of the answer, what to do with the own part, number of fields to set, these fields and their values by
--   turns, number of fields to remove, these fields, and by turns the writers whose parts are known and their versions.
--   The own part is 'replace'd, 'update'd, or left alone ('read').
-- Answers: 0 if the own part to be updated is missing, else 1; how many parts and values were left out; the names of
--   all other writers; and of each part that is not known: writer, version, its fields and values by turns.
--
-- A version is the server's time of the last change. Its field is no valid UTF-8, so that no name collides with it.
local VERSION = '\255version'

local writers, own = KEYS[1], KEYS[2]
local writer, prefix, expiry_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local most_writers, most_fields = tonumber(ARGV[4]), tonumber(ARGV[5])
local most_value, most_bytes = tonumber(ARGV[6]), tonumber(ARGV[7])
local mode = ARGV[8]
local remove = 10 + 2 * tonumber(ARGV[9])
local known_from = remove + 1 + tonumber(ARGV[remove])

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function delete_if_not(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end

local function write()
  if mode == 'replace' then
    redis.call('DEL', own)
  elseif redis.call('EXISTS', own) == 0 then
    return false
  end
  for i = 10, remove - 1, 2 do redis.call('HSET', own, ARGV[i], ARGV[i + 1]) end
  for i = remove + 1, known_from - 1 do redis.call('HDEL', own, ARGV[i]) end
  if mode == 'replace' or known_from > 11 then
    redis.call('HSET', own, VERSION, time[1] .. string.format('%06d', time[2]))
  end
  redis.call('PEXPIRE', own, expiry_ms)
  redis.call('ZADD', writers, now_ms, writer)
  redis.call('PEXPIRE', writers, expiry_ms)
  return true
end

delete_if_not(writers, 'zset')
delete_if_not(own, 'hash')
if mode ~= 'read' and not write() then return {0, 0, {}, {}} end
redis.call('ZREMRANGEBYSCORE', writers, '-inf', now_ms - expiry_ms)
local kept = most_writers + (mode == 'read' and 0 or 1)
for _, surplus in ipairs(redis.call('ZRANGE', writers, 0, -1 - kept)) do
  redis.call('ZREM', writers, surplus)
  redis.call('DEL', prefix .. surplus)
end

local known = {}
for i = known_from, #ARGV - 1, 2 do known[ARGV[i]] = ARGV[i + 1] end

local names, news, left_out, bytes = {}, {}, 0, 0
local function read(other)
  local fields = redis.pcall('HLEN', prefix .. other)
  if fields == 0 then return end
  if type(fields) ~= 'number' or fields > most_fields + 1 then
    left_out = left_out + 1
    return
  end
  local version = redis.call('HGET', prefix .. other, VERSION) or ''
  names[#names + 1] = other
  if version ~= '' and known[other] == version then return end
  local part, fitting, size = redis.call('HGETALL', prefix .. other), {}, 0
  local oversized = 0
  for i = 1, #part, 2 do
    local length = #part[i] + #part[i + 1]
    if part[i] == VERSION then
      -- It is answered apart.
    elseif #part[i + 1] > most_value or size + length > most_bytes then
      oversized = oversized + 1
    else
      size = size + length
      fitting[#fitting + 1] = part[i]
      fitting[#fitting + 1] = part[i + 1]
    end
  end
  -- What does not fit now is read by the next exchange, which knows the others.
  if bytes + size > most_bytes then return end
  bytes = bytes + size
  left_out = left_out + oversized
  news[#news + 1] = {other, version, fitting}
end
for _, other in ipairs(redis.call('ZREVRANGE', writers, 0, -1)) do
  if other ~= writer then read(other) end
end
return {1, left_out, names, news}
