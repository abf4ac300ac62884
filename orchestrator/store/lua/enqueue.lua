-- ARGV: id, attempt, tokens, uncached, score offset, bound, ttl, reply_to, body, cached.
-- Returns 'queued', 'known' or 'full'.
-- include now
local id, uncached, ttl, cached = ARGV[1], ARGV[4], ARGV[7], ARGV[10]
local arrived_at, outcome = now, 'full'

local eventful = redis.call('EXISTS', JOB .. id, IDLE) > 0 -- it replaces an older attempt, or there is somebody to wake
if eventful and redis.call('EXISTS', JOB .. id) == 1 then
  -- include read_job
  -- include drop
  local old, attempt = read_job(id), tonumber(ARGV[2])
  if old then
    local indexed = redis.call('ZSCORE', old.state == 'waiting' and QUEUE or LEASES, id)
    if old.attempt > attempt or (old.attempt == attempt and indexed) then return 'known' end
    arrived_at = old.arrived_at -- a retried request keeps its place
    remove(id, old)
  else
    drop(id, nil, 'corrupt')
  end
end
if redis.call('ZCARD', QUEUE) < tonumber(ARGV[6]) then
  outcome = 'queued'
  redis.call('HSET', JOB .. id, 'state', 'waiting', 'tokens', ARGV[3], 'uncached', uncached,
    'arrived_at', SECONDS:format(arrived_at), 'attempt', ARGV[2], 'deliveries', '0', 'reply_to', ARGV[8], 'body', ARGV[9])
  if cached ~= '' then
    redis.call('HSET', JOB .. id, 'cached', cached)
    redis.call('SET', PREFIX .. 'affine', 1, 'EX', 60) -- exists while jobs come whose prompts are cached somewhere
  end
  local score = arrived_at + ARGV[5]
  -- include place
end
-- include settle
if eventful and outcome == 'queued' then
  -- include wake
  wake(now, cached)
end
return outcome
