-- In front of every script: key names, the server's clock, and the parts that transitions share.
-- KEYS[1] is the prefix of all keys, `pd:{NAMESPACE}:`, so that a cluster routes the call to the right slot.
local PREFIX = KEYS[1]
local QUEUE, LEASES = PREFIX .. 'queue', PREFIX .. 'leases'
local QUEUED_TOKENS, DROPPED, IDLE = PREFIX .. 'queued_tokens', PREFIX .. 'dropped', PREFIX .. 'idle'
local AFFINE = PREFIX .. 'affine' -- exists while jobs come whose prompts are cached somewhere

local function job_key(id) return PREFIX .. 'job:' .. id end
local function claims_key(worker) return PREFIX .. 'claims:' .. worker end

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local function seconds(value) return string.format('%.6f', value) end

-- A count as stored text, or nil: 'nan', '-1', '1.5' and absent fields are no counts.
local function count(text)
  local value = text and tonumber(text)
  if value and value >= 0 and value < 9007199254740992 and math.floor(value) == value then return value end
  return nil
end

-- A job as a table, or nil when there is none, or none that can be trusted; then also whether something is there.
local function read_job(id, with_body)
  local fields = redis.pcall('HMGET', job_key(id), 'state', 'attempt', 'tokens', 'uncached', 'arrived_at',
    'deliveries', 'reply_to', 'claimed_by', 'score', with_body and 'body' or 'state', 'cached')
  if fields.err then return nil, true end
  local job = {
    state = fields[1], attempt = count(fields[2]), tokens = count(fields[3]), uncached = count(fields[4]),
    arrived_at = tonumber(fields[5] or ''), deliveries = count(fields[6]), reply_to = fields[7],
    claimed_by = fields[8], score = fields[9], body = fields[10], cached = fields[11] or ''
  }
  if job.attempt and job.tokens and job.uncached and job.arrived_at and job.deliveries and job.reply_to
      and job.body and (job.state == 'waiting' or (job.state == 'claimed' and job.claimed_by)) then
    return job, true
  end
  return nil, fields[1] or fields[2] or fields[3] or fields[10]
end

-- What a script took from the queue; `settle` at its end brings the counter of waiting tokens up to date.
-- A job whose hash was lost or spoilt took an unknown number with it: then the counter is counted afresh, as long
-- as few jobs wait, and at the latest when the queue runs empty.
local removed, damaged = nil, false

local function settle()
  local left = removed and redis.call('DECRBY', QUEUED_TOKENS, removed) or 1
  if left > 0 and not damaged then return end
  local waiting = redis.call('ZCARD', QUEUE)
  if waiting == 0 then
    redis.call('DEL', QUEUED_TOKENS)
  elseif waiting <= 1000 then
    local sum = 0
    for _, id in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do
      sum = sum + (count(redis.pcall('HGET', job_key(id), 'uncached')) or 0)
    end
    redis.call('SET', QUEUED_TOKENS, sum, 'KEEPTTL')
  elseif left < 0 then
    redis.call('SET', QUEUED_TOKENS, 0, 'KEEPTTL')
  end
end

local function unclaim(id, worker)
  redis.call('ZREM', LEASES, id)
  if worker then redis.call('ZREM', claims_key(worker), id) end
end

-- Added to the deadline of a waiter that has something to do, so that all idle ones come before it.
local BUSY = 10000000000

local function told(waiter, score, now)
  return tonumber(score) % BUSY > now and redis.call('PUBLISH', PREFIX .. 'wake:' .. waiter, '') > 0
end

-- One waiting worker is told, not all of them: with a thousand workers the others would only find an empty queue. First
-- one that has some of the prompt (`cached`), then an idle one, then (unless `only_idle`) any.
local function wake(now, cached, only_idle)
  while true do
    local first = redis.call('ZRANGE', IDLE, 0, 0, 'WITHSCORES')
    if not first[1] then return end
    for waiter in string.gmatch(cached, '(%S+)=%d+') do
      local score = redis.call('ZSCORE', IDLE, waiter)
      if score and redis.call('ZREM', IDLE, waiter) and told(waiter, score, now) then return end
    end
    if only_idle and tonumber(first[2]) > BUSY then return end
    if redis.call('ZREM', IDLE, first[1]) == 1 and told(first[1], first[2], now) then return end
    cached = ''
  end
end

-- Indexes get their time to live when they are made, and again from every sweep: without a fleet they run out.
local function keep(key, ttl) redis.call('EXPIRE', key, ttl) end

local function queue_up(id, score, uncached, cached, ttl, now)
  if redis.call('ZADD', QUEUE, score, id) == 0 then damaged = true end
  if redis.call('INCRBY', QUEUED_TOKENS, uncached) == tonumber(uncached) then
    keep(QUEUE, ttl)
    keep(QUEUED_TOKENS, ttl)
  end
  redis.call('EXPIRE', job_key(id), ttl)
  wake(now, cached)
end

-- From claimed back to waiting, at its old place.
local function requeue(id, job, deliveries, ttl, now)
  unclaim(id, job.claimed_by)
  redis.call('HDEL', job_key(id), 'claimed_by', 'lease_until', 'score')
  redis.call('HSET', job_key(id), 'state', 'waiting', 'deliveries', deliveries)
  queue_up(id, tonumber(job.score or '') or job.arrived_at, job.uncached, job.cached, ttl, now)
end

-- Forget a job, whatever it is. `job` is nil when its hash could not be read. `settle` must follow.
local function remove(id, job)
  redis.call('DEL', job_key(id))
  if not job or job.state == 'claimed' then unclaim(id, job and job.claimed_by) end
  if redis.call('ZREM', QUEUE, id) == 1 then
    if job then removed = (removed or 0) + job.uncached else damaged = true end
  end
end

local function drop(id, job, why)
  remove(id, job)
  redis.call('HINCRBY', DROPPED, why, 1)
  redis.call('EXPIRE', DROPPED, 86400)
end

-- Nobody waits for the answer any more. The grace covers a frontend whose key Redis has just lost.
local alive = {}

local function orphaned(job, grace, now)
  if now - job.arrived_at <= grace then return false end
  local frontend = job.reply_to
  if alive[frontend] == nil then alive[frontend] = redis.call('EXISTS', PREFIX .. 'frontend:' .. frontend) == 1 end
  return not alive[frontend]
end
