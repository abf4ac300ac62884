-- ARGV: ms. Announces members that fell silent, unless somebody did so less than this long ago: everybody asks.
-- include members_common
if redis.call('SET', PREFIX .. 'pruned', '1', 'NX', 'PX', ARGV[1]) then
  live('worker')
  live('frontend')
end
return 1
