-- ARGV[6..9]: max tokens, max jobs, window, 1 if idle. Returns the claims from the head of the queue, in order, that fit;
-- an idle worker's first one fits any budget. Where another order may be better, no claims but what look.lua says of the
-- first `window` jobs, to choose from: one of them is cached on a worker that claims, or the head does not fit.
-- include claim_begin
local left, room, window, idle = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9] == '1'
-- `looked` bounds the time that a long row of unusable jobs can take; the next call goes on after them.
local looked, fits = 0, true
local look = window > 0 and redis.call('EXISTS', PREFIX .. 'affine') == 1
repeat
  if look then
    -- include look
    if affine or not fits then
      -- include settle
      return seen
    end
  end
  while fits and left > 0 and #claims < room and looked < room + 200 do
    local head = redis.call('ZRANGE', QUEUE, 0, math.min(room - #claims, 16) - 1, 'WITHSCORES')
    if #head == 0 then break end
    for i = 1, #head, 2 do
      local id, score = head[i], head[i + 1]
      -- include read_waiting
      looked = looked + 1
      if usable then
        local cost = math.max(1, tokens)
        fits = cost <= left or (idle and #claims == 0)
        if not fits then break end
        left = left - cost
        -- include take
        if left <= 0 then break end
      end
    end
  end
  look = window > 0 and not fits and #claims == 0
until not look
-- include claim_end
return claimed
