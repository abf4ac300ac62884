-- The verb that puts a job into the queue.

-- Returns 'queued', 'known' or 'full'.
local function enqueue(keys, args)
  local q, now = open(keys), clock()
  local id, attempt, tokens, uncached, delay_s, max_waiting, ttl_s, reply_to, body, cached, ttft_s = unpack(args)
  local arrived_at, outcome = now, 'full'
  -- Mostly there is neither an older attempt to replace nor anybody to wake: one look tells.
  local eventful = call('EXISTS', q.job .. id, q.waiters) > 0
  if eventful and call('EXISTS', q.job .. id) == 1 then
    local old = read_job(q, id)
    if old then
      local indexed = call('ZSCORE', old.state == 'waiting' and q.waiting or q.leases, id)
      if old.attempt > tonumber(attempt) or (old.attempt == tonumber(attempt) and indexed) then return 'known' end
      arrived_at = old.arrived_at -- a retried request keeps its place
      remove(q, id, old)
    else
      drop(q, id, nil, 'corrupt')
    end
  end
  if call('ZCARD', q.waiting) < tonumber(max_waiting) then
    outcome = 'queued'
    call('HSET', q.job .. id, 'state', 'waiting', 'tokens', tokens, 'uncached', uncached,
      'arrived_at', SECONDS:format(arrived_at), 'attempt', attempt, 'deliveries', '0', 'reply_to', reply_to, 'body', body)
    if cached ~= '' then
      call('HSET', q.job .. id, 'cached', cached)
      call('SET', q.prefix .. 'affine', 1, 'EX', AFFINE_S)
    end
    if tonumber(ttft_s) > 0 then call('HSET', q.job .. id, 'ttft_s', ttft_s) end -- seconds; most jobs have none
    place(q, id, arrived_at + delay_s, uncached, ttl_s)
  end
  settle(q)
  if eventful and outcome == 'queued' then wake(q, cached, now) end
  return outcome
end
