#!lua name=pd_queue_VERSION

-- The prefill queue. Every function that is registered at the end is one atomic step, a verb of store/queue.py.
-- KEYS[1] is the prefix of all keys, `pd:{NAMESPACE}:`: it leads the call to the cluster slot of its namespace.
-- VERSION stands for a hash of this text, so that each of two releases on one server calls its own functions.

local SECONDS = '%.6f'    -- how times are stored and told: unix seconds on the server's clock
local HEAD_JOBS = 16      -- jobs read from the head of the queue at once
local MAX_UNUSABLE = 200  -- unusable jobs that one claim drops; the next one goes on behind them
local MAX_RECOUNT = 1000  -- most waiting jobs whose tokens are counted afresh
local AFFINE_S = 60       -- for this long after a job with a cached prefix, claims look for such jobs
local WAITERS_S = 60      -- a set of waiters outlives its last waiter by this
local TOLD_S = 0.1        -- for this long an idle worker that was told of a job is expected to claim
local DROPPED_S = 86400   -- the statistics of dropped jobs live this long

-- ---- what every verb begins with -------------------------------------------------------------------------------

-- What verbs use of the server, as locals: every look-up of a global costs about a tenth of a command. The first call
-- fills them, because a library that is being loaded does not see them yet.
local function globals() return redis.call, redis.pcall, cmsgpack.pack, table.concat, tonumber, unpack, type, math end
local call, try, pack, concat, tonumber, unpack, type, math

local queues = {} -- by prefix

-- The queue of this call: names of keys, made once, and what this call took from it, which starts afresh. `removed` is
-- the tokens of its jobs, nil for no job; `damaged` says that a job went whose tokens nobody knows; `alive` remembers
-- which frontends live.
local function open(keys)
  if not call then call, try, pack, concat, tonumber, unpack, type, math = globals() end
  local prefix = keys[1]
  local q = queues[prefix]
  if not q then
    q = {
      prefix = prefix, waiting = prefix .. 'queue', waiting_tokens = prefix .. 'queued_tokens', job = prefix .. 'job:',
      leases = prefix .. 'leases', claims = prefix .. 'claims:', idle = prefix .. 'idle', busy = prefix .. 'busy',
      told = prefix .. 'told'
    }
    queues[prefix] = q
  end
  q.removed, q.damaged, q.alive = nil, false, nil
  return q
end

local function clock()
  local time = call('TIME')
  return time[1] + time[2] / 1000000
end

-- A count as stored text, or nil: 'nan', '-1', '1.5' and absent fields are no counts.
local function count(text)
  local value = text and tonumber(text)
  if value and value >= 0 and value < 9007199254740992 and value % 1 == 0 then return value end
  return nil
end

-- ---- jobs ------------------------------------------------------------------------------------------------------

-- A job as a table from the values of its fields 'state', 'attempt', 'tokens', 'uncached', 'arrived_at', 'deliveries',
-- 'reply_to' and 'cached'; nil when there is none or it cannot be trusted.
local function parse_job(fields)
  if fields.err then return nil end
  local job = {
    state = fields[1], attempt = count(fields[2]), tokens = count(fields[3]), uncached = count(fields[4]),
    arrived_at = tonumber(fields[5] or ''), deliveries = count(fields[6]), reply_to = fields[7], cached = fields[8] or ''
  }
  local sound = job.attempt and job.tokens and job.uncached and job.arrived_at and job.deliveries and job.reply_to
  return sound and job or nil
end

-- A job that waits or is claimed, with who claimed it and its place in the queue before; else nil, and whether
-- something is there. Its body, which may be long, is left out.
local function read_job(q, id)
  local fields = try('HMGET', q.job .. id, 'state', 'attempt', 'tokens', 'uncached', 'arrived_at', 'deliveries',
    'reply_to', 'cached', 'claimed_by', 'score')
  local job = parse_job(fields)
  if job and (job.state == 'waiting' or (job.state == 'claimed' and fields[9])) then
    job.claimed_by, job.score = fields[9], fields[10]
    return job, true
  end
  return nil, fields.err or fields[1] or fields[2] or fields[3]
end

