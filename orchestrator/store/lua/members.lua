-- ARGV: kind. Returns the live ones as rows of id and the hash's fields and values.
-- include members_common
local kind = ARGV[1]
local rows = {}
for i, id in ipairs(live(kind)) do
  local fields = redis.pcall('HGETALL', member_key(kind, id))
  local row = { id }
  if not fields.err then
    for _, value in ipairs(fields) do row[#row + 1] = value end
  end
  rows[i] = row
end
return rows
