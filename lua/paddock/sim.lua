--- A backend that only pretends: sandboxes are tables, and faults are made by hand.
---
--- For `paddock repl --sim` and for trying policies: with `clock = "manual"` and `threads = false` an operator acquires,
--- lets hours pass, breaks things, and sees what the runtime and the policies make of it. Nothing outside is touched.
---
---     local sim = require("paddock.sim").new()
---     local rt = paddock.open { backend = sim.backend, clock = "manual", threads = false }
---     sim.fail("create", 2)
local errors = require "paddock.errors"

local M = {}

local OPS = { "create", "destroy", "inspect", "discover", "alive", "ready", "list", "finish", "connect", "exec", "read",
  "write", "files", "fence", "doom", "probe" }
local KNOWN = {}
for _, op in ipairs(OPS) do KNOWN[op] = true end

---@class paddock.sim.Thing    one generation of a sandbox
---@field info table           what create answered
---@field spec table           what create was asked for
---@field healthy boolean
---@field present boolean      false = the engine knows it no more
---@field sticky boolean       stops are accepted and nothing happens
---@field token integer        the largest that its guest has seen
---@field doomed boolean
---@field files table<string, string>

---@class paddock.Sim
---@field backend table
---@field calls string[]       "create 3f1c", ... in order
local Sim = {}

local function copy(value)
  if type(value) ~= "table" then return value end
  local out = {}
  for key, inner in pairs(value) do out[key] = copy(inner) end
  return out
end

