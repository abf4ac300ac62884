-- ARGV[6..]: 1 to take the head where none of the ids is left, else 0; ids. Returns the claims of those that still wait;
-- the others were somebody else's first.
-- include claim_begin
local last = #ARGV
for i = 7, last + 1 do
  local id = ARGV[i]
  if i > last and ARGV[6] == '1' and #claims == 0 then id = redis.call('ZRANGE', QUEUE, 0, 0)[1] end
  local score = id and redis.call('ZSCORE', QUEUE, id)
  if score then
    -- include read_waiting
    if usable then
      -- include take
    end
  end
end
-- include claim_end
-- What is left behind is an idle worker's, whoever it would suit best.
if redis.call('EXISTS', QUEUE, IDLE) == 2 then
  -- include wake
  wake(now, '', true)
end
return claimed
