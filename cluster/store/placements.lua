-- Homes of programs: a value is "<epoch> <replica>", the epoch below 10^12, since Lua's numbers are exact that far. A strange
-- value counts as none.
--
-- ARGV[1] is the operation. The answer to `claim`, `move` and `get` is the home's epoch and replica, and whether a damaged
-- value was found.
local corrupt = 0

local function held(key)
  if redis.call('TYPE', key).ok == 'none' then return nil end
  local value = redis.call('TYPE', key).ok == 'string' and redis.call('STRLEN', key) <= 512 and redis.call('GET', key)
  local epoch, replica = string.match(value or '', '^([1-9]%d*) ([!-~]+)$')
  if epoch == nil or #epoch > 12 then corrupt = 1 return nil end
  return tonumber(epoch), replica
end

local function set(key, epoch, replica, expiry_ms)
  redis.call('SET', key, string.format('%.0f %s', epoch, replica), 'PX', expiry_ms)
  return {string.format('%.0f', epoch), replica, corrupt}
end

local function keep(key, epoch, replica, expiry_ms)
  redis.call('PEXPIRE', key, expiry_ms)
  return {string.format('%.0f', epoch), replica, corrupt}
end

local operations = {}

-- ARGV: replica, epoch, expiry in ms. A home of an older epoch is that of a Redis that has lost the newer ones.
function operations.claim(wanted, wanted_epoch, expiry_ms)
  local epoch, replica = held(KEYS[1])
  if epoch == nil or epoch < tonumber(wanted_epoch) then
    return set(KEYS[1], tonumber(wanted_epoch), wanted, expiry_ms)
  end
  return keep(KEYS[1], epoch, replica, expiry_ms)
end

-- ARGV: the epoch that is left, replica, expiry in ms.
function operations.move(left_epoch, wanted, expiry_ms)
  local epoch, replica = held(KEYS[1])
  if epoch == nil or epoch <= tonumber(left_epoch) then
    return set(KEYS[1], tonumber(left_epoch) + 1, wanted, expiry_ms)
  end
  return keep(KEYS[1], epoch, replica, expiry_ms)
end

function operations.get()
  local epoch, replica = held(KEYS[1])
  if epoch == nil then return {false, false, corrupt} end
  return {string.format('%.0f', epoch), replica, corrupt}
end

-- ARGV: the epoch that has ended. Answers whether there was a home to be forgotten.
function operations.forget(ended_epoch)
  local epoch = held(KEYS[1])
  if epoch == nil or epoch <= tonumber(ended_epoch) then return redis.call('DEL', KEYS[1]) end
  return 0
end

-- ARGV: expiry in ms, and what is expected of each key. Answers the places, from 1, of those that differ.
function operations.touch(expiry_ms)
  local others = {}
  for i, key in ipairs(KEYS) do
    local epoch, replica = held(key)
    if epoch == nil or string.format('%.0f %s', epoch, replica) ~= ARGV[i + 2] then
      others[#others + 1] = i
    else
      redis.call('PEXPIRE', key, expiry_ms)
    end
  end
  return others
end

return operations[ARGV[1]](ARGV[2], ARGV[3], ARGV[4])
