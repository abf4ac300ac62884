-- ARGV: leases to look at, waiting jobs to look at, max deliveries, ttl, orphan grace.
-- Returns the ids returned to the queue, the failed jobs as id, attempt, reply_to, and the orphaned ids.
-- include now
-- include read_job
-- include drop
-- include orphaned
-- include requeue
local limit, max_deliveries, ttl, grace = ARGV[1], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local returned, failed, orphans = {}, {}, {}

for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, limit)) do
  local job, present = read_job(id)
  if not job or job.state ~= 'claimed' then
    if job then
      redis.call('ZREM', LEASES, id)
    elseif present then
      drop(id, nil, 'corrupt')
    else
      drop(id, nil, 'vanished')
    end
  elseif orphaned(job.reply_to, now - job.arrived_at, grace) then
    drop(id, job, 'orphaned')
    orphans[#orphans + 1] = id
  elseif job.deliveries >= max_deliveries then
    drop(id, job, 'failed')
    failed[#failed + 1] = id
    failed[#failed + 1] = tostring(job.attempt)
    failed[#failed + 1] = job.reply_to
  else
    requeue(id, job, job.deliveries, ttl, now)
    returned[#returned + 1] = id
  end
end

-- Waiting jobs are looked at a slice per call; the place is shared, so that sweepers divide the work.
local place = PREFIX .. 'sweep_cursor'
local slice = redis.call('ZSCAN', QUEUE, redis.call('GET', place) or '0', 'COUNT', ARGV[2])
if slice[1] == '0' then redis.call('DEL', place) else redis.call('SET', place, slice[1], 'EX', ttl) end
for i = 1, #slice[2], 2 do
  local id = slice[2][i]
  local job, present = read_job(id)
  if not job or job.state ~= 'waiting' then
    -- A scan may name one id twice: then the job is off the queue already.
    if redis.call('ZSCORE', QUEUE, id) then drop(id, nil, present and 'corrupt' or 'vanished') end
  elseif orphaned(job.reply_to, now - job.arrived_at, grace) then
    drop(id, job, 'orphaned')
    orphans[#orphans + 1] = id
  end
end
-- include settle
for _, key in ipairs({ QUEUE, QUEUED_TOKENS, LEASES }) do redis.call('EXPIRE', key, ttl) end
return { returned, failed, orphans }
