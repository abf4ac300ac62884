-- ARGV: waiter, seconds, 'idle', 'busy', or 'left' (busy, and what waits is left to others).
-- Returns 1 when there is work already; else the waiter is woken by the next job.
if ARGV[3] ~= 'left' and redis.call('ZCARD', QUEUE) > 0 then return 1 end
-- include now
-- include wake
local wait_s = tonumber(ARGV[2])
redis.call('ZADD', IDLE, now + wait_s + (ARGV[3] == 'idle' and 0 or BUSY), ARGV[1])
redis.call('EXPIRE', IDLE, math.ceil(wait_s) + 60)
return 0
