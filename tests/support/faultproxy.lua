--- A proxy before a real engine that spoils single calls: see faultproxy.py for what it can do.
---
---     local proxy <close> = faultproxy.open(engine.socket)
---     -- a runtime or curl uses proxy.socket in the engine's place
---     proxy:cut("POST", "^/containers/create$", "after")            -- the engine acts, its answer gets lost; once
---     proxy:hang("POST", "/stop$", "before", { times = -1 })        -- until proxy:release(), proxy:drop() or proxy:reset()
---     proxy:rewrite("GET", "/json$", { replace = { '"running"', '"paused"' } })
---     proxy:rewrite("POST", "/start$", { status = 500, body = { message = "no space" }, pass = false })
---     assert.equal(1, proxy:count("POST", "^/containers/create$"))
local cjson = require "cjson.safe"

local M = {}

---@class tests.FaultProxy
---@field socket string
local Proxy = {}
Proxy.__index = Proxy
Proxy.__close = function(self) self:close() end

local opened = 0
--- Starts a proxy before the unix socket `upstream`. It ends with close(), or with this process.
---@param upstream string
---@return tests.FaultProxy
function M.open(upstream)
  opened = opened + 1
  local folder = os.getenv "TMPDIR" or "/tmp"
  local path = ("%s/faults-%d-%s.sock"):format(folder, opened, tostring({}):match("0x(%x+)"))
  assert(#path < 95, "the path of a unix socket is too long: " .. path)
  local pipe = assert(io.popen(("exec python3 tests/support/faultproxy.py '%s' '%s'"):format(path, upstream), "w"))
  local proxy = setmetatable({ socket = path, pipe = pipe }, Proxy)
  for _ = 1, 500 do
    if os.execute("test -S '" .. path .. "'") then return proxy end
    os.execute("sleep 0.02")
  end
  error("the fault proxy did not start")
end

function Proxy:close()
  if self.pipe then self.pipe:close() end
  self.pipe = nil
end

function Proxy:_order(method, path, body)
  local command = ("curl -sS --max-time 30 --unix-socket '%s.control' -X %s http://proxy%s"):format(self.socket, method, path)
  if body then command = command .. " --data-binary '" .. cjson.encode(body):gsub("'", "'\\''") .. "'" end
  local pipe <close> = assert(io.popen(command))
  local answer = assert(cjson.decode(pipe:read("a")), "the fault proxy does not answer")
  assert(answer.error == nil, answer.error)
  return answer
end

--- Adds a rule; its number.
---@param rule table
---@return integer
function Proxy:rule(rule)
  return self:_order("POST", "/rules", rule).id
end

local function with(opts, more)
  local rule = {}
  for k, v in pairs(opts or {}) do rule[k] = v end
  for k, v in pairs(more) do rule[k] = v end
  return rule
end

--- Closes the connection: at "before", "after" or "middle".
function Proxy:cut(method, path, at, opts)
  return self:rule(with(opts, { method = method, path = path, action = "cut", at = at }))
end

--- The same places, but silence in place of an end.
function Proxy:hang(method, path, at, opts)
  return self:rule(with(opts, { method = method, path = path, action = "hang", at = at }))
end

function Proxy:delay(method, path, seconds, at, opts)
  return self:rule(with(opts, { method = method, path = path, action = "delay", seconds = seconds, at = at }))
end

function Proxy:rewrite(method, path, opts)
  return self:rule(with(opts, { method = method, path = path, action = "rewrite" }))
end

--- `what`: "answer", "request" or "lines".
function Proxy:duplicate(method, path, what, opts)
  return self:rule(with(opts, { method = method, path = path, action = "duplicate", what = what }))
end

--- How often a rule has struck.
function Proxy:hits(id)
  for _, rule in ipairs(self:_order("GET", "/rules")) do
    if rule.id == id then return rule.hits end
  end
  return 0
end

--- Waits until a rule has struck n times (1).
function Proxy:await(id, n)
  for _ = 1, 1000 do
    if self:hits(id) >= (n or 1) then return end
    os.execute("sleep 0.01")
  end
  error("the call that the rule waits for did not come", 2)
end

--- All calls since the start or the last reset, in order: { n, method, path, query, passed, status, rule, time, done, body }.
function Proxy:calls()
  return self:_order("GET", "/calls")
end

--- How many calls came of this method (nil: any) whose path without the version has this Lua pattern in it.
function Proxy:count(method, pattern)
  local n = 0
  for _, call in ipairs(self:calls()) do
    if (method == nil or call.method == method) and (pattern == nil or call.path:find(pattern)) then n = n + 1 end
  end
  return n
end

--- Forgets all rules and calls; what hangs goes on.
function Proxy:reset() self:_order("DELETE", "/rules") end
--- What hangs goes on.
function Proxy:release() self:_order("POST", "/release") end
--- Closes every open connection to clients, event streams too.
function Proxy:drop() self:_order("POST", "/drop") end
--- Nobody listens any more; open connections stay (see drop).
function Proxy:down() self:_order("POST", "/down") end
function Proxy:up() self:_order("POST", "/up") end
--- { connections, calls }: open now.
function Proxy:open_now() return self:_order("GET", "/open") end

return M
