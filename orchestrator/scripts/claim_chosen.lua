-- ARGV[6..]: ids. Returns the claims of those that still wait; the others were somebody else's first.
-- include claim_begin
for i = 6, #ARGV do
  local id = ARGV[i]
  local score = redis.call('ZSCORE', QUEUE, id)
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
