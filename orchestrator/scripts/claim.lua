-- ARGV[6..8]: max tokens, max jobs, window. Returns the claims from the head of the queue; or, where one of the first
-- `window` jobs is cached on a worker that claims, no claims but what look.lua returns of those jobs.
-- include claim_begin
local budget, room, window = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
if window > 0 and redis.call('EXISTS', PREFIX .. 'affine') == 1 then
  -- include look
end

-- `looked` bounds the time that a long row of unusable jobs can take; the next call goes on after them.
local looked, full = 0, false
while not full and #claims < room and used <= budget and looked < room + 200 do
  local head = redis.call('ZRANGE', QUEUE, 0, math.min(room - #claims, 16) - 1, 'WITHSCORES')
  if #head == 0 then break end
  for i = 1, #head, 2 do
    local id, score = head[i], head[i + 1]
    -- include read_waiting
    looked = looked + 1
    if usable then
      full = #claims > 0 and used + uncached > budget
      if full then break end
      -- include take
    end
  end
end
-- include claim_end
return claimed
