--- Ownership, orphans, readiness, shutdown (rows O and P, and E12 to E17) over scripted stores.
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

describe("ownership", function()
  local world, rt
  before_each(function()
    world = support.world()
    rt = world:open { ownership = world.ownership, journal = world.journal }
  end)
  after_each(function()
    world.leases = {}
    world:assert_quiet()
  end)

  it("that cannot be published hands nothing out [E17, O4]", function()
    world:fail("lease.take", 1, "store down")
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("ownership_unavailable", err.kind)
    assert.equal(0, #world:running())
    rt:acquire(ALICE):release()
    world:fail("lease.take", 1, "store down")
    err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("ownership_unavailable", err.kind)
    assert.equal("warm", world:state_of(rt:explain(ALICE).id))
    assert.equal("warm", rt:acquire(ALICE).source)
  end)

  it("of a peer that is destroying it: dropped without being stopped, and the acquire goes on [E17]", function()
    local box = rt:acquire(ALICE)
    box:release()
    local destroyed = world:count "destroy"
    world.leases[box.id] = { owner = "peer", state = "del", token = 50 }
    local dropped
    world.on.discover = function(next, ...)
      dropped = rt:inspect(box.id) == nil
      world:kill(box.generation) -- the peer has ended it
      world.leases[box.id] = nil
      return next(...)
    end
    local again = rt:acquire(ALICE)
    assert.equal("created", again.source)
    assert.is_true(dropped)
    assert.equal(destroyed, world:count "destroy")
  end)

  it("is published in the order intent, take, epoch [O6]", function()
    local seen
    world.on["lease.take"] = function(next, this, id, ctx)
      local i = rt:inspect(id)
      seen = { i.intent, i.epoch }
      return next(this, id, ctx)
    end
    local box = rt:acquire(ALICE)
    assert.same({ true, 0 }, seen)
    local i = rt:inspect(box.id)
    assert.is_false(i.intent)
    assert.equal(1, i.epoch)
  end)

  it("renewed for active and warm; lapsed is claimed again; lost is forgotten, not stopped [O5, L14, B15]", function()
    local other = world:open { ownership = world.ownership, idle_timeout = 0 }
    local active, warm = other:acquire(ALICE), other:acquire { user = "bob", thread = "t" }
    warm:release()
    other:advance(61)
    other:tick()
    assert.equal(2, world:count "lease.renew")
    world.leases[warm.id] = nil
    other:advance(61)
    other:tick()
    assert.is_table(world.leases[warm.id])
    world.leases[active.id] = { owner = "peer", state = "own", token = 1000 }
    other:advance(61)
    other:tick()
    assert.is_nil(world:state_of(active.id, other))
    assert.equal("warm", world:state_of(warm.id, other))
    assert.equal(0, world:count "destroy")
    assert.equal(0, world:open_clients(active.id))
    assert.equal("lost", support.caught(active.exec, active, "echo x").kind)
    world:kill(active.id)
  end)

  it("is told of with the generation: made, handed out, parked, replaced, lost, destroyed", function()
    local told, other = {}, world:open { ownership = world.ownership, idle_timeout = 0, policies = { reuse = {
      source = [[return { decide = function(ctx) return ctx.idle_seconds > 5 and "replace" or "reuse" end }]] } } }
    other:on("*", function(record) told[#told + 1] = record.event .. " " .. tostring(record.generation) end)
    other:acquire(ALICE):release()
    other:advance(6)
    local box = other:acquire(ALICE)
    world.leases[box.id] = { owner = "peer", state = "own", token = 1000 }
    other:advance(61)
    other:tick()
    other:dispatch()
    assert.equal("created g1, acquired g1, parked g1, replacing g1, teardown g1, destroyed g1, created g2, acquired g2, lost g2",
      table.concat(told, ", "))
    world:kill(box.id)
  end)

  it("whose renewal cannot be answered is kept, and tried again [O4]", function()
    local box = rt:acquire(ALICE)
    world:fail("lease.renew", 1, "store down")
    rt:advance(61)
    rt:tick()
    assert.equal("active", world:state_of(box.id))
    rt:advance(61)
    rt:tick()
    assert.equal(2, world:count "lease.renew")
  end)

  it("that the store forgot is claimed again only while the guest has seen no larger token [O5, B046]", function()
    local box = rt:acquire(ALICE)
    world.leases[box.id] = nil -- it has lost its keys, and with them that a peer had it
    world:container(box.id).token = box.token + 5
    rt:advance(61)
    rt:tick()
    assert.is_nil(world.leases[box.id])
    assert.is_nil(rt:inspect(box.id))
    assert.equal(0, world:count "destroy")
    assert.equal(0, world:open_clients())
    world:kill(box.id)
  end)

  it("is released when the sandbox is gone, and asked for only when it has run out [O3]", function()
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    rt:acquire { user = "alice", thread = "t1", holder = false }
    assert.equal(1, world:count "lease.take")
    rt:advance(170) -- past our own deadline: the store is asked before anybody uses it
    rt:acquire { user = "alice", thread = "t1", holder = false }
    assert.equal(2, world:count "lease.take")
    assert.is_true(rt:destroy(box.id))
    assert.is_nil(world.leases[box.id])
  end)

  it("with a token that changed makes older grips lost [B045, B052]", function()
    local box = rt:acquire(ALICE)
    rt:advance(200)
    world.leases[box.id] = nil
    world.last_token = 500
    local again = rt:acquire(ALICE)
    assert.is_true(again.token > box.token)
    assert.equal(box.generation, again.generation)
    assert.equal(again.token, world:container(box.id).token)
    assert.equal("lost", support.caught(box.exec, box, "echo x").kind)
    assert.equal("ok\n", again:exec("echo ok").stdout)
  end)

  it("without a guest ends at the runtime's own deadline: no command after it [B045]", function()
    local plain = support.world { fenced = false }
    local r = plain:open { ownership = plain.ownership }
    local box = r:acquire(ALICE)
    r:advance(181)
    assert.equal("lost", support.caught(box.exec, box, "echo x").kind)
    assert.equal(0, plain:count "client.exec")
    plain:assert_quiet()
  end)
end)

describe("readiness that never comes", function()
  for _, case in ipairs {
    { "destroys under this instance's del lease [O8], sync", destroys = 1, acquire = support.WAYS[1].acquire },
    { "destroys under this instance's del lease [O8], async", destroys = 1, acquire = support.WAYS[2].acquire },
    { "destroys nothing that a peer owns [O9]", destroys = 0, peer = true },
    { "destroys nothing when the store cannot answer [O9]", destroys = 0, down = true },
  } do
    it(case[1], function()
      local world = support.world()
      local rt = world:open { ownership = world.ownership }
      world.on.ready = function(_, _, info)
        if case.peer then world.leases[info.sandbox_id] = { owner = "peer", state = "own", token = 9 } end
        if case.down then world:fail("lease.claim_for_destroy", 1, "store down") end
        return false
      end
      local lease, given
      world.on.destroy = function(next, this, info, opts)
        lease, given = world.leases[info.sandbox_id], info
        lease = { lease.state, lease.owner }
        return next(this, info, opts)
      end
      local made
      world.on.create = function(next, ...)
        made = next(...)
        return made
      end
      local err = support.caught(case.acquire or rt.acquire, rt, ALICE)
      assert.equal("unready", err.kind)
      assert.equal(case.destroys, world:count "destroy")
      assert.equal(case.destroys == 0, world.order[1].running)
      assert.is_nil(rt:get(rt:explain(ALICE).id))
      if case.destroys == 1 then
        assert.same({ "del", rt:stats().runtime_id }, lease)
        assert.same(made, given)
        assert.same({}, world.leases)
      end
      for _, c in ipairs(world.order) do c.running = false end
      world.leases = {}
      world:assert_quiet()
    end)
  end

  it("is adopted once nothing is torn down and nobody owns it [O11]", function()
    local world = support.world()
    local rt = world:open()
    world.on.ready = function() return false end
    support.caught(rt.acquire, rt, ALICE)
    assert.equal(1, world:count "destroy")
    local id = rt:explain(ALICE).id
    assert.is_nil(rt:inspect(id))
    world:add(id)
    rt:reconcile()
    assert.equal("warm", world:state_of(id))
    world:assert_quiet()
  end)
end)

describe("orphans", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function()
    world.leases = {}
    world:assert_quiet()
  end)

  it("become warm with a fresh stamp, and their identity finds them [O11, O12, C5]", function()
    local rt = world:open()
    local id = rt:explain(ALICE).id
    local c = world:add(id)
    rt:reconcile()
    local seen = rt:inspect(id)
    assert.equal("warm", seen.state)
    assert.is_nil(seen.identity)
    assert.equal(0, seen.idle_seconds)
    local box = rt:acquire(ALICE)
    assert.equal(c.generation, box.generation)
    assert.same(ALICE, rt:inspect(id).identity)
    box:release()
    assert.equal("identity_collision", (function()
      local other = world:open { policies = { identity = { name = "i.lua",
        source = "return { derive = function() return '" .. id .. "' end }" } } }
      other:acquire(ALICE):release()
      return support.caught(other.acquire, other, { user = "bob", thread = "t" }).kind
    end)())
  end)

  it("are adopted at start and before each idle pass; a failing list is a warning [O12]", function()
    local logs = {}
    local rt = world:open { log = function(r) logs[#logs + 1] = r.event .. ":" .. r.level end }
    world:add "orphan-1"
    rt:tick()
    assert.equal("warm", world:state_of "orphan-1")
    world:add "orphan-2"
    world:fail("list", 1, "engine is down")
    rt:advance(61)
    rt:tick()
    assert.is_nil(rt:inspect "orphan-2")
    assert.is_truthy(table.concat(logs, " "):find "reconcile_failed:warn")
    rt:advance(61)
    rt:tick()
    assert.equal("warm", world:state_of "orphan-2")
  end)

  it("with a shared store wait for one full TTL; an owner that reappears restarts the wait [O13]", function()
    local rt = world:open { ownership = world.ownership }
    world:add "orphan-1"
    rt:reconcile()
    rt:advance(179)
    rt:reconcile()
    assert.is_nil(rt:inspect "orphan-1")
    world.leases["orphan-1"] = { owner = "peer", state = "own", token = 3 }
    rt:reconcile()
    world.leases["orphan-1"] = nil
    rt:advance(2)
    rt:reconcile()
    assert.is_nil(rt:inspect "orphan-1")
    rt:advance(179)
    world:fail("lease.owner", 1, "store down")
    rt:reconcile() -- defers
    rt:advance(5)
    rt:reconcile()
    assert.is_nil(rt:inspect "orphan-1")
    rt:advance(181)
    rt:reconcile()
    assert.equal("warm", world:state_of "orphan-1")
  end)

  it("whose attestation demands replacement are destroyed under both fences, after the same wait [O13]", function()
    local rt = world:open { ownership = world.ownership, policies = { reuse = { name = "reuse.lua", source = [[
      return { decide = function(ctx)
        return ctx.attestation.image == "old" and "replace" or "reuse" end }]] } } }
    local old = world:add("orphan-1", { attestation = { image = "old" } })
    world:add("orphan-2", { attestation = { image = "new" } })
    local fences
    world.on.destroy = function(next, this, info, opts)
      local seen = rt:inspect(info.sandbox_id)
      fences = { seen.reserved, seen.lease.state, world.leases[info.sandbox_id].state, info.generation }
      return next(this, info, opts)
    end
    rt:reconcile()
    rt:advance(179)
    rt:reconcile()
    assert.equal(0, world:count "destroy")
    rt:advance(2)
    rt:reconcile()
    assert.same({ true, "del", "del", old.generation }, fences)
    assert.is_false(old.running)
    assert.is_nil(rt:inspect "orphan-1")
    assert.equal("warm", world:state_of "orphan-2")
    assert.equal(1, world:count "destroy")
  end)

  it("that got another owner meanwhile, as their guest's token says, wait anew [O13]", function()
    local rt = world:open { ownership = world.ownership }
    local c = world:add "orphan-1"
    rt:reconcile()
    rt:advance(179)
    c.token = 5 -- somebody had it, and is gone again
    rt:reconcile()
    rt:advance(2)
    rt:reconcile()
    assert.is_nil(rt:inspect "orphan-1")
    rt:advance(180)
    rt:reconcile()
    assert.equal("warm", world:state_of "orphan-1")
  end)

  it("that are quarantined or doomed are never adopted: they are ended [O13, K2]", function()
    local rt = world:open { journal = world.journal }
    local recorded, doomed = world:add("orphan-1", { stubborn = true }), world:add "orphan-2"
    world.records["orphan-1"] = { [recorded.generation] = "test" }
    world.on.list = function(next, this)
      local list = next(this)
      for _, info in ipairs(list) do info.doomed = info.sandbox_id == "orphan-2" or nil end
      return list
    end
    rt:reconcile()
    assert.equal(1, world:count("destroy", "orphan-1"))
    assert.equal("kept", world:state_of "orphan-1") -- it is still there
    assert.is_string(world.records["orphan-1"][recorded.generation])
    assert.is_false(doomed.running)
    assert.is_nil(rt:inspect "orphan-2")
    recorded.stubborn = nil
    assert.is_true(rt:destroy "orphan-1")
    assert.same({}, world.records)
  end)

  it("that say they are held or owned elsewhere are left alone [O12]", function()
    local rt = world:open()
    world:add "orphan-1"
    world.on.list = function(next, this)
      local list = next(this)
      for _, info in ipairs(list) do info.held = true end
      return list
    end
    rt:reconcile()
    assert.is_nil(rt:inspect "orphan-1")
    world:kill "orphan-1"
  end)
end)

describe("a registration that fails", function()
  for name, case in pairs {
    ["journal storage error"] = { kind = "io_error", arrange = function(world)
      world.on["lease.take"] = function(next, ...) world:fail("journal.has", 1, "disk error") return next(...) end
    end },
    ["policy check error"] = { kind = "policy_error", arrange = function(world)
      world.on["lease.take"] = function(next, ...) world.flag = true return next(...) end
    end, source = true },
  } do
    for _, way in ipairs(support.WAYS) do
      it(("after ownership of a discovered one: %s, %s [E12]"):format(name, way.name), function()
        local world = support.world()
        local folder = support.tmpdir()
        local policies
        if case.source then
          support.write_file(folder .. "/reuse.lua", [[
            local n = 0
            return { decide = function(ctx)
              if ctx.source == "discovered" then n = n + 1 if n == 2 then error("broken") end end
              return "reuse" end }]])
          policies = folder
        end
        local rt = world:open { ownership = world.ownership, journal = world.journal, policies = policies }
        local other = rt:acquire { user = "other", thread = "t" }
        local id = rt:explain(ALICE).id
        local c = world:add(id)
        local destroys = world:count "destroy"
        case.arrange(world)
        local err = support.caught(way.acquire, rt, ALICE)
        assert.equal(case.kind, err.kind)
        assert.equal(destroys, world:count "destroy")
        assert.equal(1, world:count "create")
        assert.is_nil(rt:inspect(id))
        assert.is_nil(world.leases[id])                          -- a peer may have it at once
        assert.equal(1, world:count("connect", id))
        assert.equal(1, world:count("client.close", id))
        assert.equal("active", world:state_of(other.id))
        assert.equal("ok\n", other:exec("echo ok").stdout)
        c.running = false
        world:assert_quiet()
      end)
    end
  end

  for name, case in pairs {
    ["journal storage error"] = { kind = "io_error" },
    ["decision replace"] = { kind = "replacement_deferred", reason = "incompatible" },
    ["probe unknown"] = { kind = "unverified", reason = "capability" },
  } do
    for i = 1, 4 do
      local peer, way = i > 2, support.WAYS[i % 2 + 1]
      it(("of a created one: %s, %s, %s [E15]"):format(name, peer and "peer-owned" or "unowned", way.name), function()
        local world = support.world()
        local policies
        if case.reason then
          policies = { reuse = { name = "reuse.lua", source = case.reason == "capability"
            and [[return { decide = function() return "refuse", "capability", "cannot tell" end }]]
            or [[return { decide = function() return "replace" end }]] } }
        end
        local rt = world:open { ownership = world.ownership, journal = world.journal, policies = policies }
        world.on.ready = function(_, _, info)
          if not case.reason then world:fail("journal.has", 1, "disk error") end
          if peer then world.leases[info.sandbox_id] = { owner = "peer", state = "own", token = 9 } end
          return true
        end
        local given
        world.on.destroy = function(next, this, info, opts)
          given = info
          return next(this, info, opts)
        end
        local err = support.caught(way.acquire, rt, ALICE)
        assert.equal(case.kind, err.kind)
        assert.equal(case.reason, err.reason)
        assert.equal(peer and 0 or 1, world:count "destroy")
        assert.equal(peer, world.order[1].running)
        if not peer then assert.same({ world.order[1].generation, world.order[1].url }, { given.generation, given.url }) end
        assert.is_nil(rt:inspect(rt:explain(ALICE).id))
        for _, c in ipairs(world.order) do c.running = false end
        world.leases = {}
        world:assert_quiet()
      end)
    end
  end

  for what, kind in pairs { ["client.fence"] = "backend_error", ["lease.take"] = "ownership_unavailable" } do
    it("rolls the created one back under both fences, its client closed: " .. what .. " [E16]", function()
      local world = support.world()
      local rt = world:open { ownership = world.ownership }
      world:fail(what, 1, { kind = "backend_error", message = "no answer" })
      local fences
      world.on.destroy = function(next, this, info, opts)
        local seen = rt:inspect(info.sandbox_id)
        fences = { seen.reserved, world.leases[info.sandbox_id].state, info.generation }
        return next(this, info, opts)
      end
      assert.equal(kind, support.caught(rt.acquire, rt, ALICE).kind)
      assert.same({ true, "del", world.order[1].generation }, fences)
      assert.equal(0, world:open_clients())
      assert.is_nil(rt:inspect(rt:explain(ALICE).id))
      assert.same({}, world.leases)
      world:assert_quiet()
    end)
  end
end)

describe("shutdown", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("closes every client once, destroys every tracked sandbox, and leaves nothing [P1, P9]", function()
    local rt = world:open { ownership = world.ownership }
    local warm = rt:acquire { user = "bob", thread = "t" }
    warm:release()
    local a = rt:acquire(ALICE)
    local from, closes = #world.calls, world:closes()
    rt:shutdown()
    assert.equal(0, #world:running())
    assert.equal(0, world:open_clients())
    assert.equal(closes + 1, world:closes())
    assert.equal(1, world:count "lease.close")
    assert.same({}, world.leases)
    local order = {} -- active ones, then warm ones, then the store (P9)
    for i = from + 1, #world.calls do
      local call = world.calls[i]
      if call.name == "destroy" or call.name == "lease.close" then order[#order + 1] = call.sandbox_id or call.name end
    end
    assert.same({ a.id, warm.id, "lease.close" }, order)
    assert.equal("closed", support.caught(a.exec, a, "x").kind)
    assert.equal("closed", support.caught(rt.acquire, rt, ALICE).kind)
    rt:shutdown()
    assert.equal(1, world:count "lease.close")
    assert.equal(2, world:count "destroy")
  end)

  for _, which in ipairs { "active", "warm" } do
    for _, writable in ipairs { true, false } do
      it(("raises while %s cannot be stopped, record %s; called again it stops only that [P2, P3, P4]"):format(which,
          writable and "written" or "not writable"), function()
        -- without a guest it is recorded before the stop, with one that is doomed after it has failed
        world = support.world { fenced = which == "warm" }
        local rt = world:open { ownership = world.ownership, journal = world.journal }
        local a, b = rt:acquire { user = "a", thread = "t", holder = false }, rt:acquire { user = "b", thread = "t" }
        b:release()
        local bad = which == "active" and a.id or b.id
        local closed = {}
        local at_record
        world.on["journal.record"] = function(next, this, id, ...)
          if id == bad and not writable then error("disk full", 0) end
          if id == bad then
            local seen = rt:inspect(id)
            at_record = tostring(seen.reserved) .. ":" .. world.leases[id].state .. ":" ..
              tostring((world.ownership:take(id, { runtime = rt:stats().runtime_id })))
          end
          return next(this, id, ...)
        end
        world.on.destroy = function(next, this, info, opts)
          if info.sandbox_id == bad then error("engine is down", 0) end
          return next(this, info, opts)
        end
        local err = support.caught(rt.shutdown, rt)
        assert.equal("backend_error", err.kind)
        assert.equal("shutdown", err.stage)
        assert.equal(2, world:count "destroy")
        assert.equal(0, world:count "lease.close")
        assert.equal(writable, world.records[bad] ~= nil)
        if writable then assert.equal("true:del:false", at_record) end
        local kept = rt:list()
        assert.same({ 1, bad, true }, { #kept, kept[1].id, rt:inspect(bad).retry })
        assert.same({ world:container(bad) }, world:running())
        world.on = {}
        rt:shutdown()
        for _, client in ipairs(world.clients) do
          if client.opts.own ~= false then closed[client.sandbox_id] = (closed[client.sandbox_id] or 0) + 1 end
          assert.is_false(client.open)
        end
        assert.same({ [a.id] = 1, [b.id] = 1 }, closed)
        assert.equal(2, world:closes())
        assert.equal(3, world:count "destroy")
        assert.equal(1, world:count "lease.close")
        assert.is_nil(world.records[bad])
        rt:shutdown()
        assert.equal(3, world:count "destroy")
      end)
    end
  end

  it("is not held up by live holders; after a failed stop, which is said, the next shutdown stops it [P5, P8]", function()
    local said = {}
    local rt = world:open { log = function(r) if r.event == "shutdown_failed" then said[#said + 1] = r.level end end }
    local box = rt:acquire { user = "a", thread = "t", holder = "run" }
    world:fail("destroy", 1, "engine is down")
    assert.equal("backend_error", support.caught(rt.shutdown, rt).kind)
    local seen = rt:inspect(box.id)
    assert.same({ true, { "run" } }, { seen.retry, seen.holders })
    assert.same({ "error" }, said)
    rt:shutdown()
    assert.equal(2, world:count "destroy")
    assert.equal(0, #world:running())
  end)
end)
