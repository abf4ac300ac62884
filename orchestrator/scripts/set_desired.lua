-- ARGV: prefill, decode, by, the event as JSON.
redis.call('DEL', PREFIX .. 'desired')
redis.call('HSET', PREFIX .. 'desired', 'prefill', ARGV[1], 'decode', ARGV[2], 'set_by', ARGV[3],
  'set_at', seconds(clock()))
redis.call('PUBLISH', EVENTS, ARGV[4])
return 1
