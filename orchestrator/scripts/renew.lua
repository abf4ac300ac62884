-- ARGV: worker, lease seconds, ttl, ids. Returns the ids that this worker does not hold.
local worker, ttl = ARGV[1], ARGV[3]
local lease_until = clock() + tonumber(ARGV[2])
local lost = {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local holder = redis.pcall('HGET', job_key(id), 'claimed_by')
  if holder == worker then
    redis.call('HSET', job_key(id), 'lease_until', seconds(lease_until))
    redis.call('EXPIRE', job_key(id), ttl)
    redis.call('ZADD', LEASES, lease_until, id)
    redis.call('ZADD', claims_key(worker), lease_until, id)
  else
    redis.call('ZREM', claims_key(worker), id)
    lost[#lost + 1] = id
  end
end
if #lost < #ARGV - 3 then
  keep(LEASES, ttl)
  keep(claims_key(worker), ttl)
end
return lost
