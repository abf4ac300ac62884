-- Brings the counter of waiting tokens up to date. A job whose hash was lost or spoilt took an unknown number with it:
-- then the counter is counted afresh, as long as few jobs wait, and at the latest when the queue runs empty.
if removed or damaged then
  local left = removed and redis.call('DECRBY', QUEUED_TOKENS, removed) or 1
  if left <= 0 or damaged then
    local waiting = redis.call('ZCARD', QUEUE)
    if waiting == 0 then
      redis.call('DEL', QUEUED_TOKENS)
    elseif waiting <= 1000 then
      -- include count
      local sum = 0
      for _, id in ipairs(redis.call('ZRANGE', QUEUE, 0, -1)) do
        sum = sum + (count(redis.pcall('HGET', JOB .. id, 'uncached')) or 0)
      end
      redis.call('SET', QUEUED_TOKENS, sum, 'KEEPTTL')
    elseif left < 0 then
      redis.call('SET', QUEUED_TOKENS, 0, 'KEEPTTL')
    end
  end
end
