-- What operators, launchers and the automatic ratio want: orders to workers, the desired ratio, rollouts; and events, which
-- they read later.

-- ---- orders ----------------------------------------------------------------------------------------------------

local function order(prefix, kind, id, field, value)
  local key = member_key(prefix, kind, id)
  -- From the clock, so that it grows even when Redis has lost the earlier orders.
  local sequence = math.max(order_sequence(key) + 1, math.floor(clock() * 1000))
  redis.call('HSET', key, field, value, 'order_sequence', sequence)
  if kind == 'worker' then touch(prefix, id) end
  publish(prefix)
  redis.call('PUBLISH', prefix .. 'orders:' .. id, '')
end

-- args: worker, sequence. The sequence itself stays, so that it never goes back.
local function clear_orders(keys, args)
  local key = member_key(keys[1], 'worker', args[1])
  if order_sequence(key) > tonumber(args[2]) then return end
  if redis.call('HDEL', key, 'order_role', 'order_drain') > 0 then touch(keys[1], args[1]) end
end

-- ---- the desired ratio -----------------------------------------------------------------------------------------

-- `at`: when it was set, of one that is set again; nil for now. Redis may have moved to a host whose clock is behind: what
-- is set later has the later time all the same.
local function write_desired(prefix, prefill, decode, by, why, at)
  local before = desired_now(prefix)
  at = at or math.max(clock(), before and tonumber(before[4]) + 0.000001 or 0)
  local key = desired_key(prefix)
  redis.call('DEL', key)
  local set_at = SECONDS:format(at)
  redis.call('HSET', key, 'prefill', prefill, 'decode', decode, 'set_by', by, 'set_at', set_at, 'why', why)
  redis.call('EXPIRE', key, KEPT_S)
  -- With the ratio: who hears of it can restore it, also where it is lost before it is read.
  publish(prefix, { prefill = prefill, decode = decode, set_by = by, set_at = set_at, why = why })
  note(prefix, 'type', 'scaled', 'prefill', prefill, 'decode', decode, 'by', by, 'why', why)
end

-- Returns prefill, decode, by, when it was set, and why; nil where none is set, or it cannot be read.
local function desired(keys) return desired_now(keys[1]) end

-- args: as `desired` returns them, of the ratio that somebody has read before. Sets it again where none is set now, or an
-- older one.
local function restore_desired(keys, args)
  local found = desired_now(keys[1])
  if found and tonumber(found[4]) >= tonumber(args[4]) then return end
  write_desired(keys[1], args[1], args[2], args[3], args[5], tonumber(args[4]))
end

-- ---- what follows from a reading -------------------------------------------------------------------------------

-- Whether all that a plan relies on is still so.
local function holds(prefix, plan)
  live(prefix, 'worker')
  live(prefix, 'launcher')
  if plan.version and plan.version ~= version_now(prefix) then return false end
  local found = desired_now(prefix)
  if plan.set_at and plan.set_at ~= (found and found[4] or '') then return false end
  if plan.leader and plan.leader ~= redis.call('GET', typed(leader_key(prefix), 'string')) then return false end
  for _, told in ipairs(plan.orders) do
    if redis.call('TYPE', member_key(prefix, told[1], told[2])).ok ~= 'hash' then return false end
  end
  return true
end

-- args: a plan, as JSON: the version of the members that was read, and when the ratio that was read was set ('' for none);
-- who decides as long as it leads; then what is to be done: orders as kind, id, field and value, the desired ratio as
-- prefill, decode, by and why, an entry as arguments of `put_member`, the roles of workers whose ids that launcher
-- claims, and the name that those begin with.
-- What was not read, and not decided, is missing. All is done, and nobody sees a part of it; or nothing where what was
-- read is not so any more. Returns the ids; nil where nothing was done.
local function steer(keys, args)
  local prefix, plan, ids = keys[1], cjson.decode(args[1]), {}
  if not holds(prefix, plan) then return nil end
  for _, told in ipairs(plan.orders) do order(prefix, unpack(told)) end
  if plan.entry then
    put_member(keys, plan.entry)
    ids = take_ids(prefix, plan.entry[2], plan.entry[3], plan.claims, '', plan.named)
  end
  if plan.desired then write_desired(prefix, unpack(plan.desired)) end
  return ids
