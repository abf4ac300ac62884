#!lua name=pd_queue_VERSION

-- The prefill queue. Every function that is registered at the end is one atomic step, a verb of store/queue.py.
-- KEYS[1] is the prefix of all keys, `pd:{NAMESPACE}:`: it leads the call to the cluster slot of its namespace.
-- VERSION stands for a hash of the library's text, so that each of two releases on one server calls its own functions.

local SECONDS = '%.6f'    -- how times are stored and told: unix seconds on the server's clock
local HEAD_JOBS = 16      -- jobs read from the head of the queue at once
local MAX_UNUSABLE = 200  -- unusable jobs that one claim drops; the next one goes on behind them
local MAX_PASSED = 1000   -- jobs that one claim passes over, because the worker does not reach their frontends
local MAX_RECOUNT = 1000  -- most waiting jobs whose tokens are counted afresh
local AFFINE_S = 60       -- for this long after a job with a cached prefix, claims look for such jobs
local WAITERS_S = 60      -- a set of waiters outlives its last waiter by this
local TOLD_S = 0.1        -- for this long an idle worker that was told of a job is expected to claim
local DROPPED_S = 86400   -- the statistics of dropped jobs live this long

-- ---- what every verb begins with -------------------------------------------------------------------------------

-- What verbs use of the server, as locals: every look-up of a global costs about a tenth of a command. The first call
-- fills them, because a library that is being loaded does not see them yet.
local function globals() return redis.call, redis.pcall, cmsgpack.pack, table.concat, tonumber, unpack, type, math end
local call, try, pack, concat, tonumber, unpack, type, math

local queues = {} -- by prefix

-- The queue of this call: names of keys, made once, and what this call took from it, which starts afresh. `removed` is
-- the tokens of its jobs, nil for no job; `damaged` says that a job went whose tokens nobody knows; `alive` remembers
-- which frontends live.
local function open(keys)
  if not call then call, try, pack, concat, tonumber, unpack, type, math = globals() end
  local prefix = keys[1]
  local q = queues[prefix]
  if not q then
    q = {
      prefix = prefix, waiting = prefix .. 'queue', waiting_tokens = prefix .. 'queued_tokens', job = prefix .. 'job:',
      leases = prefix .. 'leases', claims = prefix .. 'claims:', waiters = prefix .. 'waiters',
      waits_until = prefix .. 'waits_until', told = prefix .. 'told'
    }
    queues[prefix] = q
  end
  q.removed, q.damaged, q.alive = nil, false, nil
  return q
end

local function clock()
  local time = call('TIME')
  return time[1] + time[2] / 1000000
end

-- A time or a count as stored text, or nil: 'nan', 'inf', '-1' and absent fields are none, '1.5' is no count.
local function amount(text)
  local value = text and tonumber(text)
  return value and value >= 0 and value < 9007199254740992 and value or nil
end
local function count(text)
  local value = amount(text)
  return value and value % 1 == 0 and value or nil
end
