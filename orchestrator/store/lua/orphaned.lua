-- Nobody waits for the answer any more. The grace covers a frontend whose key Redis has just lost.
local alive = {}

local function orphaned(frontend, waited_s, grace_s)
  if waited_s <= grace_s then return false end
  if alive[frontend] == nil then alive[frontend] = redis.call('EXISTS', PREFIX .. 'frontend:' .. frontend) == 1 end
  return not alive[frontend]
end
