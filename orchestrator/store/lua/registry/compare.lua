-- Whether a worker fits those that live: KV passes only between engines that are alike.

local PAIRED = { 'kv_tp_size', 'kv_pp_size', 'kv_shards' } -- compared by pairs, beside the identity

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

-- The first live worker between which and this one KV cannot pass: by which field, its value there, and its id. Of ranks
-- one number has to divide the other. What pipeline stages send is not dealt out to ranks that share each prompt.
local function unpaired(prefix, id, mine)
  local ranks, stages, shards = tonumber(mine.kv_tp_size), tonumber(mine.kv_pp_size), tonumber(mine.kv_shards)
  for _, other in ipairs(live(prefix, 'worker')) do
    local key = member_key(prefix, 'worker', other)
    local values = other ~= id and same_generation(key, mine) and redis.pcall('HMGET', key, unpack(PAIRED))
    if values and not values.err then
      local theirs, its_stages, its_shards = tonumber(values[1] or ''), tonumber(values[2] or ''), tonumber(values[3] or '')
      if ranks and theirs and theirs > 0 and ranks % theirs ~= 0 and theirs % ranks ~= 0 then
        return PAIRED[1], values[1], other
      end
      if (stages or 1) > 1 and (its_shards or 1) > 1 or (shards or 1) > 1 and (its_stages or 1) > 1 then
        return PAIRED[2], values[2] or '1', other
      end
    end
  end
end

-- Whether this worker equals a live one in all that is compared. Live workers have been compared with each other, so
-- whatever equals one of them fits all: a fleet that starts is not compared each with each. Else the field of `kinds`
-- where the next one will look for this worker.
local function equals_another(prefix, id, identity, mine)
  local names = { unpack(identity) }
  names[#names + 1] = 'generation'
  for _, name in ipairs(PAIRED) do names[#names + 1] = name end
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
  name, value, other = unpaired(prefix, id, mine)
  if name then return { 'unpaired', name, value, other } end
  redis.call('HSET', prefix .. 'kinds', field, id)
  redis.call('EXPIRE', prefix .. 'kinds', INDEX_S)
end
