-- ARGV: id. Returns now, the body's bytes, then fields and values without the body; nothing when there is no job.
local fields = redis.pcall('HGETALL', JOB .. ARGV[1])
if fields.err or #fields == 0 then return {} end
-- include now
local reply = { SECONDS:format(now), 0 }
for i = 1, #fields, 2 do
  if fields[i] == 'body' then
    reply[2] = #fields[i + 1]
  else
    reply[#reply + 1] = fields[i]
    reply[#reply + 1] = fields[i + 1]
  end
end
return reply
