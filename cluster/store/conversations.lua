-- The conversations of one tenant.
-- KEYS: record (hash of one conversation: creation, metadata, the size in bytes of the metadata and the entries, and for how many
-- entries and when, in ms, the responses were renewed), the list of its entries, `kept` (zset: the tenant's conversations by the time in ms when they expire), `sizes` (hash: the bytes of each of them,
-- and their sum at the field `/`).
-- ARGV[1] is the operation, ARGV[2] the expiry in ms, ARGV[3] the quoted name of the conversation. ARGV[4] to ARGV[7] are the largest
-- number of entries and of bytes of a conversation, and the largest number and bytes of the tenant's conversations.
-- Each answer is what became of it: `ok`, `unknown`, `moved`, or what has no room: `full` (the conversation), `many` or `quota` (the
-- tenant's conversations).
local record, list, kept, sizes = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local expiry_ms, name = tonumber(ARGV[2]), ARGV[3]
local most_entries, most_bytes, most_conversations, most_tenant_bytes =
  tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local FIRST = 8  -- the first argument of an operation

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function number(text) return tonumber(text or '0') end

local function known()
  return redis.call('TYPE', record).ok == 'hash' and redis.call('HEXISTS', record, 'created') == 1
end

local function keep()
  redis.call('PEXPIRE', record, expiry_ms)
  redis.call('PEXPIRE', list, expiry_ms)
  redis.call('ZADD', kept, now_ms + expiry_ms, name)
  for _, key in ipairs({kept, sizes}) do
    if redis.call('PTTL', key) < expiry_ms then redis.call('PEXPIRE', key, expiry_ms) end
  end
end

local function forget(one)
  redis.call('ZREM', kept, one)
  redis.call('HINCRBY', sizes, '/', string.format('%.0f', 0 - number(redis.call('HGET', sizes, one))))
  redis.call('HDEL', sizes, one)
end

local function sweep()
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', kept, '-inf', now_ms)) do forget(one) end
end

-- Returns what has no room for a conversation of this many bytes, if anything.
local function lacks(bytes)
  if bytes > most_bytes then return 'full' end
  local more = bytes - number(redis.call('HGET', sizes, name))
  if more > 0 and number(redis.call('HGET', sizes, '/')) + more > most_tenant_bytes then return 'quota' end
end

local function set_size(bytes)
  local more = bytes - number(redis.call('HGET', sizes, name))
  redis.call('HSET', record, 'bytes', string.format('%.0f', bytes))
  redis.call('HSET', sizes, name, string.format('%.0f', bytes))
  redis.call('HINCRBY', sizes, '/', string.format('%.0f', more))
end

local function bytes_of_arguments(first)
  local bytes = 0
  for i = first, #ARGV do bytes = bytes + #ARGV[i] end
  return bytes
end

local function push(first)
  for i = first, #ARGV do redis.call('RPUSH', list, ARGV[i]) end
end

local operations = {}

-- ARGV: creation, metadata, entries.
function operations.create()
  sweep()
  redis.call('DEL', record, list)
  forget(name)
  local bytes = bytes_of_arguments(FIRST + 1)
  if #ARGV - FIRST - 1 > most_entries then return {'full'} end
  if redis.call('ZCARD', kept) >= most_conversations then return {'many'} end
  local lacking = lacks(bytes)
  if lacking then return {lacking} end
  redis.call('HSET', record, 'created', ARGV[FIRST], 'metadata', ARGV[FIRST + 1])
  set_size(bytes)
  push(FIRST + 2)
  keep()
  return {'ok'}
end

-- ARGV: ms after which all responses are renewed again. Answers with creation, metadata, the number of entries whose responses need
-- not be renewed now, and the entries, too. `renewed` is called when the responses of the others have been renewed.
function operations.load()
  if not known() then return {'unknown'} end
  keep()
  local found = redis.call('HMGET', record, 'created', 'metadata', 'renewed', 'renewed_ms')
  local fresh = now_ms - number(found[4]) < tonumber(ARGV[FIRST])
  local answer = {'ok', found[1], found[2], fresh and found[3] or '0'}
  for _, entry in ipairs(redis.call('LRANGE', list, 0, -1)) do answer[#answer + 1] = entry end
  return answer
end

-- ARGV: number of leading entries whose responses are renewed now, 1 if all of these were renewed at this time. Redis refuses a script
-- without memory at its first write, if that needs memory: the first one needs none, so that a full store can still be read.
function operations.renewed()
  if not known() then return {'unknown'} end
  redis.call('PEXPIRE', record, expiry_ms)
  redis.call('HSET', record, 'renewed', ARGV[FIRST])
  if ARGV[FIRST + 1] == '1' then redis.call('HSET', record, 'renewed_ms', string.format('%.0f', now_ms)) end
  return {'ok'}
end

-- ARGV: number of entries that the caller knows or -1, entries.
function operations.append()
  if not known() then return {'unknown'} end
  sweep()
  local expected, there = tonumber(ARGV[FIRST]), redis.call('LLEN', list)
  if expected >= 0 and there ~= expected then return {'moved'} end
  if there + #ARGV - FIRST > most_entries then return {'full'} end
  local bytes = number(redis.call('HGET', record, 'bytes')) + bytes_of_arguments(FIRST + 1)
  local lacking = lacks(bytes)
  if lacking then return {lacking} end
  set_size(bytes)
  push(FIRST + 1)
  keep()
  return {'ok'}
end

-- ARGV: metadata.
function operations.describe()
  if not known() then return {'unknown'} end
  sweep()
  local found = redis.call('HMGET', record, 'bytes', 'metadata')
  local bytes = number(found[1]) - #found[2] + #ARGV[FIRST]
  local lacking = lacks(bytes)
  if lacking then return {lacking} end
  set_size(bytes)
  redis.call('HSET', record, 'metadata', ARGV[FIRST])
  keep()
  return {'ok'}
end

function operations.delete()
  if not known() then return {'unknown'} end
  redis.call('DEL', record, list)
  forget(name)
  return {'ok'}
end

return operations[ARGV[1]]()
