-- ARGV: waiter, seconds. Returns 1 when there is work already; else the waiter is woken by the next job.
if redis.call('ZCARD', QUEUE) > 0 then return 1 end
local wait_s = tonumber(ARGV[2])
redis.call('ZADD', IDLE, clock() + wait_s, ARGV[1])
redis.call('EXPIRE', IDLE, math.ceil(wait_s) + 60)
return 0
