--- The default instance in Lua, implementations other than paddock's own, and what a runtime answers about skills and the network.
local paddock = require "paddock"
local errors = require "paddock.errors"
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

--- An implementation of three functions that counts, over `more`.
local function functions(more)
  local f = { calls = {}, clients = {} }
  local function count(name) f.calls[name] = (f.calls[name] or 0) + 1 end
  function f:acquire(request)
    count "acquire"
    local id = "id-" .. tostring(request.thread)
    self.clients[id] = { exec = function(_, command) return { stdout = command } end, name = id }
    return id
  end
  function f:get(id) return self.clients[id] end
  function f:release(id)
    count "release"
    self.clients[id] = nil
  end
  for key, value in pairs(more or {}) do f[key] = value end
  return f
end

local function counting(more)
  local f = functions(more)
  local shutdown, reset = f.shutdown, f.reset
  function f.shutdown(self)
    self.calls.shutdown = (self.calls.shutdown or 0) + 1
    if shutdown then shutdown(self) end
  end
  function f.reset(self)
    self.calls.reset = (self.calls.reset or 0) + 1
    if reset then reset(self) end
  end
  return f
end

describe("an implementation", function()
  it("is complete with acquire, get and release [A1, A2, A5, R1, S1]", function()
    local f = functions()
    local impl = paddock.implement(f)
    local box = impl:acquire(ALICE)
    assert.equal("id-t1", box.id)
    assert.equal(f.clients["id-t1"], box.client)
    assert.equal("hi", box:exec("hi").stdout)
    assert.equal("id-t1", box.name)
    assert.equal(box.client, impl:get("id-t1").client)
    assert.is_nil(impl:get("other"))
    assert.is_nil(impl:get("id-t1", ALICE)) -- it knows no identities
    local caps = impl:capabilities()
    assert.same({ false, true, false, "open", 300 }, { caps.thread_data_mounts, caps.upload_permission_adjustment,
      caps.agent_skill_isolation, caps.network_mode, caps.network_grant })
    assert.same({}, impl:network_events("id-t1"))
    assert.is_false(impl:deny_pending("id-t1"))
    assert.is_false(impl:decide("id-t1", "r1", "allow"))
    impl:sync_skills { sandbox_id = "id-t1" }
    impl:reset()
    impl:shutdown()
    assert.equal("paddock implementation", tostring(impl))
  end)

  it("overrides what it wants to, and its further functions are reached by their names", function()
    local seen = {}
    local impl = paddock.implement(functions {
      capabilities = { thread_data_mounts = true },
      get_scoped = function(self, id, who) return who.user == "alice" and self.clients[id] or nil end,
      network_events = function(_, id) return { { request_id = "r1", host = "example.org", port = 443, about = id } } end,
      deny_pending = function() return true end,
      decide = function(_, _, request_id, decision) return request_id == "r1" and decision == "deny" end,
      sync_skills = function(_, skills) seen[#seen + 1] = skills.sandbox_id end,
      describe = function(self, what) return what .. tostring(self.clients ~= nil) end,
    })
    local box <close> = impl:acquire(ALICE)
    assert.is_true(impl:capabilities().thread_data_mounts)
    assert.is_not_nil(impl:get(box.id, ALICE))
    assert.is_nil(impl:get(box.id, { user = "bob", thread = "t1" }))
    assert.equal(box.id, impl:network_events(box.id)[1].about)
    assert.is_true(impl:deny_pending(box.id))
    assert.is_true(impl:decide(box.id, "r1", "deny"))
    assert.is_false(impl:decide(box.id, "r2", "deny"))
    impl:sync_skills { sandbox_id = box.id }
    assert.same({ box.id }, seen)
    assert.equal("a true", impl:describe("a "))
    assert.is_nil(impl.nothing)
  end)

  it("has holders: the last one to leave releases, a release by id changes nothing meanwhile", function()
    local f = functions()
    local impl = paddock.implement(f)
    local run = impl:acquire { thread = "t1", holder = "run" }
    local upload = impl:acquire { thread = "t1" }
    assert.equal("id-t1", impl:binding("run"))
    assert.equal(2, f.calls.acquire)
    assert.equal("run", impl:acquire({ thread = "t1", holder = "run" }).holder)
    assert.equal(2, f.calls.acquire) -- the live binding, without another acquire
    impl:park("id-t1")
    assert.is_nil(f.calls.release)
    upload:release()
    upload:release()
    assert.is_nil(f.calls.release)
    run:release()
    assert.equal(1, f.calls.release)
    assert.is_nil(impl:binding("run"))
    impl:release("run")
    assert.equal(1, f.calls.release)
    local none = impl:acquire { thread = "t2", holder = false }
    assert.is_nil(none.holder)
    none:release()
    assert.equal(1, f.calls.release)
    impl:park("id-t2")
    assert.equal(2, f.calls.release)
    do local _box <close> = impl:acquire { thread = "t3" } end
    assert.equal(3, f.calls.release)
    impl:acquire { thread = "t4", holder = "x" }
    local err = support.caught(impl.retain, impl, "id-t5", { holder = "x" })
    assert.equal("invalid_argument", err.kind)
  end)

  it("has asynchronous forms: what yields is gone on with by poll, wait and dispatch, the loop turns meanwhile [A3, R5, S2]", function()
    local ready = false
    local f = functions { network_events = function() return { { request_id = "r1", host = "a.example" } } end,
      sync_skills = function() errors.raise("io_error", "cannot copy") end }
    local acquire = f.acquire
    function f.acquire(self, request)
      while not ready do coroutine.yield() end
      if request.thread == "full" then errors.raise("capacity_exhausted", "no room") end
      return acquire(self, request)
    end
    local impl = paddock.implement(f)
    local told = {}
    local op = impl:acquire_async(ALICE, function(o) told[#told + 1] = o end)
    local full = impl:acquire_async { thread = "full" }
    for _ = 1, 3 do
      assert.is_nil(op:poll())
      assert.equal(0, impl:dispatch())
    end
    assert.is_nil(op:wait(0))
    ready = true
    assert.equal(1, impl:dispatch())
    assert.equal(op, told[1])
    local done, box = op:poll()
    assert.same({ true, "id-t1", "acquire", impl }, { done, box.id, op:kind(), op:runtime() })
    assert.equal("capacity_exhausted", support.caught(full.wait, full).kind)
    f.deny_pending = function() error(nil) end
    assert.same({ false }, { pcall(function() impl:deny_pending_async("id-t1"):wait() end) })
    f.deny_pending = nil
    assert.equal("io_error", support.caught(function() impl:sync_skills_async({ sandbox_id = "id-t1" }):wait() end).kind)
    assert.equal("r1", select(2, impl:network_events_async("id-t1"):wait())[1].request_id)
    assert.same({ true, false }, { impl:deny_pending_async("id-t1"):wait() })
    assert.same({ true, false }, { impl:decide_async("id-t1", "r1", "deny"):wait() })
    local failing = impl:deny_pending_async("id-t1", function() error "of the callback" end)
    impl:deny_pending_async("id-t1", function(o) told[#told + 1] = o end)
    assert.matches("of the callback", support.caught(impl.dispatch, impl))
    assert.equal(2, #told)
    assert.is_true(failing:poll())
    box:release()
  end)

  it("has operations that can be cancelled: unstarted they never run, started they are drained, their box is given back [S3, F12]",
    function()
      local ready = false
      local f = functions()
      local acquire = f.acquire
      function f.acquire(self, request)
        while not ready do coroutine.yield() end
        return acquire(self, request)
      end
      local impl = paddock.implement(f)
      local unstarted = impl:acquire_async { thread = "t1" }
      assert.is_true(unstarted:cancel())
      assert.equal("cancelled", support.caught(unstarted.poll, unstarted).kind)
      assert.is_false(unstarted:cancel())
      local started = impl:acquire_async { thread = "t2" }
      assert.is_nil(started:poll())
      assert.is_true(started:cancel())
      assert.is_true(started:cancel())
      assert.is_nil(started:poll()) -- not before it has ended
      ready = true
      assert.equal("cancelled", support.caught(started.wait, started).kind)
      assert.same({ acquire = 1, release = 1 }, f.calls)
      local untaken = impl:acquire_async { thread = "t3" }
      assert.is_true(untaken:wait())
      untaken:close()
      assert.same({ acquire = 2, release = 2 }, f.calls)
    end)

  it("names what is missing or wrong", function()
    for _, name in ipairs { "acquire", "get", "release" } do
      local f = functions()
      f[name] = nil
      local err = support.caught(paddock.implement, f)
      assert.equal("invalid_argument", err.kind)
      assert.truthy(err.message:find(name, 1, true))
    end
    assert.equal("invalid_argument", support.caught(paddock.implement, 1).kind)
    local impl = paddock.implement(functions { acquire = function() return 7 end })
    assert.equal("backend_error", support.caught(impl.acquire, impl, {}).kind)
    impl = paddock.implement(functions { acquire = function() return "there" end })
    assert.equal("lost", support.caught(impl.acquire, impl, {}).kind)
    impl = paddock.implement(functions())
    assert.equal("invalid_argument", support.caught(impl.acquire, impl, { holder = 1 }).kind)
    assert.equal("invalid_argument", support.caught(impl.get, impl, "").kind)
    impl = paddock.implement(functions { acquire = function() errors.raise("capacity_exhausted", "no room") end })
    assert.equal("capacity_exhausted", support.caught(impl.acquire, impl, {}).kind)
  end)
end)

describe("the default instance", function()
  before_each(function()
    paddock.set_constructor(nil)
    paddock.set_default(nil)
  end)
  after_each(function()
    paddock.set_constructor(nil)
    paddock.set_default(nil)
    support.cleanup()
  end)

  it("is peeked at without being made [A6]", function()
    paddock.set_constructor(function() error "not to be called" end)
    assert.is_nil(paddock.peek_default())
    local impl = paddock.implement(functions())
    paddock.set_default(impl)
    assert.equal(impl, paddock.peek_default())
  end)

  it("is what is installed, whatever the arguments [A7]", function()
    local impl = paddock.implement(functions())
    paddock.set_constructor(function() error "not to be called" end)
    paddock.set_default(impl)
    assert.equal(impl, paddock.default("/nonexistent/config.lua", {}))
  end)

  it("is made with the caller's arguments when there is none [A8]", function()
    local seen
    paddock.set_constructor(function(...)
      seen = { ... }
      return functions() -- three functions will do
    end)
    local impl = paddock.default("a", 2)
    assert.same({ "a", 2 }, seen)
    assert.equal("id-t1", impl:acquire(ALICE).id)
    assert.equal(impl, paddock.default())
  end)

  it("is what `use` in the configuration names [A8]", function()
    local given
    package.loaded["tests.their_runtime"] = { new = function(options, extra)
      given = { options = options, extra = extra }
      return functions()
    end }
    local impl = paddock.default({ use = "tests.their_runtime", anything = 1 }, "more")
    assert.same({ options = { anything = 1 }, extra = "more" }, given)
    assert.equal("id-t1", impl:acquire(ALICE).id)
    paddock.set_default(nil)
    local path = support.tmpdir() .. "/config.lua"
    support.write_file(path, "return { use = 'tests.their_runtime' }")
    assert.equal("id-t1", paddock.default(path):acquire(ALICE).id)
    paddock.set_default(nil)
    given = nil
    paddock.default { sandbox = { use = "tests.their_runtime" } } -- as a deer-flow configuration names it
    assert.is_not_nil(given)
    paddock.set_default(nil)
    package.loaded["tests.their_runtime"] = nil
    local err = support.caught(paddock.default, { use = "tests.their_runtime" })
    assert.equal("invalid_argument", err.kind)
    assert.truthy(err.message:find("tests.their_runtime", 1, true))
    err = support.caught(paddock.open, { use = "tests.their_runtime" })
    assert.equal("invalid_argument", err.kind)
    assert.truthy(err.message:find("`use`", 1, true))
  end)

  it("is a runtime when nothing else is named, and a constructor's failure is the caller's [A8]", function()
    local world = support.world()
    local rt = world:open()
    paddock.set_constructor(function() return rt end)
    assert.equal(rt, paddock.default())
    paddock.set_default(nil)
    paddock.set_constructor(function() errors.raise("io_error", "no disk") end)
    assert.equal("io_error", support.caught(paddock.default).kind)
    paddock.set_constructor(function() return 7 end)
    assert.equal("invalid_argument", support.caught(paddock.default).kind)
    paddock.set_constructor(nil)
    local opened = paddock.default { backend = world.backend, ownership = world.ownership, journal = world.journal,
      state_dir = support.tmpdir(), threads = false, clock = "manual", user = "u", log = "off" }
    assert.equal("paddock runtime (open)", tostring(opened))
    paddock.shutdown_default()
    assert.is_nil(paddock.peek_default())
    assert.equal("paddock runtime (shut down)", tostring(opened))
    world:assert_quiet()
  end)

  it("is one for two coroutines that make it at once; the loser is shut down [A9]", function()
    local f = { counting(), counting() }
    local n = 0
    paddock.set_constructor(function()
      n = n + 1
      local mine = f[n]
      coroutine.yield()
      return paddock.implement(mine)
    end)
    local got = {}
    local threads = {}
    for i = 1, 2 do
      threads[i] = coroutine.create(function() got[i] = paddock.default() end)
      assert(coroutine.resume(threads[i]))
    end
    assert(coroutine.resume(threads[2]))
    assert(coroutine.resume(threads[1]))
    assert.is_not_nil(got[1])
    assert.equal(got[1], got[2])
    assert.equal(f[2], got[1].functions)
    assert.equal(1, f[1].calls.shutdown)
    assert.is_nil(f[2].calls.shutdown)
  end)

  it("is reset: reference, holders, reset, in this order; no shutdown [A10]", function()
    paddock.reset_default()
    local impl, seen
    local f = counting { reset = function()
      seen = { paddock.peek_default() == nil, impl:binding("run") == nil }
    end }
    impl = paddock.implement(f)
    paddock.set_default(impl)
    impl:acquire { thread = "t1", holder = "run" }
    paddock.reset_default()
    assert.same({ true, true }, seen)
    assert.is_nil(f.calls.shutdown)
    assert.is_nil(f.calls.release)
    paddock.set_constructor(function() return functions() end)
    assert.are_not.equal(impl, paddock.default())
  end)

  it("is shut down in the same order, and detached although something could not be stopped [A11]", function()
    paddock.shutdown_default()
    local impl, seen
    local f = counting { shutdown = function()
      seen = { paddock.peek_default() == nil, impl:binding("run") == nil }
      errors.raise("backend_error", "one is left")
    end }
    impl = paddock.implement(f)
    paddock.set_default(impl)
    impl:acquire { thread = "t1", holder = "run" }
    assert.equal("backend_error", support.caught(paddock.shutdown_default).kind)
    assert.same({ true, true }, seen)
    assert.is_nil(f.calls.reset)
    assert.is_nil(paddock.peek_default())
    paddock.set_default(paddock.implement(functions()))
    paddock.shutdown_default()
    assert.is_nil(paddock.peek_default())
  end)

  it("is replaced without a reset or shutdown of the former one, whose holders go unless it is the same [A12]", function()
    local f = counting()
    local first = paddock.implement(f)
    paddock.set_default(first)
    first:acquire { thread = "t1", holder = "run" }
    paddock.set_default(first)
    assert.equal("id-t1", first:binding("run"))
    paddock.set_default(paddock.implement(functions()))
    assert.is_nil(first:binding("run"))
    assert.same({ acquire = 1 }, f.calls)
    assert.equal("invalid_argument", support.caught(paddock.set_default, functions()).kind)
  end)

  it("forgets a replaced runtime's holders: their sandboxes go on, and idle from then on [A12]", function()
    local world = support.world()
    local rt = world:open { idle_timeout = 60 }
    paddock.set_default(rt)
    local box = rt:acquire { user = "alice", thread = "t1", holder = "run" }
    paddock.set_default(rt)
    assert.equal(box.id, rt:binding("run"))
    rt:advance(50)
    paddock.set_default(nil)
    assert.is_nil(rt:binding("run"))
    assert.equal("active", world:state_of(box.id))
    assert.equal("lost", support.caught(box.exec, box, "true").kind)
    rt:advance(30)
    rt:tick()
    assert.equal(0, world:count "destroy")
    rt:advance(31)
    rt:tick()
    assert.equal(1, world:count "destroy")
    rt:shutdown()
    world:assert_quiet()
  end)

  it("may be asked for, set, reset and shut down from constructor, reset and shutdown [A13]", function()
    local depth = 0
    paddock.set_constructor(function()
      depth = depth + 1
      if depth == 1 then
        local inner = paddock.default()
        paddock.reset_default()
        paddock.set_default(inner)
      end
      return functions()
    end)
    local got = paddock.default()
    assert.equal(got, paddock.peek_default())
    paddock.set_constructor(function() return paddock.default() end)
    paddock.set_default(nil)
    assert.equal("unsupported", support.caught(paddock.default).kind)
    for _, how in ipairs { "reset", "shutdown" } do
      local busy = true
      paddock.set_constructor(function() return functions() end)
      local f = functions { [how] = function()
        if not busy then return end
        busy = false
        local another = paddock.default()
        paddock.reset_default()
        paddock.set_default(another)
        paddock.shutdown_default()
      end }
      paddock.set_default(paddock.implement(f))
      paddock[how .. "_default"]()
      assert.is_false(busy)
      assert.is_nil(paddock.peek_default())
    end
  end)
end)

describe("skills and network decisions of a runtime", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("have defaults when the engine knows nothing of them [R1, S1]", function()
    local rt = world:open()
    local box = rt:acquire(ALICE)
    local calls = #world.calls
    rt:sync_skills { sandbox_id = box.id, user = "alice", thread = "t1", projection = { root = "/skills" } }
    assert.same({}, rt:network_events(box.id))
    assert.is_false(rt:deny_pending(box.id))
    assert.is_false(rt:decide(box.id, "r1", "allow"))
    assert.equal(calls, #world.calls)
    local caps = rt:capabilities()
    assert.equal("open", caps.network_mode)
    assert.equal(300, caps.network_grant)
    box:release()
  end)

  it("refuse what they cannot understand", function()
    local rt = world:open()
    for _, case in ipairs {
      { "sync_skills" }, { "sync_skills", {} }, { "sync_skills", { sandbox_id = "a", other = 1 } },
      { "sync_skills", { sandbox_id = "NO" } }, { "network_events" }, { "network_events", "" }, { "network_events", "a/b" },
      { "deny_pending", 7 }, { "decide", "a" }, { "decide", "a", "r", "perhaps" }, { "decide", "a", ("r"):rep(64), "deny" },
    } do
      local err = support.caught(rt[case[1]], rt, table.unpack(case, 2))
      assert.equal("invalid_argument", err.kind, case[1])
    end
  end)

  it("are the engine's where it has them: an event is given out once, in order, and denied in one step [R1, R2, R3, R4, S1]", function()
    local waiting, decided, synced = {}, {}, {}
    world = support.world { methods = {
      network_events = function(_, info)
        assert(info.sandbox_id)
        local out = waiting
        waiting = {}
        return out
      end,
      deny_pending = function()
        local n = #waiting
        waiting = {}
        return n > 0
      end,
      decide = function(_, _, request_id, decision)
        if request_id ~= "r1" then return false end
        decided[#decided + 1] = decision
        return true
      end,
      sync_skills = function(_, info, skills) synced[#synced + 1] = { info.sandbox_id, skills } end,
    } }
    local rt = world:open()
    local box = rt:acquire(ALICE)
    waiting = { { request_id = "r1", host = "a.example", port = 443, method = "CONNECT" }, { request_id = "r2", host = "b.example" } }
    local events = rt:network_events(box.id)
    assert.same({ "r1", "r2" }, { events[1].request_id, events[2].request_id })
    assert.same({}, rt:network_events(box.id))
    assert.is_true(rt:decide(box.id, "r1", "allow_once"))
    assert.is_false(rt:decide(box.id, "r9", "deny"))
    assert.same({ "allow_once" }, decided)
    waiting = { { request_id = "r3", host = "c.example" } }
    assert.is_true(rt:deny_pending(box.id))
    assert.is_false(rt:deny_pending(box.id))
    rt:sync_skills { sandbox_id = box.id, user = "alice", thread = "t1", projection = { root = "/skills" } }
    assert.same({ { box.id, { user = "alice", thread = "t1", projection = { root = "/skills" } } } }, synced)
    -- another's sandbox is as unknown as none (B216)
    local other = support.caught(rt.sync_skills, rt, { sandbox_id = box.id, user = "bob", thread = "t1" })
    assert.equal("lost", other.kind)
    assert.equal("lost", support.caught(rt.network_events, rt, "unknown").kind)
    waiting = { { host = "without an id" } }
    assert.equal("backend_error", support.caught(rt.network_events, rt, box.id).kind)
    box:release()
  end)

  it("tell a failure of the engine, with the sandbox", function()
    world = support.world { methods = { decide = function() error "proxy is down" end, deny_pending = function() return 1 end } }
    local rt = world:open()
    local box = rt:acquire(ALICE)
    local err = support.caught(rt.decide, rt, box.id, "r1", "deny")
    assert.equal("backend_error", err.kind)
    assert.equal(box.id, err.sandbox_id)
    assert.equal("decide", err.stage)
    assert.equal("backend_error", support.caught(rt.deny_pending, rt, box.id).kind)
    box:release()
  end)
end)
