-- ARGV: worker, lease seconds, ttl, ids. Returns the ids that this worker does not hold.
-- include now
local worker, ttl = ARGV[1], ARGV[3]
local lease_until = now + tonumber(ARGV[2])
local lost = {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local holder = redis.pcall('HGET', JOB .. id, 'claimed_by')
  if holder == worker then
    redis.call('HSET', JOB .. id, 'lease_until', SECONDS:format(lease_until))
    redis.call('EXPIRE', JOB .. id, ttl)
    redis.call('ZADD', LEASES, lease_until, id)
    redis.call('ZADD', CLAIMS .. worker, lease_until, id)
  else
    redis.call('ZREM', CLAIMS .. worker, id)
    lost[#lost + 1] = id
  end
end
if #lost < #ARGV - 3 then
  redis.call('EXPIRE', LEASES, ttl)
  redis.call('EXPIRE', CLAIMS .. worker, ttl)
end
return lost
