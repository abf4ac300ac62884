-- ARGV: id, attempt. Removes this attempt, or an older one; a newer one is left alone. Returns what was removed.
-- include read_job
-- include drop
local id = ARGV[1]
local job, present = read_job(id)
if not job then
  if present or redis.call('ZSCORE', QUEUE, id) then drop(id, nil, 'corrupt') end
  -- include settle
  return 'absent'
end
if job.attempt > tonumber(ARGV[2]) then return 'absent' end
remove(id, job)
-- include settle
return job.state
