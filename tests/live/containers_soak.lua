--- Cycles of real containers, and what they leave: nothing.
---
---     python3 tests/support/engines.py run lua5.4 tests/live/containers_soak.lua [--engine docker|podman] [--plane P] [--cycles N] \
---         [--workers N]
---
--- Some runtimes (processes) on one engine acquire, use and take down sandboxes in every way there is: released and reclaimed,
--- parked, destroyed while held, removed or killed behind their backs, gone through a restart of the runtime. Checked at the end:
--- no container, network, volume, mount, process, control group, listening port or network link of theirs is left in the engine's
--- namespaces, no folder in their state; and no runtime has more descriptors, threads or connections than after its first cycles.
---
--- containers_soak_spec.lua loads this file and runs a short share of it. Both start at the top of the tree.
package.path = "./?.lua;" .. package.path
local engines = require "tests.support.engines"
local json = require "cjson.safe"
local core = require "paddock.core"

local M = {}

local function sh(command, ...)
  local pipe <close> = assert(io.popen("( " .. command:format(...) .. "\n) 2>&1; printf '\\n%d' $?"))
  local output, status = pipe:read("a"):match("^(.*)\n(%d+)$")
  return output, math.tointeger(tonumber(status))
end

local function count(command, ...)
  return math.tointeger(tonumber((sh(command, ...):match("%d+")))) or 0
end

-- ---- a worker: one runtime and its share of the cycles ------------------------------------------------------------------

local WARM_UP = 6 -- cycles, one of each kind, after which nothing may grow
local LOOKS = 8   -- at the memory, on the way
local IDLE = 15   -- descriptors of five connections that may be open, or not, at the moment of a count

--- Descriptors and threads of this process.
local function own()
  return { descriptors = count("ls /proc/$PPID/fd | wc -l"), threads = count("ls /proc/$PPID/task | wc -l") }
end

