-- The verbs by which a worker gets jobs, or waits for one.

-- Who claims, as args[1..6] of both claiming verbs say, and what it got: rows, and bodies in the same order. `away`: the
-- frontends that it does not reach, whose jobs it leaves to others; nil for none.
local function open_claims(q, args)
  local worker, lease_s, ttl_s, grace_s, waiter, unreached = unpack(args, 1, 6)
  local now, away = clock(), nil
  for frontend in string.gmatch(unreached, '%S+') do
    away = away or {}
    away[frontend] = true
  end
  stop_waiting(q, waiter)
  return { worker = worker, now = now, lease_until = SECONDS:format(now + lease_s), ttl_s = ttl_s,
    grace_s = tonumber(grace_s), away = away, rows = {}, bodies = {} }
end

local function is_left(q, claims, id) return claims.away and claims.away[try('HGET', q.job .. id, 'reply_to')] end

-- A waiting job that can be claimed, and its body; else nil, and it is dropped: nobody can read it or waits for it.
local function read_claimable(q, claims, id)
  local fields = try('HMGET', q.job .. id, 'state', 'attempt', 'tokens', 'uncached', 'arrived_at', 'deliveries',
    'reply_to', 'cached', 'body', 'ttft_s')
  local job, body = parse_job(fields), fields[9]
  if not (job and job.state == 'waiting' and body) then
    drop(q, id, nil, 'corrupt')
    return nil
  end
  if orphaned(q, job, claims.now, claims.grace_s) then
    drop(q, id, job, 'orphaned')
    return nil
  end
  job.ttft_s = amount(fields[10]) or 0
  return job, body
end

local function take(q, claims, id, score, job, body)
  local deliveries = job.deliveries + 1
  call('HSET', q.job .. id, 'state', 'claimed', 'claimed_by', claims.worker, 'lease_until', claims.lease_until,
    'score', score, 'deliveries', deliveries)
  call('ZREM', q.waiting, id)
  call('ZADD', q.leases, claims.lease_until, id)
  call('ZADD', q.claims .. claims.worker, claims.lease_until, id)
  q.removed = (q.removed or 0) + job.uncached
  local number = #claims.rows + 1
  claims.rows[number] = { id, job.reply_to, job.cached, #body, job.attempt, job.tokens, job.uncached, deliveries,
    job.arrived_at, job.ttft_s }
  claims.bodies[number] = body
end

