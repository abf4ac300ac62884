-- Returns waiting jobs, waiting uncached tokens, claimed jobs.
return { redis.call('ZCARD', QUEUE), tonumber(redis.call('GET', QUEUED_TOKENS) or 0), redis.call('ZCARD', LEASES) }
