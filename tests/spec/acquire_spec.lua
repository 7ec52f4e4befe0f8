--- Acquire: its order, its candidates, and identities.
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }
local BOB = { user = "bob", thread = "t1" }

local function policies(reuse, identity)
  return {
    reuse = reuse and { source = reuse, name = "reuse.lua" },
    identity = identity and { source = identity, name = "identity.lua" },
  }
end

describe("acquire", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  describe("order", function()
    it("looks at active, warm and discovered before it creates [E1]", function()
      local rt = world:open()
      rt:acquire(ALICE)
      assert.equal("create ready connect client.fence", (world:trace():gsub(" client%.close", "")))
      assert.equal(1, world:count "discover")
    end)

    it("reuses the active sandbox without discovery and creation, and refreshes its stamp [E2]", function()
      local rt = world:open()
      local a = rt:acquire(ALICE)
      local from, before = world:count "discover", rt:inspect(a.id).last_used
      rt:advance(7)
      local b = rt:acquire(ALICE)
      assert.equal("active", b.source)
      assert.equal(a.id, b.id)
      assert.equal(a.generation, b.generation)
      assert.equal(from, world:count "discover")
      assert.equal(1, world:count "create")
      assert.equal(1, #world.clients)
      assert.equal(before + 7, rt:inspect(a.id).last_used)
    end)

    it("registers a compatible discovered sandbox with ownership published first [E11]", function()
      world = support.world()
      local rt = world:open { ownership = world.ownership }
      local id = rt:explain(ALICE).id
      local c = world:add(id)
      local seen
      world.on.connect = function(next, ...)
        seen = world.leases[id] and world.leases[id].state
        return next(...)
      end
      local box = rt:acquire(ALICE)
      assert.equal("discovered", box.source)
      assert.equal(c.generation, box.generation)
      assert.equal("own", seen)
      assert.equal(0, world:count "create")
    end)

    it("finds under the lock what another process made meanwhile, and does not create [E10, B011]", function()
      local rt = world:open()
      local id = rt:explain(ALICE).id
      world.on.discover = function(next, this, sandbox_id)
        if #world:running(id) == 0 then world:add(id) end
        return next(this, sandbox_id)
      end
      assert.equal("discovered", rt:acquire(ALICE).source)
      assert.equal(0, world:count "create")
    end)
  end)

  describe("health", function()
    it("replaces an active sandbox that is dead: closed once, destroyed once, created anew [E3, B054]", function()
      local rt = world:open()
      local a = rt:acquire(ALICE)
      world.containers[a.generation].health = false
      local b = rt:acquire(ALICE)
      assert.equal(a.id, b.id)
      assert.not_equal(a.generation, b.generation)
      assert.equal("created", b.source)
      assert.equal(1, world:closes())
      assert.equal(1, world:count "destroy")
      assert.equal(b.generation, rt:inspect(ALICE).generation)
      assert.equal("lost", support.caught(a.exec, a, "echo x").kind)
      assert.equal("x\n", b:exec("echo x").stdout)
    end)

    it("takes unknown health for alive: same client, nothing closed or destroyed [E4]", function()
      local rt = world:open()
      local a = rt:acquire(ALICE)
      world.containers[a.generation].health = "unknown"
      local b = rt:acquire(ALICE)
      assert.equal(a.generation, b.generation)
      assert.equal("active", b.source)
      assert.equal(0, world:closes())
      assert.equal(0, world:count "destroy")
      assert.equal(1, #world.clients)
    end)

    it("drops a dead warm sandbox and creates another [E5]", function()
      local rt = world:open()
      local a = rt:acquire(ALICE)
      a:release()
      world.containers[a.generation].health = false
      local b = rt:acquire(ALICE)
      assert.equal("created", b.source)
      assert.equal(1, world:count "destroy")
      assert.equal("active", world:state_of(b.id))
      assert.equal(0, rt:stats().warm)
    end)

    it("trusts a good answer for health_ttl seconds [E4]", function()
      local rt = world:open { health_ttl = 5 }
      rt:acquire(ALICE)
      rt:acquire(ALICE)
      assert.equal(0, world:count "alive")
      rt:advance(6)
      rt:acquire(ALICE)
      assert.equal(1, world:count "alive")
    end)
  end)

  describe("an identity whose id has changed", function()
    local source = [[
      return { derive = function(ctx)
        local suffix = ctx.requirements.labels and ctx.requirements.labels.v or "1"
        return "box-" .. suffix
      end }]]
    local requirements = [[
      return { resolve = function(ctx) return { labels = { v = ctx.request and ctx.request.v or "1" } } end }]]
    local set = { identity = { source = source, name = "identity.lua" },
                  requirements = { source = requirements, name = "requirements.lua" } }

    it("has its unheld predecessor destroyed, and goes on [E7]", function()
      local rt = world:open { policies = set }
      local a = rt:acquire { user = "alice", thread = "t1", holder = false }
      local b = rt:acquire { user = "alice", thread = "t1", requirements = { v = "2" } }
      assert.equal("box-1", a.id)
      assert.equal("box-2", b.id)
      assert.equal(1, world:count "destroy")
      assert.equal(1, world:closes())
      assert.is_nil(rt:inspect("box-1"))
    end)

    it("is deferred while a holder is live [E8]", function()
      local rt = world:open { policies = set }
      local a = rt:acquire(ALICE)
      local err = support.caught(rt.acquire, rt, { user = "alice", thread = "t1", requirements = { v = "2" } })
      assert.equal("replacement_deferred", err.kind)
      assert.equal("identity_outdated", err.reason)
      assert.equal(0, world:count "destroy")
      assert.equal(0, world:closes())
      assert.equal("ok\n", a:exec("echo ok").stdout)
    end)
  end)

  describe("create", function()
    it("waits until ready, then registers [E13]", function()
      local rt = world:open { ready_timeout = 60 }
      local asked
      world.on.ready = function(_, _, _, seconds) asked = seconds return true end
      local box = rt:acquire(ALICE)
      assert.equal(60, asked)
      assert.equal(box.id, rt:inspect(ALICE).id)
      assert.equal(0, world:count "destroy")
    end)

    it("passes identity, environment and limits to the backend [E13, C10]", function()
      local rt = world:open { user = "ambient", environment = { MODE = "x" }, limits = { memory = 1 << 28 } }
      rt:acquire { thread = "t9" }
      local spec = world.order[1].spec
      assert.same({ user = "ambient", thread = "t9" }, spec.identity)
      assert.equal("x", spec.env.MODE)
      assert.equal(1 << 28, spec.limits.memory)
      rt:acquire { user = "explicit", thread = "t9" }
      assert.equal("explicit", world.order[2].spec.identity.user)
    end)

    it("takes back one that never gets ready, and says so [B108]", function()
      local rt = world:open()
      world.on.ready = function() return false end
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal("unready", err.kind)
      assert.equal(1, world:count "destroy")
      assert.equal(0, #world:running())
      assert.is_nil(rt:inspect(err.sandbox_id))
      world.on.ready = nil
      assert.equal("created", rt:acquire(ALICE).source)
    end)

    it("leaves no slot taken however a create fails [B192, B205, B116]", function()
      local rt = world:open { max_sandboxes = 3, replicas = 3 }
      for round = 1, 10 do
        world:fail(({ "create", "ready", "connect", "client.fence" })[round % 4 + 1], 1, "no")
        assert.is_table(support.caught(rt.acquire, rt, { user = "u", thread = "t" .. round }))
      end
      for i = 1, 3 do rt:acquire { user = "u", thread = "ok" .. i } end
      assert.equal("capacity_exhausted", support.caught(rt.acquire, rt, { user = "u", thread = "ok4" }).kind)
    end)

    it("rejects metadata of another sandbox, and hands nothing out [B006]", function()
      local rt = world:open()
      world.on.create = function(next, this, spec)
        local info = next(this, spec)
        info.sandbox_id = "somebody-else"
        return info
      end
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal("backend_error", err.kind)
      assert.equal("create", err.stage)
      for _, c in ipairs(world.order) do c.running = false end
    end)
  end)

  describe("the reuse policy", function()
    it("is asked about a created one too: replace there is a failure, not a loop [I12]", function()
      local rt = world:open { policies = policies [[return { decide = function() return "replace", "x", "no good" end }]] }
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal("replacement_deferred", err.kind)
      assert.equal("incompatible", err.reason)
      assert.equal(1, world:count "create")
      assert.equal(0, #world:running())
    end)

    it("may refuse, defer or probe [I1]", function()
      local rt = world:open { policies = policies [[return { decide = function(ctx)
        if ctx.source == "created" then return "reuse" end
        if ctx.identity.thread == "refuse" then return "refuse", "capability", "cannot tell" end
        if ctx.identity.thread == "defer" then return "defer", "later", "not now" end
        if ctx.capability == nil then return "probe" end
        return "reuse" end }]] }
      local function twice(thread)
        rt:acquire { user = "u", thread = thread }
        return support.caught(rt.acquire, rt, { user = "u", thread = thread })
      end
      local err = twice "refuse"
      assert.equal("unverified", err.kind)
      assert.equal("capability", err.reason)
      err = twice "defer"
      assert.equal("replacement_deferred", err.kind)
      assert.equal("later", err.reason)
      assert.equal(0, world:count "destroy")
      rt:acquire { user = "u", thread = "probe" } -- without a probe function the policy is told that it is unknown
      assert.equal("active", rt:acquire { user = "u", thread = "probe" }.source)
    end)

    it("that fails hands nothing out and destroys nothing [I1]", function()
      local rt = world:open { policies = policies [[return { decide = function(ctx)
        if ctx.source == "active" then error("broken") end return "reuse" end }]] }
      local box = rt:acquire(ALICE)
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal("policy_error", err.kind)
      assert.matches("reuse.lua:2", err.message, 1, true)
      assert.equal(0, world:count "destroy")
      assert.equal("ok\n", box:exec("echo ok").stdout)
    end)
  end)

  describe("identity", function()
    it("derives the same id in every runtime, and other ids for other pairs [C1]", function()
      local rt = world:open()
      assert.equal("5f520be8674edf7129a342d712c24367", rt:acquire { user = "alice", thread = "thread-1" }.id)
      assert.equal("dcd520660fa816954f7fe6cb0d3b9220", rt:acquire { user = "u-1", thread = "t-1" }.id)
      local a, b = rt:acquire { user = "a:b", thread = "c" }, rt:acquire { user = "a", thread = "b:c" }
      assert.equal("1c2de18a3ef3c0cdcce3495f7903aff9", a.id)
      assert.equal("804536b63b049b4dcd2bcfedd2982e9b", b.id)
      assert.not_equal(a.generation, b.generation)
    end)

    local one_id = [[return { derive = function() return "deadbeefdeadbeef" end }]]

    it("never gives a warm sandbox to another identity of the same id [C3, B001]", function()
      local rt = world:open { policies = policies(nil, one_id) }
      local a = rt:acquire(ALICE)
      a:write("/workspace/secret", "mine")
      a:release()
      local err = support.caught(rt.acquire, rt, BOB)
      assert.equal("identity_collision", err.kind)
      assert.equal("deadbeefdeadbeef", err.sandbox_id)
      assert.equal("warm", world:state_of(a.id))
      assert.equal(0, world:count "destroy")
      assert.equal(1, world:count "create")
      local again = rt:acquire(ALICE)
      assert.equal(a.generation, again.generation)
      assert.equal("mine", again:read("/workspace/secret"))
    end)

    it("never gives an active one either, also not after ownership was published [C4]", function()
      local rt = world:open { policies = policies(nil, one_id) }
      local a = rt:acquire(ALICE)
      assert.equal("identity_collision", support.caught(rt.acquire, rt, BOB).kind)
      assert.equal("ok\n", a:exec("echo ok").stdout)
      assert.equal(1, world:count "create")
    end)

    it("compares the identity that a discovered sandbox has stored [B001, C4]", function()
      local rt = world:open { policies = policies(nil, one_id) }
      local c = world:add("deadbeefdeadbeef")
      world.on.discover = function(next, this, id)
        local info = next(this, id)
        info.identity = { user = "bob", thread = "t1" }
        return info
      end
      assert.equal("identity_collision", support.caught(rt.acquire, rt, ALICE).kind)
      assert.equal(0, world:count "create")
      assert.equal("discovered", rt:acquire(BOB).source)
      assert.is_true(c.running)
    end)

    it("uses the explicit user, else the ambient one [C10]", function()
      local rt = world:open { user = "ambient" }
      assert.equal(rt:acquire { user = "ambient", thread = "t" }.id, rt:acquire { thread = "t" }.id)
      assert.not_equal(rt:acquire { user = "other", thread = "t" }.id, rt:acquire { thread = "t" }.id)
      local none = world:open()
      local err = support.caught(none.acquire, none, { thread = "t" })
      assert.equal("invalid_argument", err.kind)
      assert.matches("user", err.message)
    end)

    it("without a thread is fresh each time: no mapping, no reuse [C11]", function()
      local rt = world:open()
      local a, b = rt:acquire { user = "u" }, rt:acquire { user = "u" }
      assert.not_equal(a.id, b.id)
      assert.equal("created", a.source)
      assert.equal("created", b.source)
      assert.is_nil(rt:inspect { user = "u", thread = "" })
      assert.equal(0, world:count "discover")
      a:release()
      assert.equal("created", rt:acquire { user = "u" }.source)
    end)

    it("keeps hostile names apart, byte for byte [C1, B004]", function()
      local rt = world:open { replicas = 100 }
      local names = { "", "a", "a/b", "../../etc", "a\nb", "a\0b", "a\0", "\xff\xfe", "'; rm -rf /", ("x"):rep(4096) }
      local seen = {}
      for _, name in ipairs(names) do
        local box = rt:acquire { user = name, thread = "t" }
        assert.matches("^[0-9a-f]+$", box.id)
        assert.equal(32, #box.id)
        assert.is_nil(seen[box.id])
        seen[box.id] = true
        box:release()
        assert.equal("warm", rt:acquire { user = name, thread = "t" }.source)
      end
      local err = support.caught(rt.acquire, rt, { user = ("x"):rep(1 << 20), thread = "t" })
      assert.equal("invalid_argument", err.kind)
      assert.matches("user", err.message)
      err = support.caught(rt.acquire, rt, { user = "u", thread = ("x"):rep(1 << 20) })
      assert.matches("thread", err.message)
    end)

    it("gives every identity its own sandbox, and its own again after a restart of the runtime [B005]", function()
      local first = world:open()
      local a = first:acquire(ALICE)
      a:write("/workspace/f", "kept")
      first:reset() -- as good as a crash: nothing is stopped
      local second = world:open()
      local again, other = second:acquire(ALICE), second:acquire(BOB)
      assert.equal("discovered", again.source)
      assert.equal(a.generation, again.generation)
      assert.equal("kept", again:read("/workspace/f"))
      assert.not_equal(a.id, other.id)
      assert.equal("created", other.source)
    end)
  end)
end)
