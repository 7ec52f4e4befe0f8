-- What a hostile or unlucky day does to real process sandboxes: each test is the smallest sequence that once broke something.
local paddock = require "paddock"
local sandboxes = require "tests.live.sandboxes"
local support = require "tests.support"
local sh = support.sh

local LUA, quiet, guest_of = sandboxes.LUA, sandboxes.quiet, sandboxes.guest_of

--- Processes that have a file of this folder open: nobody may when all is over.
local function users_of(path)
  return (sh(("ls -l /proc/[0-9]*/fd 2>/dev/null | grep -F '%s/' | sort -u"):format(path)))
end

describe("a process sandbox", function()
  local here, state

  before_each(function()
    here = sandboxes.new()
    state = here.state
  end)
  after_each(function() here:close() end)

  local function open(options) return here:open(options) end

  local function live(name, fn)
    it(name, function()
      if not sandboxes.works then return pending(sandboxes.why_not) end
      fn()
    end)
  end

  --- Runs a Lua program with `state` and `paddock` set; returns its output and status.
  local function other(text)
    local file = state .. "/other.lua"
    support.write_file(file, ('local state, paddock = %q, require "paddock"\n'):format(state) .. text)
    return sh(LUA .. " " .. file)
  end

  live("gives a command all of a large standard input, however fast it reads [B093]", function()
    local box = open():acquire { user = "alice", thread = "t" }
    for _, size in ipairs { 1, 2, 3, 5, 8, 13 } do
      local input = ("0123456789abcdef"):rep(size << 16)
      for _, command in ipairs { "wc -c", "cat | wc -c", "sleep 0.1; wc -c" } do
        local r = box:exec(command, { stdin = input, timeout = 20 })
        assert.equal("completed", r.outcome, command)
        assert.equal(#input, tonumber(r.stdout), command)
      end
    end
  end)

  live("that died while it was parked fails one command at most [B054]", function()
    local rt = open()
    local box = rt:acquire { user = "alice", thread = "t" }
    box:exec("true")
    box:release()
    sh("kill -9 " .. guest_of(state, box.id))
    local failures = 0
    for _ = 1, 3 do
      local again = rt:acquire { user = "alice", thread = "t" }
      local ok, r = pcall(again.exec, again, "echo ok")
      if not (ok and r.outcome == "completed") then failures = failures + 1 end
      again:release()
    end
    assert.is_true(failures <= 1, failures .. " of 3 turns failed")
  end)

  live("that a running process keeps warm is left alone by others [B129]", function()
    local rt = open()
    local box = rt:acquire { user = "alice", thread = "t" }
    box:write("/workspace/mine", "1")
    box:release()
    local out = other [[
      local rt = paddock.open { state_dir = state, log = function() end }
      os.execute("sleep 1") -- its own threads look around as well
      rt:reconcile()
      rt:shutdown()
    ]]
    local again = rt:acquire { user = "alice", thread = "t" }
    assert.equal("warm", again.source, out)
    assert.equal(box.generation, again.generation)
    assert.equal("1", again:read("/workspace/mine"))
  end)

  live("is made, used and ended by many processes at once without an error [B007, B011]", function()
    support.write_file(state .. "/one.lua", ([[
      local paddock = require "paddock"
      local rt = paddock.open { state_dir = %q, log = function() end }
      local box = rt:acquire { user = "u" .. arg[1], thread = "t", timeout = 20 }
      local r = box:exec("echo hello", { timeout = 10 })
      assert(r.outcome == "completed" and r.stdout == "hello\n", tostring(r))
      box:release()
      rt:shutdown()
    ]]):format(state))
    for _ = 1, 3 do
      local out = sh(("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do %s %s/one.lua $i & done; wait"):format(LUA, state))
      assert.equal("", out)
    end
  end)

  live("whose making was cut off leaves nothing [B032, B181]", function()
    if select(2, sh("command -v paddock")) ~= 0 then return pending("the program paddock is not built") end
    for i = 1, 40 do
      local signal = ({ "INT", "TERM", "KILL" })[i % 3 + 1]
      sh(("timeout -s %s %.3f env XDG_STATE_HOME=%s paddock exec -n --user u --thread t%d -- sleep 1 < /dev/null > /dev/null 2>&1")
        :format(signal, 0.004 + 0.0012 * i, state, i))
    end
    sh("sleep 0.3")
    local said, status = sh(("XDG_STATE_HOME=%s paddock destroy --all 2>&1"):format(state))
    assert.equal(0, status, said)
    for _ = 1, 50 do -- what was killed before it had a record ends by itself
      if users_of(state) == "" then break end
      sh("sleep 0.1")
    end
    assert.equal("", users_of(state))
    local left = sh(("find %s/paddock/sandboxes %s/paddock/sockets -type f -o -type s"):format(state, state))
    assert.equal("", left)
  end)

  live("whose command was interrupted twice is nobody's, also when its teardown had begun [B178, B181]", function()
    if select(2, sh("command -v paddock")) ~= 0 then return pending("the program paddock is not built") end
    for i = 1, 24 do
      sh(("env XDG_STATE_HOME=%s paddock exec -n --user u --thread t%d -- sleep 1 < /dev/null > /dev/null 2>&1 & p=$!; "
        .. "sleep %.3f; kill -TERM $p; sleep %.4f; kill -TERM $p 2> /dev/null; wait $p")
        :format(state, i, 0.06 + 0.003 * i, 0.0025 * (i % 8)))
      local said, status = sh(("XDG_STATE_HOME=%s paddock destroy --all 2>&1"):format(state))
      assert.equal(0, status, said)
    end
    assert.equal("[]", (sh(("XDG_STATE_HOME=%s paddock ps --json"):format(state)):gsub("%s", "")))
  end)

  live("cannot limit its own pid 1 [B056]", function()
    local rt = open()
    local box = rt:acquire { user = "alice", thread = "t" }
    local r = box:exec("command -v prlimit > /dev/null || exit 77; prlimit --pid 1 --nofile=0:0; prlimit --pid 1 --nproc=0:0")
    if r.exit_code == 77 then return pending("no prlimit in /usr") end
    r = box:exec("echo ok")
    assert.equal("completed", r.outcome)
    assert.equal("ok\n", r.stdout)
  end)

  live("that cannot start one more process says so instead of `unknown` [B112]", function()
    local box = open { limits = { pids = 1 } }:acquire { user = "alice", thread = "t" }
    local ok, r = pcall(box.exec, box, "echo ok")
    assert.is_true(not ok or r.outcome ~= "unknown")
  end)

  live("is seen by the runtime's own views without the values of its environment [B215]", function()
    local rt = open { environment = { TOKEN = "canary-5e1f" } }
    local box = rt:acquire { user = "alice", thread = "t" }
    local function search(value, path)
      if type(value) == "table" then
        for key, inner in pairs(value) do search(inner, path .. "." .. tostring(key)) end
      else
        assert.is_nil(tostring(value):find("canary-5e1f", 1, true), path)
      end
    end
    search(rt:explain { user = "alice", thread = "t" }, "explain")
    search(rt:inspect(box.id), "inspect")
    search(rt:list(), "list")
  end)

  live("leaves no record of the commands that looked at it [B197]", function()
    if select(2, sh("command -v paddock")) ~= 0 then return pending("the program paddock is not built") end
    sh(("for i in 1 2 3; do XDG_STATE_HOME=%s paddock exec -n --user u -- true < /dev/null; done"):format(state))
    sh(("XDG_STATE_HOME=%s paddock gc"):format(state))
    assert.equal("", (sh(("ls %s/paddock/runtimes"):format(state))))
  end)

  live("can be destroyed while the disk is full [B197]", function()
    local small = state .. "/small"
    if select(2, sh(("mkdir %s && mount -t tmpfs -o size=64k tmpfs %s"):format(small, small))) ~= 0 then
      return pending("no right to mount a small file system")
    end
    if select(2, sh("command -v paddock")) ~= 0 then
      sh("umount " .. small)
      return pending("the program paddock is not built")
    end
    local cli = ("XDG_STATE_HOME=%s paddock "):format(small)
    sh(cli .. "exec -n --user u --keep -- true < /dev/null")
    sh(("dd if=/dev/zero of=%s/fill bs=4k"):format(small))
    local out, status = sh(cli .. "destroy --all")
    sh("rm " .. small .. "/fill; " .. cli .. "destroy --all; sleep 0.2; umount " .. small)
    assert.equal(0, status, out)
  end)

  live("ends a fork bomb that ignores signals and leaves its session, soon after its limit [B079]", function()
    if select(2, sh("command -v python3")) ~= 0 then return pending("no python3") end
    local box = open { limits = { pids = 512 } }:acquire { user = "alice", thread = "t" }
    local r = box:exec([[command -v python3 > /dev/null || exit 77
python3 -c 'import os, signal
signal.signal(15, signal.SIG_IGN)
while 1:
  try:
    if os.fork() == 0: os.setsid()
  except OSError: pass']], { timeout = 1 })
    if r.exit_code == 77 then return pending("no python3 in the sandbox") end
    assert.equal("hard_timeout", r.outcome)
    r = box:exec("ls -d /proc/[0-9]* | wc -l", { timeout = 10 })
    assert.equal("completed", r.outcome)
    assert.is_true(tonumber(r.stdout) < 12, r.stdout)
  end)

  live("whose guest hangs keeps a command near its limit [B095]", function()
    local rt = open()
    local box = rt:acquire { user = "alice", thread = "t" }
    box:exec("true")
    local pid = guest_of(state, box.id)
    sh("kill -STOP " .. pid)
    for _ = 1, 2 do
      local start = tonumber((sh("date +%s.%N")))
      pcall(box.exec, box, "true", { timeout = 1 })
      local took = tonumber((sh("date +%s.%N"))) - start
      assert.is_true(took < 8, ("a command with a limit of 1 s took %.1f s"):format(took))
    end
    sh("kill -CONT " .. pid)
  end)
end)

describe("a configuration", function()
  it("that is a pipe is refused, and not waited for [B158]", function()
    if select(2, sh("command -v paddock")) ~= 0 then return pending("the program paddock is not built") end
    local dir = sandboxes.folder()
    local _, status = sh(("mkfifo %s/c.lua; timeout -k 1 5 paddock ps --config %s/c.lua < /dev/null"):format(dir, dir))
    sh("rm -rf " .. dir)
    assert.equal(78, status)
  end)

  it("with a relative data_dir is refused [B172]", function()
    local ok, err = pcall(paddock.open, { data_dir = "relative", log = quiet, state_dir = "/tmp/pdk-break-never" })
    assert.is_false(ok)
    assert.equal("invalid_argument", err.kind)
    assert.is_truthy(err.message:find("data_dir", 1, true))
  end)
end)
