-- In the scripts that claim; they end with claim_end.lua. ARGV[1..5]: worker, lease seconds, ttl, orphan grace, waiter.
-- Claims are told as now, lease end, then per job: id, attempt, tokens, uncached, arrived_at, deliveries, reply_to,
-- cached, body.
-- include now
-- include count
local WORKER, TTL, GRACE = ARGV[1], ARGV[3], tonumber(ARGV[4])
local lease_until = SECONDS:format(now + ARGV[2])
local claimed = { SECONDS:format(now), lease_until }
local taken, leases, used = {}, {}, 0

-- Whoever claims is awake: a wake-up meant for an idle worker must not go to it.
redis.call('ZREM', IDLE, ARGV[5])

-- A job of the queue, as a claim tells it but with its state where its id belongs; and its uncached tokens. One that
-- cannot be read, or that nobody waits for, is dropped: nil.
local function usable(id)
  local job = redis.pcall('HMGET', JOB .. id, 'state', 'attempt', 'tokens', 'uncached', 'arrived_at', 'deliveries',
    'reply_to', 'cached', 'body')
  local arrived_at, uncached = tonumber(job[5] or ''), count(job[4])
  local sound = job[1] == 'waiting' and arrived_at and uncached and count(job[2]) and count(job[3]) and count(job[6])
    and job[7] and job[9]
  if sound and now - arrived_at <= GRACE then return job, uncached end
  -- include orphaned
  if sound and not orphaned(job[7], now - arrived_at, GRACE) then return job, uncached end
  -- include drop
  if sound then drop(id, { uncached = uncached }, 'orphaned') else drop(id, nil, 'corrupt') end
  return nil
end
