-- A count as stored text, or nil: 'nan', '-1', '1.5' and absent fields are no counts.
local function count(text)
  local value = text and tonumber(text)
  if value and value >= 0 and value < 9007199254740992 and value % 1 == 0 then return value end
  return nil
end
