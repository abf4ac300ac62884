-- ARGV: worker, field, value. Returns 1, or 0 when there is no such worker.
-- include count
-- include now
-- include members_common
local key = member_key('worker', ARGV[1])
if redis.call('EXISTS', key) == 0 then return 0 end
-- From the clock, so that it grows even when Redis has lost the earlier orders.
local last = count(redis.call('HGET', key, 'order_sequence')) or 0
local sequence = math.max(last + 1, math.floor(now * 1000))
redis.call('HSET', key, ARGV[2], ARGV[3], 'order_sequence', sequence)
tell('ordered', nil, ARGV[1])
return 1
