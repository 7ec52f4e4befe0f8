--- Helpers of all specs: a scripted backend with a small world of containers behind it, and runtimes on a manual clock.
---
---     local support = require "tests.support"
---     describe("release", function()
---       local world
---       before_each(function() world = support.world() end)
---       after_each(function() world:assert_quiet() end)
---       it("parks on the last release [L1]", function()
---         local rt = world:open { idle_timeout = 60 }       -- options of paddock.open beside those of support.open
---         local a = rt:acquire { user = "alice", thread = "t1" }
---         world:fail("destroy", 1, "engine is down")        -- the next destroy raises
---         world.on.alive = function(next, backend, info)    -- any method can be replaced; `next` is what it does else
---           return info.sandbox_id ~= a.id and next(backend, info)
---         end
---         ...
---         assert.equal(1, world:count "create")
---       end)
---     end)
---
--- The world. A container: { sandbox_id, generation, running, health, ready, stubborn, token, doomed, doomed_by, files,
--- sessions, spec, attestation, url, name, created_at, finished, commands }. Tests may change every field:
---   health = true | false | "unknown" (alive raises)      ready = false: never gets ready
---   stubborn = true: a stop is accepted, yet it stays      attestation = {}: what info reports
--- Generations are "g1", "g2", ... in the order of creation; several of one sandbox id may run at once.
---
--- Methods are called by name: create destroy inspect discover alive ready list finish connect, and those of clients with
--- "client." before: client.exec, client.open_session, client.close_session, client.read, client.write, client.list,
--- client.fence, client.doom, client.close. `world.calls` has all of them in order: { name =, sandbox_id =, args... }.
---
--- world.ownership and world.journal are scripted stores of the same kind, for the options of these names: lease.take,
--- lease.claim, lease.claim_for_destroy, lease.renew, lease.release, lease.owner, lease.close, and journal.record,
--- journal.has, journal.retire. What they hold is in world.leases[id] = { owner, state = "own"|"del", token } and
--- world.records[id] = { [generation or "?"] = why }; tests may put a peer's lease there. Nothing in them expires by itself.
local M = {}

---@class tests.World
---@field calls table[]
---@field on table<string, function>
---@field containers table<string, table>   by generation
---@field clients table[]                    each with `open`
---@field leases table<string, table>
---@field records table<string, table>
local World = {}
World.__index = World

--- Raises an error of paddock's form.
---@param kind string
---@param message string
---@param reason? string
function M.raise(kind, message, reason)
  require("paddock.errors").raise(kind, message, { reason = reason })
end

--- Calls fn, which must raise, and gives back what it raised.
function M.caught(fn, ...)
  local results = table.pack(pcall(fn, ...))
  assert(not results[1], "an error was expected, but the call returned " .. tostring(results[2]))
  return results[2]
end

--- The two ways to acquire, for rows that hold for both: each blocks, and raises what the operation raises.
M.WAYS = {
  { name = "sync", acquire = function(rt, request) return rt:acquire(request) end },
  { name = "async", acquire = function(rt, request)
    local op <close> = rt:acquire_async(request)
    return select(2, op:wait(30))
  end },
}

-- ---- folders, programs -------------------------------------------------------------------------------------

--- Runs a shell command: its output, both streams, and its status.
---@return string output
---@return integer status
function M.sh(command)
  local pipe <close> = assert(io.popen("( " .. command .. "\n) 2>&1; printf '\\n%d' $?"))
  local output, status = pipe:read("a"):match("^(.*)\n(%d+)$")
  return output, math.tointeger(tonumber(status))
end

