-- In the scripts that claim; they end with claim_end.lua. ARGV[1..5]: worker, lease seconds, ttl, orphan grace, waiter.
-- include now
-- include count
local WORKER, GRACE = ARGV[1], tonumber(ARGV[4])
local lease_until = SECONDS:format(now + ARGV[2])
local claims, used = {}, 0

-- Whoever claims is awake: a wake-up meant for an idle worker must not go to it.
redis.call('ZREM', IDLE, ARGV[5])
