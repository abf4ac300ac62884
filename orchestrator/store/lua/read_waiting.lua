-- The job `id` of the queue, and whether it is `usable`: one that cannot be read, or that nobody waits for, is dropped.
local job = redis.pcall('HMGET', JOB .. id, 'state', 'attempt', 'tokens', 'uncached', 'arrived_at', 'deliveries',
  'reply_to', 'cached', 'body')
local attempt, tokens, uncached, arrived_at = count(job[2]), count(job[3]), count(job[4]), tonumber(job[5] or '')
local deliveries, reply_to, cached, body = count(job[6]), job[7], job[8] or '', job[9]
local usable = job[1] == 'waiting' and attempt and tokens and uncached and arrived_at and deliveries and reply_to and body
if not usable or now - arrived_at > GRACE then
  -- include orphaned
  if not usable or orphaned(reply_to, now - arrived_at, GRACE) then
    -- include drop
    drop(id, usable and { uncached = uncached }, usable and 'orphaned' or 'corrupt')
    usable = false
  end
end
