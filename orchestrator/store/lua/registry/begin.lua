#!lua name=pd_registry_VERSION

-- The registry: members ("worker", "frontend" or "launcher"), their orders, the desired ratio, and events of every change. Each
-- function registered at the end is one atomic step, called by store/registry.py.
-- KEYS[1] is the prefix of all keys, `pd:{NAMESPACE}:`: it leads the call to the cluster slot of its namespace.
-- VERSION stands for a hash of the library's text, so that each of two releases on one server calls its own functions.

local SECONDS = '%.6f'  -- how times are stored and told: unix seconds on the server's clock
local INDEX_S = 3600    -- an index of members outlives the last of them by this
local KEPT_S = 86400    -- what operators set and look at outlives the fleet by this: a crash, an upgrade, a night
local LEVELS_S = 60     -- log levels by this: they are not of the next fleet
local ANSWERED_S = 60   -- what was answered to an operator stays for whoever has not got it
local PRUNED_MS = 900   -- a little less than the time after which each asks again, so that one alone is not too early
local NOTED = 5000      -- events that are kept for whoever asks later
local DEPARTED = 5000   -- workers that left, kept for those whom it concerns
local TOLD = 500        -- of them, at one heartbeat
-- Where more entries than so many run out together, and more than are left, their owners have so long to come back before
-- they count as gone: otherwise each worker would look whether all others are dead.
local MANY, COME_BACK_S = 32, 10
-- What is kept of a worker for when it is gone, in the order of `Departed` of fields.py after its id, and its domain.
local ENDPOINT = { 'kv_engine_id', 'request_address', 'kv_host', 'kv_port', 'domain' }
local FRONTEND_LOAD = { cpu = true, in_flight = true, reaches = true, idle_s = true }

local function clock()
  local time = redis.call('TIME')
  return time[1] + time[2] / 1000000
end

-- Indexes that only these functions use: pruned, workers, frontends, launchers, version, changed, domains, domain:D,
-- decoders:D, kinds, endpoints, departed, frontend_key:KEY; and begun, when Redis first heard of the fleet.
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

-- Behind which entry of a stream somebody wants the others who knows this one. One that is later than all there are is of
-- a server that has lost its data, and whose clock was ahead: what is here has come since.
local function known_entry(key, id)
  local function ms(entry) return tonumber(string.match(entry, '^%d+')) or 0 end
  local newest = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  return newest and ms(newest[1]) < ms(id) and '0-0' or id
end

-- Tells frontends and launchers that something has changed; of the desired ratio also what it is now. Workers do not listen:
-- all would hear of each change.
local function publish(prefix, ratio) redis.call('PUBLISH', prefix .. 'events', ratio and cjson.encode(ratio) or '') end

local function version_now(prefix) return redis.call('GET', typed(prefix .. 'version', 'string')) or '0' end

-- The workers are others than before, or something of one is, or of who holds their ids, or of the rollout. Returns the
-- version that this is.
local function bump(prefix)
  -- Microseconds of the clock, so that it grows even when Redis has lost the earlier ones: changes are fewer than those.
  local version = math.max((tonumber(version_now(prefix)) or 0) + 1, math.floor(clock() * 1000000))
  redis.call('SET', prefix .. 'version', ('%.0f'):format(version), 'EX', INDEX_S)
  return version
end

-- The row of a worker is another than before: `workers_since` gives it to whoever has an older version.
local function touch(prefix, id)
  redis.call('ZADD', typed(prefix .. 'changed', 'zset'), ('%.0f'):format(bump(prefix)), id)
  redis.call('EXPIRE', prefix .. 'changed', INDEX_S)
end

-- The workers of a domain, within which KV passes, and those of them that decode.
local function domain_key(prefix, domain) return prefix .. 'domain:' .. domain end
local function decoders_key(prefix, domain) return prefix .. 'decoders:' .. domain end

-- Keeps an event for operators (store/operator/events.py): fields and values.
local function note(prefix, ...)
  redis.call('XADD', typed(prefix .. 'noted', 'stream'), 'MAXLEN', '~', NOTED, '*', ...)
  redis.call('EXPIRE', prefix .. 'noted', KEPT_S)
end

-- The same, of a member. What a worker that was started by hand holds its id by (`BY_HAND` of store/planned.py) is none: the
-- worker itself is one.
local function note_member(prefix, event, kind, id, ...)
  if kind == 'launcher' and string.find(id, '^by%-hand:') then return end
  note(prefix, 'type', event, 'kind', kind, 'id', id, ...)
end

-- The desired ratio as prefill, decode, by, set_at and why; nil where none is set that can be read.
local function desired_now(prefix)
  local found = redis.pcall('HMGET', desired_key(prefix), 'prefill', 'decode', 'set_by', 'set_at', 'why')
  for i, pattern in ipairs({ '^%d+$', '^%d+$', '', '^%d+%.%d+$' }) do
    if not found[i] or not string.find(found[i], pattern) then return nil end
  end
  found[5] = found[5] or ''
  return found
end
