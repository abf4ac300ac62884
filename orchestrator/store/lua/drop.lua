-- Forget a job, whatever it is. `job` is nil when its hash could not be read. settle.lua must follow.
local function remove(id, job)
  redis.call('DEL', JOB .. id)
  if not job or job.state == 'claimed' then
    redis.call('ZREM', LEASES, id)
    if job then redis.call('ZREM', CLAIMS .. job.claimed_by, id) end
  end
  if redis.call('ZREM', QUEUE, id) == 1 then
    if job then removed = (removed or 0) + job.uncached else damaged = true end
  end
end

local function drop(id, job, why)
  remove(id, job)
  redis.call('HINCRBY', PREFIX .. 'dropped', why, 1)
  redis.call('EXPIRE', PREFIX .. 'dropped', 86400)
end
