-- Enters what was taken into the books.
if #taken > 0 then
  redis.call('ZREM', QUEUE, unpack(taken))
  redis.call('ZADD', LEASES, unpack(leases))
  redis.call('ZADD', CLAIMS .. WORKER, unpack(leases))
  redis.call('EXPIRE', LEASES, TTL)
  redis.call('EXPIRE', CLAIMS .. WORKER, TTL)
  removed = (removed or 0) + used
end
-- include settle
