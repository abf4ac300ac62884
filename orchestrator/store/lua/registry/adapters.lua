-- The fleet's LoRA adapters: a hash of JSON by name, and the revision of the whole, which grows with every change.

local function adapters_key(prefix) return typed(prefix .. 'adapters', 'hash') end
local function adapters_revision(prefix) return redis.call('GET', typed(prefix .. 'adapters_revision', 'string')) or '0' end

local function set_adapters_revision(prefix, revision)
  redis.call('SET', prefix .. 'adapters_revision', ('%.0f'):format(revision), 'EX', KEPT_S)
  redis.call('EXPIRE', prefix .. 'adapters', KEPT_S)
  redis.call('PUBLISH', prefix .. 'adapters_changed', '')
end

-- args: the revision that is known, name, its JSON ('' takes the adapter out of the list). Returns the new revision; 0 where
-- the list is another by now.
local function change_adapters(keys, args)
  local prefix, known, name, adapter = keys[1], args[1], args[2], args[3]
  if adapters_revision(prefix) ~= known then return '0' end
  if adapter == '' then redis.call('HDEL', adapters_key(prefix), name)
  else redis.call('HSET', adapters_key(prefix), name, adapter) end
  -- Microseconds of the clock, so that it grows even when Redis has lost the earlier ones.
  set_adapters_revision(prefix, math.max(tonumber(known) + 1, math.floor(clock() * 1000000)))
  return adapters_revision(prefix)
end

-- args: a frontend ('' while it starts), the revision that it knows, which is kept with its entry. Returns the revision, and
-- names and JSON where it is another one.
local function follow_adapters(keys, args)
  local prefix, key, revision = keys[1], member_key(keys[1], 'frontend', args[1]), adapters_revision(keys[1])
  if redis.call('TYPE', key).ok == 'hash' then redis.call('HSET', key, 'adapters', args[2]) end
  if revision == args[2] then return { revision } end
  return { revision, redis.call('HGETALL', adapters_key(prefix)) }
end

-- args: a revision, then name and JSON of each adapter. Puts this list back where Redis has lost it, or has an older one.
local function restore_adapters(keys, args)
  local prefix, revision = keys[1], tonumber(args[1])
  if tonumber(adapters_revision(prefix)) >= revision then return end
  redis.call('DEL', adapters_key(prefix))
  for i = 2, #args, 2 do redis.call('HSET', adapters_key(prefix), args[i], args[i + 1]) end
  set_adapters_revision(prefix, revision)
end

-- args: a revision. Returns the frontends that serve an older list. One that starts reads the list before it serves.
local function behind_adapters(keys, args)
  local prefix, late = keys[1], {}
  for _, id in ipairs(live(prefix, 'frontend')) do
    local there = redis.pcall('HMGET', member_key(prefix, 'frontend', id), 'adapters', 'url')
    local serves = not there.err and (there[1] or ((there[2] or '') ~= '' and '0'))
    if serves and tonumber(serves) < tonumber(args[1]) then late[#late + 1] = id end
  end
  return late
end
