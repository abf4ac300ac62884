-- Added to the deadline of a waiter that has something to do, so that all idle ones come before it.
local BUSY = 10000000000

local function told(waiter, score, now)
  return tonumber(score) % BUSY > now and redis.call('PUBLISH', PREFIX .. 'wake:' .. waiter, '') > 0
end

-- One waiting worker is told, not all of them: with a thousand workers the others would only find an empty queue. First
-- one that has some of the prompt (`cached`), then an idle one, then (unless `only_idle`) any.
local function wake(now, cached, only_idle)
  while true do
    local first = redis.call('ZRANGE', IDLE, 0, 0, 'WITHSCORES')
    if not first[1] then return end
    for waiter in string.gmatch(cached, '(%S+)=%d+') do
      local score = redis.call('ZSCORE', IDLE, waiter)
      if score and redis.call('ZREM', IDLE, waiter) and told(waiter, score, now) then return end
    end
    if only_idle and tonumber(first[2]) > BUSY then return end
    if redis.call('ZREM', IDLE, first[1]) == 1 and told(first[1], first[2], now) then return end
    cached = ''
  end
end
