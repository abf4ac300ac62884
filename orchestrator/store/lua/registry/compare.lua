-- Whether a worker fits those that live: KV passes only between engines that are alike.

local PAIRED = { 'kv_tp_size', 'kv_pp_size', 'kv_shards' } -- compared by pairs, beside the identity

-- The values of these fields of a worker's entry; nil where there is none that can be read.
local function values_of(prefix, id, names)
  local found = redis.pcall('HMGET', member_key(prefix, 'worker', id), unpack(names))
  return not found.err and found or nil
end

local function as_kind(values, count)
  local parts = {}
  for i = 1, count do parts[i] = values[i] or '' end
  return table.concat(parts, '\n')
end

-- By which of PAIRED, if any, KV cannot pass between two workers; `first`: where these begin in their values. Of ranks one
-- number has to divide the other. What pipeline stages send is not dealt out to ranks that share each prompt.
local function unpaired(mine, theirs, first)
  local function sizes(values)
    return tonumber(values[first] or ''), tonumber(values[first + 1] or '') or 1, tonumber(values[first + 2] or '') or 1
  end
  local ranks, stages, shards = sizes(mine)
  local its_ranks, its_stages, its_shards = sizes(theirs)
  if ranks and its_ranks and its_ranks > 0 and ranks % its_ranks ~= 0 and its_ranks % ranks ~= 0 then return 1 end
  if stages > 1 and its_shards > 1 or shards > 1 and its_stages > 1 then return 2 end
end

-- Compares a worker with those that live. Returns nil where it may join, else as `put_member` does: with the other's value,
-- and its id. With one of another generation the first `always` fields are compared and no others. Live workers have been
-- compared with each other, so whatever equals one of them fits all: a fleet that starts is not compared each with each.
-- `kinds` has where to look for one that is equal.
local function misfit(prefix, id, identity, always, entry)
  local names, mine = { unpack(identity) }, {}
  for _, name in ipairs({ 'generation', unpack(PAIRED) }) do names[#names + 1] = name end
  for i, name in ipairs(names) do mine[i] = entry[name] or false end
  local kinds, kind = typed(prefix .. 'kinds', 'hash'), as_kind(mine, #names)
  local equal = redis.call('HGET', kinds, kind)
  local theirs = equal and equal ~= id and values_of(prefix, equal, names)
  if theirs and as_kind(theirs, #names) == kind then return nil end
  for _, other in ipairs(live(prefix, 'worker')) do
    theirs = other ~= id and values_of(prefix, other, names)
    if theirs then
      local same_generation = (theirs[#identity + 1] or '0') == (mine[#identity + 1] or '0')
      for i = 1, same_generation and #identity or always do
        -- A field that is missing is a corrupt hash, which must not keep sound workers out.
        if theirs[i] and theirs[i] ~= mine[i] then return { 'differs', names[i], theirs[i], other } end
      end
      local by = same_generation and unpaired(mine, theirs, #identity + 2)
      if by then return { 'unpaired', PAIRED[by], theirs[#identity + 1 + by] or '1', other } end
    end
  end
  redis.call('HSET', kinds, kind, id)
  redis.call('EXPIRE', kinds, INDEX_S)
end
