-- ARGV: kind, id, ttl in ms, 'join' or 'refresh', n, n names of identity fields, then fields and values.
-- Returns 'ok', order_role, order_drain, order_sequence; or 'differs', field, the fleet's value, whose.
-- include now
-- include members_common
local kind, id, ttl_ms, joining = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == 'join'
local key = member_key(kind, id)
local names = tonumber(ARGV[5])
local first = 6 + names

local mine = {}
for i = first, #ARGV, 2 do mine[ARGV[i]] = ARGV[i + 1] end

if redis.call('TYPE', key).ok ~= 'hash' then redis.call('DEL', key) end
local known = redis.call('EXISTS', key) == 1
if names > 0 and (joining or not known) then
  local identity = {}
  for i = 6, first - 1 do identity[#identity + 1] = ARGV[i] end
  for _, other in ipairs(live(kind)) do
    local theirs = other ~= id and redis.pcall('HMGET', member_key(kind, other), unpack(identity)) or { err = 'mine' }
    if not theirs.err then
      for i, name in ipairs(identity) do
        -- A field that is missing is a corrupt hash, which must not keep sound workers out.
        if theirs[i] and theirs[i] ~= mine[name] then return { 'differs', name, theirs[i], other } end
      end
    end
  end
end

local since = not joining and redis.call('HGET', key, 'since')
local changed = false
if joining then
  redis.call('DEL', key)
elseif known then
  for i = first, #ARGV, 2 do
    -- What was offered grows with every heartbeat, and is nobody's news.
    if not string.find(ARGV[i], '^offered_') and redis.call('HGET', key, ARGV[i]) ~= ARGV[i + 1] then
      changed = true
    end
  end
end
redis.call('HSET', key, 'since', since or SECONDS:format(now), unpack(ARGV, first))
redis.call('PEXPIRE', key, ttl_ms)
redis.call('SADD', index_key(kind), id)
redis.call('EXPIRE', index_key(kind), 3600 + math.ceil(ttl_ms / 1000))
if joining or not known then tell('joined', kind, id) elseif changed then tell('changed', kind, id) end

local orders = redis.call('HMGET', key, 'order_role', 'order_drain', 'order_sequence')
return { 'ok', orders[1] or '', orders[2] or '', orders[3] or '0' }
