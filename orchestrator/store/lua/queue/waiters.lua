-- Workers that wait to be told of a job. `waiters` has them in the order in which they are told, `waits_until` has how
-- long each waits. `told` has idle ones that were told just now, and until when they are expected to claim.

-- The order: an idle worker, an idle one that left what waits to others, one with room beside its work, one with work
-- that left what waits; of those that are alike the one that is done first with what it has.
local IDLE, LEFT, ROOM, ALL = 1, 2, 3, 4  -- where each of these four parts ends
local PART_S = 1e10              -- from one part to the next: more than any unix time

local function order(claimer, left, done_at)
  return ((claimer == 'idle' and 0 or 2) + (left and 1 or 0)) * PART_S + done_at
end

local function forget(q, waiter)
  call('ZREM', q.waiters, waiter)
  call('ZREM', q.waits_until, waiter)
end

-- It is awake, or gone: no wake-up that is meant for a waiting worker may go to it. A fleet with work has none waiting.
local function stop_waiting(q, waiter)
  if call('EXISTS', q.waiters, q.told) == 0 then return end
  forget(q, waiter)
  call('ZREM', q.told, waiter)
end

-- Forgets whoever has waited for as long as it wanted: it comes by itself, or has died. Nobody waits for WAITERS_S: that
-- is a deadline by the clock of another host, from which Redis has moved, and of a worker that may have died since.
local function forget_late(q, now)
  for _, waiter in ipairs(call('ZRANGEBYSCORE', q.waits_until, '-inf', now)) do forget(q, waiter) end
  for _, waiter in ipairs(call('ZRANGEBYSCORE', q.waits_until, now + WAITERS_S, '+inf')) do forget(q, waiter) end
end

local function expected(q, now) return call('ZCOUNT', q.told, now, now + WAITERS_S) end

-- How many idle workers wait, or were told and will claim in a moment.
local function count_idle(q, now)
  if call('EXISTS', q.waiters, q.told) == 0 then return 0 end
  forget_late(q, now)
  return call('ZCOUNT', q.waiters, '-inf', IDLE * PART_S) + expected(q, now)
end

-- Whether this waiter waited, and was told.
local function tell(q, waiter, now)
  local place = call('ZSCORE', q.waiters, waiter)
  if not place then return false end
  forget(q, waiter)
  if call('PUBLISH', q.prefix .. 'wake:' .. waiter, '') == 0 then return false end
  if tonumber(place) < IDLE * PART_S then
    call('ZADD', q.told, now + TOLD_S, waiter)
    call('EXPIRE', q.told, WAITERS_S)
  end
  return true
end

-- Tells the first in the order of these parts; only an idle one while another of these is expected: that one claims what
-- has come meanwhile too, and tells the next of what it leaves. Returns whether one was told.
local function tell_first(q, first, last, now)
  if expected(q, now) > 0 then last = IDLE end
  while true do
    local found = call('ZRANGEBYSCORE', q.waiters, first * PART_S, '(' .. last * PART_S, 'LIMIT', 0, 1)[1]
    if not found then return false end
    if tell(q, found, now) then return true end
  end
end

-- Tells one worker of a new job: with a thousand of them the others would only find an empty queue. First one that has
-- some of the prompt cached or its adapter (@).
local function wake(q, cached, now)
  forget_late(q, now)
  for waiter in string.gmatch(cached, '@?([^%s@]+)=%d+') do
    if tell(q, waiter, now) then return end
  end
  tell_first(q, 0, ALL, now)
end

-- Tells one worker of these parts of the order of what waits still. Returns whether one was told.
local function pass_on(q, first, last, now)
  if call('EXISTS', q.waiting, q.waiters) < 2 then return false end
  forget_late(q, now)
  return tell_first(q, first, last, now)
end

-- The next job wakes it, for so many seconds. It is done with what it has in `done_s`.
local function await_jobs(q, waiter, claimer, left, wait_s, done_s, now)
  local ttl_s = math.ceil(wait_s) + WAITERS_S
  call('ZADD', q.waiters, order(claimer, left, now + done_s), waiter)
  call('ZADD', q.waits_until, now + wait_s, waiter)
  call('EXPIRE', q.waiters, ttl_s)
  call('EXPIRE', q.waits_until, ttl_s)
end

-- From claimed back to waiting, at its old place.
local function requeue(q, id, job, deliveries, ttl_s, now)
  call('ZREM', q.leases, id)
  call('ZREM', q.claims .. job.claimed_by, id)
  call('HDEL', q.job .. id, 'claimed_by', 'lease_until', 'score')
  call('HSET', q.job .. id, 'state', 'waiting', 'deliveries', deliveries)
  local score = tonumber(job.score or '')
  place(q, id, score == score and score or job.arrived_at, job.uncached, ttl_s) -- 'nan' is not even itself
  wake(q, job.cached, now)
end

-- Back to waiting by whoever did not begin with it: this claim does not count against the job.
local function give_back(q, id, job, ttl_s, now)
  requeue(q, id, job, math.max(job.deliveries - 1, 0), ttl_s, now)
end
