-- ARGV: worker, id, attempt. Returns 1 when the job was this worker's, and is gone now.
local worker, id = ARGV[1], ARGV[2]
local held = redis.pcall('HMGET', JOB .. id, 'claimed_by', 'attempt')
if held.err or held[1] ~= worker or held[2] ~= ARGV[3] then return 0 end
redis.call('DEL', JOB .. id)
redis.call('ZREM', LEASES, id)
redis.call('ZREM', CLAIMS .. worker, id)
return 1
