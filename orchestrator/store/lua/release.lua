-- ARGV: worker, id, attempt, ttl. Returns 1 when the job was this worker's, and waits again now.
-- include now
-- include read_job
-- include requeue
local id = ARGV[2]
local job = read_job(id)
if not job or job.state ~= 'claimed' or job.claimed_by ~= ARGV[1] or job.attempt ~= tonumber(ARGV[3]) then return 0 end
-- Given back on purpose: this claim does not count against the job.
requeue(id, job, math.max(job.deliveries - 1, 0), ARGV[4], now)
return 1
