-- The verbs on claimed jobs, and what removes jobs that nobody will end.

-- args: worker, lease seconds, ttl, ids. Returns the ids that this worker does not hold.
local function renew(keys, args)
  local q, worker, ttl_s, lost = open(keys), args[1], args[3], {}
  local lease_until = clock() + tonumber(args[2])
  for i = 4, #args do
    local id = args[i]
    if try('HGET', q.job .. id, 'claimed_by') == worker then
      call('HSET', q.job .. id, 'lease_until', SECONDS:format(lease_until))
      call('EXPIRE', q.job .. id, ttl_s)
      call('ZADD', q.leases, lease_until, id)
      call('ZADD', q.claims .. worker, lease_until, id)
    else
      call('ZREM', q.claims .. worker, id)
      lost[#lost + 1] = id
    end
  end
  if #lost < #args - 3 then
    call('EXPIRE', q.leases, ttl_s)
    call('EXPIRE', q.claims .. worker, ttl_s)
  end
  return lost
end

-- args: worker, id, attempt. Returns 1 when the job was this worker's, and is gone now.
local function ack(keys, args)
  local q, worker, id, attempt = open(keys), args[1], args[2], args[3]
  local held = try('HMGET', q.job .. id, 'claimed_by', 'attempt')
  if held.err or held[1] ~= worker or held[2] ~= attempt then return 0 end
  call('DEL', q.job .. id)
  call('ZREM', q.leases, id)
  call('ZREM', q.claims .. worker, id)
  return 1
end

-- args: worker, id, attempt, ttl. Returns 1 when the job was this worker's, and waits again now.
local function release(keys, args)
  local q, worker, id, attempt = open(keys), args[1], args[2], tonumber(args[3])
  local job = read_job(q, id)
  if not job or job.state ~= 'claimed' or job.claimed_by ~= worker or job.attempt ~= attempt then return 0 end
  give_back(q, id, job, args[4], clock())
  return 1
end

-- args: worker. Its leases end now, and the next sweep returns its claims; not those of a worker that is registered,
-- which renews them. Returns how many.
local function expire_leases(keys, args)
  local q, worker, expired = open(keys), args[1], 0
  if call('EXISTS', q.prefix .. 'worker:' .. worker) == 1 then return 0 end
  local now = clock()
  for _, id in ipairs(call('ZRANGE', q.claims .. worker, 0, -1)) do
    if try('HGET', q.job .. id, 'claimed_by') == worker then
      expired = expired + call('ZADD', q.leases, 'XX', 'LT', 'CH', now, id)
    end
  end
  return expired
end

-- args: id, attempt. Removes this attempt, or an older one; a newer one is left alone. Returns what was removed.
local function cancel(keys, args)
  local q, id, removed = open(keys), args[1], 'absent'
  local job, present = read_job(q, id)
  if job and job.attempt <= tonumber(args[2]) then
    removed = job.state
    remove(q, id, job)
  elseif not job and (present or call('ZSCORE', q.waiting, id)) then
    drop(q, id, nil, 'corrupt')
  end
  settle(q)
  return removed
end

-- args: leases to look at, waiting jobs to look at, most deliveries, ttl, orphan grace.
-- Returns the ids returned to the queue; rows of id, attempt and reply_to of the failed jobs; the orphaned ids.
local function sweep(keys, args)
  local q, now = open(keys), clock()
  local max_leases, max_waiting, max_deliveries, ttl_s, grace_s = args[1], args[2], tonumber(args[3]), args[4],
    tonumber(args[5])
  local returned, failed, orphans = {}, {}, {}

  for _, id in ipairs(call('ZRANGEBYSCORE', q.leases, '-inf', now, 'LIMIT', 0, max_leases)) do
    local job, present = read_job(q, id)
    if not job then
      drop(q, id, nil, present and 'corrupt' or 'vanished')
    elseif job.state ~= 'claimed' then
      call('ZREM', q.leases, id)
    elseif orphaned(q, job, now, grace_s) then
      drop(q, id, job, 'orphaned')
      orphans[#orphans + 1] = id
    elseif job.deliveries >= max_deliveries then
      drop(q, id, job, 'failed')
      failed[#failed + 1] = { id, job.attempt, job.reply_to }
    else
      requeue(q, id, job, job.deliveries, ttl_s, now)
      returned[#returned + 1] = id
    end
  end

  -- Waiting jobs are looked at a slice per call; the cursor is shared, so that sweepers divide the work.
  local cursor = q.prefix .. 'sweep_cursor'
  local slice = call('ZSCAN', q.waiting, call('GET', cursor) or '0', 'COUNT', max_waiting)
  if slice[1] == '0' then call('DEL', cursor) else call('SET', cursor, slice[1], 'EX', ttl_s) end
  for i = 1, #slice[2], 2 do
    local id = slice[2][i]
    local job, present = read_job(q, id)
    if not job or job.state ~= 'waiting' then
      -- A scan may name one id twice: then the job is off the queue already.
      if call('ZSCORE', q.waiting, id) then drop(q, id, nil, present and 'corrupt' or 'vanished') end
    elseif orphaned(q, job, now, grace_s) then
      drop(q, id, job, 'orphaned')
      orphans[#orphans + 1] = id
    end
  end
  if call('EXISTS', q.waiting) == 0 then q.damaged = true end -- its counter must be gone too, if the queue was removed
  settle(q)
  for _, key in ipairs({ q.waiting, q.waiting_tokens, q.leases }) do call('EXPIRE', key, ttl_s) end
  return { returned, failed, orphans }
end
