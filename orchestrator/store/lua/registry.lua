#!lua name=pd_registry_VERSION

-- The registry: members ("worker", "frontend" or "launcher"), their orders, the desired ratio, and events of every change. Each
-- function registered at the end is one atomic step, called by store/registry.py.
-- KEYS[1] is the prefix of all keys, `pd:{NAMESPACE}:`: it leads the call to the cluster slot of its namespace.
-- VERSION stands for a hash of this text, so that each of two releases on one server calls its own functions.

local SECONDS = '%.6f'  -- how times are stored and told: unix seconds on the server's clock
local INDEX_S = 3600    -- an index of members outlives the last of them by this
local PRUNED_MS = 900   -- a little less than the time after which each asks again, so that one alone is not too early
local NOTED = 5000      -- events that are kept for whoever asks later
local DEPARTED = 5000   -- workers that left, kept for those whom it concerns
local TOLD = 500        -- of them, at one heartbeat
-- What is kept of a worker for when it is gone, in the order of `Departed` of types.py after its id, and its generation.
local ENDPOINT = { 'kv_engine_id', 'request_address', 'kv_host', 'kv_port', 'generation' }
local FRONTEND_LOAD = { cpu = true, in_flight = true, reaches = true }

local function clock()
  local time = redis.call('TIME')
  return time[1] + time[2] / 1000000
end

-- Indexes that only these functions use: pruned, workers, frontends, launchers, version, changed, generation:N, decoders:N,
-- kinds, endpoints, departed, frontend_key:KEY.
local function index_key(prefix, kind) return prefix .. kind .. 's' end
local function member_key(prefix, kind, id) return prefix .. kind .. ':' .. id end
local function frontend_key(prefix, mesh_key) return prefix .. 'frontend_key:' .. mesh_key end
local function leader_key(prefix) return prefix .. 'ratio_leader' end
local function desired_key(prefix) return prefix .. 'desired' end

-- The key. What stands there and is of another type is removed: it would make every call fail.
local function typed(key, wanted)
  local found = redis.call('TYPE', key).ok
  if found ~= wanted and found ~= 'none' then redis.call('DEL', key) end
  return key
end

-- To frontends and launchers. Workers do not listen: each event would reach all of them.
local function publish(prefix, event) redis.call('PUBLISH', prefix .. 'events', cjson.encode(event)) end

local function version_now(prefix) return redis.call('GET', typed(prefix .. 'version', 'string')) or '0' end

-- The workers are others than before, or something of one is. Returns the version that this is.
local function bump(prefix)
  -- From the clock, so that it grows even when Redis has lost the earlier ones.
  local version = math.max((tonumber(version_now(prefix)) or 0) + 1, math.floor(clock() * 1000))
  redis.call('SET', prefix .. 'version', ('%.0f'):format(version), 'EX', INDEX_S)
  return version
end

-- The row of a worker is another than before: `workers_since` gives it to whoever has an older version.
local function touch(prefix, id)
  redis.call('ZADD', typed(prefix .. 'changed', 'zset'), ('%.0f'):format(bump(prefix)), id)
end

local function generation_key(prefix, generation) return prefix .. 'generation:' .. generation end
local function decoders_key(prefix, generation) return prefix .. 'decoders:' .. generation end

-- Keeps an event for operators (store/events.py): fields and values.
local function note(prefix, ...)
  redis.call('XADD', typed(prefix .. 'noted', 'stream'), 'MAXLEN', '~', NOTED, '*', ...)
end

-- ---- what is known of workers beside their hashes, so that nobody has to look at all of them ---------------------

-- Where a worker's engine is or was, as a list; nil where that is not known.
local function endpoint_of(prefix, id)
  local sound, kept = pcall(cjson.decode, redis.call('HGET', typed(prefix .. 'endpoints', 'hash'), id) or '')
  if sound and type(kept) == 'table' and #kept == #ENDPOINT then return kept end
end

