-- Sets `claimed`: a line of now and lease end; then per job a line of attempt, tokens, uncached, arrived_at, deliveries
-- and the lengths of what follows it: id, reply_to, cached, body. One string, because a table as a reply costs the server
-- a buffer of 16 KiB for each of its levels: more than all the rest.
if #claims > 0 then
  redis.call('EXPIRE', LEASES, ARGV[3])
  redis.call('EXPIRE', CLAIMS .. WORKER, ARGV[3])
  removed = (removed or 0) + used
end
-- include settle
local claimed = ('%.6f %s\n'):format(now, lease_until) .. table.concat(claims)
