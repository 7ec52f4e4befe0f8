--- One suite over the ways into a container, on each real engine: the guest, an all-in-one image's API, the engine's own exec.
--- Where a plane cannot do a thing, its row here says so; the README has the same table.
local containers = require "tests.live.containers"
local engines = require "tests.support.engines"
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

-- What a plane lacks: standard input, bytes that are no text, standard error apart, a first process of ours,
-- `exit 137` told from a kill, no_overwrite.
local PLANES = {
  guest = { image = "busybox" },
  exec = { image = "busybox", no_exact_signal = true },
  aio = { image = "aio", no_stdin = true, no_raw = true, merged = true, no_exact_signal = true, no_exclusive = true,
          own_init = true },
}

local CASES = {
  { "runs a command and says what it printed", function(box)
    local r = box:exec "echo hello; echo oops >&2"
    assert.equal("completed", r.outcome)
    assert.equal(0, r.exit_code)
    assert.matches("hello", r.stdout)
    assert.matches("oops", r.stdout .. r.stderr)
  end },
  { "keeps standard error apart", function(box)
    local r = box:exec "echo hello; echo oops >&2"
    assert.equal("hello\n", r.stdout)
    assert.equal("oops\n", r.stderr)
  end, "merged" },
  { "says the exit code of everything [B091, B114]", function(box)
    for command, code in pairs { ["true"] = 0, ["false"] = 1, ["exit 3"] = 3, ["no-such-command"] = 127, ["/tmp"] = 126,
                                 ["exec true"] = 0, ["set -e; false"] = 1, ["exec >&-; exit 4"] = 4 } do
      local r = box:exec(command)
      assert.equal("completed", r.outcome, command)
      assert.equal(code, r.exit_code, command)
    end
    assert.equal("ok", (box:exec("echo ok").stdout:gsub("%s", "")))
  end },
  { "says which signal ended a command", function(box)
    local r = box:exec "kill -9 $$"
    assert.equal("signalled", r.outcome)
    assert.equal(9, r.signal)
    assert.equal(137, r.exit_code)
    assert.equal("ok", (box:exec("echo ok").stdout:gsub("%s", "")))
  end },
  { "tells exit 137 from a kill", function(box)
    assert.equal("completed", box:exec("exit 137").outcome)
  end, "no_exact_signal" },
  { "runs in the workspace, or in the directory that is asked for", function(box, world)
    assert.matches(world.workdir, (box:exec("pwd").stdout))
    assert.matches("/tmp", box:exec("pwd", { cwd = "/tmp" }).stdout)
    local fine, err = pcall(box.exec, box, "pwd", { cwd = "/no/such/place" })
    assert.is_false(fine)
    assert.is_truthy(err.kind == "invalid_argument" or err.kind == "backend_error", tostring(err))
  end },
  { "passes an environment, for that command alone", function(box)
    assert.matches("a b'c", box:exec("printf %s \"$PDK_X\"", { env = { PDK_X = "a b'c" } }).stdout, 1, true)
    assert.equal("", (box:exec("printf %s \"$PDK_X\"").stdout:gsub("%s", "")))
    assert.equal("invalid_argument", support.caught(box.exec, box, "true", { env = { ["a b"] = "x" } }).kind)
  end },
  { "ends a command at its limit, with all that it started [B079, B081]", function(box)
    box:write("/tmp/stop.sh", "(setsid sh -c 'while :; do echo x >> /tmp/ticks; sleep 0.1; done' &)\nsleep 60\n")
    for _ = 1, 2 do
      local r = box:exec("sh /tmp/stop.sh", { timeout = 1 })
      assert.equal("hard_timeout", r.outcome)
      assert.equal(124, r.exit_code)
    end
    local size = box:exec("wc -c < /tmp/ticks").stdout
    box:exec "sleep 0.5"
    assert.equal(size, box:exec("wc -c < /tmp/ticks").stdout)
    assert.equal("0", (box:exec("ps | grep -c '[s]top.sh'").stdout:gsub("%s", "")))
  end },
  { "comes back when the command has ended, whatever it left in the background [B080]", function(box)
    local r = box:exec "sleep 30 & echo hi"
    assert.equal("completed", r.outcome)
    assert.matches("hi", r.stdout)
    assert.is_true(r.duration < 10)
  end },
  { "keeps what a flood prints within a bound, and goes on [B087, B088]", function(box)
    local r = box:exec("head -c 20000000 /dev/zero | tr '\\0' x", { timeout = 60 })
    assert.equal("completed", r.outcome)
    assert.is_true(r.truncated)
    assert.is_true(#r.stdout <= 1 << 20)
    assert.equal("ok", (box:exec("echo ok").stdout:gsub("%s", "")))
  end },
  { "carries bytes that are no text [B085]", function(box)
    local r = box:exec "printf 'a\\000\\377\\355\\240\\200\\300\\257z'"
    assert.equal("a\0\255\237\160\128\192\175z", r.stdout)
    box:write("/workspace/raw", r.stdout)
    assert.equal(r.stdout, box:read "/workspace/raw")
  end, "no_raw" },
  { "feeds standard input, and ends it", function(box)
    assert.equal("3\n", (box:exec("wc -c", { stdin = "a\0b" }).stdout:gsub("^%s+", "")))
    assert.equal("seen\n", box:exec("echo seen", { stdin = ("x"):rep(1 << 20) }).stdout)
    assert.equal(1 << 20, math.tointeger(tonumber((box:exec("wc -c", { stdin = ("x"):rep(1 << 20) }).stdout:gsub("%s", "")))))
  end, "no_stdin" },
  { "gives a command that reads an end at once when there is no input [B093]", function(box)
    local r = box:exec("cat", { timeout = 5 })
    assert.is_true(r.outcome == "completed" or r.outcome == "hard_timeout")
  end, "merged" },
  { "keeps directory and variables in a scope, and says when they are lost [B094, B096]", function(box)
    box:exec("cd /tmp; export A=1; B=2", { scope = "s" })
    assert.matches("/tmp 1 2", box:exec('echo "$PWD $A $B"', { scope = "s" }).stdout)
    assert.matches("^%s*$", (box:exec('printf %s "$A"').stdout))
    assert.equal(3, box:exec("exit 3", { scope = "s" }).exit_code)
    local r = box:exec('echo "ok $A"', { scope = "s" })
    assert.is_true(r.session_reset or r.stdout:find("ok 1", 1, true) ~= nil)
    box:exec("sleep 20", { scope = "s", timeout = 1 })
    r = box:exec('echo "ok $A"', { scope = "s" })
    assert.matches("ok", r.stdout)
  end },
  { "writes, reads and lists files", function(box)
    box:write("/workspace/a.txt", "one\n")
    box:write("/workspace/a.txt", "two\n")
    assert.equal("two\n", box:read "/workspace/a.txt")
    assert.matches("two", box:exec("cat /workspace/a.txt").stdout)
    box:write("/workspace/empty", "")
    assert.equal("", box:read "/workspace/empty")
    local big = ("0123456789abcdef"):rep(1 << 16)
    box:write("/workspace/big", big)
    assert.is_true(box:read "/workspace/big" == big)
    box:exec "mkdir /workspace/sub; touch '/workspace/sub/x y'"
    local names = {}
    for _, entry in ipairs(box:list "/workspace") do names[entry.name] = entry end
    assert.equal(4, names["a.txt"].size)
    assert.equal(false, names["a.txt"].is_directory)
    assert.equal(true, names.sub.is_directory)
    assert.equal("/workspace/sub", names.sub.path)
    assert.equal("x y", box:list("/workspace/sub")[1].name)
    assert.same({}, box:list("/workspace/sub/../sub/.") and {})
  end },
  { "says why a file cannot be had", function(box)
    local function reason(fn, ...)
      local err = support.caught(fn, box, ...)
      assert.is_true(err.kind == "io_error" or err.kind == "invalid_argument", tostring(err))
      return err.reason
    end
    assert.equal("not_found", reason(box.read, "/workspace/nope"))
    assert.equal("not_found", reason(box.list, "/workspace/nope"))
    assert.is_truthy(reason(box.read, "/workspace"))
    assert.is_truthy(reason(box.write, "/workspace", "x"))
    assert.is_truthy(reason(box.write, "/workspace/no/parent", "x"))
  end },
  { "refuses to overwrite where that is asked for [B021]", function(box)
    box:write("/workspace/once", "1", { no_overwrite = true })
    assert.equal("already_exists", support.caught(box.write, box, "/workspace/once", "2", { no_overwrite = true }).reason)
    assert.equal("1", box:read "/workspace/once")
  end, "no_exclusive" },
  { "leaves no zombies [B110]", function(box)
    box:exec "for i in $(seq 40); do (sleep 0.01 &); done; sleep 0.5"
    assert.equal("0", (box:exec("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l").stdout:gsub("%s", "")))
  end, "own_init" },
  { "says that the memory limit ended a command [B098, B203]", function(box)
    local r = box:exec("x=xxxxxxxx; while :; do x=$x$x; done", { timeout = 60 })
    assert.equal(137, r.exit_code)
    assert.is_true(r.outcome == "oom" or r.outcome == "signalled")
    assert.equal("ok", (box:exec("echo ok").stdout:gsub("%s", "")))
  end },
}

for _, engine in ipairs(engines.all(ONLY)) do
  for plane, lacks in pairs(PLANES) do
    describe(("the %s plane on %s"):format(plane, engine.name), function()
      local world, rt, box
      local why = engine.why or (not engines.image(lacks.image) and "there is no image " .. lacks.image) or nil

      setup(function()
        if why then return end
        world = containers.world(engine, { plane = plane })
        rt = world:open {
          image = engines.image(lacks.image), limits = { memory = 128 << 20, pids = 128 }, network = plane == "aio" and "open" or nil,
          ownership = { ttl = 180 },
        }
      end)
      before_each(function()
        if why then return end
        box = rt:acquire(ALICE)
        world.workdir = plane == "aio" and "/home/gem" or "/workspace" -- an all-in-one image has its own
      end)
      after_each(function()
        if why then return end
        pcall(box.release, box)
      end)
      teardown(function()
        if world then world:close(true) end
      end)

      for _, case in ipairs(CASES) do
        local name, fn, needs = case[1], case[2], case[3]
        if not (needs and lacks[needs]) then
          it(name, function()
            if why then
              pending(why)
              return
            end
            fn(box, world)
          end)
        end
      end
    end)
  end
end
