local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
