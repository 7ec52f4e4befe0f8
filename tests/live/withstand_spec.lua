-- What the process backend withstands: makers that die, commands that attack their own sandbox, configurations that cannot
-- work. Each test is one fault that was there once.
local paddock = require "paddock"
local core_path = assert(package.searchpath("paddock.core", package.cpath))
package.preload["paddock.io"] = package.preload["paddock.io"] or assert(package.loadlib(core_path, "luaopen_paddock_io"))
local proc = require("paddock.io").proc
local records = require "paddock.process.record"
local process = require "paddock.backend.process"
local sandboxes = require "tests.live.sandboxes"
local support = require "tests.support"
local sh = support.sh

local LUA = sandboxes.LUA
local function has(program) return select(2, sh("command -v " .. program)) == 0 end

describe("the process backend withstands", function()
  local here, state

  before_each(function()
    here = sandboxes.new()
    state = here.state
  end)
  after_each(function() here:close() end)

  local function open(options) return here:open(options) end
  local function box_of(options) return open(options):acquire { user = "alice", thread = "t" } end
  local function live(name, fn)
    it(name, function()
      if not sandboxes.works then return pending(sandboxes.why_not) end
      fn()
    end)
  end
  local function refused(kind, text, options)
    local ok, err = pcall(open, options)
    assert.is_false(ok, "it was accepted")
    assert.equal(kind, err.kind)
    assert.is_truthy(err.message:find(text, 1, true), err.message)
    assert.is_nil(err.message:find("\n"))
  end

  live("a maker that died and left a process which waits for it [B032]", function()
    -- The remains as a killed runtime leaves them: only a child holds the record's first lock.
    support.write_file(state .. "/maker.lua", ([[
      package.preload["paddock.io"] = assert(package.loadlib(%q, "luaopen_paddock_io"))
      local store = require("paddock.process.record").open(%q)
      local record = store:begin "halfmade"
      store:listen(record.generation)
      local proc = require("paddock.io").proc
      print(proc.spawn({ argv = { "/bin/sleep", "1000" }, fds = { [5] = record.guest_fd } }):pid())
    ]]):format(core_path, state))
    local pid = math.tointeger(tonumber((sh(LUA .. " " .. state .. "/maker.lua"))))
    assert.is_truthy(proc.start_of(pid))
    local backend = process.new({}, { state_dir = state })
    assert.same({}, backend:list())
    local _, kind = proc.start_of(pid)
    assert.is_true(kind == nil or kind == "Z")
    assert.equal("", (sh(("ls -A %s/sandboxes %s/sockets | grep -v : | tr -d '\n'"):format(state, state))))
  end)

  live("somebody who looks at a creation that goes on [B007]", function()
    local store = records.open(state)
    local record = store:begin "busy"
    local other = process.new({}, { state_dir = state })
    other:list()
    assert.is_true(record.fd:stat().links > 0)
    record.guest_fd:close()
    record.fd:close()
    other:list()
    assert.equal("", (sh(("ls -A %s/sandboxes"):format(state))))
  end)

  live("a command that stops whatever it can reach [B056]", function()
    local box = box_of()
    local start = paddock.now()
    local r = box:exec("kill -STOP $PPID; kill -STOP -- -1; echo done", { timeout = 5 })
    assert.same({ "completed", "done\n" }, { r.outcome, r.stdout })
    assert.is_true(paddock.now() - start < 5)
    assert.equal("ok\n", box:exec("echo ok").stdout)
  end)

  live("a command that turns to pid 1 with limits, priorities and processors [B056]", function()
    if not has "python3" then return pending("no python3") end
    local r = box_of():exec([[command -v python3 > /dev/null || exit 77
python3 - <<'EOF'
import ctypes, os, resource
def refused(what, fn):
    try: fn()
    except PermissionError: return
    print("allowed:", what)
refused("limit", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)))
refused("affinity", lambda: os.sched_setaffinity(1, [0]))
refused("scheduler", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
refused("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
refused("priority of the group", lambda: os.setpriority(os.PRIO_PGRP, 1, 19))
refused("priority of the user", lambda: os.setpriority(os.PRIO_USER, 0, 19))
if os.uname().machine == "x86_64":   # the kernel reads 32 bits of a pid, whatever is above them
    libc = ctypes.CDLL(None)
    if libc.syscall(203, ctypes.c_long((1 << 32) | 1), 8, b"\xff" * 8) == 0: print("allowed: wide affinity")
    if libc.syscall(302, ctypes.c_long((1 << 32) | 1), 7, b"\0" * 16, 0) == 0: print("allowed: wide limit")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3))
print(resource.prlimit(1, resource.RLIMIT_NOFILE)[0] > 0)
EOF]])
    if r.exit_code == 77 then return pending("no python3 in the sandbox") end
    assert.equal("True\n", r.stdout, r.stderr)
  end)

  live("a fork bomb beside another session, which goes on [B079]", function()
    if not has "python3" then return pending("no python3") end
    local box = box_of()
    assert.equal("hi\n", box:exec("sleep 1000 & echo hi", { session = "other" }).stdout)
    local start = paddock.now()
    local r = box:exec([[command -v python3 > /dev/null || exit 77
python3 -c 'import os, signal
signal.signal(15, signal.SIG_IGN)
while 1:
  try:
    if os.fork() == 0: os.setsid()
  except OSError: pass']], { timeout = 1 })
    if r.exit_code == 77 then return pending("no python3 in the sandbox") end
    assert.equal("hard_timeout", r.outcome)
    assert.is_true(paddock.now() - start < 20, "it took " .. paddock.now() - start)
    r = box:exec("jobs | grep -c Running; echo alive", { session = "other" })
    assert.same({ "1\nalive\n", false }, { r.stdout, r.session_reset })
  end)

  live("a guest that the kernel kills for memory: the command's outcome says so [B098, B203]", function()
    if proc.self().uid ~= 0 or not has "python3" then return pending("needs root and python3") end
    local seen = {}
    local rt = open { limits = { memory = 64 << 20 }, log = function(record) seen[record.event] = record end }
    local box = rt:acquire { user = "alice", thread = "t" }
    if rt:inspect(box.id).info.attestation.limits.memory == "rlimit" then return pending("no memory groups here") end
    box:exec("true")
    -- Chosen first, as the kernel does where its own reckoning comes to that.
    os.execute(("(sleep 0.5; echo 1000 > /proc/%d/oom_score_adj) &"):format(sandboxes.guest_of(state, box.id)))
    local r = box:exec([[sleep 1; for i in 1 2 3 4 5 6; do python3 -c 'x = bytearray(15 << 20); import time; time.sleep(5)' &
done; wait]], { timeout = 20 })
    assert.same({ "oom", 137, "sandbox" }, { r.outcome, r.exit_code, r.reason })
    box:release()
    rt:dispatch()
    assert.is_truthy(seen.sandbox_oom)
    assert.equal(box.id, seen.sandbox_oom.sandbox_id)
    local again = rt:acquire { user = "alice", thread = "t" }
    assert.equal("created", again.source)
    assert.equal("ok\n", again:exec("echo ok").stdout)
  end)

  live("a root file system without a shell: a definite error [B112]", function()
    sh(("mkdir -p %s/images/none/bin; chmod -R 755 %s"):format(state, state))
    local box = box_of { backend_options = { images = state .. "/images" }, image = "none", state_dir = state .. "/s" }
    local ok, err = pcall(box.exec, box, "true")
    assert.is_false(ok)
    assert.same({ "backend_error", "no_shell" }, { err.kind, err.reason })
  end)

  live("no room for one more process: a definite error with its reason [B112]", function()
    local box = box_of { limits = { pids = 1 } }
    local ok, err = pcall(box.exec, box, "true")
    assert.is_false(ok)
    assert.same({ "backend_error", "process_limit" }, { err.kind, err.reason })
  end)

  live("files that are larger than one call takes: one kind, and the limit by name", function()
    local box = box_of()
    box:exec("truncate -s 100M big")
    for _, call in ipairs { function() box:read("/workspace/big") end, function() box:write("/workspace/x", ("x"):rep(65 << 20)) end } do
      local ok, err = pcall(call)
      assert.is_false(ok)
      assert.same({ "invalid_argument", "too_large" }, { err.kind, err.reason })
      assert.is_truthy(err.message:find("67043328", 1, true), err.message)
    end
    box:write("/workspace/x", ("x"):rep(63 << 20))
    assert.equal(63 << 20, #box:read("/workspace/x"))
  end)

  live("few descriptors, however many sandboxes come and go [B117]", function()
    support.write_file(state .. "/many.lua", ([[
      local paddock = require "paddock"
      local rt = paddock.open { state_dir = %q, log = function() end }
      for i = 1, 100 do
        local box = rt:acquire { user = "u", thread = "t" .. i }
        assert(box:exec("echo hi").stdout == "hi\n")
        box:release()
        assert(rt:destroy(box.id))
      end
      rt:shutdown()
      print "done"
    ]]):format(state))
    assert.equal("done\n", (sh(("bash -c 'ulimit -n 64; %s %s/many.lua' 2>&1"):format(LUA, state))))
  end)

  live("creations that fail: they keep no descriptor [B117]", function()
    local backend = process.new({}, { state_dir = state })
    local function count() -- the least of some looks: ThreadSanitizer's own thread opens a file now and then
      local least = math.huge
      for _ = 1, 5 do least = math.min(least, tonumber((sh("ls /proc/" .. proc.self().pid .. "/fd | wc -l")))) end
      return least
    end
    local function try()
      return pcall(backend.create, backend, { sandbox_id = "x", mounts = { { source = "/tmp", target = "/usr/none/there" } } })
    end
    assert.is_false((try()))
    collectgarbage()
    collectgarbage("stop")
    local before = count()
    for _ = 1, 5 do try() end
    local after = count()
    collectgarbage("restart")
    assert.is_true(after <= before, ("%d, then %d"):format(before, after))
  end)

  it("configurations that cannot work: each is refused by name [B172]", function()
    refused("invalid_argument", "backend_options.cgroup", { backend_options = { cgroup = "/sys/fs/cgroup/not-there" } })
    refused("invalid_argument", "limits.memory is too small", { limits = { memory = 1 } })
    refused("invalid_argument", "user", { user = "" })
    refused("invalid_argument", "policy_options.f", { policy_options = { f = print } })
    refused("invalid_argument", "state_dir", { state_dir = "relative" })
    refused("unsupported", "e2b", { backend = "e2b" })
  end)

  it("a file system that cannot be written: one error that says so, one exit code", function()
    if not has "paddock" then return pending("the program paddock is not built") end
    local place = state .. "/ro"
    if select(2, sh(("mkdir %s && mount -t tmpfs -o ro tmpfs %s"):format(place, place))) ~= 0 then
      return pending("no right to mount a file system")
    end
    for _, command in ipairs { "exec -n --user u -- true", "ps", "gc" } do
      local out, status = sh(("XDG_STATE_HOME=%s paddock %s 2>&1 < /dev/null"):format(place, command))
      assert.equal(78, status, command .. ": " .. out)
      assert.is_truthy(out:find("Read-only file system", 1, true), out)
      assert.equal(1, select(2, out:gsub("\n", "")), out)
    end
    sh("umount " .. place)
  end)

  it("policies whose answers are outside the contract: the check says so", function()
    if not has "paddock" then return pending("the program paddock is not built") end
    for name, text in pairs {
      decide = 'decide = function() return "bogus" end',
      idle_timeout = 'decide = function() return "reuse" end, idle_timeout = function() return "soon" end',
      evict = 'decide = function() return "reuse" end, evict = function() return "nobody" end',
    } do
      support.write_file(state .. "/reuse.lua", "return { " .. text .. " }")
      local out, status = sh(("XDG_STATE_HOME=%s paddock policy check %s 2>&1"):format(state, state))
      assert.equal(78, status, out)
      assert.is_truthy(out:find("reuse.lua:1: " .. name .. ": answered", 1, true), out)
    end
  end)
end)
