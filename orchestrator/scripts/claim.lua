-- ARGV: worker, max tokens, max jobs, lease seconds, ttl, orphan grace, waiter.
-- Returns now, lease end, then per job: id, attempt, tokens, uncached, arrived_at, deliveries, reply_to, body.
local worker, budget, room, ttl, grace = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[5], tonumber(ARGV[6])
local now = clock()
local lease_until = now + tonumber(ARGV[4])
local reply = { seconds(now), seconds(lease_until) }
local taken, leases, used, looked = {}, {}, 0, 0
local claims = claims_key(worker)

-- Whoever claims is awake: a wake-up meant for an idle worker must not go to it.
redis.call('ZREM', IDLE, ARGV[7])

-- `looked` bounds the time that a long row of unusable jobs can take; the next call goes on after them.
while #taken < room and budget > 0 and looked < room + 200 do
  local window = redis.call('ZRANGE', QUEUE, #taken, room - 1, 'WITHSCORES')
  if #window == 0 then break end
  local full = false
  for i = 1, #window, 2 do
    local id = window[i]
    local job = read_job(id, true)
    looked = looked + 1
    if not job or job.state ~= 'waiting' then
      drop(id, nil, 'corrupt')
    elseif orphaned(job, grace, now) then
      drop(id, job, 'orphaned')
    elseif #taken > 0 and used + job.uncached > budget then
      full = true
      break
    else
      taken[#taken + 1], used = id, used + job.uncached
      redis.call('HSET', job_key(id), 'state', 'claimed', 'claimed_by', worker, 'lease_until', seconds(lease_until),
        'score', window[i + 1], 'deliveries', job.deliveries + 1)
      leases[#leases + 1], leases[#leases + 2] = lease_until, id
      for _, value in ipairs({ id, job.attempt, job.tokens, job.uncached, seconds(job.arrived_at), job.deliveries + 1,
        job.reply_to, job.body }) do
        reply[#reply + 1] = value
      end
    end
  end
  if full then break end
end

if #taken > 0 then
  redis.call('ZREM', QUEUE, unpack(taken))
  redis.call('ZADD', LEASES, unpack(leases))
  redis.call('ZADD', claims, unpack(leases))
  removed = (removed or 0) + used
  keep(LEASES, ttl)
  keep(claims, ttl)
end
settle()
return reply
