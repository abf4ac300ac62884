-- Whether a worker fits those that live: KV passes only between engines that are alike.

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
