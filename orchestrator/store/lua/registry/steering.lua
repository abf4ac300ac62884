-- What operators and the automatic ratio want: orders to workers, the desired ratio, rollouts; and events, which they
-- read later.

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

-- args: as for `order`, then prefill, decode, by. Nobody sees the order without the ratio that goes with it.
local function order_and_desire(keys, args)
  if order(keys, args) == 0 then return 0 end
  write_desired(keys[1], args[5], args[6], args[7])
  return 1
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

-- ---- events that are kept for operators ---------------------------------------------------------------------------

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
