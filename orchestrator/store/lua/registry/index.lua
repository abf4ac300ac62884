-- What is known of workers beside their hashes, so that nobody has to look at all of them; and who fell silent.

-- Where a worker's engine is or was, as a list; nil where that is not known.
local function endpoint_of(prefix, id)
  local sound, kept = pcall(cjson.decode, redis.call('HGET', typed(prefix .. 'endpoints', 'hash'), id) or '')
  if sound and type(kept) == 'table' and #kept == #ENDPOINT then return kept end
end

local function leave_domain(prefix, domain, id)
  redis.call('SREM', typed(domain_key(prefix, domain), 'set'), id)
  redis.call('SREM', typed(decoders_key(prefix, domain), 'set'), id)
  local left = redis.call('EXISTS', domain_key(prefix, domain))
  if left == 0 then redis.call('SREM', typed(prefix .. 'domains', 'set'), domain) end
end

-- Takes a worker out of it, and keeps where it was for those that exchange KV with its engine.
local function depart(prefix, id)
  local kept = endpoint_of(prefix, id)
  redis.call('ZREM', typed(prefix .. 'changed', 'zset'), id)
  redis.call('HDEL', prefix .. 'endpoints', id)
  bump(prefix)
  local domains = kept and { kept[#ENDPOINT] } or redis.call('SMEMBERS', typed(prefix .. 'domains', 'set'))
  for _, domain in ipairs(domains) do leave_domain(prefix, domain, id) end
  if not kept then return end
  local claims = redis.pcall('ZCARD', prefix .. 'claims:' .. id)
  local departed = { id, kept[1], kept[2], kept[3], kept[4], type(claims) == 'number' and claims > 0 }
  local key = typed(prefix .. 'departed', 'stream')
  redis.call('XADD', key, 'MAXLEN', '~', DEPARTED, '*', 'worker', cjson.encode(departed))
  redis.call('EXPIRE', key, INDEX_S)
end

-- Notes a worker that is there. `fresh`: its hash is new, or another than before.
local function note_worker(prefix, id, mine, fresh, ttl_s)
  local key, domain = typed(prefix .. 'endpoints', 'hash'), mine.domain or '0'
  local before, endpoint = endpoint_of(prefix, id), {}
  if fresh or not before then
    if before and before[1] ~= mine.kv_engine_id then depart(prefix, id) end -- another process had this id
    if before and before[#ENDPOINT] ~= domain then leave_domain(prefix, before[#ENDPOINT], id) end
    for i, name in ipairs(ENDPOINT) do endpoint[i] = mine[name] or '' end
    endpoint[#ENDPOINT] = domain
    redis.call('HSET', key, id, cjson.encode(endpoint))
    touch(prefix, id)
  end
  local all, decoders = typed(domain_key(prefix, domain), 'set'), typed(decoders_key(prefix, domain), 'set')
  local domains = typed(prefix .. 'domains', 'set')
  redis.call('SADD', domains, domain)
  redis.call('SADD', all, id)
  redis.call(mine.role == 'decode' and mine.state == 'ready' and 'SADD' or 'SREM', decoders, id)
  for _, index in ipairs({ key, domains, all, decoders, prefix .. 'version', prefix .. 'changed' }) do
    redis.call('EXPIRE', index, INDEX_S + ttl_s)
  end
end

-- A member has left, or fell silent.
local function gone(prefix, kind, id)
  if kind == 'worker' then depart(prefix, id) end
  if kind == 'launcher' then bump(prefix) end
end

-- Whether so many keys have expired, beside those of so many who live, that Redis stood still, has moved, or took no writes:
-- that says nothing about their owners. All whose keys have expired may come back for a while then.
local function may_come_back(prefix, kind, expired, alive)
  local key, now = typed(prefix .. 'stood_still:' .. kind, 'string'), clock()
  if expired > MANY and expired > alive then
    redis.call('SET', key, SECONDS:format(now), 'NX', 'EX', 2 * COME_BACK_S)
  end
  local since = tonumber(redis.call('GET', key) or '')
  if since and now - since < COME_BACK_S then return true end
  redis.call('DEL', key)
  return false
end

-- The live members of a kind; those whose key has expired are taken off the index and announced once. Where none is left
-- Redis may have been away: those who live come back, and the fleet is known from now on.
local function live(prefix, kind)
  local ids, expired = {}, {}
  for _, id in ipairs(redis.call('SMEMBERS', typed(index_key(prefix, kind), 'set'))) do
    local among = redis.call('EXISTS', member_key(prefix, kind, id)) == 1 and ids or expired
    among[#among + 1] = id
  end
  if #expired == 0 then return ids end
  if #ids == 0 then redis.call('SET', prefix .. 'begun', SECONDS:format(clock()), 'EX', INDEX_S) end
  if may_come_back(prefix, kind, #expired, #ids) then return ids end
  for _, id in ipairs(expired) do
    redis.call('SREM', index_key(prefix, kind), id)
    gone(prefix, kind, id)
    publish(prefix)
    note_member(prefix, 'lost', kind, id, 'why', 'silent')
  end
  return ids
end

-- What the keys of a fleet hold, the queue's too; of workers, their entries and claims.
local TYPES = {
  queue = 'zset', queued_tokens = 'string', leases = 'zset', waiters = 'zset', waits_until = 'zset', told = 'zset',
  affine = 'string', sweep_cursor = 'string', dropped = 'hash',
  workers = 'set', frontends = 'set', launchers = 'set', domains = 'set', endpoints = 'hash', kinds = 'hash', version = 'string',
  changed = 'zset', departed = 'stream', noted = 'stream', log_levels = 'hash',
  adapters = 'string', desired = 'hash', ratio_leader = 'string', config = 'string', rollout = 'string'
}

-- The keys of them that no member has for itself: how long they outlive the last member, seconds.
local LIVES = {
  noted = KEPT_S, desired = KEPT_S, config = KEPT_S, rollout = KEPT_S, adapters = KEPT_S,
  log_levels = LEVELS_S,
}

-- Removes what is of another type: it makes every call fail that reads or writes it. What removed it before is made
-- again by those whose it is, as after a loss of all data.
local function repair(prefix)
  local function check(name, wanted)
    local found = redis.call('TYPE', prefix .. name).ok
    if found ~= wanted and found ~= 'none' then
      redis.call('DEL', prefix .. name)
      note(prefix, 'type', 'repaired', 'id', name, 'why', 'it was a ' .. found .. ', not a ' .. wanted)
    end
  end
  for name, wanted in pairs(TYPES) do check(name, wanted) end
  for name, life_s in pairs(LIVES) do redis.call('EXPIRE', prefix .. name, life_s) end
  for _, id in ipairs(redis.call('SMEMBERS', index_key(prefix, 'worker'))) do check('claims:' .. id, 'zset') end
end

-- Announces workers and frontends that fell silent, repairs keys and keeps them, unless somebody did so just now: everybody asks.
local function prune(keys)
  local prefix = keys[1]
  if redis.call('SET', typed(prefix .. 'pruned', 'string'), '1', 'NX', 'PX', PRUNED_MS) then
    repair(prefix)
    live(prefix, 'worker')
    live(prefix, 'frontend')
  end
end

-- The sequence number of a worker's last order; 0 when there is none that can be read.
local function order_sequence(key)
  local sequence = tonumber(redis.call('HGET', key, 'order_sequence') or '')
  return sequence and sequence >= 0 and sequence < 9007199254740992 and sequence % 1 == 0 and sequence or 0
end
