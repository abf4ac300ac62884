-- include wake

-- From claimed back to waiting, at its old place.
local function requeue(id, job, deliveries, ttl, now)
  redis.call('ZREM', LEASES, id)
  redis.call('ZREM', CLAIMS .. job.claimed_by, id)
  redis.call('HDEL', JOB .. id, 'claimed_by', 'lease_until', 'score')
  redis.call('HSET', JOB .. id, 'state', 'waiting', 'deliveries', deliveries)
  local score, uncached = tonumber(job.score or '') or job.arrived_at, job.uncached
  -- include place
  wake(now, job.cached)
end
