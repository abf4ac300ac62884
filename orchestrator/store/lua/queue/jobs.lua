-- Jobs: their hashes, their places in the queue, and the count of waiting tokens.

-- A job as a table from the values of its fields 'state', 'attempt', 'tokens', 'uncached', 'arrived_at', 'deliveries',
-- 'reply_to' and 'cached'; nil when there is none or it cannot be trusted.
local function parse_job(fields)
  if fields.err then return nil end
  local job = {
    state = fields[1], attempt = count(fields[2]), tokens = count(fields[3]), uncached = count(fields[4]),
    arrived_at = amount(fields[5]), deliveries = count(fields[6]), reply_to = fields[7], cached = fields[8] or ''
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
