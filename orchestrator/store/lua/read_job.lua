-- include count

-- A job as a table, or nil when there is none, or none that can be trusted; then also whether something is there.
local function read_job(id)
  local fields = redis.pcall('HMGET', JOB .. id, 'state', 'attempt', 'tokens', 'uncached', 'arrived_at', 'deliveries',
    'reply_to', 'claimed_by', 'score', 'cached')
  if fields.err then return nil, true end
  local job = {
    state = fields[1], attempt = count(fields[2]), tokens = count(fields[3]), uncached = count(fields[4]),
    arrived_at = tonumber(fields[5] or ''), deliveries = count(fields[6]), reply_to = fields[7],
    claimed_by = fields[8], score = fields[9], cached = fields[10] or ''
  }
  if job.attempt and job.tokens and job.uncached and job.arrived_at and job.deliveries and job.reply_to
      and (job.state == 'waiting' or (job.state == 'claimed' and job.claimed_by)) then
    return job, true
  end
  return nil, fields[1] or fields[2] or fields[3]
end
