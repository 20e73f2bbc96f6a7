-- Conversations: KEYS[1] is a hash of the creation, the metadata and the size in bytes of the entries, KEYS[2] the list of the entries.
-- ARGV[1] is the operation, ARGV[2] the expiry in ms. Each answer is what became of it: `ok`, `unknown`, `moved` or `full`.
local record, list = KEYS[1], KEYS[2]

local function known()
  return redis.call('TYPE', record).ok == 'hash' and redis.call('HEXISTS', record, 'created') == 1
end

local function keep()
  redis.call('PEXPIRE', record, ARGV[2])
  redis.call('PEXPIRE', list, ARGV[2])
end

-- The entries are ARGV from `first` on. Returns false if there is no room for them.
local function push(first, most, most_bytes)
  local bytes = tonumber(redis.call('HGET', record, 'bytes') or '0')
  for i = first, #ARGV do bytes = bytes + #ARGV[i] end
  if redis.call('LLEN', list) + #ARGV - first + 1 > most or bytes > most_bytes then return false end
  redis.call('HSET', record, 'bytes', string.format('%.0f', bytes))
  for i = first, #ARGV do redis.call('RPUSH', list, ARGV[i]) end
  return true
end

local operations = {}

-- ARGV: largest number of entries, largest size in bytes, creation, metadata, entries.
function operations.create()
  redis.call('DEL', record, list)
  redis.call('HSET', record, 'created', ARGV[5], 'metadata', ARGV[6])
  if not push(7, tonumber(ARGV[3]), tonumber(ARGV[4])) then
    redis.call('DEL', record, list)
    return {'full'}
  end
  keep()
  return {'ok'}
end

-- Answers with creation, metadata and entries, too.
function operations.load()
  if not known() then return {'unknown'} end
  keep()
  local found = redis.call('HMGET', record, 'created', 'metadata')
  local answer = {'ok', found[1], found[2]}
  for _, entry in ipairs(redis.call('LRANGE', list, 0, -1)) do answer[#answer + 1] = entry end
  return answer
end

-- ARGV: largest number of entries, largest size in bytes, number of entries that the caller knows or -1, entries.
function operations.append()
  if not known() then return {'unknown'} end
  local expected = tonumber(ARGV[5])
  if expected >= 0 and redis.call('LLEN', list) ~= expected then return {'moved'} end
  if not push(6, tonumber(ARGV[3]), tonumber(ARGV[4])) then return {'full'} end
  keep()
  return {'ok'}
end

-- ARGV: metadata.
function operations.describe()
  if not known() then return {'unknown'} end
  redis.call('HSET', record, 'metadata', ARGV[3])
  keep()
  return {'ok'}
end

function operations.delete()
  if not known() then return {'unknown'} end
  redis.call('DEL', record, list)
  return {'ok'}
end

return operations[ARGV[1]]()
