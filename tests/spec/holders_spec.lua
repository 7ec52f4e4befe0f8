--- Holders: who holds a sandbox, release, retain, get.
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

describe("holders", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("park on the last release, not on the first [L1]", function()
    local rt = world:open()
    local run, upload = rt:acquire(ALICE), rt:acquire(ALICE)
    upload:release()
    assert.equal("active", world:state_of(run.id))
    assert.equal(1, world:open_clients())
    run:release()
    assert.equal("warm", world:state_of(run.id))
    assert.equal(0, world:open_clients())
    assert.equal(1, world:count "client.close")
    assert.is_nil(rt:get(run.id))
  end)

  it("leave the container running at release; the reclaim builds a new client [L2]", function()
    local rt = world:open()
    local a = rt:acquire(ALICE)
    a:release()
    a:release()
    assert.equal(1, world:count "client.close")
    assert.equal(0, world:count "destroy")
    assert.equal(1, #world:running(a.id))
    local b = rt:acquire(ALICE)
    assert.equal("warm", b.source)
    assert.equal(a.generation, b.generation)
    assert.equal(2, #world.clients)
    assert.equal(0, rt:stats().warm) -- active and warm exclude each other [A14]
  end)

  it("are active or warm, never both, after discovery and adoption [A14]", function()
    local rt = world:open()
    local id = rt:explain(ALICE).id
    world:add(id)
    rt:reconcile()
    assert.equal("warm", world:state_of(id))
    local box = rt:acquire(ALICE)
    assert.equal(id, box.id)
    local stats = rt:stats()
    assert.same({ 1, 0 }, { stats.active, stats.warm })
    rt:advance(601)
    rt:tick()
    assert.equal(0, world:count "destroy")
  end)

  it("park although closing the client fails, with a warning [L3]", function()
    local records = {}
    local rt = world:open { log = function(r) records[#records + 1] = r end }
    local a = rt:acquire(ALICE)
    world:fail("client.close", 1, "socket gone")
    a:release()
    assert.equal("warm", world:state_of(a.id))
    local found
    for _, r in ipairs(records) do found = found or (r.event == "client_close_failed" and r) end
    assert.is_table(found)
    assert.equal(a.id, found.sandbox_id)
    assert.equal("release", found.reason)
    for _, client in ipairs(world.clients) do client.open = false end
  end)

  it("have their id as binding after acquire, and nothing after a failed one [L10]", function()
    local rt = world:open()
    local box = rt:acquire { user = "alice", thread = "t1", holder = "run-1" }
    assert.equal("run-1", box.holder)
    assert.equal(box.id, rt:binding "run-1")
    world:fail("create", 1, "no room")
    support.caught(rt.acquire, rt, { user = "bob", thread = "t1", holder = "run-2" })
    assert.is_nil(rt:binding "run-2")
    box:release()
    assert.is_nil(rt:binding "run-1")
  end)

  it("cannot be bound while a teardown is in progress [L11, M12]", function()
    local rt = world:open()
    local a = rt:acquire(ALICE)
    rt:retain(a.id, { holder = "elsewhere", user = "alice", thread = "t1" })
    local b = rt:acquire { user = "bob", thread = "t2", holder = "keeper" }
    rt:release "elsewhere"
    a:release()
    local err, bound
    world.on.destroy = function(next, this, info)
      err = support.caught(rt.retain, rt, a.id, { holder = "keeper2" })
      bound = rt:binding "keeper2"
      return next(this, info)
    end
    assert.is_true(rt:destroy(a.id))
    assert.equal("being_destroyed", err.kind)
    assert.is_nil(bound)
    assert.equal(b.id, rt:binding "keeper")
  end)

  it("do not move between identities, and acquiring again is the same binding [L12]", function()
    local rt = world:open()
    local box = rt:acquire { user = "alice", thread = "t1", holder = "run" }
    local alive = world:count "alive"
    local again = rt:acquire { user = "alice", thread = "t1", holder = "run" }
    assert.equal(box.generation, again.generation)
    assert.equal(alive, world:count "alive")
    local err = support.caught(rt.acquire, rt, { user = "bob", thread = "t1", holder = "run" })
    assert.equal("invalid_argument", err.kind)
    assert.matches("run", err.message)
    rt:release "run"
    rt:release "run"
    rt:release "nobody"
    assert.equal("warm", world:state_of(box.id))
    assert.equal(1, world:count "client.close")
  end)

  it("that do not ask for parking never park alone, but remember who did [L13]", function()
    local rt = world:open()
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    rt:retain(box.id, { holder = "watch", release_on_last = false })
    rt:release "watch"
    assert.equal("active", world:state_of(box.id))
    rt:retain(box.id, { holder = "watch", release_on_last = false })
    local run = rt:acquire(ALICE)
    run:release()
    assert.equal("active", world:state_of(box.id)) -- still watched
    rt:release "watch"
    assert.equal("warm", world:state_of(box.id))
  end)

  it("that do not ask are upgraded by an ordinary acquire [L13]", function()
    local rt = world:open()
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    rt:retain(box.id, { holder = "h", release_on_last = false })
    rt:acquire { user = "alice", thread = "t1", holder = "h" }
    rt:release "h"
    assert.equal("warm", world:state_of(box.id))
  end)

  it("of one sandbox keep it from being parked by id and destroyed [L4, M3]", function()
    local rt = world:open()
    local box = rt:acquire(ALICE)
    rt:park(box.id)
    assert.equal("active", world:state_of(box.id))
    local done, why = rt:destroy(box.id)
    assert.is_false(done)
    assert.equal("deferred", why)
    assert.equal(0, world:count "destroy")
    box:release()
    assert.is_true(rt:destroy(box.id))
  end)

  it("release when a box is closed by the end of its scope [L2]", function()
    local rt = world:open()
    local id
    do
      local box <close> = rt:acquire(ALICE)
      id = box.id
      assert.equal("active", world:state_of(id))
    end
    assert.equal("warm", world:state_of(id))
  end)
end)

describe("get", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("answers from memory alone, even when the container has died, and refreshes the stamp [A4]", function()
    world = support.world()
    local rt = world:open { ownership = world.ownership, journal = world.journal }
    local box = rt:acquire(ALICE)
    world:kill(box.id)
    local before, calls = rt:inspect(box.id).last_used, #world.calls
    rt:advance(9)
    local got = rt:get(box.id)
    assert.equal(box.generation, got.generation)
    assert.equal(calls, #world.calls)
    assert.equal(before + 9, rt:inspect(box.id).last_used)
  end)

  it("with an identity answers only that identity's [A5, B216]", function()
    local rt = world:open()
    local box = rt:acquire(ALICE)
    assert.equal(box.id, rt:get(box.id, ALICE).id)
    assert.is_nil(rt:get(box.id, { user = "bob", thread = "t1" }))
    assert.is_nil(rt:get(box.id, { user = "alice", thread = "t2" }))
    assert.is_nil(rt:get "unknown")
    -- the same answer as for an unknown id, and no side effect
    local known = support.caught(rt.retain, rt, box.id, { holder = "h", user = "bob", thread = "t1" })
    local unknown = support.caught(rt.retain, rt, "unknown", { holder = "h", user = "bob", thread = "t1" })
    assert.equal(unknown.kind, known.kind)
    assert.equal((unknown.message:gsub("unknown", "X")), (known.message:gsub(box.id, "X")))
    assert.is_nil(rt:binding "h")
  end)

  it("gives nothing while a failed teardown fences the sandbox [A5, M10]", function()
    local rt = world:open { journal = world.journal }
    local box = rt:acquire(ALICE)
    box:release()
    box = rt:acquire { user = "alice", thread = "t1", holder = false }
    world:fail("destroy", 1, "engine is down")
    assert.equal("backend_error", support.caught(rt.destroy, rt, box.id).kind)
    assert.is_nil(rt:get(box.id))
    assert.is_nil(rt:get(box.id, ALICE))
    assert.is_true(rt:destroy(box.id))
  end)
end)

describe("a runtime", function()
  it("needs only the functions that a backend must have, and says which is missing [A1]", function()
    local paddock = require "paddock"
    local world = support.world()
    local backend = {}
    for _, name in ipairs { "create", "destroy", "inspect", "discover", "alive", "ready", "connect" } do
      backend[name] = world.backend[name]
    end
    for name in pairs(backend) do
      local without = {}
      for k, v in pairs(backend) do without[k] = k ~= name and v or nil end
      local err = support.caught(paddock.open, { backend = without, threads = false, state_dir = support.tmpdir() })
      assert.equal("invalid_argument", err.kind)
      assert.matches(name, err.message)
    end
    local rt = world:open { backend = backend }
    local box = rt:acquire(ALICE)
    assert.equal(box.id, rt:get(box.id).id)
    box:release()
    assert.is_true(rt:destroy(box.id))
    world:assert_quiet()
  end)

  it("says what it can by default [A2]", function()
    local world = support.world()
    local capabilities = world:open():capabilities()
    assert.is_false(capabilities.thread_data_mounts)
    assert.is_true(capabilities.upload_permission_adjustment)
    assert.is_false(capabilities.agent_skill_isolation)
    assert.equal("scripted", capabilities.backend)
    world:assert_quiet()
  end)
end)
