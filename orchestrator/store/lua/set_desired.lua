-- ARGV: prefill, decode, by, the event as JSON; where a leader decides also its id and the prefill, decode and set_at
-- that it decided upon. Returns 1, or 0 when it leads no more, or somebody else has set something meanwhile.
-- include now
-- include members_common
local desired = PREFIX .. 'desired'
if ARGV[5] then
  local seen = redis.call('HMGET', desired, 'prefill', 'decode', 'set_at')
  local same = seen[1] == ARGV[6] and seen[2] == ARGV[7] and tonumber(seen[3] or '') == tonumber(ARGV[8])
  if redis.call('GET', LEADER) ~= ARGV[5] or not same then return 0 end
end
redis.call('DEL', desired)
redis.call('HSET', desired, 'prefill', ARGV[1], 'decode', ARGV[2], 'set_by', ARGV[3], 'set_at', SECONDS:format(now))
redis.call('PUBLISH', EVENTS, ARGV[4])
return 1
