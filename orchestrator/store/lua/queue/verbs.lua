-- The names by which store/queue.py calls the verbs.

local function register(name, verb, flag)
  redis.register_function{ function_name = 'pd_queue_VERSION_' .. name, callback = verb, flags = { flag } }
end

-- A server that is out of memory refuses new jobs and claims. What frees memory, or keeps what is held, goes on.
register('enqueue', enqueue)
register('claim', claim)
register('claim_chosen', claim_chosen)
register('wait', wait)
register('leave', leave, 'allow-oom')
register('renew', renew, 'allow-oom')
register('ack', ack, 'allow-oom')
register('release', release, 'allow-oom')
register('expire_leases', expire_leases, 'allow-oom')
register('cancel', cancel, 'allow-oom')
register('sweep', sweep, 'allow-oom')
register('depth', depth, 'no-writes')
-- The depth too, but refused wherever claims are: out of memory, read-only, too few replicas.
register('poll', depth)
register('states', states, 'no-writes')
register('claims_of', claims_of, 'no-writes')
register('peek', peek, 'no-writes')
register('show', show, 'no-writes')
