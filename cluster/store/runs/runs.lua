-- The Lua scripts of `cluster.store.runs.store`, each one step that nobody sees half done, and the names of the keys.
--
--     run:ID           hash: tenant, program, created_us, status, labels, owner, and while they apply closed, cancel,
--                      secret, idempotency (the name of its key), compact (only the first and the last item are left),
--                      repeated (a request with its idempotency key came again)
--     log:ID           stream: item n is the field `i` of the entry 0-(n+1); the entry 1-1 ends a closed log
--     open             zset: open runs by the end of their lease
--     ended            zset: TENANT/PROGRAM/ID of closed runs by the time when their keys expire
--     tenant:TENANT, program:TENANT/PROGRAM
--                      zsets: ids of runs by creation
--     idempotency:TENANT/KEY
--                      hash: run, fingerprint
--     gone:ID          string: the run was deleted or renounced a short time ago, so that its former owner must not write it again
--     wake:OWNER       stream: an entry says that the followers of a process want to read something else
--
-- Ids, tenants and the like are percent-encoded, so that a slash separates them. Times are microseconds of the Redis
-- server's clock. A run of which something is lost, or of another kind, counts as unknown.
--
-- KEYS[1] is one of the keys, for whoever has to find their node, and its beginning is that of all keys of logs of one kind; the
-- others' names follow from ids, some of which are
-- only read inside. Where memory is short, Redis refuses a script's first write if it takes some, and none after that: so
-- leases and ends begin with a write that takes none.
local space = string.match(KEYS[1], '^caesura:v1:{[^}]*}:')
local GONE_MS = 600000  -- time for which a deleted run cannot be created again; longer than a process is likely to be stopped
local GONE = 1024  -- the largest number of places of runs that are gone that one eviction removes

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function is(key, kind) return redis.call('TYPE', key).ok == kind end