end

-- args: id, lease in ms. Returns now for the one that leads, by a new lease or by its own renewed; else nil.
local function lead(keys, args)
  local key, id, lease_ms = typed(leader_key(keys[1]), 'string'), args[1], args[2]
  local leader = redis.call('GET', key)
  if leader and leader ~= id then return nil end
  redis.call('SET', key, id, 'PX', lease_ms)
  return SECONDS:format(clock())
end

-- ---- documents ---------------------------------------------------------------------------------------------------

-- args: the name of a document (store/documents.py), what it is believed to be, and what it becomes, '' for none. Returns 1,
-- or 0 when it is another by now.
local function write_document(keys, args)
  local prefix, name = keys[1], args[1]
  local key = typed(prefix .. name, 'string')
  if (redis.call('GET', key) or '') ~= args[2] then return 0 end
  if args[3] == '' then
    redis.call('DEL', key)
  else
    redis.call('SET', key, args[3], 'EX', KEPT_S)
  end
  redis.call('PUBLISH', key .. '_changed', '')
  if name == 'rollout' then
    bump(prefix) -- who is to restart follows from it
    publish(prefix)
  end
  return 1
end

-- args: a token, which of the verbs below, and its arguments. Carries it out once under this token, whose answer is kept:
-- whoever has not got it asks again.
local function once(keys, args)
  local key, verb = keys[1] .. 'answered:' .. table.remove(args, 1), table.remove(args, 1)
  local kept = redis.call('GET', key)
  if kept then return cjson.decode(kept) end
  local answer = ({ steer = steer, write_document = write_document })[verb](keys, args)
  if answer then redis.call('SET', key, cjson.encode(answer), 'EX', ANSWERED_S) end
  return answer
end

-- Removes everything of a namespace that has no member any more. Returns 1, or 0 while it has one.
local function forget(keys)
  local prefix = keys[1]
  for _, kind in ipairs({ 'worker', 'frontend', 'launcher' }) do
    if #live(prefix, kind) > 0 then return 0 end
  end
  for _, index in ipairs({ 'queue', 'leases' }) do
    for _, id in ipairs(redis.call('ZRANGE', typed(prefix .. index, 'zset'), 0, -1)) do
      local claimed_by = redis.pcall('HGET', prefix .. 'job:' .. id, 'claimed_by')
      if type(claimed_by) == 'string' then redis.call('DEL', prefix .. 'claims:' .. claimed_by) end
      redis.call('DEL', prefix .. 'job:' .. id)
    end
  end
  -- Of workers too that were never seen to leave, or to change.
  for _, domain in ipairs(redis.call('SMEMBERS', typed(prefix .. 'domains', 'set'))) do
    redis.call('DEL', domain_key(prefix, domain), decoders_key(prefix, domain))
  end
  for name in pairs(TYPES) do redis.call('DEL', prefix .. name) end
  redis.call('DEL', prefix .. 'begun', prefix .. 'pruned')
  for _, kind in ipairs({ 'worker', 'frontend', 'launcher' }) do redis.call('DEL', prefix .. 'stood_still:' .. kind) end
  return 1
end

-- ---- events that are kept for operators ---------------------------------------------------------------------------

-- args: fields and values.
local function note_event(keys, args)
  note(keys[1], unpack(args))
end

-- args: the id of the last event that is known ('-' for none), how many at most. Returns the newest of those after it,
-- oldest first, as rows of id and of fields and values.
local function noted(keys, args)
  local key = keys[1] .. 'noted'
  local after = args[1] == '-' and '-' or '(' .. known_entry(key, args[1])
  local newest, rows = redis.call('XREVRANGE', key, '+', after, 'COUNT', args[2]), {}
  for i = #newest, 1, -1 do rows[#rows + 1] = newest[i] end
  return rows
end