-- Forgets a job. `job` is nil when its hash could not be read. `settle` must follow.
local function remove(q, id, job)
  call('DEL', q.job .. id)
  if not job or job.state == 'claimed' then
    call('ZREM', q.leases, id)
    if job then call('ZREM', q.claims .. job.claimed_by, id) end
  end
  if call('ZREM', q.waiting, id) == 1 then
    if job then q.removed = (q.removed or 0) + job.uncached else q.damaged = true end
  elseif job and job.state == 'waiting' then
    q.damaged = true -- its place was lost, and its tokens may be counted still
  end
end

-- Removes a job that nobody asked to remove, and counts it.
local function drop(q, id, job, why)
  remove(q, id, job)
  call('HINCRBY', q.prefix .. 'dropped', why, 1)
  call('EXPIRE', q.prefix .. 'dropped', DROPPED_S)
end

-- Whether nobody waits for the answer any more. The grace covers a frontend whose key Redis has just lost.
local function orphaned(q, job, now, grace_s)
  if now - job.arrived_at <= grace_s then return false end
  local frontend = job.reply_to
  q.alive = q.alive or {}
  if q.alive[frontend] == nil then q.alive[frontend] = call('EXISTS', q.prefix .. 'frontend:' .. frontend) == 1 end
  return not q.alive[frontend]
end

-- Counts the waiting tokens of a short queue afresh; an empty queue has no counter. Returns whether it did.
local function recount(q)
  local waiting, tokens = call('ZCARD', q.waiting), 0
  if waiting > MAX_RECOUNT then return false end
  if waiting == 0 then
    call('DEL', q.waiting_tokens)
  else
    for _, id in ipairs(call('ZRANGE', q.waiting, 0, -1)) do
      tokens = tokens + (count(try('HGET', q.job .. id, 'uncached')) or 0)
    end
    call('SET', q.waiting_tokens, tokens, 'KEEPTTL')
  end
  return true
end

-- Changes the counter of waiting tokens, and counts afresh where it is no number. Returns the new count.
local function add_tokens(q, change)
  local total = try('INCRBY', q.waiting_tokens, change)
  if type(total) == 'number' then return total end
  call('DEL', q.waiting_tokens)
  recount(q)
  return count(call('GET', q.waiting_tokens)) or 0
end

-- Puts a job at its place in the queue.
-- Indexes get their time to live when they are made, and again from every sweep: without a fleet they run out.
local function place(q, id, score, uncached, ttl_s)
  call('EXPIRE', q.job .. id, ttl_s)
  if call('ZADD', q.waiting, score, id) == 0 then q.damaged = true end -- the place of a job whose hash was lost
  if add_tokens(q, tonumber(uncached)) == tonumber(uncached) then
    call('EXPIRE', q.waiting, ttl_s)
    call('EXPIRE', q.waiting_tokens, ttl_s)
  end
end

-- Takes what this call removed off the counter of waiting tokens; the end of every verb that removes. Where an
-- unknown number went, a short queue is counted afresh. An empty queue has no counter.
local function settle(q)
  if not (q.removed or q.damaged) then return end
  local left = q.removed and add_tokens(q, -q.removed)
  if left and left > 0 and not q.damaged then return end
  if not recount(q) and left and left < 0 then call('SET', q.waiting_tokens, 0, 'KEEPTTL') end
end

-- ---- waiters: two sets, of idle and of busy workers, each by the deadline of their waiting; and idle ones just told --

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

-- How many idle workers wait, or were told and will claim in a moment.
local function count_idle(q, now)
  if call('EXISTS', q.idle, q.told) == 0 then return 0 end
  return call('ZCOUNT', q.idle, now, '+inf') + call('ZCOUNT', q.told, now, '+inf')
end

local function tell_first(q, waiters, now)
  while true do
    local first = call('ZRANGE', waiters, 0, 0)[1]
    if not first then return false end
    if tell(q, waiters, first, now) then return true end
  end
end

-- Tells one worker of a job: with a thousand of them the others would only find an empty queue. First one that has
-- some of the prompt cached, then an idle one, then a busy one.
local function wake(q, cached, now)
  for waiter in string.gmatch(cached, '(%S+)=%d+') do
    if tell(q, q.idle, waiter, now) or tell(q, q.busy, waiter, now) then return end
  end
  if not tell_first(q, q.idle, now) then tell_first(q, q.busy, now) end
end

-- What a claim leaves behind is an idle worker's, whoever it would suit best.
local function wake_idle(q, now)
  if call('EXISTS', q.waiting, q.idle) == 2 then tell_first(q, q.idle, now) end
