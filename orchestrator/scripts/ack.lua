-- ARGV: worker, id, attempt. Returns 1 when the job was this worker's, and is gone now.
local id = ARGV[2]
local job = read_job(id)
if not job or job.state ~= 'claimed' or job.claimed_by ~= ARGV[1] or job.attempt ~= tonumber(ARGV[3]) then return 0 end
remove(id, job)
return 1
