-- ARGV[6..]: ids. Returns the claims of those that still wait; the others were somebody else's first.
for i = 6, #ARGV do
  local score = redis.call('ZSCORE', QUEUE, ARGV[i])
  local job = score and usable(ARGV[i], true)
  if job then take(ARGV[i], score, job) end
end
book()
-- What is left behind is an idle worker's, whoever it would suit best.
if redis.call('ZCARD', QUEUE) > 0 then wake(now, '', true) end
return claimed