end

-- The next job wakes it, until the deadline. It is in no other set.
local function await_jobs(q, waiters, waiter, deadline, wait_s)
  call('ZADD', waiters, deadline, waiter)
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

-- ---- verbs: enqueue --------------------------------------------------------------------------------------------

-- Returns 'queued', 'known' or 'full'.
local function enqueue(keys, args)
  local q, now = open(keys), clock()
  local id, attempt, tokens, uncached, delay_s, max_waiting, ttl_s, reply_to, body, cached = unpack(args)
  local arrived_at, outcome = now, 'full'
  -- Mostly there is neither an older attempt to replace nor anybody to wake: one look tells.
  local eventful = call('EXISTS', q.job .. id, q.idle, q.busy) > 0
  if eventful and call('EXISTS', q.job .. id) == 1 then
    local old = read_job(q, id)
    if old then
      local indexed = call('ZSCORE', old.state == 'waiting' and q.waiting or q.leases, id)
      if old.attempt > tonumber(attempt) or (old.attempt == tonumber(attempt) and indexed) then return 'known' end
      arrived_at = old.arrived_at -- a retried request keeps its place
      remove(q, id, old)
    else
      drop(q, id, nil, 'corrupt')
    end
  end
  if call('ZCARD', q.waiting) < tonumber(max_waiting) then
    outcome = 'queued'
    call('HSET', q.job .. id, 'state', 'waiting', 'tokens', tokens, 'uncached', uncached,
      'arrived_at', SECONDS:format(arrived_at), 'attempt', attempt, 'deliveries', '0', 'reply_to', reply_to, 'body', body)
    if cached ~= '' then
      call('HSET', q.job .. id, 'cached', cached)
      call('SET', q.prefix .. 'affine', 1, 'EX', AFFINE_S)
    end
    place(q, id, arrived_at + delay_s, uncached, ttl_s)
  end
  settle(q)
  if eventful and outcome == 'queued' then wake(q, cached, now) end
  return outcome
end

-- ---- verbs: claim ----------------------------------------------------------------------------------------------

-- Who claims, as args[1..5] of both claiming verbs say, and what it got: rows, and bodies in the same order.
local function open_claims(q, args)
  local worker, lease_s, ttl_s, grace_s, waiter = unpack(args, 1, 5)
  local now = clock()
  -- Whoever claims is awake: a wake-up meant for a waiting worker must not go to it. A fleet with work has none waiting.
  if call('EXISTS', q.idle, q.busy, q.told) > 0 then
    call('ZREM', q.idle, waiter)
    call('ZREM', q.busy, waiter)
    call('ZREM', q.told, waiter)
  end
  return { worker = worker, now = now, lease_until = SECONDS:format(now + lease_s), ttl_s = ttl_s,
    grace_s = tonumber(grace_s), rows = {}, bodies = {} }
end

-- A waiting job that can be claimed, and its body; else nil, and it is dropped: nobody can read it or waits for it.
local function read_claimable(q, claims, id)
  local fields = try('HMGET', q.job .. id, 'state', 'attempt', 'tokens', 'uncached', 'arrived_at', 'deliveries',
    'reply_to', 'cached', 'body')
  local job, body = parse_job(fields), fields[9]
  if not (job and job.state == 'waiting' and body) then
    drop(q, id, nil, 'corrupt')
    return nil
  end
  if orphaned(q, job, claims.now, claims.grace_s) then
    drop(q, id, job, 'orphaned')
    return nil
  end
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
    job.arrived_at }
  claims.bodies[number] = body
end