--- Notes a call, and raises when a fault was ordered for it.
local function called(sim, op, id)
  local line = id and op .. " " .. id or op
  sim.calls[#sim.calls + 1] = line
  if #sim.calls > 10000 then table.remove(sim.calls, 1) end
  local fault = sim.faults[op]
  local failing = fault ~= nil
  if failing then
    fault.left = fault.left - 1
    if fault.left <= 0 then sim.faults[op] = nil end
  end
  if sim.on_call then sim.on_call(op, id, failing) end
  if failing then errors.raise(fault.kind, fault.message) end
end

local function current(sim, id)
  local thing = sim.things[id]
  return thing and thing.present and thing or nil
end

local function info_of(thing)
  local info = copy(thing.info)
  info.token = thing.token > 0 and thing.token or nil
  info.doomed = thing.doomed or nil
  return info
end

--- The thing that an info speaks of, if it is still there.
local function same_generation(sim, info)
  local thing = current(sim, info.sandbox_id)
  return thing and (info.generation == nil or thing.info.generation == info.generation) and thing or nil
end

-- ---- clients ------------------------------------------------------------------------------------------------------

local Client = {}
Client.__index = Client

--- The thing, or the error that a dead, doomed or newer one gives.
local function reach(client, op)
  local sim, thing = client.sim, client.thing
  called(sim, op, thing.info.sandbox_id)
  if not thing.present or not thing.healthy then
    errors.raise("backend_error", ("sandbox %s does not answer"):format(thing.info.sandbox_id), { reason = "connect" })
  end
  return thing
end

local function check_token(thing, token)
  if thing.doomed then errors.raise("lost", "this sandbox is being taken down", { reason = "doomed" }) end
  if token < thing.token then errors.raise("lost", "a newer owner has this sandbox", { reason = "stale_token" }) end
end

local function completed(stdout, code)
  return { outcome = "completed", exit_code = code or 0, stdout = stdout or "", stderr = "", truncated = false,
    duration = 0, session_reset = false }
end

--- What the pretended shell can: echo, cat, true, false, exit N, sleep N; anything else says that it ran.
local function pretend(thing, req)
  local command = req.command
  local word, rest = command:match("^%s*(%S*)%s*(.-)%s*$")
  if word == "echo" then return completed(rest .. "\n") end
  if word == "true" or word == "sleep" then return completed() end
  if word == "false" then return completed("", 1) end
  if word == "exit" then return completed("", math.tointeger(tonumber(rest)) or 0) end
  if word == "cat" and rest == "" then return completed(req.stdin) end
  if word == "cat" then
    local text = thing.files[rest]
    if text then return completed(text) end
    local missing = completed("", 1)
    missing.stderr = ("cat: %s: No such file or directory\n"):format(rest)
    return missing
  end
  return completed(("(simulated) %s\n"):format(command))
end

function Client:exec(req)
  local thing = reach(self, "exec")
  check_token(thing, self.token)
  for _, script in ipairs(self.sim.scripts) do
    if req.command:find(script.pattern) then
      local result = completed()
      for key, value in pairs(script.result) do result[key] = value end
      return result
    end
  end
  return pretend(thing, req)
end

function Client:open_session() check_token(reach(self, "exec"), self.token) end
function Client:close_session() check_token(reach(self, "exec"), self.token) end

function Client:write(path, bytes)
  local thing = reach(self, "write")
  check_token(thing, self.token)
  thing.files[path] = bytes
  return true
end

function Client:read(path)
  local thing = reach(self, "read")
  check_token(thing, self.token)
  return thing.files[path] or errors.raise("io_error", path .. ": no such file", { reason = "not_found" })
end

function Client:list(path)
  local thing = reach(self, "files")
  check_token(thing, self.token)
  local prefix, out = path:gsub("/*$", "/"), {}
  for name, bytes in pairs(thing.files) do
    local rest = name:sub(1, #prefix) == prefix and name:sub(#prefix + 1)
    if rest and rest ~= "" and not rest:find("/", 1, true) then
      out[#out + 1] = { name = rest, path = name, is_directory = false, size = #bytes, modified_time = 0, mode = 420 }
    end
  end
  table.sort(out, function(a, b) return a.name < b.name end)
  return out
end

function Client:fence(token)
  local thing = reach(self, "fence")
  token = math.tointeger(tonumber(token))
  check_token(thing, token)
  thing.token, self.token = token, token
  return true
end

function Client:doom(expected, token)
  local thing = reach(self, "doom")
  if thing.doomed then return true end
  if thing.token ~= math.tointeger(tonumber(expected)) then
    errors.raise("lost", "a newer owner has this sandbox", { reason = "stale_token" })
  end
  thing.doomed, thing.token = true, math.max(thing.token, math.tointeger(tonumber(token)))
  return true
end

function Client:close() self.closed = true end

-- ---- the backend --------------------------------------------------------------------------------------------------

local Backend = {}
Backend.__index = Backend

function Backend:create(spec)
  local sim, id = self.sim, spec.sandbox_id
  called(sim, "create", id)
  sim.generations = sim.generations + 1
  sim.things[id] = {
    spec = copy(spec), healthy = true, present = true, sticky = false, doomed = false, token = 0, files = {},
    info = {
      sandbox_id = id, generation = ("g%d"):format(sim.generations), name = "sim-" .. id, url = "sim://" .. id,
      created_at = os.time(),
      attestation = { image = spec.image, network = spec.network, limits = copy(spec.limits), labels = copy(spec.labels) },
    },
  }
  return info_of(sim.things[id])
end

function Backend:destroy(info)
  called(self.sim, "destroy", info.sandbox_id)
  local thing = same_generation(self.sim, info)
  if thing and not thing.sticky then thing.present = false end
end

function Backend:inspect(id, info)
  called(self.sim, "inspect", id)
  local thing = info and same_generation(self.sim, info) or not info and current(self.sim, id)
  return thing and info_of(thing) or nil
end

function Backend:discover(id)
  called(self.sim, "discover", id)
  local thing = current(self.sim, id)
  return thing and thing.healthy and info_of(thing) or nil
end

function Backend:alive(info)
  called(self.sim, "alive", info.sandbox_id)
  local thing = same_generation(self.sim, info)
  return thing ~= nil and thing.healthy
end

function Backend:ready(info)
  called(self.sim, "ready", info.sandbox_id)
  local thing = same_generation(self.sim, info)
  return thing ~= nil and thing.healthy
end

function Backend:list()
  called(self.sim, "list")
  local out = {}
  for id in pairs(self.sim.things) do
    local thing = current(self.sim, id)
    if thing then out[#out + 1] = info_of(thing) end
  end
  table.sort(out, function(a, b) return a.sandbox_id < b.sandbox_id end)
  return out
end

function Backend:finish(id)
  called(self.sim, "finish", id)
  if not current(self.sim, id) then self.sim.things[id] = nil end
end

function Backend:connect(info, opts)
  called(self.sim, "connect", info.sandbox_id)
  local thing = same_generation(self.sim, info)
    or errors.raise("backend_error", ("sandbox %s is gone"):format(info.sandbox_id), { reason = "connect" })
  return setmetatable({ sim = self.sim, thing = thing, token = math.tointeger(tonumber((opts or {}).token)) or 0 }, Client)
end

function Backend:probe()
  called(self.sim, "probe")
  return copy(self.sim.capability)
end

-- ---- what an operator turns ---------------------------------------------------------------------------------------

--- A fresh pretended engine.
---@return paddock.Sim
function M.new()
  local sim = { calls = {}, faults = {}, scripts = {}, things = {}, generations = 0, capability = {} }
  for name, method in pairs(Sim) do -- with dots, as an operator types: sim.kill(id)
    if type(method) == "function" then sim[name] = function(...) return method(sim, ...) end end
  end
  sim.backend = setmetatable({
    name = "sim", sim = sim,
    capabilities = { mounts = true, pause = false, snapshot = false, limits = true, fenced = true },
  }, Backend)
  for key, method in pairs(Backend) do -- methods as plain fields: a backend is a table of functions
    if type(method) == "function" then sim.backend[key] = method end
  end
  return sim
end

--- The thing that `what` names: a box, an id, or the beginning of one.
---@param what table|string
---@return paddock.sim.Thing
function Sim:find(what)
  local id = type(what) == "string" and what or (type(what) == "table" or type(what) == "userdata") and what.id
  if type(id) ~= "string" or id == "" then error("which sandbox? give its id, the beginning of it, or a box", 0) end
  if self.things[id] then return self.things[id] end
  local found
  for known, thing in pairs(self.things) do
    if known:sub(1, #id) == id then
      if found then error(("%q is the beginning of several ids"):format(id), 0) end
      found = thing
    end
  end
  return found or error(("the engine has no sandbox %q"):format(id), 0)
end

--- The next `n` calls of `op` fail (1; 0 = none). `kind`: the error's kind, "backend_error" by default.
---@param op string
---@param n integer?
---@param message string?
---@param kind string?
function Sim:fail(op, n, message, kind)
  if not KNOWN[op] then error(("no operation %q; they are: %s"):format(tostring(op), table.concat(OPS, ", ")), 0) end
  if n ~= nil and (type(n) ~= "number" or n ~= n or n < 0) then error("how many calls? a number, 0 = none", 0) end
  if kind ~= nil and not errors.kinds[kind] then error(("no kind of error %q"):format(tostring(kind)), 0) end
  self.faults[op] = n ~= 0 and {
    left = n or 1, kind = kind or "backend_error", message = message or ("the engine failed: %s (ordered)"):format(op),
  } or nil
end

--- It dies: the engine knows it no more.
function Sim:kill(what) Sim.find(self, what).present = false end
--- It is there, but does not answer.
function Sim:sicken(what) Sim.find(self, what).healthy = false end
--- It answers again.
function Sim:cure(what) Sim.find(self, what).healthy = true end
--- Stops of it are accepted, and nothing happens; `on` = false: they work again.
function Sim:stick(what, on) Sim.find(self, what).sticky = on ~= false end
--- Changes what it reports about itself, such as ("image", "other:1").
function Sim:attest(what, key, value) Sim.find(self, what).info.attestation[key] = value end

--- Somebody replaced it: another generation stands behind the same id.
function Sim:replace(what)
  local old = Sim.find(self, what)
  self.generations = self.generations + 1
  local new = copy(old)
  new.info.generation = ("g%d"):format(self.generations)
  new.token, new.doomed, new.healthy, new.present, new.sticky, new.files = 0, false, true, true, false, {}
  self.things[old.info.sandbox_id] = new
end

--- Commands that match `pattern` (a Lua pattern) answer with `result`, e.g. { outcome = "unknown", reason = "response" }.
function Sim:script(pattern, result)
  if type(pattern) ~= "string" or type(result) ~= "table" then error("script wants a pattern and a result", 0) end
  table.insert(self.scripts, 1, { pattern = pattern, result = result })
end

--- What the engine has: one row for each sandbox.
---@return table[]
function Sim:show()
  local rows = {}
  for id, thing in pairs(self.things) do
    rows[#rows + 1] = {
      sandbox_id = id, generation = thing.info.generation, token = thing.token,
      condition = not thing.present and "gone" or thing.doomed and "doomed" or not thing.healthy and "sick"
        or thing.sticky and "stuck" or "running",
    }
  end
  table.sort(rows, function(a, b) return a.sandbox_id < b.sandbox_id end)
  return rows
end

return M
