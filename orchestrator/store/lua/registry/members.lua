-- The verbs by which members join, stay, leave and are read, and by which launchers claim ids for workers.

-- args: kind, id, ttl in ms, 'join' or 'refresh', n, m, n names of identity fields, then fields and values. The first m
-- must be equal on workers of all generations, the others within one.
-- Returns 'ok', order_role, order_drain, order_sequence; or 'differs', field, the fleet's value, whose; or
-- 'unpaired', field, the other's value, whose; or 'taken' where a worker does not join and its id is another's.
local function put_member(keys, args)
  local prefix, kind, id, ttl_ms, joining = keys[1], args[1], args[2], args[3], args[4] == 'join'
  local key, names = member_key(prefix, kind, id), tonumber(args[5])
  local first = 7 + names -- of the fields
  local mine, identity = {}, {}
  for i = first, #args, 2 do mine[args[i]] = args[i + 1] end
  for i = 7, first - 1 do identity[#identity + 1] = args[i] end

  typed(key, 'hash')
  local known = redis.call('EXISTS', key) == 1
  local engine = kind == 'worker' and not joining and redis.call('HGET', key, 'kv_engine_id')
  if engine and engine ~= mine.kv_engine_id then return { 'taken' } end
  if names > 0 and (joining or not known) then
    local refused = misfit(prefix, id, identity, tonumber(args[6]), mine)
    if refused then return refused end
  end

  local since, changed = nil, false
  local was = known and redis.call('HGET', key, 'role')
  if joining then
    if known then note_member(prefix, 'lost', kind, id, 'why', 'another process took its place') end
    redis.call('DEL', key)
  elseif known then
    since = redis.call('HGET', key, 'since')
    local named = {}
    for name in pairs(mine) do
      -- What was offered grows with every heartbeat, and is nobody's news. Nor is what a frontend does.
      local news = not string.find(name, '^offered_') and not (kind == 'frontend' and FRONTEND_LOAD[name])
      if news then named[#named + 1] = name end
    end
    for i, value in ipairs(redis.call('HMGET', key, unpack(named))) do
      if value ~= mine[named[i]] then changed = true end
    end
  end
  redis.call('HSET', key, 'since', since or SECONDS:format(clock()), unpack(args, first))
  redis.call('PEXPIRE', key, ttl_ms)
  local new = redis.call('SADD', typed(index_key(prefix, kind), 'set'), id) == 1
  redis.call('EXPIRE', index_key(prefix, kind), INDEX_S + math.ceil(ttl_ms / 1000))
  if kind == 'frontend' and (mine.mesh_key or '') ~= '' then
    redis.call('SET', frontend_key(prefix, mine.mesh_key), id, 'PX', ttl_ms)
  end
  local fresh = joining or not known
  if kind == 'worker' then note_worker(prefix, id, mine, fresh or changed, math.ceil(ttl_ms / 1000)) end
  if kind == 'launcher' and (fresh or changed) then bump(prefix) end
  if fresh then
    redis.call('SET', typed(prefix .. 'begun', 'string'), SECONDS:format(clock()), 'NX', 'EX', INDEX_S)
    publish(prefix)
    if joining or new then note_member(prefix, 'joined', kind, id, 'role', mine.role or '') end
  elseif changed then
    publish(prefix)
    local unit = string.match(mine.ranks or '', '^[^,]+')
    if unit then redis.call('PUBLISH', prefix .. 'orders:' .. unit, '') end -- the other ranks may wait for this
    if was and mine.role and was ~= mine.role then
      note_member(prefix, 'flipped', kind, id, 'from', was, 'to', mine.role)
    end
  end

  local orders = redis.call('HMGET', key, 'order_role', 'order_drain', 'order_sequence')
  return { 'ok', orders[1] or '', orders[2] or '', orders[3] or '0' }
end

-- What the entries of a worker's unit say, all of whose ranks its own entry names: its orders, which are the first one's
-- as is its role; how many ranks are there; and how many others have drained.
local function unit_of(prefix, id, ranks)
  local first, there, others = nil, 0, 0
  for rank in string.gmatch(ranks ~= '' and ranks or id, '[^,]+') do
    local names = { 'order_role', 'order_drain', 'order_sequence', 'role', 'drained' }
    local its = redis.pcall('HMGET', member_key(prefix, 'worker', rank), unpack(names))
    if its.err then its = {} end
    first = first or its
    if its[4] then there = there + 1 end
    if its[4] and rank ~= id and its[5] == 'True' then others = others + 1 end
  end
  return first, there, others
end

-- What a worker is told that is in the registry and has heard of this last departure ('' where none concerns it): 'ok', and
-- its unit's order_role, order_drain, order_sequence; how many workers there are; 1 where KV of it could pass to a decode
-- worker, else 0; the last departure; those since then, as JSON; its unit's role ('' where that is not known),
-- and the two numbers of `unit_of`.
local function tell(keys, id, heard)
  prune(keys)
  local mine = redis.call('HMGET', member_key(keys[1], 'worker', id), 'domain', 'ranks')
  local domain = mine[1] or '0'
  local prefix, key = keys[1], typed(keys[1] .. 'departed', 'stream')
  local workers = redis.call('SCARD', index_key(prefix, 'worker'))
  local mixed = redis.call('SCARD', domain_key(prefix, domain)) < workers
  local decodes = not mixed or redis.call('SCARD', decoders_key(prefix, domain)) > 0
  local rows, last = {}, heard
  if heard ~= '' then
    for i, entry in ipairs(redis.call('XRANGE', key, '(' .. known_entry(key, heard), '+', 'COUNT', TOLD)) do
      last, rows[i] = entry[1], entry[2][2]
    end
  else
    local newest = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
    last = newest and newest[1] or '0-0'
  end
  local first, there, others = unit_of(prefix, id, mine[2] or '')
  local orders = { first[1] or '', first[2] or '', first[3] or '0' }
  return { 'ok', orders[1], orders[2], orders[3], workers, decodes and 1 or 0, last, rows, first[4] or '', there, others }
end

-- args: the last departure that this worker has heard of, the rest as for `put_member`. Returns what `tell` does, or why
-- it was refused.
local function put_worker(keys, args)
  local heard = table.remove(args, 1)
  local reply = put_member(keys, args)
  if reply[1] ~= 'ok' then return reply end
  return tell(keys, args[2], heard)
end

-- args: the last departure that this worker has heard of, its id, ttl in ms, engine. Its entry stays as it is: what
-- `put_worker` does and returns, for a sixth of the bytes; nil where it does not stand.
local function stay(keys, args)
  local prefix, heard, id, ttl_ms, engine = keys[1], args[1], args[2], args[3], args[4]
  local key = member_key(prefix, 'worker', id)
  local mine = redis.pcall('HGET', key, 'kv_engine_id')
  if mine ~= engine then return nil end
  if redis.call('SADD', typed(index_key(prefix, 'worker'), 'set'), id) == 1 then return nil end
  redis.call('PEXPIRE', key, ttl_ms)
  return tell(keys, id, heard)
end

-- Whether nobody is there, nor anybody whose entry has run out and of whom nobody has said so yet.
local function is_empty(prefix)
  for _, kind in ipairs({ 'worker', 'frontend', 'launcher' }) do
    if redis.call('SCARD', typed(index_key(prefix, kind), 'set')) > 0 then return false end
  end
  return true
end

-- args: kind, id, and the engine of a worker that leaves by itself: what another process has put there since stays.
-- Returns 1 or 2 when something of the member was there, else 0.
local function remove_member(keys, args)
  local prefix, kind, id, engine = keys[1], args[1], args[2], args[3]
  local found = (engine or '') ~= '' and redis.pcall('HGET', member_key(prefix, kind, id), 'kv_engine_id')
  if type(found) == 'string' and found ~= engine then return 0 end
  local mesh_key = kind == 'frontend' and redis.pcall('HGET', member_key(prefix, kind, id), 'mesh_key')
  if type(mesh_key) == 'string' then redis.call('DEL', frontend_key(prefix, mesh_key)) end
  local removed = redis.call('DEL', member_key(prefix, kind, id)) + redis.call('SREM', index_key(prefix, kind), id)
  if removed > 0 then
    gone(prefix, kind, id)
    publish(prefix)
    note_member(prefix, 'left', kind, id)
    if is_empty(prefix) then redis.call('DEL', prefix .. 'begun') end -- nobody is to come back
  end
  return removed
end

-- Returns for how many seconds Redis has known the fleet: 0 where it knows nobody. `begun` goes with the last one that leaves, or
-- expires after INDEX_S, and the next one to join sets it again; between the two, a fleet with members is known for INDEX_S. So it is where that was set by a
-- host whose clock is ahead, from which Redis has moved with all it knows.
local function known_for(keys)
  local there = 0
  for _, kind in ipairs({ 'worker', 'frontend', 'launcher' }) do there = there + #live(keys[1], kind) end
  local begun = tonumber(redis.call('GET', typed(keys[1] .. 'begun', 'string')))
  local known_s = begun and clock() - begun or -1
  if known_s >= 0 then return SECONDS:format(known_s) end
  return there > 0 and tostring(INDEX_S) or '0'
end

-- args: kind. Returns the live ones as rows of id and of the hash's fields and values.
local function members(keys, args)
  local prefix, kind, rows = keys[1], args[1], {}
  for i, id in ipairs(live(prefix, kind)) do
    local fields = redis.pcall('HGETALL', member_key(prefix, kind, id))
    rows[i] = { id, fields.err and {} or fields }
  end
  return rows
end

-- args: a version, 0 for none. Returns the version now, the ids of all live workers; rows, as of `members`, of those that
-- changed since then, and of all launchers; and the desired ratio.
local function read(keys, args)
  local prefix, since = keys[1], tonumber(args[1])
  local ids, launchers, rows = live(prefix, 'worker'), members(keys, { 'launcher' }), {}
  local version = version_now(prefix)
  if since > (tonumber(version) or 0) then since = 0 end -- of a server that has lost its data
  local changed = typed(prefix .. 'changed', 'zset')
  for _, id in ipairs(ids) do
    local at = since > 0 and redis.call('ZSCORE', changed, id)
    if not at or tonumber(at) > since then
      local fields = redis.pcall('HGETALL', member_key(prefix, 'worker', id))
      rows[#rows + 1] = { id, fields.err and {} or fields }
    end
  end
  return { version, ids, rows, launchers, desired_now(prefix) or {} }
end

-- ---- ids of workers: a launcher's hash has those of its workers, as `ids`: "worker-0=prefill worker-1=decode" ----

-- Claims an id for each of these roles for this launcher: this one, or the first free ones of this name where it is ''. There
-- is no role in them, which may change. Returns them, or none when somebody has that one.
local function take_ids(prefix, launcher, ttl_ms, roles, wanted, name)
  local taken, ids, held, number = {}, {}, {}, 0
  if #roles == 0 then return ids end
  live(prefix, 'worker')
  for _, id in ipairs(redis.call('SMEMBERS', index_key(prefix, 'worker'))) do taken[id] = true end -- who may come back too
  for _, other in ipairs(live(prefix, 'launcher')) do
    local theirs = redis.pcall('HGET', member_key(prefix, 'launcher', other), 'ids')
    for id in string.gmatch(type(theirs) == 'string' and theirs or '', '([^ =]+)=') do taken[id] = true end
  end
  if taken[wanted] then return ids end
  local key = typed(member_key(prefix, 'launcher', launcher), 'hash')
  local mine = redis.call('HGET', key, 'ids')
  if mine and mine ~= '' then held[1] = mine end
  for i, role in ipairs(roles) do
    while wanted == '' and taken[name .. '-' .. number] do number = number + 1 end
    ids[i] = wanted ~= '' and wanted or name .. '-' .. number
    taken[ids[i]], held[#held + 1] = true, ids[i] .. '=' .. role
  end
  redis.call('HSET', key, 'ids', table.concat(held, ' '))
  redis.call('PEXPIRE', key, ttl_ms)
  redis.call('SADD', index_key(prefix, 'launcher'), launcher)
  redis.call('EXPIRE', index_key(prefix, 'launcher'), INDEX_S + math.ceil(ttl_ms / 1000))
  bump(prefix)
  publish(prefix)
  return ids
end

-- args: launcher, its ttl in ms, role, id. Returns the id; nil when somebody has it.
local function claim_id(keys, args) return take_ids(keys[1], args[1], args[2], { args[3] }, args[4])[1] end
