-- After common.lua in the scripts that claim. ARGV[1..5]: worker, lease seconds, ttl, orphan grace, waiter.
-- Claims are told as now, lease end, then per job: id, attempt, tokens, uncached, arrived_at, deliveries, reply_to,
-- cached, body.
local WORKER, TTL, GRACE = ARGV[1], ARGV[3], tonumber(ARGV[4])
local now = clock()
local lease_until = seconds(now + tonumber(ARGV[2]))
local claimed = { seconds(now), lease_until }
local taken, leases, used = {}, {}, 0

-- Whoever claims is awake: a wake-up meant for an idle worker must not go to it.
redis.call('ZREM', IDLE, ARGV[5])

-- A job of the queue, or nil: one that cannot be read, or that nobody waits for, is dropped.
local function usable(id, with_body)
  local job = read_job(id, with_body)
  if not job or job.state ~= 'waiting' then
    drop(id, nil, 'corrupt')
  elseif orphaned(job, GRACE, now) then
    drop(id, job, 'orphaned')
  else
    return job
  end
  return nil
end

local function take(id, score, job)
  local deliveries, at = job.deliveries + 1, #claimed
  taken[#taken + 1], used = id, used + job.uncached
  leases[#leases + 1], leases[#leases + 2] = lease_until, id
  redis.call('HSET', job_key(id), 'state', 'claimed', 'claimed_by', WORKER, 'lease_until', lease_until,
    'score', score, 'deliveries', deliveries)
  claimed[at + 1], claimed[at + 2], claimed[at + 3], claimed[at + 4] = id, job.attempt, job.tokens, job.uncached
  claimed[at + 5], claimed[at + 6], claimed[at + 7] = seconds(job.arrived_at), deliveries, job.reply_to
  claimed[at + 8], claimed[at + 9] = job.cached, job.body
end

-- Enters what was taken into the books. Call once, at the end.
local function book()
  if #taken > 0 then
    local claims = claims_key(WORKER)
    redis.call('ZREM', QUEUE, unpack(taken))
    redis.call('ZADD', LEASES, unpack(leases))
    redis.call('ZADD', claims, unpack(leases))
    removed = (removed or 0) + used
    keep(LEASES, TTL)
    keep(claims, TTL)
  end
  settle()
end
