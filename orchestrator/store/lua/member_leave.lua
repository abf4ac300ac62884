-- ARGV: kind, id.
-- include members_common
local kind, id = ARGV[1], ARGV[2]
local was = redis.call('DEL', member_key(kind, id)) + redis.call('SREM', index_key(kind), id)
if was > 0 then tell('left', kind, id) end
return was
