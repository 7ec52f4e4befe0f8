--- The fence: the one path by which anything is stopped.
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

describe("destroy", function()
  local world, rt, box
  local function start(opts, world_opts)
    world = support.world(world_opts)
    if opts and opts.journal then opts.journal = world.journal end
    rt = world:open(opts)
    box = rt:acquire { user = "alice", thread = "t1", holder = false }
  end
  after_each(function() world:assert_quiet() end)

  it("stops a clean, unheld sandbox once, with its metadata, and forgets it [M1]", function()
    start()
    local info
    world.on.destroy = function(next, this, given, opts)
      info = given
      return next(this, given, opts)
    end
    assert.is_true(rt:destroy(box.id))
    assert.equal(box.generation, info.generation)
    assert.equal(1, world:count "destroy")
    assert.equal(1, world:closes())
    assert.is_nil(rt:inspect(box.id))
    assert.is_nil(rt:inspect(ALICE))
    assert.is_true(rt:destroy(box.id)) -- never there: absent is absent
    assert.equal(1, world:count "destroy")
  end)

  it("passes claim, doom, stop, absence and clean-up in this order, under both fences [M1, M14, M15]", function()
    start({ ownership = nil })
    local order = {}
    local function note(name)
      world.on[name] = function(next, ...)
        local seen = rt:inspect(box.id)
        order[#order + 1] = name .. ":" .. tostring(seen.reserved) .. ":" .. tostring(seen.lease and seen.lease.state)
        return next(...)
      end
    end
    note "client.doom"
    note "destroy"
    note "inspect"
    note "finish"
    assert.is_true(rt:destroy(box.id))
    assert.same({ "client.doom:true:del", "destroy:true:del", "inspect:true:del", "finish:true:del" }, order)
  end)

  it("journals before the stop where there is no guest to doom [M14]", function()
    world = support.world { fenced = false }
    rt = world:open { journal = world.journal }
    box = rt:acquire { user = "alice", thread = "t1", holder = false }
    local recorded
    world.on.destroy = function(next, ...)
      recorded = world.records[box.id] ~= nil
      return next(...)
    end
    assert.is_true(rt:destroy(box.id))
    assert.is_true(recorded)
    assert.is_nil(world.records[box.id]) -- retired once it was confirmed absent
  end)

  it("warns when closing the client fails, and stops it all the same [M2]", function()
    local records = {}
    start { log = function(r) records[#records + 1] = r end }
    world.on["client.close"] = function(next, this) next(this) error("cannot close", 0) end
    assert.is_true(rt:destroy(box.id))
    assert.equal(1, world:count "destroy")
    local found
    for _, r in ipairs(records) do found = found or (r.event == "client_close_failed" and r.reason == "destroy" and r) end
    assert.is_table(found)
    assert.equal(box.id, found.sandbox_id)
  end)

  it("is deferred while another teardown has it reserved [M3]", function()
    start()
    local inner, why
    world.on.destroy = function(next, ...)
      world.on.destroy = nil
      inner = rt:inspect(box.id).reserved
      why = rt:inspect(box.id).state
      return next(...)
    end
    assert.is_true(rt:destroy(box.id))
    assert.is_true(inner)
    assert.equal("active", why)
  end)

  it("raises a failed stop, keeps the metadata, and stops the same generation at the next call [M4]", function()
    start { journal = true }
    local given = {}
    world.on.destroy = function(next, this, info, opts)
      given[#given + 1] = info
      assert.equal(#given == 2, world.records[box.id] ~= nil) -- a clean one is recorded when its stop has failed
      if #given == 1 then error("engine is down", 0) end
      return next(this, info, opts)
    end
    local err = support.caught(rt.destroy, rt, box.id)
    assert.equal("backend_error", err.kind)
    assert.equal("stop", err.stage)
    assert.matches("engine is down", err.message)
    assert.equal("kept", world:state_of(box.id))
    assert.is_string(world.records[box.id][box.generation])
    assert.equal(1, world:closes())
    assert.is_nil(rt:get(box.id))
    assert.is_true(rt:destroy(box.id))
    assert.equal(box.generation, given[1].generation)
    assert.same(given[1], given[2])
    assert.equal(2, world:count "destroy")
    assert.equal(1, world:closes())
    assert.is_nil(rt:inspect(box.id))
    assert.same({}, world.records)
  end)

  it("never turns a failing stop into an answer [M5, B028]", function()
    start { journal = true }
    for _, kind in ipairs { "backend_error", "timeout", "io_error" } do
      world:fail("destroy", 1, { kind = kind, message = "no" })
      assert.equal(kind, support.caught(rt.destroy, rt, box.id).kind)
      assert.is_string(world.records[box.id][box.generation])
    end
    assert.equal(3, world:count "destroy")
    assert.equal(1, #world:running())
  end)

  it("leaves a newer generation alone [M6, M13]", function()
    start { journal = true }
    world:fail("destroy", 1, "engine is down")
    support.caught(rt.destroy, rt, box.id)
    world:kill(box.generation)
    local newer = world:add(box.id)
    world.on.inspect = function(_, _, id) return world:info(world:container(id)) end
    for _ = 1, 2 do
      local done, why = rt:destroy(box.id)
      assert.is_false(done)
      assert.equal("replaced", why)
      assert.same({ [box.generation] = "destroy" }, world.records[box.id])
    end
    assert.equal(1, world:count "destroy")
    assert.is_true(newer.running)
    assert.equal(newer.generation, rt:acquire(ALICE).generation) -- nothing fences it
    assert.equal(1, world:count "destroy")
    world.on.inspect = nil
  end)

  it("says so when an accepted stop is no absence, and needs no second stop once it is gone [M11]", function()
    for _, failed in ipairs { 0, 1 } do
      start { journal = true }
      world:fail("destroy", failed, "engine is down")
      for _ = 1, failed do support.caught(rt.destroy, rt, box.id) end
      world.containers[box.generation].stubborn = true
      local err = support.caught(rt.destroy, rt, box.id)
      assert.equal("backend_error", err.kind)
      assert.equal("still_present", err.reason)
      assert.is_string(world.records[box.id][box.generation])
      world:kill(box.generation)
      assert.is_true(rt:destroy(box.id))
      assert.equal(failed + 1, world:count "destroy")
      assert.same({}, world.records)
      if failed == 0 then world:assert_quiet() end
    end
  end)

  it("stops nothing while a peer has the lease, or the store cannot answer [M14, B025]", function()
    world = support.world()
    rt = world:open { ownership = world.ownership }
    box = rt:acquire { user = "alice", thread = "t1", holder = false }
    local mine = world.leases[box.id]
    world.leases[box.id] = { owner = "peer", state = "own", token = mine.token + 5 }
    assert.is_false((rt:destroy(box.id)))
    world.leases[box.id] = mine
    world:fail("lease.claim_for_destroy", 1, "store down")
    assert.is_false((rt:destroy(box.id)))
    assert.equal(0, world:count "destroy")
    assert.equal("active", world:state_of(box.id))
    assert.is_false(rt:inspect(box.id).reserved)
    assert.equal("ok\n", box:exec("echo ok").stdout)
    assert.is_true(rt:destroy(box.id))
    assert.is_nil(world.leases[box.id])
  end)

  it("stops nothing that a peer took meanwhile: the guest refuses the doom [M14, B051]", function()
    start()
    world.containers[box.generation].token = box.token + 1 -- a newer owner has fenced it
    assert.is_false((rt:destroy(box.id)))
    assert.equal(0, world:count "destroy")
    assert.is_nil(rt:inspect(box.id)) -- it is the peer's now
    world:kill(box.generation)
  end)

  it("records first what no guest answers for, and stops nothing where that cannot be recorded [M14, K19]", function()
    start { journal = true }
    world.on["client.doom"] = function() support.raise("backend_error", "no answer", "connect") end
    world:fail("journal.record", 1, "disk full")
    assert.equal("io_error", support.caught(rt.destroy, rt, box.id).kind)
    assert.equal(0, world:count "destroy")
    assert.equal("active", world:state_of(box.id))
    local recorded
    world.on.destroy = function(next, ...)
      recorded = world.records[box.id]
      return next(...)
    end
    assert.is_true(rt:destroy(box.id))
    assert.is_table(recorded)
    assert.same({}, world.records)
  end)

  it("keeps its reservation while a claim that was not answered may still come into force: for a TTL [O4, E17]", function()
    world = support.world()
    rt = world:open { ownership = world.ownership }
    box = rt:acquire { user = "alice", thread = "t1", holder = false }
    world:fail("lease.claim_for_destroy", 1, "store down")
    world:fail("lease.release", 1, "store down")
    assert.is_false((rt:destroy(box.id)))
    assert.is_true(rt:inspect(box.id).reserved)
    assert.is_nil(rt:get(box.id))
    assert.equal("being_destroyed", support.caught(rt.acquire, rt, ALICE).kind)
    assert.is_false((rt:destroy(box.id)))
    rt:advance(181)
    assert.equal(box.generation, rt:acquire(ALICE).generation)
    assert.equal(0, world:count "destroy")
    world.leases = {}
  end)

  it("stops nothing without a guest once its own claim has run out meanwhile [M14, B045]", function()
    start({ journal = true, ownership = { type = "memory", ttl = 180 } }, { fenced = false })
    world.on["journal.record"] = function(next, ...)
      rt:advance(200) -- as if this process had stood still
      return next(...)
    end
    assert.equal("lost", support.caught(rt.destroy, rt, box.id).kind)
    assert.equal(0, world:count "destroy")
    world.on["journal.record"] = nil
    assert.is_string(world.records[box.id][box.generation]) -- it must not serve again, stopped or not
    assert.is_nil(rt:get(box.id))
    assert.is_true(rt:destroy(box.id))
    assert.equal(1, world:count "destroy")
  end)

  it("keeps everything when the sandbox cannot be looked at before the retry [M4]", function()
    start()
    world:fail("destroy", 1, "engine is down")
    support.caught(rt.destroy, rt, box.id)
    world:fail("inspect", 1, "engine is down")
    local err = support.caught(rt.destroy, rt, box.id)
    assert.equal("inspect", err.stage)
    assert.equal(1, world:count "destroy")
    assert.is_true(rt:destroy(box.id))
  end)

  it("refuses ids that are none [M1]", function()
    start()
    for _, id in ipairs { "", "UPPER", "a/b", "..", ("x"):rep(64), "a\nb" } do
      assert.equal("invalid_argument", support.caught(rt.destroy, rt, id).kind)
    end
  end)

  it("is told apart in events: reasons and errors are not lost [M4]", function()
    start()
    local events = {}
    rt:on("*", function(r) events[#events + 1] = r.event .. ":" .. tostring(r.reason) end)
    world:fail("destroy", 1, "engine is down")
    support.caught(rt.destroy, rt, box.id)
    rt:destroy(box.id)
    rt:dispatch()
    assert.is_truthy(table.concat(events, " "):find("stop_failed:destroy", 1, true))
    assert.is_truthy(table.concat(events, " "):find("destroyed:destroy", 1, true))
  end)
end)

describe("acquire after a failed stop", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("destroys it inline, once, and goes on to create [K15]", function()
    local rt = world:open { journal = world.journal }
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    world:fail("destroy", 1, "engine is down")
    support.caught(rt.destroy, rt, box.id)
    assert.equal("kept", world:state_of(box.id))
    local given
    world.on.destroy = function(next, this, info, opts)
      given = info
      return next(this, info, opts)
    end
    local at_create
    world.on.create = function(next, ...)
      at_create = { world:state_of(box.id) or "untracked", world.records[box.id] or "no record" }
      return next(...)
    end
    local fresh = rt:acquire(ALICE)
    assert.equal("created", fresh.source)
    assert.not_equal(box.generation, fresh.generation)
    assert.equal(2, world:count "destroy")
    assert.equal(box.generation, given.generation)
    assert.equal(world.containers[box.generation].url, given.url)
    assert.same({ "untracked", "no record" }, at_create)
  end)

  it("is deferred while the stop goes on failing [K16, B030]", function()
    local rt = world:open { journal = world.journal }
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    world:fail("destroy", 2, "engine is down")
    support.caught(rt.destroy, rt, box.id)
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("replacement_deferred", err.kind)
    assert.equal("quarantined", err.reason)
    assert.equal(2, world:count "destroy") -- one in this acquire
    assert.is_string(world.records[box.id][box.generation])
    assert.equal(1, world:count "create")
    assert.equal("created", rt:acquire(ALICE).source)
  end)

  for _, found_by in ipairs { "discovery", "orphan adoption" } do
    for _, via in ipairs { "the runtime", "the holder manager" } do
      it(("takes a replacement generation that has appeared, and leaves the old stop at that: %s, via %s [M7]"):format(found_by, via),
        function()
          local rt = world:open { journal = world.journal }
          local request = { user = "alice", thread = "t1", holder = via == "the holder manager" and "run" or false }
          local box = rt:acquire { user = "alice", thread = "t1", holder = false }
          world:fail("destroy", 1, "engine is down")
          support.caught(rt.destroy, rt, box.id)
          world:kill(box.generation)
          local newer = world:add(box.id)
          world.on.inspect = function(_, _, id) return world:info(world:container(id)) end
          if found_by == "orphan adoption" then
            rt:advance(61)
            rt:tick() -- the retry finds the other one, and lets go of what is gone
            rt:advance(61)
            rt:tick()
            assert.same({ "warm", newer.generation }, { world:state_of(box.id), rt:inspect(box.id).generation })
          end
          for _, source in ipairs { found_by == "discovery" and "discovered" or "warm", "warm" } do
            local fresh = rt:acquire(request)
            assert.same({ source, newer.generation }, { fresh.source, fresh.generation })
            local seen = rt:inspect(box.id)
            assert.same({ "active", newer.generation, false }, { seen.state, seen.generation, seen.retry })
            assert.is_truthy(rt:get(box.id))
            assert.is_truthy(rt:get(box.id, ALICE))
            assert.equal(request.holder and box.id or nil, rt:binding "run")
            assert.same({ [box.generation] = "destroy" }, world.records[box.id])
            if request.holder then fresh:release() else rt:park(box.id) end
          end
          assert.equal(1, world:count "destroy")
          world.on.inspect = nil
        end)
    end
  end
end)
