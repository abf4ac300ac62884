-- ARGV: worker. Its leases end now, and the next sweep returns its claims; not those of a worker that is registered, which
-- renews them. Returns how many.
-- include now
local ended = 0
if redis.call('EXISTS', PREFIX .. 'worker:' .. ARGV[1]) == 0 then
  for _, id in ipairs(redis.call('ZRANGE', CLAIMS .. ARGV[1], 0, -1)) do
    if redis.pcall('HGET', JOB .. id, 'claimed_by') == ARGV[1] then
      ended = ended + redis.call('ZADD', LEASES, 'XX', 'LT', 'CH', now, id)
    end
  end
end
return ended