--- Memory of this process, in KiB: resident, and the Lua universe's. Shown, not judged: the first one says more about malloc.
local function memory(rt, cycle)
  local file <close> = assert(io.open "/proc/self/status")
  return { cycle = cycle, resident = math.tointeger(tonumber(file:read("a"):match("VmRSS:%s+(%d+)"))), lua = rt:stats().lua_bytes // 1024 }
end

--- Acquires. A refusal that says "try again later", as when the runtime itself is taking a dead one down, is no fault and is
--- counted: it has to pass.
local function acquire(w, who)
  local deadline = core.now() + 20
  while true do
    local fine, box = pcall(w.rt.acquire, w.rt, who)
    if fine then return box end
    if (box.kind ~= "replacement_deferred" and box.kind ~= "being_destroyed") or core.now() > deadline then error(box, 0) end
    w.deferred = w.deferred + 1
    os.execute("sleep 0.05")
  end
end

--- The ways of a sandbox: each gets a fresh identity, and ends with nothing left.
local kinds = {
  { "used and destroyed", function(w, who)
    local box = acquire(w, who)
    assert(box:exec("true").exit_code == 0)
    local id = box.id
    box:release()
    assert(w.rt:destroy(id))
  end },
  { "released and reclaimed", function(w, who)
    local box = acquire(w, who)
    local generation = box.generation
    box:release()
    box = acquire(w, who)
    assert(box.source == "warm" and box.generation == generation, "not the warm one: " .. box.source)
    local id = box.id
    box:release()
    assert(w.rt:destroy(id))
  end },
  { "removed behind our back", function(w, who)
    local box = acquire(w, who)
    local generation = box.generation
    box:release()
    w.engine:call("DELETE", "/containers/" .. generation .. "?force=true&v=true")
    box = acquire(w, who)
    assert(box.generation ~= generation, "a container that is gone was handed out")
    assert(box:exec("true").exit_code == 0)
    local id = box.id
    box:release()
    assert(w.rt:destroy(id))
  end },
  { "killed behind our back", function(w, who)
    local box = acquire(w, who)
    local generation = box.generation
    box:release()
    w.engine:call("POST", "/containers/" .. generation .. "/kill?signal=KILL")
    box = acquire(w, who)
    assert(box.generation ~= generation, "a container that is dead was handed out")
    local id = box.id
    box:release()
    assert(w.rt:destroy(id))
  end },
  { "found by the next runtime", function(w, who)
    local box = acquire(w, who)
    local generation = box.generation
    box:release()
    w:reopen()
    box = acquire(w, who)
    assert(box.generation == generation, "made again instead of found: " .. box.source)
    local id = box.id
    box:release()
    assert(w.rt:destroy(id))
  end },
  { "whose creation fails", function(w, who)
    local fine, err = pcall(w.rt.acquire, w.rt, { user = who.user, thread = who.thread, requirements = { image = "localhost/none:1" } })
    assert(not fine and err.kind == "backend_error", "a container without an image: " .. tostring(err))
  end },
}

M.kinds = kinds

local function worker(options)
  local paddock = require "paddock"
  local engine
  for _, one in ipairs(engines.all()) do if one.name == options.engine then engine = one end end
  local w = { engine = engine, deferred = 0 }
  function w:open()
    self.rt = paddock.open { backend = "docker", state_dir = options.state, log = function() end,
      image = engines.image(options.plane == "aio" and "aio" or "busybox"), ready_timeout = 60,
      stop_timeout = options.plane == "guest" and 60 or 10, idle_timeout = 0, health_ttl = 0,
      backend_options = { host = "unix://" .. engine.socket, prefix = options.prefix, plane = options.plane, pull = "never" } }
  end
  function w:reopen()
    self.rt:reset()
    self:open()
  end
  w:open()
  local before, report = nil, { cycles = 0, problems = {}, seconds = {}, memory = {} }
  for i = 1, options.cycles do
    local kind = kinds[(i - 1) % #kinds + 1]
    local started = core.now()
    local fine, err = pcall(kind[2], w, { user = options.prefix, thread = "t" .. i })
    report.seconds[kind[1]] = (report.seconds[kind[1]] or 0) + core.now() - started
    if fine then report.cycles = report.cycles + 1
    else report.problems[#report.problems + 1] = ("cycle %d, %s: %s"):format(i, kind[1], tostring(err)) end
    if #report.problems > 5 then break end
    if i % math.max(1, options.cycles // LOOKS) == 0 then table.insert(report.memory, memory(w.rt, i)) end
    if i == WARM_UP or (i == options.cycles and before == nil) then
      collectgarbage()
      before = own()
    end
  end
  collectgarbage()
  collectgarbage()
  local after
  for _ = 1, 60 do -- threads of the pool go when they had nothing to do for a while
    after = own()
    if after.descriptors <= before.descriptors + IDLE and after.threads <= before.threads then break end
    os.execute("sleep 0.25")
  end
  report.before, report.after, report.deferred = before, after, w.deferred
  for name, n in pairs(after) do
    if n > before[name] + (name == "descriptors" and IDLE or 0) then
      report.problems[#report.problems + 1] = ("%s: %d after the first cycles, %d at the end"):format(name, before[name], n)
    end
  end
  w.rt:shutdown()
  local at_end = own()
  report.closed = at_end
  print(json.encode(report))
end

-- ---- all of them, and what is left ------------------------------------------------------------------------------------

--- What exists in the engine and its namespaces, counted. What an engine keeps for itself is in both counts.
---@param engine tests.Engine
local function census(engine, prefix)
  local state = engines.state()
  local folder = os.getenv "PDK_ENGINES"
  local _, networks = engine:call("GET", "/networks")
  local _, volumes = engine:call("GET", "/volumes")
  local _, containers = engine:call("GET", "/containers/json?all=1&filters=%7B%22name%22%3A%5B%22" .. prefix .. "%22%5D%7D")
  return {
    containers = #containers, networks = #networks, volumes = type(volumes.Volumes) == "table" and #volumes.Volumes or 0,
    listening = count("awk '$4 == \"0A\"' /proc/net/tcp /proc/net/tcp6 | wc -l"),
    links = count("tail -n +3 /proc/net/dev | wc -l"),
    mounts = count("grep -vc ' /run/netns ' /proc/%d/mountinfo", state.pid), -- that one podman makes once
    namespaces = count("ls %s/docker/exec/netns 2> /dev/null | wc -l", folder),
    groups = count("find /sys/fs/cgroup -path '*/%s/*' -type d | wc -l", folder:match("[^/]+$")),
    -- Without those of podman's execs: it keeps them for five minutes after their end.
    processes = count("pgrep -fa '[c]ontainerd-shim.*%s|[c]onmon.*%s' | grep -vc exec-process-spec", folder, folder),
  }
end

---@class soak.Options
---@field engine tests.Engine
---@field cycles integer
---@field workers integer
---@field plane string?       ("guest")
---@field patience number?    seconds that an engine may take for what it does in the background (10)

--- Runs it: problems (lines), the census before and after, and what each worker says.
---@param options soak.Options
function M.run(options)
  local engine, prefix = options.engine, "pdksoak" .. tostring({}):match("0x(%x+)"):sub(-6)
  local folder = sh("mktemp -d \"${TMPDIR:-/tmp}/soak.XXXXXX\""):gsub("\n", "")
  local report = { problems = {}, workers = {}, before = census(engine, prefix), started = os.time(), cycles = 0 }
  local pipes = {}
  for i = 1, options.workers do
    local share = options.cycles // options.workers + (i <= options.cycles % options.workers and 1 or 0)
    sh("mkdir -m 700 %s/%d", folder, i)
    local words = "--worker --engine %s --cycles %d --prefix %s-%d --state %s/%d --plane " .. (options.plane or "guest")
    pipes[i] = assert(io.popen("${LUA:-lua5.4} tests/live/containers_soak.lua " ..
      words:format(engine.name, share, prefix, i, folder, i) .. " 2>&1"))
  end
  for i, pipe in ipairs(pipes) do
    local output = pipe:read("a")
    pipe:close()
    local said = json.decode(output:match("[^\n]*\n?$"))
    report.workers[i] = said
    report.cycles = report.cycles + (said and said.cycles or 0)
    for _, line in ipairs(said and said.problems or { "it ended early: " .. output }) do
      report.problems[#report.problems + 1] = ("worker %d: %s"):format(i, line)
    end
    local left = count("ls %s/%d/docker 2> /dev/null | wc -l", folder, i)
    if left ~= 0 then report.problems[#report.problems + 1] = ("worker %d: %d folders are left in its state"):format(i, left) end
  end
  local deadline = core.now() + (options.patience or 10)
  repeat -- what an engine takes away after its answer; docker looks after names of network namespaces once a minute
    report.after = census(engine, prefix)
    if (options.patience or 10) < 60 then report.after.namespaces = report.before.namespaces end
    local more = false
    for name, n in pairs(report.after) do more = more or n > report.before[name] end
    if more then os.execute("sleep 0.2") end
  until not more or core.now() > deadline
  for name, n in pairs(report.after) do
    if n > report.before[name] then
      report.problems[#report.problems + 1] = ("%s: %d before, %d afterwards"):format(name, report.before[name], n)
    end
  end
  report.seconds = os.time() - report.started
  sh("rm -rf %s", folder)
  return report
end

--- The report as lines.
function M.text(report)
  local lines = { ("%d cycles in %d s"):format(report.cycles, report.seconds) }
  for _, name in ipairs { "containers", "networks", "volumes", "listening", "links", "mounts", "namespaces", "groups", "processes" } do
    lines[#lines + 1] = ("  %-12s %4d before, %4d afterwards"):format(name, report.before[name], report.after[name])
  end
  for i, w in ipairs(report.workers) do
    lines[#lines + 1] = ("  runtime %d    descriptors %d, then %d; threads %d, then %d; closed: %d and %d; "
      .. "told to try again: %d"):format(i,
      w.before.descriptors, w.after.descriptors, w.before.threads, w.after.threads, w.closed.descriptors, w.closed.threads, w.deferred)
  end
  for i, w in ipairs(report.workers) do
    local parts = {}
    for n, m in ipairs(w.memory) do parts[n] = ("%d: %d (%d)"):format(m.cycle, m.resident, m.lua) end
    lines[#lines + 1] = ("  runtime %d    resident KiB (of Lua) after cycles: %s"):format(i, table.concat(parts, ", "))
  end
  for _, line in ipairs(report.problems) do lines[#lines + 1] = "PROBLEM  " .. line end
  return table.concat(lines, "\n")
end

local function main(words)
  local options = { cycles = 2000, workers = 3 }
  local i = 1
  while words[i] do
    local name = words[i]:match("^%-%-(%w+)$")
    if name == "worker" then
      options.worker = true
      i = i + 1
    else
      options[assert(name, "unknown: " .. words[i])] = tonumber(words[i + 1]) or words[i + 1]
      i = i + 2
    end
  end
  if options.worker then return worker(options) end
  local failed = false
  for _, engine in ipairs(engines.all()) do
    if options.engine == nil or options.engine == engine.name then
      if engine.why then
        print(engine.name .. ": " .. engine.why)
        failed = true
      else
        print(engine.name .. " " .. engine.version .. ": " .. options.cycles .. " cycles by " .. options.workers .. " runtimes ...")
        local report = M.run { engine = engine, cycles = options.cycles, workers = options.workers, plane = options.plane,
          patience = 120 }
        print(M.text(report))
        failed = failed or #report.problems > 0
      end
    end
  end
  os.exit(not failed, true)
end

if arg and arg[0] and arg[0]:find("containers_soak%.lua$") and not package.loaded.busted then main(arg) end
return M
