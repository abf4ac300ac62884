-- For claim.lua: `seen` is what it returns of the first `window` jobs of the queue, `affine` whether one of them is cached
-- on a worker that claims. After an empty line a line of, for each job, score, tokens, seconds waited, tokens cached here,
-- most tokens cached on another worker, and length of id; then the ids.
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
  -- include read_waiting
  if usable then return tokens, now - arrived_at, cached end
end

local head, rows, ids, affine = redis.call('ZRANGE', QUEUE, 0, window - 1, 'WITHSCORES'), {}, {}, false
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
    rows[#rows + 1] = ('%s %d %.6f %d %d %d'):format(head[i + 1], tokens, waited_s, here, elsewhere, #head[i])
    ids[#ids + 1] = head[i]
  end
end
local seen = '\n' .. table.concat(rows, ' ') .. '\n' .. table.concat(ids)
