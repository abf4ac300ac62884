-- In front of every script: key names. KEYS[1] is the prefix of all keys, `pd:{NAMESPACE}:`, so that a cluster routes the
-- call to the right slot. A line `-- include NAME` stands for the text of that file. What a script makes, functions
-- above all, costs as much as what it calls: therefore short parts are written in line, and helpers are included in
-- the branch that needs them.
local PREFIX = KEYS[1]
local QUEUE, QUEUED_TOKENS, JOB = PREFIX .. 'queue', PREFIX .. 'queued_tokens', PREFIX .. 'job:'
local LEASES, CLAIMS, IDLE = PREFIX .. 'leases', PREFIX .. 'claims:', PREFIX .. 'idle'
local SECONDS = '%.6f'
-- What a script took from the queue, and whether tokens that nobody knows went with it: for settle.lua.
local removed, damaged = nil, false
