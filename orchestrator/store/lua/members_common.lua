-- In the scripts of the registry: members ("worker" or "frontend") and their events.
local EVENTS = PREFIX .. 'events'
local LEADER = PREFIX .. 'ratio_leader' -- the frontend that decides the ratio, for as long as its lease runs

local function index_key(kind) return PREFIX .. kind .. 's' end
local function member_key(kind, id) return PREFIX .. kind .. ':' .. id end

local function tell(event, kind, id)
  redis.call('PUBLISH', EVENTS, cjson.encode({ type = event, id = id, kind = kind }))
end

-- The live members of a kind; those whose key has expired are taken off the index and announced once.
local function live(kind)
  local ids = {}
  for _, id in ipairs(redis.call('SMEMBERS', index_key(kind))) do
    if redis.call('EXISTS', member_key(kind, id)) == 1 then
      ids[#ids + 1] = id
    else
      redis.call('SREM', index_key(kind), id)
      tell('left', kind, id)
    end
  end
  return ids
end