-- Claims from the head of the queue, in order. Returns whether it stopped at a job that does not fit `budget` tokens,
-- and whether it took all that waits and would have taken more.
local function take_head(q, claims, budget, max_jobs, idle)
  if budget <= 0 then return false, call('ZCARD', q.waiting) == 0 end
  local unusable = 0
  while budget > 0 and #claims.rows < max_jobs and unusable < MAX_UNUSABLE do
    local last = math.min(max_jobs - #claims.rows, HEAD_JOBS) - 1
    local head = call('ZRANGE', q.waiting, 0, last, 'WITHSCORES')
    if #head == 0 then return false, true end
    for i = 1, #head, 2 do
      local job, body = read_claimable(q, claims, head[i])
      if job then
        local cost = math.max(1, job.tokens)
        if cost > budget and not (idle and #claims.rows == 0) then return true, false end
        take(q, claims, head[i], head[i + 1], job, body)
        budget = budget - cost
        if budget <= 0 then return false, false end
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
    local tokens, arrived_at = count(fields[2]), tonumber(fields[3] or '')
    if tokens and arrived_at and claims.now - arrived_at <= claims.grace_s then
      return tokens, claims.now - arrived_at, fields[4] or ''
    end
  end
  local job = read_claimable(q, claims, id)
  if job then return job.tokens, claims.now - job.arrived_at, job.cached end
end

-- The first jobs of the queue as WindowJobs, and whether one of them is cached on a worker that claims.
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
  local head = call('ZRANGE', q.waiting, 0, size - 1, 'WITHSCORES')
  for i = 1, #head, 2 do
    local tokens, waited_s, cached = glance(q, claims, head[i])
    if tokens then
      local here, elsewhere = 0, 0
      for worker, hit in string.gmatch(cached, '(%S+)=(%d+)') do
        hit = math.min(tonumber(hit), tokens)
        if worker == claims.worker then
          here = hit
        elseif hit > elsewhere and claims_now(worker) then
          elsewhere = hit
        end
      end
      affine = affine or here > 0 or elsewhere > 0
      jobs[#jobs + 1] = { request_id = head[i], score = tonumber(head[i + 1]), tokens = tokens, waited_s = waited_s,
        cached_here = here, cached_elsewhere = elsewhere }
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

-- args[6..10]: most tokens, most jobs, window, 1 if idle, seconds. Claims from the head of the queue what fits; an idle
-- worker's first job fits any budget. Where another order may be better it claims nothing, and returns the first
-- `window` jobs: one of them is cached on a worker that claims, or the head does not fit. A worker that took all and has
-- room for more is woken by the next job for so many seconds, as after `wait`.
-- What a wave of jobs brings is shared: while others are idle an idle worker takes its part of the tokens that wait, one
-- job at least, and a busy one nothing.
local function claim(keys, args)
  local q = open(keys)
  local claims = open_claims(q, args)
  local budget, max_jobs, window, idle = tonumber(args[6]), tonumber(args[7]), tonumber(args[8]), args[9] == '1'
  local others, share = count_idle(q, claims.now), -1
  if others > 0 then share = math.ceil((count(try('GET', q.waiting_tokens)) or 0) / (others + 1)) end
  if window > 0 and call('EXISTS', q.prefix .. 'affine') == 1 then
    local jobs, affine = read_window(q, claims, window)
    if affine then return close_claims(q, claims, jobs, false, share) end
  end
  if others > 0 then budget = idle and math.min(budget, math.max(share, 1)) or 0 end
  local too_long, all = take_head(q, claims, budget, max_jobs, idle)
  local choice, wait_s = {}, tonumber(args[10])
  if too_long and #claims.rows == 0 and window > 0 then choice = read_window(q, claims, window) end
  all = all and wait_s > 0
  if all then
    await_jobs(q, idle and #claims.rows == 0 and q.idle or q.busy, args[5], claims.now + wait_s, wait_s)
  end
  local reply = close_claims(q, claims, choice, all, share)
  if others > 0 then wake_idle(q, claims.now) end
  return reply
end

-- args[6..]: 1 if idle, ids. Claims those that still wait; the others were somebody else's first. An idle worker that
-- came too late for all of them gets the head of the queue.
local function claim_chosen(keys, args)
  local q = open(keys)
  local claims = open_claims(q, args)
  local function claim_one(id)
    local score = call('ZSCORE', q.waiting, id)
    if not score then return end
    local job, body = read_claimable(q, claims, id)
    if job then take(q, claims, id, score, job, body) end
  end
  for i = 7, #args do claim_one(args[i]) end
  if args[6] == '1' and #claims.rows == 0 then
    local head = call('ZRANGE', q.waiting, 0, 0)[1]
    if head then claim_one(head) end
  end
  local reply = close_claims(q, claims, {})
  wake_idle(q, claims.now)
  return reply
end

-- args: waiter, seconds, 'idle', 'busy', or 'left' (busy, and what waits is left to others).
-- Returns 1 when there is work already; else the waiter is woken by the next job.
local function wait(keys, args)
  local q, waiter, wait_s, doing = open(keys), args[1], tonumber(args[2]), args[3]
  if doing ~= 'left' and call('ZCARD', q.waiting) > 0 then return 1 end
  local waiters, others = q.busy, q.idle
  if doing == 'idle' then waiters, others = q.idle, q.busy end
  call('ZREM', others, waiter)
  await_jobs(q, waiters, waiter, clock() + wait_s, wait_s)
  return 0
end

-- ---- verbs: hold and let go ------------------------------------------------------------------------------------

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

-- args: worker, ttl, ids that the worker knows it holds. Every other claim of it waits again now. Returns their ids.
local function release_unknown(keys, args)
  local q, worker, now = open(keys), args[1], clock()
  local known, released = {}, {}
  for i = 3, #args do known[args[i]] = true end
  for _, id in ipairs(call('ZRANGE', q.claims .. worker, 0, -1)) do
    if not known[id] then
      local job = read_job(q, id)
      if job and job.state == 'claimed' and job.claimed_by == worker then
        give_back(q, id, job, args[2], now)
        released[#released + 1] = id
      else
        call('ZREM', q.claims .. worker, id)
      end
    end
  end
  return released
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
  settle(q)
  for _, key in ipairs({ q.waiting, q.waiting_tokens, q.leases }) do call('EXPIRE', key, ttl_s) end
  return { returned, failed, orphans }
end

-- ---- verbs: for people and metrics -----------------------------------------------------------------------------

-- Returns waiting jobs, waiting uncached tokens, claimed jobs.
local function depth(keys)
  local q = open(keys)
  return { call('ZCARD', q.waiting), count(try('GET', q.waiting_tokens)) or 0,
    call('ZCARD', q.leases) }
end

-- Returns what has become of each job: 'waiting', 'claimed' or 'absent'. So is one whose place or lease was lost:
-- nobody will claim it, nor give it back.
local function states(keys, ids)
  local q, found = open(keys), {}
  for i, id in ipairs(ids) do
    local state = try('HGET', q.job .. id, 'state')
    local index = (state == 'waiting' and q.waiting) or (state == 'claimed' and q.leases)
    found[i] = index and type(try('ZSCORE', index, id)) == 'string' and state or 'absent'
  end
  return found
end

-- args: limit. Returns rows of id, tokens, uncached, age, score, attempt and reply_to from the head of the queue.
local function peek(keys, args)
  local q, now, rows = open(keys), clock(), {}
  local head = call('ZRANGE', q.waiting, 0, tonumber(args[1]) - 1, 'WITHSCORES')
  for i = 1, #head, 2 do
    local job = read_job(q, head[i])
    if job then
      rows[#rows + 1] = { head[i], job.tokens, job.uncached, SECONDS:format(now - job.arrived_at), head[i + 1],
        job.attempt, job.reply_to }
    end
  end
  return rows
end

-- args: id. Returns now, the body's bytes, and fields and values without the body; nil when there is no job.
local function show(keys, args)
  local found = try('HGETALL', open(keys).job .. args[1])
  if found.err or #found == 0 then return nil end
  local body_bytes, fields = 0, {}
  for i = 1, #found, 2 do
    if found[i] == 'body' then
      body_bytes = #found[i + 1]
    else
      fields[#fields + 1] = found[i]
      fields[#fields + 1] = found[i + 1]
    end
  end
  return { SECONDS:format(clock()), body_bytes, fields }
end

-- ---- names -----------------------------------------------------------------------------------------------------

local function register(name, verb, flag)
  redis.register_function{ function_name = 'pd_queue_VERSION_' .. name, callback = verb, flags = { flag } }
end

-- A server that is out of memory refuses new jobs and claims. What frees memory, or keeps what is held, goes on.
register('enqueue', enqueue)
register('claim', claim)
register('claim_chosen', claim_chosen)
register('wait', wait)
register('renew', renew, 'allow-oom')
register('ack', ack, 'allow-oom')
register('release', release, 'allow-oom')
register('release_unknown', release_unknown, 'allow-oom')
register('expire_leases', expire_leases, 'allow-oom')
register('cancel', cancel, 'allow-oom')
register('sweep', sweep, 'allow-oom')
register('depth', depth, 'no-writes')
-- The depth too, but refused wherever claims are: out of memory, read-only, too few replicas.
register('poll', depth)
register('states', states, 'no-writes')
register('peek', peek, 'no-writes')
register('show', show, 'no-writes')
