-- Workers that wait to be woken: a set of idle and a set of busy ones, each by the deadline of their waiting; and a
-- set of idle ones that were just told of a job.

-- Whether this waiter was in that set, still waits, and was told.
local function tell(q, waiters, waiter, now)
  local deadline = call('ZSCORE', waiters, waiter)
  if not deadline then return false end
  call('ZREM', waiters, waiter)
  if tonumber(deadline) <= now or call('PUBLISH', q.prefix .. 'wake:' .. waiter, '') == 0 then return false end
  if waiters == q.idle then
    call('ZADD', q.told, now + TOLD_S, waiter)
    call('EXPIRE', q.told, WAITERS_S)
  end
  return true
end

-- How many idle workers wait, or were told and will claim in a moment. None waits for as long as WAITERS_S: that is a
-- deadline by the clock of another host, from which Redis has moved, and of a worker that may have died since.
local function count_idle(q, now)
  if call('EXISTS', q.idle, q.told) == 0 then return 0 end
  local latest = now + WAITERS_S
  return call('ZCOUNT', q.idle, now, latest) + call('ZCOUNT', q.told, now, latest)
end

local function tell_first(q, waiters, now)
  while true do
    local first = call('ZRANGE', waiters, 0, 0)[1]
    if not first then return false end
    if tell(q, waiters, first, now) then return true end
  end
end

-- Tells one worker of a job: with a thousand of them the others would only find an empty queue. First one that has
-- some of the prompt cached or its adapter (@), then an idle one, then a busy one.
local function wake(q, cached, now)
  for waiter in string.gmatch(cached, '@?([^%s@]+)=%d+') do
    if tell(q, q.idle, waiter, now) or tell(q, q.busy, waiter, now) then return end
  end
  if not tell_first(q, q.idle, now) then tell_first(q, q.busy, now) end
end

-- What a claim leaves behind is an idle worker's, whoever it would suit best.
local function wake_idle(q, now)
  if call('EXISTS', q.waiting, q.idle) == 2 then tell_first(q, q.idle, now) end
end

-- The next job wakes it, until the deadline. It is in no other set. One that is `done_s` later done with what it has
-- comes so much later in the order, and stays so much longer: it asks again meanwhile.
local function await_jobs(q, waiters, waiter, now, wait_s, done_s)
  call('ZADD', waiters, now + wait_s + math.min(done_s, MOST_DONE_S), waiter)
  call('EXPIRE', waiters, math.ceil(wait_s) + WAITERS_S)
end

-- From claimed back to waiting, at its old place.
local function requeue(q, id, job, deliveries, ttl_s, now)
  call('ZREM', q.leases, id)
  call('ZREM', q.claims .. job.claimed_by, id)
  call('HDEL', q.job .. id, 'claimed_by', 'lease_until', 'score')
  call('HSET', q.job .. id, 'state', 'waiting', 'deliveries', deliveries)
  place(q, id, tonumber(job.score or '') or job.arrived_at, job.uncached, ttl_s)
  wake(q, job.cached, now)
end

-- Back to waiting by whoever did not begin with it: this claim does not count against the job.
local function give_back(q, id, job, ttl_s, now)
  requeue(q, id, job, math.max(job.deliveries - 1, 0), ttl_s, now)
end
