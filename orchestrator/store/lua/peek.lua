-- ARGV: limit. Returns per job at the head of the queue: id, tokens, uncached, age, score, attempt, reply_to.
-- include now
-- include read_job
local rows = {}
local head = redis.call('ZRANGE', QUEUE, 0, tonumber(ARGV[1]) - 1, 'WITHSCORES')
for i = 1, #head, 2 do
  local job = read_job(head[i])
  if job then
    rows[#rows + 1] = { head[i], job.tokens, job.uncached, SECONDS:format(now - job.arrived_at), head[i + 1], job.attempt,
      job.reply_to }
  end
end
return rows
