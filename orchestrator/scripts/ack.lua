-- ARGV: worker, id, attempt. Returns 1 when the job was this worker's, and is gone now.
local worker, id = ARGV[1], ARGV[2]
local held = redis.pcall('HMGET', job_key(id), 'state', 'claimed_by', 'attempt')
if held.err or held[1] ~= 'claimed' or held[2] ~= worker or held[3] ~= ARGV[3] then return 0 end
redis.call('DEL', job_key(id))
unclaim(id, worker)
return 1
