-- ARGV[6..8]: max tokens, max jobs, window. Returns the claims from the head of the queue, and no jobs to choose from.
-- Where one of the first `window` jobs is cached on a worker that claims: no claims, and per job of those: id, score,
-- tokens, seconds waited, tokens cached here, most tokens cached on another worker.
-- include claim_begin
local budget, room, window = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

if window > 0 and redis.call('EXISTS', PREFIX .. 'affine') == 1 then
  local claiming = {}

  -- What is cached on a worker that claims no more belongs to nobody.
  local function claims_now(worker)
    if claiming[worker] == nil then
      local member = redis.pcall('HMGET', PREFIX .. 'worker:' .. worker, 'role', 'state')
      claiming[worker] = not member.err and member[1] == 'prefill' and member[2] == 'ready'
    end
    return claiming[worker]
  end

  -- A look must be cheap: of a sound job that is not old only this is read. Returns tokens, seconds waited, cached.
  local function glance(id)
    local fields = redis.pcall('HMGET', JOB .. id, 'state', 'tokens', 'arrived_at', 'cached')
    if not fields.err and fields[1] == 'waiting' then
      local tokens, arrived_at = count(fields[2]), tonumber(fields[3] or '')
      if tokens and arrived_at and now - arrived_at <= GRACE then return tokens, now - arrived_at, fields[4] end
    end
    local job = usable(id)
    if job then return count(job[3]), now - job[5], job[8] end
  end

  local head, rows, affine = redis.call('ZRANGE', QUEUE, 0, window - 1, 'WITHSCORES'), {}, false
  for i = 1, #head, 2 do
    local tokens, waited_s, cached = glance(head[i])
    if tokens then
      local here, elsewhere = 0, 0
      for worker, hit in string.gmatch(cached or '', '(%S+)=(%d+)') do
        hit = math.min(tonumber(hit), tokens)
        if worker == WORKER then
          here = hit
        elseif hit > elsewhere and claims_now(worker) then
          elsewhere = hit
        end
      end
      affine = affine or here > 0 or elsewhere > 0
      rows[#rows + 1] = { head[i], head[i + 1], tokens, SECONDS:format(waited_s), here, elsewhere }
    end
  end
  if affine then
    -- include settle
    return { claimed, rows }
  end
end

-- `looked` bounds the time that a long row of unusable jobs can take; the next call goes on after them.
local looked, full = 0, false
while not full and #taken < room and budget > 0 and looked < room + 200 do
  local head = redis.call('ZRANGE', QUEUE, #taken, room - 1, 'WITHSCORES')
  if #head == 0 then break end
  for i = 1, #head, 2 do
    local id, score = head[i], head[i + 1]
    local job, uncached = usable(id)
    looked = looked + 1
    if job then
      full = #taken > 0 and used + uncached > budget
      if full then break end
      -- include take
    end
  end
end
-- include claim_end
return { claimed, {} }