-- Takes a worker out of it, and keeps where it was for those that exchange KV with its engine.
local function depart(prefix, id)
  local kept = endpoint_of(prefix, id)
  redis.call('ZREM', typed(prefix .. 'changed', 'zset'), id)
  redis.call('HDEL', prefix .. 'endpoints', id)
  bump(prefix)
  if not kept then return end
  local generation = kept[#ENDPOINT]
  redis.call('SREM', typed(generation_key(prefix, generation), 'set'), id)
  redis.call('SREM', typed(decoders_key(prefix, generation), 'set'), id)
  local claims = redis.pcall('ZCARD', prefix .. 'claims:' .. id)
  local departed = { id, kept[1], kept[2], kept[3], kept[4], type(claims) == 'number' and claims > 0 }
  local key = typed(prefix .. 'departed', 'stream')
  redis.call('XADD', key, 'MAXLEN', '~', DEPARTED, '*', 'worker', cjson.encode(departed))
  redis.call('EXPIRE', key, INDEX_S)
end

-- Notes a worker that is there. `fresh`: its hash is new, or another than before.
local function note_worker(prefix, id, mine, fresh, ttl_s)
  local key, generation = typed(prefix .. 'endpoints', 'hash'), mine.generation or '0'
  if fresh then
    local before, endpoint = endpoint_of(prefix, id), {}
    if before and before[1] ~= mine.kv_engine_id then depart(prefix, id) end -- another process had this id
    for i, name in ipairs(ENDPOINT) do endpoint[i] = mine[name] or '' end
    endpoint[#ENDPOINT] = generation
    redis.call('HSET', key, id, cjson.encode(endpoint))
    touch(prefix, id)
  end
  local all, decoders = typed(generation_key(prefix, generation), 'set'), typed(decoders_key(prefix, generation), 'set')
  redis.call('SADD', all, id)
  redis.call(mine.role == 'decode' and mine.state == 'ready' and 'SADD' or 'SREM', decoders, id)
  for _, index in ipairs({ key, all, decoders, prefix .. 'version', prefix .. 'changed' }) do
    redis.call('EXPIRE', index, INDEX_S + ttl_s)
  end
end

-- The live members of a kind; those whose key has expired are taken off the index and announced once.
local function live(prefix, kind)
  local ids = {}
  for _, id in ipairs(redis.call('SMEMBERS', typed(index_key(prefix, kind), 'set'))) do
    if redis.call('EXISTS', member_key(prefix, kind, id)) == 1 then
      ids[#ids + 1] = id
    else
      redis.call('SREM', index_key(prefix, kind), id)
      if kind == 'worker' then depart(prefix, id) end
      publish(prefix, { type = 'left', id = id, kind = kind })
      note(prefix, 'type', 'lost', 'kind', kind, 'id', id, 'why', 'silent')
    end
  end
  return ids
end

-- Announces workers and frontends that fell silent, unless somebody did so just now: everybody asks.
local function prune(keys)
  local prefix = keys[1]
  if redis.call('SET', prefix .. 'pruned', '1', 'NX', 'PX', PRUNED_MS) then
    live(prefix, 'worker')
    live(prefix, 'frontend')
  end
end

-- The sequence number of a worker's last order; 0 when there is none that can be read.
local function order_sequence(key)
  local sequence = tonumber(redis.call('HGET', key, 'order_sequence') or '')
  return sequence and sequence >= 0 and sequence < 9007199254740992 and sequence % 1 == 0 and sequence or 0
end

-- ---- members ---------------------------------------------------------------------------------------------------

local function same_generation(key, mine)
  local theirs = redis.pcall('HGET', key, 'generation')
  return (type(theirs) == 'string' and theirs or '0') == (mine.generation or '0')
end

-- The first difference between a member's identity and that of a live one: field, the other's value, the other's id.
-- With one of another generation the first `always` fields are compared and no others.
local function difference(prefix, kind, id, identity, always, mine)
  for _, other in ipairs(live(prefix, kind)) do
    local key = member_key(prefix, kind, other)
    local theirs = other ~= id and redis.pcall('HMGET', key, unpack(identity))
    if theirs and not theirs.err then
      for i = 1, same_generation(key, mine) and #identity or always do
        -- A field that is missing is a corrupt hash, which must not keep sound workers out.
        if theirs[i] and theirs[i] ~= mine[identity[i]] then return identity[i], theirs[i], other end
      end
    end
  end
end

-- The first live worker between whose ranks and this one's KV cannot be shared out: its number of ranks, and its id.
local function indivisible(prefix, id, mine)
  local ranks = tonumber(mine.kv_tp_size)
  for _, other in ipairs(ranks and live(prefix, 'worker') or {}) do
    local key = member_key(prefix, 'worker', other)
    local value = other ~= id and same_generation(key, mine) and redis.pcall('HGET', key, 'kv_tp_size')
    local theirs = type(value) == 'string' and tonumber(value)
    if theirs and theirs > 0 and ranks % theirs ~= 0 and theirs % ranks ~= 0 then return value, other end
  end
end

-- Whether this worker equals a live one in all that is compared. Live workers have been compared with each other, so
-- whatever equals one of them fits all: a fleet that starts is not compared each with each. Else the field of `kinds`
-- where the next one will look for this worker.
local function equals_another(prefix, id, identity, mine)
  local names = { unpack(identity) }
  names[#names + 1], names[#names + 2] = 'generation', 'kv_tp_size'
  local values = {}
  for i, name in ipairs(names) do values[i] = mine[name] or '' end
  local kind = table.concat(values, '\n')
  local other = redis.call('HGET', typed(prefix .. 'kinds', 'hash'), kind)
  if not other or other == id then return false, kind end
  local theirs = redis.pcall('HMGET', member_key(prefix, 'worker', other), unpack(names))
  if theirs.err then return false, kind end
  for i = 1, #names do
    if (theirs[i] or '') ~= values[i] then return false, kind end
  end
  return true
end

-- Compares a worker with those that live. Returns nil where it may join, else as `put_member` does.
local function misfit(prefix, kind, id, identity, always, mine)
  local equal, field = equals_another(prefix, id, identity, mine)
  if equal then return nil end
  local name, value, other = difference(prefix, kind, id, identity, always, mine)
  if name then return { 'differs', name, value, other } end
  value, other = indivisible(prefix, id, mine)
  if value then return { 'indivisible', 'kv_tp_size', value, other } end
  redis.call('HSET', prefix .. 'kinds', field, id)
  redis.call('EXPIRE', prefix .. 'kinds', INDEX_S)
end

-- args: kind, id, ttl in ms, 'join' or 'refresh', n, m, n names of identity fields, then fields and values. The first m
-- must be equal on workers of all generations, the others within one.
-- Returns 'ok', order_role, order_drain, order_sequence; or 'differs', field, the fleet's value, whose; or
-- 'indivisible', 'kv_tp_size', the other's value, whose; or 'taken' where a worker does not join and its id is another's.
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
    local refused = misfit(prefix, kind, id, identity, tonumber(args[6]), mine)
    if refused then return refused end
  end

  local since, changed = nil, false
  local was = known and redis.call('HGET', key, 'role')
  if joining then
    if known then note(prefix, 'type', 'lost', 'kind', kind, 'id', id, 'why', 'another process took its place') end
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
  redis.call('SADD', index_key(prefix, kind), id)
  redis.call('EXPIRE', index_key(prefix, kind), INDEX_S + math.ceil(ttl_ms / 1000))
  if kind == 'frontend' and (mine.mesh_key or '') ~= '' then
    redis.call('SET', frontend_key(prefix, mine.mesh_key), id, 'PX', ttl_ms)
  end
  local fresh = joining or not known
  if kind == 'worker' then note_worker(prefix, id, mine, fresh or changed, math.ceil(ttl_ms / 1000)) end
  if fresh then
    publish(prefix, { type = 'joined', id = id, kind = kind })
    note(prefix, 'type', 'joined', 'kind', kind, 'id', id, 'role', mine.role or '')
  elseif changed then
    publish(prefix, { type = 'changed', id = id, kind = kind })
    if was and mine.role and was ~= mine.role then
      note(prefix, 'type', 'flipped', 'kind', kind, 'id', id, 'from', was, 'to', mine.role)
    end
  end

  local orders = redis.call('HMGET', key, 'order_role', 'order_drain', 'order_sequence')
  return { 'ok', orders[1] or '', orders[2] or '', orders[3] or '0' }
end

-- Adds to what `put_member` returns what a worker is told besides, of the last departure that it has heard of ('' where
-- none concerns it): how many workers there are; 1 where KV of its generation could pass to a decode worker, else 0; the
-- last departure; and those since then, as JSON.
local function tell(keys, reply, generation, heard)
  prune(keys)
  local prefix, key = keys[1], typed(keys[1] .. 'departed', 'stream')
  local workers = redis.call('SCARD', index_key(prefix, 'worker'))
  local mixed = redis.call('SCARD', generation_key(prefix, generation)) < workers
  local decodes = not mixed or redis.call('SCARD', decoders_key(prefix, generation)) > 0
  local rows, last = {}, heard
  if heard ~= '' then
    for i, entry in ipairs(redis.call('XRANGE', key, '(' .. heard, '+', 'COUNT', TOLD)) do
      last, rows[i] = entry[1], entry[2][2]
    end
  else
    local newest = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
    last = newest and newest[1] or '0-0'
  end
  reply[5], reply[6], reply[7], reply[8] = workers, decodes and 1 or 0, last, rows
  return reply
end

-- args: the last departure that this worker has heard of, the rest as for `put_member`. Returns what `tell` does, or why
-- it was refused.
local function put_worker(keys, args)
  local heard = table.remove(args, 1)
  local reply = put_member(keys, args)
  if reply[1] ~= 'ok' then return reply end
  local generation = redis.call('HGET', member_key(keys[1], 'worker', args[2]), 'generation') or '0'
  return tell(keys, reply, generation, heard)
end

-- args: the last departure that this worker has heard of, its id, ttl in ms, engine. Its entry stays as it is: what
-- `put_worker` does and returns, for a sixth of the bytes; nil where it does not stand.
local function stay(keys, args)
  local prefix, heard, id, ttl_ms, engine = keys[1], args[1], args[2], args[3], args[4]
  local key = member_key(prefix, 'worker', id)
  local mine = redis.pcall('HMGET', key, 'kv_engine_id', 'generation', 'order_role', 'order_drain', 'order_sequence')
  if mine.err or mine[1] ~= engine then return nil end
  if redis.call('SADD', typed(index_key(prefix, 'worker'), 'set'), id) == 1 then return nil end
  redis.call('PEXPIRE', key, ttl_ms)
  return tell(keys, { 'ok', mine[3] or '', mine[4] or '', mine[5] or '0' }, mine[2] or '0', heard)
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
    if kind == 'worker' then depart(prefix, id) end
    publish(prefix, { type = 'left', id = id, kind = kind })
    note(prefix, 'type', 'left', 'kind', kind, 'id', id)
  end
  return removed
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

-- args: a version, 0 for none. Returns the version now, the ids of all live workers, and rows, as of `members`, of those
-- that changed since then.
local function workers_since(keys, args)
  local prefix, since = keys[1], tonumber(args[1])
  local ids, rows = live(prefix, 'worker'), {}
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
  return { version, ids, rows }
end

-- ---- worker ids: a launcher's hash has those of its workers, as `ids`: "prefill-0=prefill decode-0=prefill" ---------

-- args: launcher, its ttl in ms, role, id or ''. Claims this id, or the role's first free one, for this launcher, and
-- returns it; nil when somebody has it.
local function claim_id(keys, args)
  local prefix, launcher, ttl_ms, role, wanted = keys[1], args[1], args[2], args[3], args[4]
  local taken = {}
  for _, id in ipairs(live(prefix, 'worker')) do taken[id] = true end
  for _, other in ipairs(live(prefix, 'launcher')) do
    local ids = redis.call('HGET', member_key(prefix, 'launcher', other), 'ids') or ''
    for id in string.gmatch(ids, '([^ =]+)=') do taken[id] = true end
  end
  if taken[wanted] then return nil end
  local number = 0
  while taken[role .. '-' .. number] do number = number + 1 end
  local id = wanted ~= '' and wanted or role .. '-' .. number
  local key = member_key(prefix, 'launcher', launcher)
  local ids = redis.call('HGET', key, 'ids')
  redis.call('HSET', key, 'ids', (ids and ids ~= '' and ids .. ' ' or '') .. id .. '=' .. role)
  redis.call('PEXPIRE', key, ttl_ms)
  redis.call('SADD', index_key(prefix, 'launcher'), launcher)
  publish(prefix, { type = 'changed', id = launcher, kind = 'launcher' })
  return id
end

-- ---- orders ----------------------------------------------------------------------------------------------------

-- args: kind, id, field, value. Returns 1, or 0 when there is no such member.
local function order(keys, args)
  local prefix, kind, id, field, value = keys[1], args[1], args[2], args[3], args[4]
  local key = member_key(prefix, kind, id)
  if redis.call('EXISTS', key) == 0 then return 0 end
  -- From the clock, so that it grows even when Redis has lost the earlier orders.
  local sequence = math.max(order_sequence(key) + 1, math.floor(clock() * 1000))
  redis.call('HSET', key, field, value, 'order_sequence', sequence)
  if kind == 'worker' then touch(prefix, id) end
  publish(prefix, { type = 'ordered', id = id })
  redis.call('PUBLISH', prefix .. 'orders:' .. id, '')
  return 1
end

-- args: the version of the workers that somebody has read, then id, field and value of each order. Returns 1, or 0 where
-- one has changed, come or gone since then: nothing is ordered.
local function order_all(keys, args)
  live(keys[1], 'worker')
  if version_now(keys[1]) ~= args[1] then return 0 end
  for i = 2, #args, 3 do order(keys, { 'worker', args[i], args[i + 1], args[i + 2] }) end
  return 1
end

-- args: worker, sequence. The sequence itself stays, so that it never goes back.
local function clear_orders(keys, args)
  local key = member_key(keys[1], 'worker', args[1])
  if order_sequence(key) > tonumber(args[2]) then return end
  if redis.call('HDEL', key, 'order_role', 'order_drain') > 0 then touch(keys[1], args[1]) end
end

-- ---- the desired ratio -----------------------------------------------------------------------------------------

local function write_desired(prefix, prefill, decode, by)
  local key = desired_key(prefix)
  redis.call('DEL', key)
  redis.call('HSET', key, 'prefill', prefill, 'decode', decode, 'set_by', by, 'set_at', SECONDS:format(clock()))
  publish(prefix, { type = 'desired_changed' })
  note(prefix, 'type', 'scaled', 'prefill', prefill, 'decode', decode, 'by', by)
end

-- args: prefill, decode, by.
local function set_desired(keys, args)
  write_desired(keys[1], args[1], args[2], args[3])
end

-- args: prefill, decode, by, launcher. Sets it, unless one is set and another launcher lives, whose fleet this is too.
local function begin_desired(keys, args)
  local prefix, launcher = keys[1], args[4]
  if redis.call('EXISTS', desired_key(prefix)) == 1 then
    for _, other in ipairs(live(prefix, 'launcher')) do
      if other ~= launcher and not string.find(other, '^by%-hand:') then return end
    end
  end
  write_desired(prefix, args[1], args[2], args[3])
end

-- args: prefill, decode, by; who leads, and the prefill, decode and set_at that it decided upon. Returns 1, or 0 when
-- it leads no more, or somebody else has set something meanwhile.
local function propose_desired(keys, args)
  local prefix, leader = keys[1], args[4]
  local seen = redis.call('HMGET', desired_key(prefix), 'prefill', 'decode', 'set_at')
  local same = seen[1] == args[5] and seen[2] == args[6] and tonumber(seen[3] or '') == tonumber(args[7])
  if not same or redis.call('GET', leader_key(prefix)) ~= leader then return 0 end
  write_desired(prefix, args[1], args[2], args[3])
  return 1
end

-- args: id, lease in ms. Returns now for the one that leads, by a new lease or by its own renewed; else nil.
local function lead(keys, args)
  local key, id, lease_ms = typed(leader_key(keys[1]), 'string'), args[1], args[2]
  local leader = redis.call('GET', key)
  if leader and leader ~= id then return nil end
  redis.call('SET', key, id, 'PX', lease_ms)
  return SECONDS:format(clock())
end

-- ---- rollouts ----------------------------------------------------------------------------------------------------

-- args: what the rollout is believed to be ('' for none), and what it becomes. Returns 1, or 0 when it is another by now.
local function write_rollout(keys, args)
  local key = keys[1] .. 'rollout'
  if (redis.call('GET', key) or '') ~= args[1] then return 0 end
  redis.call('SET', key, args[2])
  publish(keys[1], { type = 'desired_changed' })
  return 1
end

-- ---- what happened -----------------------------------------------------------------------------------------------

-- args: fields and values.
local function note_event(keys, args)
  note(keys[1], unpack(args))
end

-- args: the id of the last event that is known ('-' for none), how many at most. Returns the newest of those after it,
-- oldest first, as rows of id and of fields and values.
local function noted(keys, args)
  local after = args[1] == '-' and '-' or '(' .. args[1]
  local newest, rows = redis.call('XREVRANGE', keys[1] .. 'noted', '+', after, 'COUNT', args[2]), {}
  for i = #newest, 1, -1 do rows[#rows + 1] = newest[i] end
  return rows
end

-- ---- names -----------------------------------------------------------------------------------------------------

local function register(name, verb, flag)
  redis.register_function{ function_name = 'pd_registry_VERSION_' .. name, callback = verb, flags = { flag } }
end

register('put_member', put_member)
register('put_worker', put_worker)
register('stay', stay)
register('remove_member', remove_member, 'allow-oom')
register('members', members)
register('workers_since', workers_since)
register('prune', prune)
register('claim_id', claim_id)
register('order', order)
register('order_all', order_all)
register('clear_orders', clear_orders)
register('set_desired', set_desired)
register('begin_desired', begin_desired)
register('propose_desired', propose_desired)
register('lead', lead)
register('write_rollout', write_rollout)
register('note_event', note_event)
register('noted', noted)