local folders = {}
--- A new, empty folder; removed by world:assert_quiet or M.cleanup.
function M.tmpdir()
  local path = M.sh("mktemp -d \"${TMPDIR:-/tmp}/pdk.XXXXXX\""):gsub("\n", "")
  folders[#folders + 1] = path
  return path
end

function M.write_file(path, text)
  local file <close> = assert(io.open(path, "wb"))
  assert(file:write(text))
end

function M.read_file(path)
  local file <close> = assert(io.open(path, "rb"))
  return file:read("a")
end

function M.cleanup()
  for _, path in ipairs(folders) do os.execute("chmod -R u+rwX '" .. path .. "' 2>/dev/null; rm -rf '" .. path .. "'") end
  folders = {}
end

--- The open descriptors of this process, as a sorted text: "3 -> /dev/null" and so on.
function M.fds()
  local text = M.sh("ls -l /proc/$PPID/fd 2>/dev/null | sed -n 's/.* \\([0-9][0-9]* -> .*\\)/\\1/p' | sort -n")
  local kept = {}
  for line in text:gmatch("[^\n]+") do
    -- The pipe that carries this answer, and the entropy sources that libraries keep, are nobody's leak.
    -- So is one that went while it was looked at.
    if not line:find("pipe:", 1, true) and not line:find("random", 1, true) and not line:find("^ls: ") then kept[#kept + 1] = line end
  end
  return table.concat(kept, "\n")
end

--- Whether process sandboxes can run here; else the reason, for pending(reason).
---@return boolean
---@return string? reason
function M.can_sandbox()
  local output, status = M.sh("bwrap --unshare-all --ro-bind / / --proc /proc --dev /dev true")
  if status == 0 then return true end
  return false, "bubblewrap cannot make a sandbox here: " .. output:gsub("\n.*", "")
end

--- Asks fn until it answers true, for at most that many real seconds.
function M.eventually(fn, seconds)
  for _ = 1, (seconds or 5) * 50 do
    if fn() then return true end
    os.execute("sleep 0.02")
  end
  return fn()
end

-- ---- the scripted engine -----------------------------------------------------------------------------------

--- A world without containers.
---@param opts? table  capabilities = {}: beside the defaults; methods = { probe = function }: more backend methods, or
---                    false to leave one out; fenced = false: clients without fence and doom
---@return tests.World
function M.world(opts)
  opts = opts or {}
  collectgarbage() -- what an earlier test forgot closes its descriptors now, not in the middle of this one
  collectgarbage()
  local world = setmetatable({
    calls = {}, on = {}, containers = {}, clients = {}, runtimes = {}, failures = {}, order = {},
    fenced = opts.fenced ~= false, commands = {}, leases = {}, records = {}, last_token = 0, fds = M.fds(),
  }, World)
  world.backend = world:_backend(opts)
  world.ownership = world:_ownership()
  world.journal = world:_journal()
  return world
end

local function copy(value)
  if type(value) ~= "table" then return value end
  local t = {}
  for k, v in pairs(value) do t[k] = copy(v) end
  return t
end

--- Makes method `name` fail `times` times (true = always): `err` is a text or a table { kind, message, reason }.
function World:fail(name, times, err)
  self.failures[name] = { times = times, err = err or (name .. " was told to fail") }
end

--- How often a method was called; with `sandbox_id`, for that sandbox.
---@return integer
function World:count(name, sandbox_id)
  local n = 0
  for _, call in ipairs(self.calls) do
    if call.name == name and (sandbox_id == nil or call.sandbox_id == sandbox_id) then n = n + 1 end
  end
  return n
end

--- How many clients that were handed out were closed; those that only carried a doom are not counted.
---@return integer
function World:closes()
  local n = self:count "client.close"
  for _, client in ipairs(self.clients) do
    if client.opts.own == false then n = n - 1 end
  end
  return n
end

--- The names of the calls so far (from the n-th on), without those that only look.
function World:trace(from)
  local quiet, names = { alive = true, inspect = true, discover = true, list = true }, {}
  for i = from or 1, #self.calls do
    if not quiet[self.calls[i].name] then names[#names + 1] = self.calls[i].name end
  end
  return table.concat(names, " ")
end

--- Adds a running container that no runtime made.
---@param sandbox_id string
---@param fields? table
function World:add(sandbox_id, fields)
  local generation = "g" .. (#self.order + 1)
  local c = {
    sandbox_id = sandbox_id, generation = generation, running = true, health = true, ready = true, token = 0,
    files = {}, sessions = {}, commands = {}, attestation = {}, url = "http://" .. generation .. ".invalid",
    name = "paddock-" .. sandbox_id .. "-" .. generation, created_at = os.time(),
  }
  for k, v in pairs(fields or {}) do c[k] = v end
  self.order[#self.order + 1] = c
  self.containers[c.generation] = c
  return c
end

--- The container of a sandbox id or of a generation: the latest one that runs, else the latest.
function World:container(id)
  if self.containers[id] then return self.containers[id] end
  local found
  for _, c in ipairs(self.order) do
    if c.sandbox_id == id and (c.running or found == nil or not found.running) then found = c end
  end
  return found
end

--- The container dies by itself.
function World:kill(id)
  self:container(id).running = false
end

--- Running containers, in the order of creation.
function World:running(sandbox_id)
  local list = {}
  for _, c in ipairs(self.order) do
    if c.running and (sandbox_id == nil or c.sandbox_id == sandbox_id) then list[#list + 1] = c end
  end
  return list
end

--- What the backend reports about a container.
function World:info(c)
  return {
    sandbox_id = c.sandbox_id, url = c.url, headers = {}, generation = c.generation, name = c.name,
    token = self.fenced and c.token > 0 and c.token or nil, created_at = c.created_at, attestation = copy(c.attestation),
  }
end

function World:_record(name, sandbox_id, ...)
  self.calls[#self.calls + 1] = { name = name, sandbox_id = sandbox_id, ... }
  local f = self.failures[name]
  if f and (f.times == true or f.times > 0) then
    if f.times ~= true then f.times = f.times - 1 end
    if type(f.err) == "table" then M.raise(f.err.kind or "backend_error", f.err.message or name, f.err.reason) end
    error(f.err, 0)
  end
end

--- A method that records its call, fails when told so, and lets world.on replace it.
function World:_method(name, id_of, default)
  return function(this, ...)
    self:_record(name, id_of(this, ...), copy { ... })
    local replaced = self.on[name]
    if replaced then return replaced(default, this, ...) end
    return default(this, ...)
  end
end

function World:_backend(opts)
  local methods = {
    create = function(_, spec)
      if #self:running(spec.sandbox_id) > 0 then
        M.raise("backend_error", "the name of sandbox " .. spec.sandbox_id .. " is in use")
      end
      return self:info(self:add(spec.sandbox_id, { spec = copy(spec) }))
    end,
    destroy = function(_, info)
      local c = self.containers[info.generation]
      if c and not c.stubborn then c.running = false end
    end,
    inspect = function(_, sandbox_id, info)
      local c = info and self.containers[info.generation]
      if info == nil then c = self:running(sandbox_id)[1] end
      return c and c.running and self:info(c) or nil
    end,
    discover = function(_, sandbox_id)
      for _, c in ipairs(self:running(sandbox_id)) do
        if c.health == true then return self:info(c) end
      end
      return nil
    end,
    alive = function(_, info)
      local c = self.containers[info.generation]
      if c and c.health == "unknown" then error("the health of " .. info.sandbox_id .. " cannot be told", 0) end
      return c ~= nil and c.running and c.health
    end,
    ready = function(_, info)
      local c = self.containers[info.generation]
      return c ~= nil and c.running and c.ready
    end,
    list = function()
      local infos = {}
      for i, c in ipairs(self:running()) do infos[i] = self:info(c) end
      return infos
    end,
    finish = function(_, _, info)
      local c = info and self.containers[info.generation]
      if c then c.finished = true end
    end,
    connect = function(_, info, connect_opts) return self:_client(info, connect_opts or {}) end,
  }
  local id_of = {
    create = function(_, spec) return spec.sandbox_id end,
    inspect = function(_, id) return id end, discover = function(_, id) return id end,
    finish = function(_, id) return id end, list = function() end,
  }
  local backend = {
    name = "scripted",
    capabilities = { mounts = true, limits = true, fenced = self.fenced, pause = false, snapshot = false },
  }
  for k, v in pairs(opts.capabilities or {}) do backend.capabilities[k] = v end
  for name, fn in pairs(opts.methods or {}) do methods[name] = fn or nil end
  for name, fn in pairs(methods) do
    backend[name] = self:_method(name, id_of[name] or function(_, info) return info and info.sandbox_id end, fn)
  end
  return backend
end

-- ---- its clients -------------------------------------------------------------------------------------------

--- Runs a command in a container: `echo`, `printf`, `cat PATH`, `true`, `false` and `exit N` are known, all else prints
--- nothing and succeeds. A test sets world.commands["..."] = function(container, req) return { stdout = ... } end for more.
function World:_run(c, req)
  local result = { outcome = "completed", exit_code = 0, stdout = "", stderr = "", truncated = false, duration = 0.001,
    session_reset = false }
  local given = self.commands[req.command]
  if given then
    for k, v in pairs(given(c, req) or {}) do result[k] = v end
    return result
  end
  local word, rest = req.command:match("^(%S*)%s*(.*)$")
  if word == "echo" then
    result.stdout = rest .. "\n"
  elseif word == "printf" then
    result.stdout = rest
  elseif word == "cat" and rest == "" then
    result.stdout = req.stdin or ""
  elseif word == "cat" then
    result.stdout = c.files[rest] or ""
    result.exit_code = c.files[rest] and 0 or 1
  elseif word == "false" then
    result.exit_code = 1
  elseif word == "exit" then
    result.exit_code = math.tointeger(tonumber(rest)) or 2
  end
  return result
end

function World:_client(info, opts)
  local client = { open = true, token = math.tointeger(opts.token), sandbox_id = info.sandbox_id,
    generation = info.generation, opts = copy(opts) }
  self.clients[#self.clients + 1] = client
  --- The container, when it runs and this client's token is good there.
  local function container()
    local c = self.containers[info.generation]
    if not client.open then M.raise("closed", "this client was closed") end
    if not (c and c.running) then M.raise("backend_error", "no container " .. tostring(info.generation), "connect") end
    if c.doomed then M.raise("lost", "the sandbox is doomed", "doomed") end
    if self.fenced and client.token and client.token < c.token then
      M.raise("lost", "the sandbox has a newer owner", "stale_token")
    end
    return c
  end
  local methods = {
    exec = function(_, req)
      local c = container()
      if req.session and not c.sessions[req.session] then
        M.raise("backend_error", "no session " .. req.session, "no_session")
      end
      c.commands[#c.commands + 1] = copy(req)
      return self:_run(c, req)
    end,
    open_session = function(_, _, id) container().sessions[id] = true return id end,
    close_session = function(_, _, id) container().sessions[id] = nil return true end,
    read = function(_, path)
      local bytes = container().files[path]
      if bytes == nil then M.raise("io_error", "there is no " .. path, "not_found") end
      return bytes
    end,
    write = function(_, path, bytes) container().files[path] = bytes return true end,
    list = function(_, path)
      local entries = {}
      for name, bytes in pairs(container().files) do
        local folder, file = name:match("^(.*)/([^/]+)$")
        if folder == path then
          entries[#entries + 1] = { name = file, path = name, is_directory = false, size = #bytes }
        end
      end
      table.sort(entries, function(a, b) return a.name < b.name end)
      return entries
    end,
    close = function() client.open = false end,
  }
  if self.fenced then
    function methods.fence(_, token)
      client.token = math.tointeger(token)
      local c = container()
      c.token = client.token
      return true
    end
    function methods.doom(_, expected, token)
      local c = self.containers[info.generation]
      if not (c and c.running) then M.raise("backend_error", "no container " .. tostring(info.generation), "connect") end
      if c.token ~= math.tointeger(expected) and not (c.doomed and c.doomed_by == math.tointeger(token)) then
        M.raise("lost", "the sandbox has seen token " .. c.token, "token_mismatch")
      end
      c.doomed, c.doomed_by = true, math.tointeger(token)
      return true
    end
  end
  local object = {}
  for name, fn in pairs(methods) do
    object[name] = self:_method("client." .. name, function() return info.sandbox_id end, fn)
  end
  return object
end

-- ---- scripted stores ---------------------------------------------------------------------------------------

function World:_grant(id, ctx, state)
  local lease = self.leases[id]
  local token = lease and lease.owner == ctx.runtime and lease.token
  if not token then
    self.last_token = math.max(self.last_token, ctx.floor or 0) + 1
    token = self.last_token
  end
  self.leases[id] = { owner = ctx.runtime, state = state, token = token }
  return true, token
end

function World:_ownership()
  local methods = {
    take = function(_, id, ctx)
      local lease = self.leases[id]
      if lease and lease.state == "del" then return false end
      return self:_grant(id, ctx, "own")
    end,
    claim = function(_, id, ctx)
      local lease = self.leases[id]
      if lease and (lease.owner ~= ctx.runtime or lease.state == "del") then return false end
      return self:_grant(id, ctx, "own")
    end,
    claim_for_destroy = function(_, id, ctx)
      local lease = self.leases[id]
      if lease and lease.owner ~= ctx.runtime then return false end
      return self:_grant(id, ctx, "del")
    end,
    renew = function(_, id, ctx)
      local lease = self.leases[id]
      if lease == nil then return "lapsed" end
      return lease.owner == ctx.runtime and "renewed" or "lost"
    end,
    release = function(_, id, ctx)
      if self.leases[id] and self.leases[id].owner == ctx.runtime then self.leases[id] = nil end
    end,
    owner = function(_, id) return copy(self.leases[id]) end,
    close = function() end,
  }
  local store = {}
  for name, fn in pairs(methods) do store[name] = self:_method("lease." .. name, function(_, id) return id end, fn) end
  return store
end

function World:_journal()
  local methods = {
    record = function(_, id, generation, why)
      self.records[id] = self.records[id] or {}
      self.records[id][generation or "?"] = why or "no reason given"
    end,
    has = function(_, id, generation)
      local records = self.records[id]
      if records == nil then return false end
      return generation == nil or records["?"] ~= nil or records[generation] ~= nil
    end,
    retire = function(_, id, generation)
      local records = self.records[id]
      if records == nil then return end
      records[generation or "?"] = nil
      if generation == nil or next(records) == nil then self.records[id] = nil end
    end,
  }
  function methods.list()
    local list = {}
    for id, records in pairs(self.records) do
      for generation, why in pairs(records) do
        list[#list + 1] = { sandbox_id = id, generation = generation ~= "?" and generation or nil, why = why }
      end
    end
    return list
  end
  local store = {}
  for name, fn in pairs(methods) do store[name] = self:_method("journal." .. name, function(_, id) return id end, fn) end
  return store
end

-- ---- runtimes ----------------------------------------------------------------------------------------------

--- Opens a runtime that a test can hold in its hands: manual clock, no threads, every health answer asked for again,
--- leases in memory, a state folder of its own, no log. `opts` is laid over that.
function M.open(opts)
  local options = {
    clock = "manual", threads = false, health_ttl = 0, ownership = { type = "memory" }, log = function() end,
  }
  for k, v in pairs(opts or {}) do options[k] = v end
  options.state_dir = options.state_dir or M.tmpdir()
  return require("paddock").open(options)
end

--- The same with this world as its backend; assert_quiet shuts it down.
function World:open(opts)
  local options = { backend = self.backend }
  for k, v in pairs(opts or {}) do options[k] = v end
  local rt = M.open(options)
  self.runtimes[#self.runtimes + 1] = rt
  return rt
end

--- What inspect says about a sandbox's state: "active", "warm", ... or nil.
function World:state_of(id, rt)
  local record = (rt or self.runtimes[#self.runtimes]):inspect(id)
  return record and record.state
end

--- Clients that are open, of all sandboxes or of one.
function World:open_clients(sandbox_id)
  local n = 0
  for _, client in ipairs(self.clients) do
    if client.open and (sandbox_id == nil or client.sandbox_id == sandbox_id) then n = n + 1 end
  end
  return n
end

--- Ends a test: lets go of everything scripted, shuts its runtimes down, and checks that nothing is left: no running
--- container that a runtime made, no open client, no descriptor, no folder. Containers that a test added or that its
--- runtimes must not stop are named in `except` (sandbox ids or generations).
---@param except? string[]
function World:assert_quiet(except)
  local spared = {}
  for _, name in ipairs(except or {}) do spared[name] = true end
  self.on, self.failures = {}, {}
  for _, c in ipairs(self.order) do c.stubborn = nil end
  local problems = {}
  for _, rt in ipairs(self.runtimes) do
    local ok, err = pcall(rt.shutdown, rt)
    if not ok and err.kind ~= "closed" then problems[#problems + 1] = "shutdown: " .. tostring(err) end
  end
  for _, c in ipairs(self:running()) do
    if c.spec and not spared[c.sandbox_id] and not spared[c.generation] then
      problems[#problems + 1] = "container " .. c.generation .. " of sandbox " .. c.sandbox_id .. " still runs"
    end
  end
  for _, client in ipairs(self.clients) do
    if client.open and not spared[client.sandbox_id] and not spared[client.generation] then
      problems[#problems + 1] = "a client of " .. client.sandbox_id .. " (" .. client.generation .. ") is open"
    end
  end
  self.runtimes = {}
  collectgarbage()
  collectgarbage()
  require("paddock.core").collect()
  local before = "\n" .. self.fds .. "\n" -- some of these may be gone by now: an earlier test's, collected late
  local open
  M.eventually(function() -- a thread closes what a finalizer has let go of
    open = {}
    for line in M.fds():gmatch("[^\n]+") do
      if not before:find("\n" .. line .. "\n", 1, true) then open[#open + 1] = "descriptor " .. line .. " is open" end
    end
    return #open == 0
  end, 2)
  table.move(open, 1, #open, #problems + 1, problems)
  M.cleanup()
  assert(#problems == 0, "not quiet: " .. table.concat(problems, "; "))
end

return M
