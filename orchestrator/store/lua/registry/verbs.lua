-- The names by which store/registry.py and its neighbours call the verbs.

local function register(name, verb, flag)
  redis.register_function{ function_name = 'pd_registry_VERSION_' .. name, callback = verb, flags = { flag } }
end

register('put_member', put_member)
register('put_worker', put_worker)
register('stay', stay)
register('remove_member', remove_member, 'allow-oom')
register('members', members)
register('known_for', known_for)
register('read', read)
register('prune', prune)
register('claim_id', claim_id)
register('clear_orders', clear_orders)
register('steer', steer)
register('desired', desired)
register('restore_desired', restore_desired)
register('lead', lead)
register('write_document', write_document)
register('once', once)
register('forget', forget, 'allow-oom')
register('note_event', note_event)
register('noted', noted)
