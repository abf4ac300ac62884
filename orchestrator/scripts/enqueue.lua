-- ARGV: id, attempt, tokens, uncached, score offset, bound, ttl, reply_to, body, cached. Returns 'queued', 'known' or 'full'.
local id, attempt, uncached, ttl = ARGV[1], tonumber(ARGV[2]), ARGV[4], ARGV[7]
local now = clock()
local arrived_at = now

if redis.call('EXISTS', job_key(id)) == 1 then
  local old = read_job(id)
  if old then
    local indexed = redis.call('ZSCORE', old.state == 'waiting' and QUEUE or LEASES, id)
    if old.attempt > attempt or (old.attempt == attempt and indexed) then return 'known' end
    arrived_at = old.arrived_at -- a retried request keeps its place
    remove(id, old)
  else
    drop(id, nil, 'corrupt')
  end
end
if redis.call('ZCARD', QUEUE) >= tonumber(ARGV[6]) then
  settle()
  return 'full'
end

redis.call('HSET', job_key(id), 'state', 'waiting', 'tokens', ARGV[3], 'uncached', uncached,
  'arrived_at', seconds(arrived_at), 'attempt', ARGV[2], 'deliveries', 0, 'reply_to', ARGV[8], 'body', ARGV[9])
local cached = ARGV[10]
if cached ~= '' then
  redis.call('HSET', job_key(id), 'cached', cached)
  redis.call('SET', AFFINE, 1, 'EX', 60)
end
queue_up(id, arrived_at + tonumber(ARGV[5]), uncached, cached, ttl, now)
settle()
return 'queued'
