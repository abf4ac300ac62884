-- ARGV: worker, ttl, ids that the worker knows it holds. Every other claim of it waits again now. Returns their ids.
-- include now
-- include read_job
-- include requeue
local worker = ARGV[1]
local known, returned = {}, {}
for i = 3, #ARGV do known[ARGV[i]] = true end
for _, id in ipairs(redis.call('ZRANGE', CLAIMS .. worker, 0, -1)) do
  if not known[id] then
    local job = read_job(id)
    if job and job.state == 'claimed' and job.claimed_by == worker then
      -- Nobody has begun with it: this claim does not count against the job.
      requeue(id, job, math.max(job.deliveries - 1, 0), ARGV[2], now)
      returned[#returned + 1] = id
    else
      redis.call('ZREM', CLAIMS .. worker, id)
    end
  end
end
return returned
