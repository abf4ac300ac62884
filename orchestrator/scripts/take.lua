-- Claims the job `id` of the queue, which is at `score` there: `job` and `uncached` are what `usable` returned.
local deliveries = ('%d'):format(job[6] + 1)
redis.call('HSET', JOB .. id, 'state', 'claimed', 'claimed_by', WORKER, 'lease_until', lease_until, 'score', score,
  'deliveries', deliveries)
job[1], job[6] = id, deliveries
claimed[#claimed + 1] = job
taken[#taken + 1], used = id, used + uncached
leases[#leases + 1], leases[#leases + 2] = lease_until, id