-- Claims from the head of the queue, in order. Returns whether it stopped at a job that does not fit `budget` tokens, and
-- whether it took all that waits and would have taken more.
local function take_head(q, claims, budget, max_jobs, idle)
  if budget <= 0 then return false, call('ZCARD', q.waiting) == 0 end
  local unusable, passed = 0, 0
  while budget > 0 and #claims.rows < max_jobs and unusable < MAX_UNUSABLE and passed < MAX_PASSED do
    local last = passed + math.min(max_jobs - #claims.rows, HEAD_JOBS) - 1
    local head = call('ZRANGE', q.waiting, passed, last, 'WITHSCORES')
    if #head == 0 then return false, passed == 0 end
    for i = 1, #head, 2 do
      local left = is_left(q, claims, head[i])
      local job, body
      if not left then job, body = read_claimable(q, claims, head[i]) end
      if job then
        local cost = math.max(1, job.tokens)
        if cost > budget and not (idle and #claims.rows == 0) then return true, false end
        take(q, claims, head[i], head[i + 1], job, body)
        budget = budget - cost
        if budget <= 0 then return false, false end
      elseif left then
        passed = passed + 1
      else
        unusable = unusable + 1
      end
    end
  end
  return false, false
end

-- What a choice among waiting jobs needs of one of them. It must be cheap: of a sound job that is not old only this
-- is read. Returns tokens, seconds waited, cached; nothing where the job was dropped.
local function glance(q, claims, id)
  local fields = try('HMGET', q.job .. id, 'state', 'tokens', 'arrived_at', 'cached')
  if not fields.err and fields[1] == 'waiting' then
    local tokens, arrived_at = count(fields[2]), amount(fields[3])
    if tokens and arrived_at and claims.now - arrived_at <= claims.grace_s then
      return tokens, claims.now - arrived_at, fields[4] or ''
    end
  end
  local job = read_claimable(q, claims, id)
  if job then return job.tokens, claims.now - job.arrived_at, job.cached end
end

-- Ids and scores, in turn, of the first jobs of the queue that are not left to others.
local function first_jobs(q, claims, size)
  local found, seen, passed, head = {}, 0, 0, nil
  repeat
    head = call('ZRANGE', q.waiting, seen, seen + size - #found / 2 - 1, 'WITHSCORES')
    seen = seen + #head / 2
    for i = 1, #head, 2 do
      if is_left(q, claims, head[i]) then
        passed = passed + 1
      else
        found[#found + 1], found[#found + 2] = head[i], head[i + 1]
      end
    end
  until not claims.away or #head == 0 or #found == 2 * size or passed >= MAX_PASSED
  return found
end

-- The first jobs of the queue that are not left to others, as WindowJobs, and whether one of them is cached, or has its
-- adapter, on a worker that claims.
local function read_window(q, claims, size)
  local claiming, jobs, affine = {}, {}, false
  -- What is cached on a worker that claims no more belongs to nobody.
  local function claims_now(worker)
    if claiming[worker] == nil then
      local member = try('HMGET', q.prefix .. 'worker:' .. worker, 'role', 'state')
      claiming[worker] = not member.err and member[1] == 'prefill' and member[2] == 'ready'
    end
    return claiming[worker]
  end
  local head = first_jobs(q, claims, size)
  for i = 1, #head, 2 do
    local tokens, waited_s, cached = glance(q, claims, head[i])
    if tokens then
      local here, saved, elsewhere, others = 0, 0, 0, {}
      for adapter, worker, hit in string.gmatch(cached, '(@?)([^%s@]+)=(%d+)') do
        hit = tonumber(hit)
        if adapter == '' then hit = math.min(hit, tokens) end
        if worker ~= claims.worker then
          others[worker] = (others[worker] or 0) + hit
        elseif adapter == '' then
          here = hit
        else
          saved = hit
        end
      end
      for worker, hit in pairs(others) do
        if hit > elsewhere and claims_now(worker) then elsewhere = hit end
      end
      affine = affine or here > 0 or saved > 0 or elsewhere > 0
      jobs[#jobs + 1] = { request_id = head[i], score = tonumber(head[i + 1]), tokens = tokens, waited_s = waited_s,
        cached_here = here, cached_elsewhere = elsewhere, adapter_here = saved }
    end
  end
  return jobs, affine
end

-- The reply of both claiming verbs: msgpack of now, end of lease, a row for each claim as `take` makes it, the jobs to
-- choose from, whether the claimer waits now to be woken, and its share of what waits, -1 for all; before it a line with
-- its length, after it the bodies, which may be long and are not copied into it.
-- One string, because a table as a reply costs the server 16 KiB of buffer for each of its levels.
local function close_claims(q, claims, window, waits, share)
  if #claims.rows > 0 then
    call('EXPIRE', q.leases, claims.ttl_s)
    call('EXPIRE', q.claims .. claims.worker, claims.ttl_s)
  end
  settle(q)
  local packed = pack({ claims.now, tonumber(claims.lease_until), claims.rows, window, waits or false, share or -1 })
  return #packed .. '\n' .. packed .. concat(claims.bodies)
end

-- What a worker leaves to others is an idle one's, whoever it would suit best, or that of one with room. None that has
-- left it before is told: two of them would wake each other for ever.
local function pass_on_what_was_left(q, now)
  if not pass_on(q, 0, IDLE, now) then pass_on(q, LEFT, ROOM, now) end
end

-- args[7..13]: most tokens, most jobs, window, 'idle', 'ahead' or 'busy', seconds, `done_s` of store/queue.py. Claims
-- from the head of the queue what fits; the first job fits any budget of an idle worker, and of one that is ahead. Where
-- another order may be better it claims nothing, and returns the first `window` jobs: one of them is cached on a worker
-- that claims, or the head does not fit. A worker that took all and has room for more is woken by the next job for so
-- many seconds, as after `wait`.
-- What a wave of jobs brings is shared: while others are idle an idle worker takes its part of the tokens that wait, one
-- job at least, and others nothing.
local function claim(keys, args)
  local q = open(keys)
  local claims = open_claims(q, args)
  local budget, max_jobs, window, claimer = tonumber(args[7]), tonumber(args[8]), tonumber(args[9]), args[10]
  local idle, others, share = claimer == 'idle', count_idle(q, claims.now), -1
  if others > 0 then share = math.ceil((count(try('GET', q.waiting_tokens)) or 0) / (others + 1)) end
  if window > 0 and call('EXISTS', q.prefix .. 'affine') == 1 then
    local jobs, affine = read_window(q, claims, window)
    if affine then return close_claims(q, claims, jobs, false, share) end
  end
  if others > 0 and idle then
    budget = math.min(budget, math.max(share, 1))
  elseif others > 0 then
    -- Who is told of a job here was not when it came; and those that have died are known afterwards.
    if not pass_on(q, 0, IDLE, claims.now) then others = count_idle(q, claims.now) end
    if others > 0 then budget = 0 else share = -1 end
  end
  local too_long, all = take_head(q, claims, budget, max_jobs, claimer ~= 'busy')
  local choice, wait_s, took = {}, tonumber(args[11]), #claims.rows > 0
  if too_long and not took and window > 0 then choice = read_window(q, claims, window) end
  all = all and wait_s > 0
  if all then
    local done_s = args[12] + (q.removed or 0) * args[13]
    await_jobs(q, args[5], idle and took and 'busy' or claimer, false, wait_s, done_s, claims.now)
  end
  local reply = close_claims(q, claims, choice, all, share)
  if took then
    pass_on(q, 0, ROOM, claims.now)
  elseif others == 0 and #choice == 0 then
    pass_on_what_was_left(q, claims.now)
  end
  return reply
end

-- args[7..]: 1 if idle, ids. Claims those that still wait; the others were somebody else's first. An idle worker that
-- came too late for all of them gets the head of the queue.
local function claim_chosen(keys, args)
  local q = open(keys)
  local claims = open_claims(q, args)
  local function claim_one(id)
    local score = call('ZSCORE', q.waiting, id)
    if not score or is_left(q, claims, id) then return end
    local job, body = read_claimable(q, claims, id)
    if job then take(q, claims, id, score, job, body) end
  end
  for i = 8, #args do claim_one(args[i]) end
  if args[7] == '1' and #claims.rows == 0 then
    local head = call('ZRANGE', q.waiting, 0, 0)[1]
    if head then claim_one(head) end
  end
  local reply = close_claims(q, claims, {})
  if #claims.rows > 0 then
    pass_on(q, 0, ROOM, claims.now)
  else
    pass_on_what_was_left(q, claims.now)
  end
  return reply
end

-- args: waiter, seconds, 'idle', 'ahead' or 'busy', 1 if it leaves what waits to others, seconds until it is done.
-- Returns 1 when there is work already; else the waiter is woken by the next job.
local function wait(keys, args)
  local q, left = open(keys), args[4] == '1'
  if not left and call('ZCARD', q.waiting) > 0 then return 1 end
  await_jobs(q, args[1], args[3], left, tonumber(args[2]), tonumber(args[5]), clock())
  return 0
end

-- args: waiter. It will not claim for now: what it may have been told of is another one's.
local function leave(keys, args)
  local q = open(keys)
  stop_waiting(q, args[1])
  pass_on(q, 0, ROOM, clock())
end
