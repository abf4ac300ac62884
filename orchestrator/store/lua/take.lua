-- Claims the job that read_waiting.lua read, from its place at `score`.
redis.call('HSET', JOB .. id, 'state', 'claimed', 'claimed_by', WORKER, 'lease_until', lease_until, 'score', score,
  'deliveries', deliveries + 1)
redis.call('ZREM', QUEUE, id)
redis.call('ZADD', LEASES, lease_until, id)
redis.call('ZADD', CLAIMS .. WORKER, lease_until, id)
used = used + uncached
claims[#claims + 1] = ('%d %d %d %.6f %d %d %d %d %d\n'):format(attempt, tokens, uncached, arrived_at, deliveries + 1,
  #id, #reply_to, #cached, #body) .. id .. reply_to .. cached .. body
