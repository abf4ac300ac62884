-- The job `id` takes its place in the queue, at `score` with its `uncached` tokens.
-- Indexes get their time to live when they are made, and again from every sweep: without a fleet they run out.
redis.call('EXPIRE', JOB .. id, ttl)
if redis.call('ZADD', QUEUE, score, id) == 0 then damaged = true end -- the place of a job whose hash was lost
if redis.call('INCRBY', QUEUED_TOKENS, uncached) == tonumber(uncached) then
  redis.call('EXPIRE', QUEUE, ttl)
  redis.call('EXPIRE', QUEUED_TOKENS, ttl)
end
