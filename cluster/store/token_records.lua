-- The recorded tokens of programs, see `cluster.store.token_records`. A program's name is TENANT/PROGRAM, percent-encoded.
--
--     program:NAME     hash: turns (the number of turns that began), bytes, base (the last turn that was completed), and of turn N
--                      N:head, N:tail (opaque), N:base, N:shared, N:prompt (its prompt: the first bytes of turn N:base's context,
--                      and the bytes after them); key:KEY (the number of the turn that began with this key)
--     context:NAME     string: the token ids of the context after the turn `base`
--     bytes            hash: bytes by tenant, and the sum of all at the field `/`
--     written          zset: names by the time of their last write in ms
--     tenant:TENANT    zset: the tenant's names, the same
--
-- KEYS[1] is one of the keys, for whoever has to find their node. ARGV[1] is the operation, ARGV[2] the retention in ms.
local space = 'caesura:v1:{records}:'
local SWEPT = 32  -- the largest number of expired programs that one call deletes
local ID = 4

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function program(name) return space .. 'program:' .. name end
local function context(name) return space .. 'context:' .. name end
local function tenant_of(name) return string.match(name, '^[^/]*') end
local function number(text) return tonumber(text or '0') or 0 end

local function count(name, bytes)
  redis.call('HINCRBY', program(name), 'bytes', bytes)
  redis.call('HINCRBY', space .. 'bytes', tenant_of(name), bytes)
  redis.call('HINCRBY', space .. 'bytes', '/', bytes)
end

local function forget(name)
  local bytes = number(redis.call('HGET', program(name), 'bytes'))
  redis.call('DEL', program(name), context(name))
  redis.call('ZREM', space .. 'written', name)
  redis.call('ZREM', space .. 'tenant:' .. tenant_of(name), name)
  redis.call('HINCRBY', space .. 'bytes', '/', -bytes)
  if redis.call('HINCRBY', space .. 'bytes', tenant_of(name), -bytes) <= 0 then
    redis.call('HDEL', space .. 'bytes', tenant_of(name))
  end
end

local function has_turns(name)
  for turn = number(redis.call('HGET', program(name), 'turns')), 1, -1 do
    if redis.call('HEXISTS', program(name), turn .. ':head') == 1 then return true end
  end
  return false
end

local function sweep()
  local over = redis.call('ZRANGEBYSCORE', space .. 'written', '-inf', now - ARGV[2], 'LIMIT', 0, SWEPT)
  for _, name in ipairs(over) do forget(name) end
end

local function touch(name)
  redis.call('ZADD', space .. 'written', now, name)
  redis.call('ZADD', space .. 'tenant:' .. tenant_of(name), now, name)
end

-- The length of what two strings of token ids have in common at their beginning, in bytes.
local function shared(one, other)
  local low, high = 0, math.floor(math.min(#one, #other) / ID)
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    if string.sub(one, low * ID + 1, middle * ID) == string.sub(other, low * ID + 1, middle * ID) then
      low = middle
    else
      high = middle - 1
    end
  end
  return low * ID
end

local operations = {}

-- ARGV: name, head, largest bytes of a program, of a tenant, of all, key. Answers with `ok` and the turn's number, or with whose
-- memory is full. A turn of the same key begins once.
function operations.begin()
  sweep()
  local name, head, key = ARGV[3], ARGV[4], 'key:' .. ARGV[8]
  local known = redis.call('HGET', program(name), key)
  if known then return {'ok', tonumber(known)} end
  if number(redis.call('HGET', program(name), 'bytes')) >= tonumber(ARGV[5]) then return {'program'} end
  if number(redis.call('HGET', space .. 'bytes', tenant_of(name))) >= tonumber(ARGV[6]) then return {'tenant'} end
  if number(redis.call('HGET', space .. 'bytes', '/')) >= tonumber(ARGV[7]) then return {'all'} end
  local turn = redis.call('HINCRBY', program(name), 'turns', 1)
  redis.call('HSET', program(name), turn .. ':head', head, key, turn)
  count(name, #head + #key)
  touch(name)
  return {'ok', turn}
end

-- ARGV: name, turn, tail, prompt, output of the first answer. Answers with 1, or 0 if the turn is unknown. A turn that is written again
-- stays as it is.
function operations.finish()
  local name, turn, tail, prompt, output = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  if redis.call('HEXISTS', program(name), turn .. ':head') == 0 then return 0 end
  if redis.call('HEXISTS', program(name), turn .. ':tail') == 1 then return 1 end
  local last = redis.call('GET', context(name)) or ''
  local base = redis.call('HGET', program(name), 'base') or '0'
  local same = shared(prompt, last)
  local rest = string.sub(prompt, same + 1)
  redis.call('HSET', program(name), 'base', turn, turn .. ':base', base, turn .. ':shared', same, turn .. ':prompt', rest,
    turn .. ':tail', tail)
  redis.call('SET', context(name), prompt .. output)
  count(name, #rest + #tail + #prompt + #output - #last)
  touch(name)
  return 1
end

-- ARGV: name, turn, key. The turn that began with this key has failed, and is left out from now on. A program without turns is
-- forgotten. Its numbers then begin again, so that only the key shows whether a turn of this number is the one that failed.
function operations.drop()
  local name, turn = ARGV[3], ARGV[4]
  if redis.call('HGET', program(name), 'key:' .. ARGV[5]) ~= turn then return 0 end
  local head = redis.call('HGET', program(name), turn .. ':head')
  if not head or redis.call('HEXISTS', program(name), turn .. ':tail') == 1 then return 0 end
  redis.call('HDEL', program(name), turn .. ':head')
  count(name, -#head)
  if not has_turns(name) then forget(name) end
  return 1
end

-- ARGV: name. Answers with the number of turns that began, then for each of them head, tail, base, shared and prompt.
function operations.load()
  sweep()
  local name = ARGV[3]
  local turns = number(redis.call('HGET', program(name), 'turns'))
  local answer = {turns}
  for turn = 1, turns do
    local found = redis.call('HMGET', program(name), turn .. ':head', turn .. ':tail', turn .. ':base', turn .. ':shared',
      turn .. ':prompt')
    answer[#answer + 1] = found
  end
  return answer
end

-- ARGV: tenant, largest number, name after which the list goes on or ''. Answers with pairs of name and bytes, in the order of names.
function operations.list()
  sweep()
  local names = redis.call('ZRANGE', space .. 'tenant:' .. ARGV[3], 0, -1)
  table.sort(names)
  local answer = {}
  for _, name in ipairs(names) do
    if name > ARGV[5] and #answer < 2 * tonumber(ARGV[4]) then
      answer[#answer + 1] = name
      answer[#answer + 1] = number(redis.call('HGET', program(name), 'bytes'))
    end
  end
  return answer
end

-- ARGV: name, the number of the last turn that the caller knows, or 0. Answers with `ok`, `unknown` or, if more turns began, `newer`.
function operations.delete()
  local turns = number(redis.call('HGET', program(ARGV[3]), 'turns'))
  if turns == 0 then return 'unknown' end
  if tonumber(ARGV[4]) ~= 0 and turns ~= tonumber(ARGV[4]) then return 'newer' end
  forget(ARGV[3])
  return 'ok'
end

-- Answers with the bytes of all that have not expired.
function operations.sweep()
  sweep()
  return number(redis.call('HGET', space .. 'bytes', '/'))
end

return operations[ARGV[1]]()
