-- An engine that fails, again and again: what is left of it, and what is tried by itself (nothing).
local support = require "tests.support"

local function identity(i) return { user = "u" .. i, thread = "t" } end

--- Resident memory of this process, in bytes.
local function resident()
  collectgarbage()
  collectgarbage()
  local pages = support.read_file("/proc/self/statm"):match("^%d+ (%d+)")
  return tonumber(pages) * 4096
end

describe("an engine whose creations always fail", function()
  local world, events
  before_each(function() world, events = support.world(), {} end)
  after_each(function() world:assert_quiet() end)

  local function open(opts)
    local options = { log = function(record) events[#events + 1] = record end, replicas = 5 }
    for k, v in pairs(opts or {}) do options[k] = v end
    return world:open(options)
  end
  local function seen(rt, name)
    rt:dispatch()
    local n = 0
    for _, record in ipairs(events) do
      if record.event == name then n = n + 1 end
    end
    return n
  end

  it("is asked once for each acquire, and never by itself; it serves as soon as it can [B191]", function()
    local rt = open()
    world:fail("create", true, "no space left")
    for i = 1, 4 do
      local err = support.caught(rt.acquire, rt, identity(i))
      assert.equal("backend_error", err.kind)
      assert.equal("create", err.stage)
      assert.matches("no space left", err.message, 1, true)
    end
    assert.equal(4, world:count "create")
    for _ = 1, 10 do -- ten minutes: there is no pool that is filled, so nothing is retried either
      rt:advance(60)
      rt:tick()
    end
    assert.equal(4, world:count "create")
    assert.same({}, rt:list())
    world.failures = {}
    assert.equal("created", rt:acquire(identity(1)).source)
    assert.equal(5, world:count "create")
  end)

  it("gives every slot back, at whatever step it fails [B191]", function()
    local rt = open { max_sandboxes = 3, replicas = 3 }
    for _, step in ipairs { "create", "ready", "connect", "client.fence", "inspect" } do
      for i = 1, 10 do
        world:fail(step, 1)
        pcall(rt.acquire, rt, identity(i))
        world.failures = {}
        for _ = 1, 2 do -- a teardown that could not be confirmed is made again
          rt:advance(61)
          rt:tick()
        end
        for _, one in ipairs(rt:list()) do
          if one.holders[1] then rt:release(one.holders[1]) end
          rt:destroy(one.id)
        end
        assert.same({}, rt:list(), step)
        assert.equal(0, rt:stats().creating, step)
        assert.equal(0, #world:running(), step)
      end
    end
    for i = 1, 3 do assert.equal("created", rt:acquire(identity(i)).source) end
    assert.equal("capacity_exhausted", support.caught(rt.acquire, rt, identity(4)).kind)
  end)

  it("by one that never gets ready: it is taken down at once, with evidence in the log [B199]", function()
    local rt = open { ready_timeout = 5 }
    world.on.create = function(next, ...)
      local info = next(...)
      world:container(info.generation).ready = false
      return info
    end
    local err = support.caught(rt.acquire, rt, identity(1))
    assert.equal("unready", err.kind)
    assert.equal(0, #world:running())
    assert.same({}, rt:list())
    assert.equal(1, seen(rt, "created"))
    assert.equal(1, seen(rt, "destroyed"))
    for _, record in ipairs(events) do
      if record.event == "destroyed" then assert.same({ "g1", "unready" }, { record.generation, record.reason }) end
    end
  end)

  it("and that cannot be stopped either: it is kept, said, and stopped when that works [B199]", function()
    local rt = open { ready_timeout = 5 }
    world.on.create = function(next, ...)
      local info = next(...)
      world:container(info.generation).ready = false
      return info
    end
    world:fail("destroy", 2, "the engine is down")
    local err = support.caught(rt.acquire, rt, identity(1))
    assert.equal("unready", err.kind)
    assert.equal(1, #world:running())
    assert.equal(1, seen(rt, "rollback_failed"))
    for _ = 1, 3 do
      rt:advance(61)
      rt:tick()
    end
    assert.equal(0, #world:running())
    assert.same({}, rt:list())
  end)

  it("1,000 whose control channel fails: each caller gets an error, nothing is left, memory and descriptors stay flat [B206]", function()
    local rt = world:open { replicas = 5 } -- without a log of ours: it would be what grows
    local function batch(step, message)
      for i = 1, 250 do
        world:fail(step, 1, message)
        local err = support.caught(rt.acquire, rt, identity(i))
        assert.matches(message, tostring(err) .. tostring(err.cause or ""), 1, true)
      end
      assert.equal(0, #world:running())
      assert.same({}, rt:list())
      -- What the scripted world remembers is the test's, and not the runtime's.
      world.calls, world.clients, world.order, world.containers, world.failures = {}, {}, {}, {}, {}
    end
    local function round()
      batch("connect", "no greeting")
      batch("client.fence", "greeting cut")
    end
    round() -- so that caches are as full as they get
    local memory, fds, lua = resident(), support.fds(), rt:stats().lua_bytes
    round()
    round()
    if (os.getenv("MODE") or "dev") == "dev" then -- sanitizers keep freed memory for a while
      assert.is_true(resident() - memory < 2 << 20, ("grew by %d KiB"):format((resident() - memory) // 1024))
    end
    assert.is_true(rt:stats().lua_bytes - lua < 1 << 20)
    assert.equal(fds, support.fds())
    assert.equal(0, rt:stats().turns)
    assert.equal(0, rt:stats().creating)
    assert.equal("created", rt:acquire(identity(1)).source)
  end)
end)
