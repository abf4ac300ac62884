-- The verbs for people and metrics. They change nothing.

-- Returns waiting jobs, waiting uncached tokens, claimed jobs.
local function depth(keys)
  local q = open(keys)
  return { call('ZCARD', q.waiting), count(try('GET', q.waiting_tokens)) or 0,
    call('ZCARD', q.leases) }
end

-- Returns what has become of each job: 'waiting', 'claimed' or 'absent'. So is one whose place or lease was lost:
-- nobody will claim it, nor give it back.
local function states(keys, ids)
  local q, found = open(keys), {}
  for i, id in ipairs(ids) do
    local state = try('HGET', q.job .. id, 'state')
    local index = (state == 'waiting' and q.waiting) or (state == 'claimed' and q.leases)
    found[i] = index and type(try('ZSCORE', index, id)) == 'string' and state or 'absent'
  end
  return found
end

-- args: worker. Returns the ids of the jobs that it has claimed.
local function claims_of(keys, args) return call('ZRANGE', open(keys).claims .. args[1], 0, -1) end

-- args: limit. Returns rows of id, tokens, uncached, age, score, attempt and reply_to from the head of the queue.
local function peek(keys, args)
  local q, now, rows = open(keys), clock(), {}
  local head = call('ZRANGE', q.waiting, 0, tonumber(args[1]) - 1, 'WITHSCORES')
  for i = 1, #head, 2 do
    local job = read_job(q, head[i])
    if job then
      rows[#rows + 1] = { head[i], job.tokens, job.uncached, SECONDS:format(now - job.arrived_at), head[i + 1],
        job.attempt, job.reply_to }
    end
  end
  return rows
end

-- args: id. Returns now, the body's bytes, and fields and values without the body; nil when there is no job.
local function show(keys, args)
  local found = try('HGETALL', open(keys).job .. args[1])
  if found.err or #found == 0 then return nil end
  local body_bytes, fields = 0, {}
  for i = 1, #found, 2 do
    if found[i] == 'body' then
      body_bytes = #found[i + 1]
    else
      fields[#fields + 1] = found[i]
      fields[#fields + 1] = found[i + 1]
    end
  end
  return { SECONDS:format(clock()), body_bytes, fields }
end