local function free_of_others(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end

local function get(id, ...) return redis.call('HMGET', space .. 'run:' .. id, ...) end

local function is_run(id)
  if not is(space .. 'run:' .. id, 'hash') or not is(space .. 'log:' .. id, 'stream') then return false end
  local there = get(id, 'owner', 'tenant', 'program', 'created_us', 'status', 'labels')
  for i = 1, 6 do
    if not there[i] then return false end
  end
  return true
end

local function although_memory_is_short() redis.call('PERSIST', space .. 'open') end

local function head(id)
  return get(id, 'tenant', 'program', 'created_us', 'status', 'labels', 'closed', 'cancel')
end

local function length(id)
  local closed = get(id, 'closed')[1] and 1 or 0
  return redis.call('XLEN', space .. 'log:' .. id) - closed
end

local function entry(number) return string.format('0-%d', number + 1) end

-- The items are ARGV from `first` on, numbered from `start`.
local function differs(id, start, first)
  local log, there = space .. 'log:' .. id, length(id)
  for i = first, math.min(#ARGV, first + there - start - 1) do
    local at = entry(start + i - first)
    local found = redis.call('XRANGE', log, at, at)[1]
    if not found or found[2][2] ~= ARGV[i] then return true end
  end
  return false
end

local function append(id, start, first)
  local log, there = space .. 'log:' .. id, length(id)
  for i = math.max(first, first + there - start), #ARGV do
    redis.call('XADD', log, entry(start + i - first), 'i', ARGV[i])
  end
end

local function indexes(tenant, program)
  return space .. 'tenant:' .. tenant, space .. 'program:' .. tenant .. '/' .. program
end

-- Removes a place from `ended`, and its run from the lists of its tenant and its program.
local function leave(place)
  local tenant, program, id = string.match(place, '^([^/]*)/([^/]*)/([^/]*)$')
  if id then
    for _, index in ipairs({indexes(tenant, program)}) do
      if is(index, 'zset') then redis.call('ZREM', index, id) end
    end
  end
  redis.call('ZREM', space .. 'ended', place)
end

local function sweep(now)
  local ended = space .. 'ended'
  if not is(ended, 'zset') then return end
  for _, place in ipairs(redis.call('ZRANGEBYSCORE', ended, '-inf', now, 'LIMIT', 0, 64)) do leave(place) end
end

local function is_gone(id) return redis.call('EXISTS', space .. 'gone:' .. id) == 1 end

-- The caller has written something before, so that Redis does not refuse it.
local function mark_gone(id) redis.call('SET', space .. 'gone:' .. id, '1', 'PX', GONE_MS) end

local function remove(id, may_return)
  local there = get(id, 'idempotency', 'tenant', 'program')
  redis.call('DEL', space .. 'run:' .. id, space .. 'log:' .. id)
  if there[1] and is(there[1], 'hash') and redis.call('HGET', there[1], 'run') == id then
    redis.call('DEL', there[1])
  end
  for _, index in ipairs({indexes(there[2], there[3])}) do
    if is(index, 'zset') then redis.call('ZREM', index, id) end
  end
  if is(space .. 'ended', 'zset') then
    redis.call('ZREM', space .. 'ended', there[2] .. '/' .. there[3] .. '/' .. id)
  end
  if not may_return then mark_gone(id) end
end

-- A request with an idempotency key has come again, for which the run `id` may be. Returns its earlier run and whether
-- the body is the same, or nothing.
local function came_again(key, fingerprint, id)
  if not is(key, 'hash') then return nil end
  local known = redis.call('HMGET', key, 'run', 'fingerprint')
  if not known[1] or known[1] == id or not is_run(known[1]) then return nil end
  if not get(known[1], 'closed')[1] then
    although_memory_is_short()
    redis.call('HSET', space .. 'run:' .. known[1], 'repeated', '1')
  end
  return {known[1], known[2] == fingerprint and 1 or 0}
end

local operations = {}

-- ARGV: id, owner, lease in us, status, tenant, program, labels, 1 if there is a secret, the secret, TENANT/KEY or
-- nothing, the body's fingerprint, items. Answers: how it went, and for `known` the other run and whether its body is
-- the same.
function operations.create()
  local id, owner, lease_us, status, tenant, program = unpack(ARGV, 1, 6)
  local meta, log, open = space .. 'run:' .. id, space .. 'log:' .. id, space .. 'open'
  local key = ARGV[10] ~= '' and space .. 'idempotency:' .. ARGV[10]
  local now = now_us()
  if is_gone(id) then return {'lost'} end
  local known = key and came_again(key, ARGV[11], id)
  if known then return {'known', unpack(known)} end
  if is_run(id) then
    local there = get(id, 'owner', 'closed')
    if there[1] ~= owner or there[2] or differs(id, 0, 12) then return {'lost'} end
    append(id, 0, 12)
  else
    if redis.call('EXISTS', meta, log) > 0 then redis.call('DEL', meta, log) end
    redis.call('HSET', meta, 'owner', owner, 'tenant', tenant, 'program', program, 'created_us',
      string.format('%d', now), 'status', status, 'labels', ARGV[7])
    if ARGV[8] == '1' then redis.call('HSET', meta, 'secret', ARGV[9]) end
    append(id, 0, 12)
    for _, index in ipairs({indexes(tenant, program)}) do
      free_of_others(index, 'zset')
      redis.call('ZADD', index, now, id)
    end
  end
  if key then
    redis.call('DEL', key)
    redis.call('HSET', key, 'run', id, 'fingerprint', ARGV[11])
    redis.call('HSET', meta, 'idempotency', key)
  end
  free_of_others(open, 'zset')
  redis.call('ZADD', open, now + lease_us, id)
  free_of_others(space .. 'ended', 'zset')
  redis.call('ZREM', space .. 'ended', tenant .. '/' .. program .. '/' .. id)
  sweep(now)
  return {'ok'}
end

-- Leaves only the first and the last item of a log, before it is closed.
local function compact(id)
  local log = space .. 'log:' .. id
  local first, last = redis.call('XRANGE', log, entry(0), entry(0))[1], redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  if not first or first[1] == last[1] then return end
  redis.call('DEL', log)
  redis.call('XADD', log, entry(0), 'i', first[2][2])
  redis.call('XADD', log, entry(1), 'i', last[2][2])
  redis.call('HSET', space .. 'run:' .. id, 'compact', '1')
end

-- ARGV: id, owner, number of the first item, status or nothing, 1 to close or `compact` to leave only the first and the last
-- item, too, retention in ms, items. Answers: how it went, and for `gap` the number that is expected.
function operations.append()
  local id, owner, start, status = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
  local final, retention_ms = ARGV[5] ~= '0', tonumber(ARGV[6])
  if is_gone(id) then return {'lost'} end
  if not is_run(id) then return {'unknown'} end
  local meta, log = space .. 'run:' .. id, space .. 'log:' .. id
  local there = get(id, 'owner', 'closed', 'idempotency', 'tenant', 'program', 'compact')
  if there[1] ~= owner then return {'lost'} end
  if there[6] then
    local last = redis.call('XRANGE', log, entry(1), entry(1))[1]
    return {final and last and last[2][2] == ARGV[#ARGV] and 'ok' or 'lost'}
  end
  if start > length(id) then return {'gap', length(id)} end
  if differs(id, start, 7) then return {'lost'} end
  if there[2] then
    local repeated = final and start + #ARGV - 6 <= length(id)
    return {repeated and 'ok' or 'lost'}
  end
  if final then redis.call('HDEL', meta, 'secret', 'cancel') end
  append(id, start, 7)
  if status ~= '' then redis.call('HSET', meta, 'status', status) end
  if not final then return {'ok'} end
  if ARGV[5] == 'compact' then compact(id) end
  redis.call('HSET', meta, 'closed', '1')
  redis.call('XADD', log, '1-1', 'end', '1')
  redis.call('PEXPIRE', meta, retention_ms)
  redis.call('PEXPIRE', log, retention_ms)
  if there[3] and is(there[3], 'hash') and redis.call('HGET', there[3], 'run') == id then
    redis.call('PEXPIRE', there[3], retention_ms)
  end
  if is(space .. 'open', 'zset') then redis.call('ZREM', space .. 'open', id) end
  local now = now_us()
  free_of_others(space .. 'ended', 'zset')
  redis.call('ZADD', space .. 'ended', now + retention_ms * 1000 + 1000000,
    there[4] .. '/' .. there[5] .. '/' .. id)
  sweep(now)
  return {'ok'}
end

-- ARGV: id, number of the first item, most items, most bytes. Answers: nothing, or one page: the head, the log's length,
-- the items.
function operations.read()
  local id, at, most, bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
  if not is_run(id) then return {} end
  local there, items = length(id), {}
  for number = at, math.min(there, at + most) - 1 do
    local found = redis.call('XRANGE', space .. 'log:' .. id, entry(number), entry(number))[1]
    if not found then break end
    bytes = bytes - #found[2][2]
    if bytes < 0 and #items > 0 then break end
    items[#items + 1] = found[2][2]
  end
  return {{head(id), there, items}}
end

-- ARGV: tenant, time in ms, ids. Keeps those of the tenant's runs that are closed for this time from now on, if that is longer.
-- Answers: those that are open, whose time begins with their end.
function operations.prolong()
  local tenant, kept_ms, now, still_open = ARGV[1], tonumber(ARGV[2]), now_us(), {}
  for i = 3, #ARGV do
    local id = ARGV[i]
    local there = is_run(id) and get(id, 'closed', 'tenant', 'program', 'idempotency') or {}
    if there[2] == tenant and not there[1] then still_open[#still_open + 1] = id end
    if there[1] and there[2] == tenant and redis.call('PTTL', space .. 'log:' .. id) < kept_ms then
      redis.call('PEXPIRE', space .. 'run:' .. id, kept_ms)
      redis.call('PEXPIRE', space .. 'log:' .. id, kept_ms)
      if there[4] and is(there[4], 'hash') and redis.call('HGET', there[4], 'run') == id then
        redis.call('PEXPIRE', there[4], kept_ms)
      end
      if is(space .. 'ended', 'zset') then
        local place = there[2] .. '/' .. there[3] .. '/' .. id
        redis.call('ZADD', space .. 'ended', 'XX', now + kept_ms * 1000 + 1000000, place)
      end
    end
  end
  return still_open
end

-- ARGV: owner, lease in us, ids. Answers: the lost ones, the unknown ones, those to be cancelled.
function operations.renew()
  local owner, ends = ARGV[1], now_us() + tonumber(ARGV[2])
  local open, lost, unknown, cancelled = space .. 'open', {}, {}, {}
  although_memory_is_short()
  free_of_others(open, 'zset')
  for i = 3, #ARGV do
    local id = ARGV[i]
    if is_gone(id) then
      lost[#lost + 1] = id
    elseif not is_run(id) then
      unknown[#unknown + 1] = id
    else
      local there = get(id, 'owner', 'closed', 'cancel')
      if there[1] ~= owner then
        lost[#lost + 1] = id
      elseif not there[2] then
        redis.call('ZADD', open, ends, id)
        if there[3] then cancelled[#cancelled + 1] = id end
      end
    end
  end
  return {lost, unknown, cancelled}
end

-- ARGV: owner, lease in us, how many, ids to be left alone. Answers: ids.
function operations.claim()
  local now, open, most, held, claimed = now_us(), space .. 'open', tonumber(ARGV[3]), {}, {}
  although_memory_is_short()
  free_of_others(open, 'zset')
  for i = 4, #ARGV do held[ARGV[i]] = true end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', open, '-inf', now, 'LIMIT', 0, most + #ARGV - 3)) do
    if not is_run(id) or get(id, 'closed')[1] then
      redis.call('ZREM', open, id)
    elseif #claimed < most and not held[id] then
      redis.call('HSET', space .. 'run:' .. id, 'owner', ARGV[1])
      redis.call('ZADD', open, now + tonumber(ARGV[2]), id)
      claimed[#claimed + 1] = id
    end
  end
  sweep(now)
  return claimed
end

-- ARGV: owner, ids. Answers: how many there were.
function operations.release()
  local open, released = space .. 'open', 0
  although_memory_is_short()
  free_of_others(open, 'zset')
  for i = 2, #ARGV do
    local id = ARGV[i]
    local there = is_run(id) and get(id, 'owner', 'closed')
    if there and there[1] == ARGV[1] and not there[2] then
      redis.call('HSET', space .. 'run:' .. id, 'owner', '')
      redis.call('ZADD', open, 0, id)
      released = released + 1
    end
  end
  return released
end

-- ARGV: id, owner, 1 to delete it in any case. Its creation was rejected to the caller, but it may exist: it is deleted, or
-- anybody may claim it if its request came again, since the answer to that names it. If it does not exist, its creation may
-- still arrive, and is rejected then.
function operations.renounce()
  local id, open = ARGV[1], space .. 'open'
  if not is_run(id) then
    although_memory_is_short()
    mark_gone(id)
    return 0
  end
  local there = get(id, 'owner', 'closed', 'repeated')
  if there[1] ~= ARGV[2] or there[2] then return 0 end
  although_memory_is_short()
  free_of_others(open, 'zset')
  if there[3] and ARGV[3] ~= '1' then
    redis.call('HSET', space .. 'run:' .. id, 'owner', '')
    redis.call('ZADD', open, 0, id)
    return 0
  end
  remove(id)
  redis.call('ZREM', open, id)
  return 1
end

-- ARGV: id. Answers: whether it is open.
function operations.cancel()
  if not is_run(ARGV[1]) or get(ARGV[1], 'closed')[1] then return 0 end
  although_memory_is_short()
  redis.call('HSET', space .. 'run:' .. ARGV[1], 'cancel', '1')
  return 1
end

-- ARGV: id. Answers: the secret, if there is one.
function operations.secret()
  return is_run(ARGV[1]) and get(ARGV[1], 'secret') or {}
end

-- KEYS[1]: the index. ARGV: how many, the creation that all are before. Answers: ids with heads and creations.
function operations.list()
  local index, most, kept = KEYS[1], tonumber(ARGV[1]), {}
  if not is(index, 'zset') then return kept end
  while true do
    local ids = redis.call('ZREVRANGEBYSCORE', index, ARGV[2], '-inf', 'LIMIT', #kept, most)
    if #ids == 0 then return kept end
    for _, id in ipairs(ids) do
      if is_run(id) then
        kept[#kept + 1] = {id, head(id), redis.call('ZSCORE', index, id)}
        if #kept == most then return kept end
      else
        redis.call('ZREM', index, id)
      end
    end
  end
end

local function delete(id, unless_keyed, may_return)
  if not is_run(id) then return 'unknown' end
  local there = get(id, 'closed', 'idempotency')
  if not there[1] then return 'open' end
  if unless_keyed and there[2] then return 'kept' end
  remove(id, may_return)
  return 'ok'
end

-- ARGV: id, 1 to keep a run with an idempotency key, 1 if it may be created again. Answers: how it went.
function operations.delete() return delete(ARGV[1], ARGV[2] == '1', ARGV[3] == '1') end

-- ARGV: TENANT/KEY, the body's fingerprint. Answers: nothing, or the run of this request and whether its body is the same.
function operations.repeated() return came_again(space .. 'idempotency:' .. ARGV[1], ARGV[2]) or {} end

-- ARGV: TENANT/KEY. Answers: the run of this idempotency key, if there is one.
function operations.keyed()
  local key = space .. 'idempotency:' .. ARGV[1]
  local id = is(key, 'hash') and redis.call('HGET', key, 'run')
  return id and is_run(id) and {id} or {}
end

-- ARGV: how many. Answers: how many closed runs were deleted, those that ended first before others. Places of runs that are gone
-- are removed on the way. They do not count, since they free no memory.
function operations.evict()
  local ended, most, evicted = space .. 'ended', tonumber(ARGV[1]), 0
  if not is(ended, 'zset') then return evicted end
  for _, place in ipairs(redis.call('ZRANGE', ended, 0, most + GONE - 1)) do
    if evicted == most then break end
    local how = delete(string.match(place, '([^/]*)$'))
    if how == 'ok' then evicted = evicted + 1 end
    if how == 'unknown' then leave(place) else redis.call('ZREM', ended, place) end
  end
  return evicted
end

return operations[table.remove(ARGV, 1)]()
