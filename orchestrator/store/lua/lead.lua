-- ARGV: id, lease in ms. Returns now for the one that leads, by a new lease or by its own renewed; else nothing.
-- include now
-- include members_common
local leader = redis.call('GET', LEADER)
if leader and leader ~= ARGV[1] then return '' end
redis.call('SET', LEADER, ARGV[1], 'PX', ARGV[2])
return SECONDS:format(now)
