-- ARGV: worker, sequence. The sequence itself stays, so that it never goes back.
-- include count
-- include members_common
local key = member_key('worker', ARGV[1])
local sequence = redis.call('HGET', key, 'order_sequence')
if (count(sequence) or 0) <= tonumber(ARGV[2]) then redis.call('HDEL', key, 'order_role', 'order_drain') end
return 1
