--- Leases in redis under real runtimes: several machines, simulated by a state directory each (rows E17, O1 to O5).
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

local folder, socket, server

local function answers() return support.sh("redis-cli -s " .. socket .. " ping"):find("PONG") ~= nil end
--- Ends with this process, however that ends.
local function start()
  server = support.sh(([[
    redis-server --port 0 --unixsocket %s --dir %s --save "" > /dev/null 2>&1 &
    server=$!
    (while kill -0 $PPID && kill -0 $server; do sleep 1; done; kill -9 $server) > /dev/null 2>&1 &
    echo $server]]):format(socket, folder)):match("%d+")
  assert(support.eventually(answers))
end
local function signal(name) support.sh(("kill -%s %s"):format(name, server)) end
local function stop()
  signal "KILL"
  support.eventually(function() return not answers() end)
end
local function redis(command) return (support.sh(("redis-cli -s %s %s"):format(socket, command)):gsub("\n$", "")) end

describe("with leases in redis", function()
  local world

  before_each(function()
    world, folder = support.world(), support.tmpdir()
    socket = folder .. "/socket"
    start()
  end)
  after_each(function()
    for _, c in ipairs(world.order) do c.running = false end
    world:assert_quiet()
    stop()
  end)

  --- Each has a state directory of its own.
  local function open(opts)
    local options = {
      ownership = { type = "redis", url = "unix://" .. socket, ttl = 30, renew_interval = 0.05 }, clock = "monotonic",
    }
    for key, value in pairs(opts or {}) do options[key] = value end
    return world:open(options)
  end
  local function renew(rt)
    support.sh "sleep 0.06"
    rt:tick()
  end

  it("a machine takes a sandbox over from another, which forgets it without stopping it [O1, O5]", function()
    local one, two = open(), open()
    assert.equal("redis", one:capabilities().ownership)
    local first = one:acquire(ALICE)
    first:release()
    local second = two:acquire(ALICE)
    assert.same({ "discovered", first.generation }, { second.source, second.generation })
    assert.is_true(second.token > first.token)
    assert.same({ false, true }, { one:lease(first.id).ours, two:lease(first.id).ours })
    renew(one)
    assert.is_nil(one:inspect(first.id))
    one:shutdown()
    assert.equal(0, world:count "destroy")
    assert.equal("completed", second:exec("echo hi").outcome)
    second:release()
    two:shutdown()
    assert.equal(1, world:count "destroy")
    assert.equal("", redis "--scan --pattern '{paddock}:lease:*'")
    assert.equal("", redis "--scan --pattern '{paddock}:session:*'")
  end)

  it("what one machine has is neither destroyed nor adopted by another [O2, O13]", function()
    local one, two = open(), open()
    local box = one:acquire(ALICE)
    assert.same({ false, "deferred", "peer" }, { two:destroy(box.id) })
    two:reconcile()
    assert.is_nil(two:inspect(box.id))
    assert.equal(0, world:count "destroy")
    assert.equal("completed", box:exec("echo hi").outcome)
    box:release()
    assert.is_true(one:destroy(box.id))
    assert.is_nil(two:lease(box.id))
  end)

  it("an acquire that cannot be published hands nothing out, and leaves nothing behind [E17, O4]", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    stop()
    local err = support.caught(rt.acquire, rt, { user = "bob", thread = "t1" })
    assert.equal("ownership_unavailable", err.kind)
    assert.is_truthy(err.message:find("redis at " .. socket, 1, true), err.message)
    renew(rt) -- cannot be answered: kept
    assert.equal("active", world:state_of(box.id, rt))
    assert.equal("completed", box:exec("echo hi").outcome)
    start()
    assert.is_true(support.eventually(function() return (pcall(rt.lease, rt, box.id)) end))
    renew(rt) -- the server has lost everything: claimed again
    assert.is_true(rt:lease(box.id).ours)
    assert.equal("created", rt:acquire({ user = "carol", thread = "t1" }).source)
  end)

  it("a server that hangs costs an acquire its bound, no more, and gives nothing away afterwards [O4]", function()
    local one, two = open(), open()
    local box = one:acquire(ALICE)
    signal "STOP"
    local from = os.time()
    assert.equal("ownership_unavailable", support.caught(two.acquire, two, ALICE).kind)
    assert.is_true(os.time() - from <= 6)
    signal "CONT"
    assert.is_true(support.eventually(function() return (pcall(one.lease, one, box.id)) end))
    assert.is_true(one:lease(box.id).ours)
    renew(one)
    assert.equal("active", world:state_of(box.id, one))
    assert.equal("completed", box:exec("echo hi").outcome)
  end)

  --- Makes the sandbox uncertain, and its stop fail.
  local function quarantine(box)
    world.on["client.open_session"] = function() support.raise("outcome_unknown", "read timeout", "session_creation") end
    assert.equal("session_creation", box:exec("echo x", { scope = "s" }).reason)
    world.on["client.open_session"] = nil
    world:fail("destroy", true, "engine is down")
    box:release()
  end

  it("what one machine has quarantined another refuses, also after a loss of all keys, until it is proven gone [K2, K3, K4]", function()
    local state_dir = support.tmpdir()
    local one, two = open { state_dir = state_dir }, open()
    local box = one:acquire(ALICE)
    quarantine(box)
    one:reset() -- as if it had crashed: its lease ends, its state directory is left
    local function refused_by(rt)
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.same({ "replacement_deferred", "quarantined" }, { err.kind, err.reason })
      assert.equal(1, world:count "create")
      local listed = rt:quarantine()
      assert.same({ 1, box.id, box.generation }, { #listed, listed[1].sandbox_id, listed[1].generation })
      rt:reset()
    end
    refused_by(two)
    redis "flushall"
    local three = open()
    assert.same({}, three:quarantine())
    open({ state_dir = state_dir }):reconcile()
    refused_by(three)
    world.failures = {}
    local four = open()
    local again = four:acquire(ALICE)
    assert.equal("created", again.source)
    assert.not_equal(box.generation, again.generation)
    assert.same({}, four:quarantine())
    local back = open { state_dir = state_dir } -- its own record is gone with the others
    assert.equal(1, tonumber((support.sh("ls " .. state_dir .. "/quarantine | wc -l"))))
    back:reconcile()
    assert.equal(0, tonumber((support.sh("ls " .. state_dir .. "/quarantine | wc -l"))))
    assert.same({}, four:quarantine())
  end)

  it("what other machines cannot be told of is not stopped, and what they recorded is never denied [K6, O4]", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    redis "set '{paddock}:quarantined:custom' foreign"
    world.on["client.open_session"] = function() support.raise("outcome_unknown", "read timeout", "session_creation") end
    box:exec("echo x", { scope = "s" })
    world.on["client.open_session"] = nil
    box:release()
    assert.equal("active", world:state_of(box.id, rt))
    assert.equal(0, world:count "destroy")
    local err = support.caught(rt.destroy, rt, box.id)
    assert.equal("io_error", err.kind)
    assert.is_truthy(err.message:find("redis at " .. socket, 1, true), err.message)
    assert.equal(0, world:count "destroy")
    redis "del '{paddock}:quarantined:custom'"
    assert.is_true(rt:destroy(box.id))
    redis(("set '{paddock}:quarantine:custom:%s' foreign"):format(box.id))
    assert.equal("ownership_unavailable", support.caught(rt.acquire, rt, ALICE).kind)
    assert.equal(1, world:count "create")
    redis "flushall"
  end)

  it("after the loss of all keys the next acquire has a larger token, and older grips are lost [B045]", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    redis "flushall"
    renew(rt)
    local again = rt:acquire(ALICE)
    assert.equal(box.generation, again.generation)
    assert.is_true(again.token > box.token)
    assert.equal(again.token, world:container(box.id).token)
    assert.equal("lost", support.caught(box.exec, box, "echo x").kind)
    assert.equal("ok\n", again:exec("echo ok").stdout)
  end)
end)

describe("process sandboxes with leases in redis", function()
  local works, why_not = support.can_sandbox()
  local runtimes

  before_each(function()
    folder, runtimes = support.tmpdir(), {}
    socket = folder .. "/socket"
    start()
  end)
  after_each(function()
    for _, rt in ipairs(runtimes) do rt:shutdown() end
    stop()
    support.cleanup()
  end)

  local function machine()
    local rt = support.open {
      backend = "process", clock = "monotonic", ownership = { type = "redis", url = "unix://" .. socket },
    }
    runtimes[#runtimes + 1] = rt
    return rt
  end

  it("of two machines with one id are two sandboxes", function()
    if not works then return pending(why_not) end
    local one, two = machine(), machine()
    local a, b = one:acquire(ALICE), two:acquire(ALICE)
    assert.equal(a.id, b.id)
    assert.not_equal(a.generation, b.generation)
    assert.same({ true, true }, { one:lease(a.id).ours, two:lease(b.id).ours })
    assert.same({ "1\n", "2\n" }, { a:exec("echo 1").stdout, b:exec("echo 2").stdout })
    assert.matches("^{paddock}:lease:process/[0-9a-f%-]+/%x+%-%x+:" .. a.id .. "\n", redis "--scan --pattern '{paddock}:lease:*'")
    a:release()
    b:release()
    one:shutdown()
    assert.is_true(two:lease(b.id).ours)
  end)
end)
