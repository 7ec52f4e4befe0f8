--- The journal of quarantined generations, and recycling (rows K, and M7 to M10).
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

describe("quarantine", function()
  local world, rt
  local function start(opts)
    world = support.world()
    opts = opts or {}
    opts.journal = world.journal
    rt = world:open(opts)
  end
  after_each(function() world:assert_quiet() end)

  --- Makes the sandbox uncertain: a session creation of unknown outcome.
  local function dirty(box)
    world.on["client.open_session"] = function() support.raise("outcome_unknown", "read timeout", "session_creation") end
    assert.equal("session_creation", box:exec("echo x", { scope = "s" }).reason)
    world.on["client.open_session"] = nil
  end

  --- A row that holds for both forms: `acquire` is the one at hand.
  local acquire
  local function in_both(title, fn)
    for _, way in ipairs(support.WAYS) do
      it(title .. ", " .. way.name, function()
        acquire = way.acquire
        fn()
      end)
    end
  end

  it("records a dirty generation before the stop; it never passes through the warm pool [K1, L7, L8]", function()
    start()
    local box = rt:acquire(ALICE)
    dirty(box)
    local recorded, state
    world.on.destroy = function(next, ...)
      recorded, state = world.records[box.id][box.generation], rt:inspect(box.id).state
      return next(...)
    end
    box:release()
    assert.is_string(recorded)
    assert.equal("active", state)
    assert.is_nil(world.records[box.id])
    assert.is_nil(rt:inspect(box.id))
    assert.equal(1, world:count "destroy")
    assert.equal(0, world:open_clients())
  end)

  it("keeps the metadata when the stop fails, says so, and never hands it out again [K2, L9, L3]", function()
    local logs = {}
    start { log = function(r) logs[#logs + 1] = r end }
    local box = rt:acquire(ALICE)
    dirty(box)
    world:fail("destroy", true, "engine is down")
    box:release()
    assert.equal("kept", world:state_of(box.id))
    assert.equal(1, world:count "destroy")
    assert.equal(0, world:open_clients())
    assert.is_string(world.records[box.id][box.generation])
    local found
    for _, r in ipairs(logs) do found = found or (r.event == "recycle_failed" and r) end
    assert.equal("error", found.level)
    assert.equal(box.id, found.sandbox_id)
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("replacement_deferred", err.kind)
    assert.equal("quarantined", err.reason)
    assert.equal(1, world:count "create")
    world.failures = {}
    assert.equal("created", rt:acquire(ALICE).source) -- K15
  end)

  it("outlives the runtime: the same generation stays fenced, another one is admitted [K3]", function()
    start()
    local box = rt:acquire(ALICE)
    dirty(box)
    world:fail("destroy", true, "engine is down")
    box:release()
    rt:reset()
    local second = world:open { journal = world.journal }
    local err = support.caught(second.acquire, second, ALICE)
    assert.equal("replacement_deferred", err.kind)
    assert.equal("quarantined", err.reason)
    assert.equal(1, world:count "create")
    world:kill(box.generation)
    local newer = world:add(box.id)
    world.on.inspect = function(_, _, id) return world:info(world:container(id)) end
    assert.equal(newer.generation, second:acquire(ALICE).generation)
    assert.equal(1, world:count "create")
    world.on.inspect = nil
  end)

  it("is lifted by confirmed absence only, not by an accepted stop [K4]", function()
    start()
    local box = rt:acquire(ALICE)
    dirty(box)
    world.containers[box.generation].stubborn = true
    box:release()
    assert.is_string(world.records[box.id][box.generation])
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("still_present", err.reason)
    assert.is_string(world.records[box.id][box.generation])
    world.containers[box.generation].stubborn = nil
    assert.equal("created", rt:acquire(ALICE).source)
    assert.is_nil(world.records[box.id])
  end)

  it("that cannot be recorded stops nothing: the same client stays tracked [K6]", function()
    start()
    local box = rt:acquire(ALICE)
    world:fail("journal.record", true, "disk full")
    dirty(box)
    box:release() -- does not raise
    assert.equal(0, world:count "destroy")
    assert.equal("active", world:state_of(box.id))
    assert.equal(1, world:open_clients())
    local err = support.caught(rt.destroy, rt, box.id)
    assert.equal("io_error", err.kind)
    assert.equal(0, world:count "destroy")
    world.failures = {}
    world:fail("destroy", 1, "engine is down")
    err = support.caught(rt.destroy, rt, box.id)
    assert.equal("backend_error", err.kind)
    assert.is_string(world.records[box.id][box.generation])
    assert.is_true(rt:destroy(box.id))
  end)

  for _, generation in ipairs { "known", "unknown" } do
    in_both("of an unknown generation is retired once absence is certain; a new " .. generation .. " one is not fenced [K7, K5]", function()
      start()
      local id = rt:explain(ALICE).id
      world.records[id] = { ["?"] = "test" }
      local fences
      world.on.inspect = function(next, ...)
        local seen = rt:inspect(id)
        fences = seen.reserved and seen.lease and seen.lease.state
        return next(...)
      end
      if generation == "unknown" then
        world.on.create = function(next, ...)
          local info = next(...)
          info.generation = nil
          return info
        end
        world.on.alive = function() return true end
        world.on.ready = function() return true end
        world.on.connect = function(_, _, _, opts)
          return world:_client({ sandbox_id = id, generation = world:container(id).generation }, opts)
        end
      end
      local box = acquire(rt, ALICE)
      assert.equal("created", box.source)
      assert.equal("del", fences)
      assert.equal(1, world:count "inspect")
      assert.is_nil(world.records[id])
      for _, c in ipairs(world.order) do c.running = false end
      world.on.inspect = function() return nil end
      box:release()
      rt:destroy(box.id)
      for _, client in ipairs(world.clients) do client.open = false end
    end)
  end

  for name, case in pairs {
    ["present and stubborn"] = { kind = "replacement_deferred", reason = "still_present",
      arrange = function(id) world:add(id, { stubborn = true, health = false }) end, probes = 2 },
    ["unknown, since the engine does not answer"] = { kind = "backend_error",
      arrange = function() world:fail("inspect", true, "engine is down") end, probes = 1 },
    ["a peer's"] = { kind = "replacement_deferred", reason = "teardown_refused", ownership = true,
      arrange = function(id) world.leases[id] = { owner = "peer", state = "own", token = 7 } end, probes = 0 },
    ["another sandbox by its metadata"] = { kind = "backend_error",
      arrange = function() world.on.inspect = function() return { sandbox_id = "other", generation = "g" } end end, probes = 1 },
  } do
    it("is not skipped when what is recorded is " .. name .. " [K8, K13]", function()
      world = support.world()
      rt = world:open { journal = world.journal, ownership = case.ownership and world.ownership or nil }
      local id = rt:explain(ALICE).id
      world.records[id] = { ["?"] = "test" }
      case.arrange(id)
      local err = support.caught(acquire, rt, ALICE)
      assert.equal(case.kind, err.kind)
      assert.equal(case.reason, err.reason)
      assert.equal(0, world:count "create")
      assert.is_truthy(world.records[id])
      assert.equal(case.probes, world:count "inspect")
      local seen = rt:inspect(id)
      assert.is_true(seen == nil or not seen.reserved)
      for _, c in ipairs(world.order) do c.running = false end
      world.leases = {}
    end)
  end

  it("fails closed when the journal cannot be read [K13]", function()
    start()
    world:fail("journal.has", 1, "disk error")
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("io_error", err.kind)
    assert.equal(0, world:count "create")
  end)

  for _, finish in ipairs { true, false } do
    in_both("is retired after finish, before create, under both fences: finish " .. (finish and "works" or "fails") .. " [K9]", function()
      start()
      local id = rt:explain(ALICE).id
      world.records[id] = { ["?"] = "test" }
      local order = {}
      world.on.finish = function(next, this, sandbox_id, info)
        local seen = rt:inspect(id)
        order[#order + 1] = "finish:" .. tostring(seen.reserved) .. ":" .. seen.lease.state .. ":" ..
          tostring(world.records[id] ~= nil) .. ":" .. world:count "create"
        if not finish then error("cannot clean up", 0) end
        return next(this, sandbox_id, info)
      end
      if finish then
        acquire(rt, ALICE)
        assert.is_nil(world.records[id])
      else
        local err = support.caught(acquire, rt, ALICE)
        assert.equal("backend_error", err.kind)
        assert.equal("finish", err.stage)
        assert.is_truthy(world.records[id])
        assert.equal(0, world:count "create")
      end
      assert.same({ "finish:true:del:true:0" }, order)
      world.on.finish = nil
    end)
  end

  for _, generation in ipairs { "recorded", "unknown" } do
    in_both("deletes a recorded one that is present without an endpoint, generation " .. generation .. " [K10]", function()
      start()
      local id = rt:explain(ALICE).id
      local c = world:add(id, { health = false }) -- not discoverable
      world.records[id] = { [generation == "recorded" and c.generation or "?"] = "test" }
      local full
      world.on.destroy = function(next, this, info, opts)
        full = opts.full
        return next(this, info, opts)
      end
      local box = acquire(rt, ALICE)
      assert.equal("created", box.source)
      assert.not_equal(c.generation, box.generation)
      assert.is_true(full)
      assert.equal("inspect destroy inspect finish", (function()
        local names = {}
        for _, call in ipairs(world.calls) do
          if ({ inspect = 1, destroy = 1, finish = 1 })[call.name] then names[#names + 1] = call.name end
        end
        return table.concat(names, " ")
      end)())
      assert.is_nil(world.records[id])
    end)
  end

  in_both("leaves an unrecorded generation alone, and drops the old record [K11]", function()
    start()
    local id = rt:explain(ALICE).id
    local c = world:add(id, { health = false })
    world.records[id] = { ["older"] = "test" }
    world.on.create = function() return world:info(c) end -- answers with what exists
    local box = acquire(rt, ALICE)
    assert.equal(c.generation, box.generation)
    assert.equal(0, world:count "destroy")
    assert.equal(0, world:count "finish")
    assert.is_nil(world.records[id])
  end)

  in_both("stays while an accepted stop is not proven; a later acquire that finds it absent goes on [K12]", function()
    start()
    local id = rt:explain(ALICE).id
    local c = world:add(id, { health = false, stubborn = true })
    world.records[id] = { [c.generation] = "test" }
    local err = support.caught(acquire, rt, ALICE)
    assert.equal("still_present", err.reason)
    assert.equal(1, world:count "destroy")
    assert.is_truthy(world.records[id])
    c.running = false
    assert.equal("created", acquire(rt, ALICE).source)
    assert.equal(1, world:count "destroy")
    assert.is_nil(world.records[id])
  end)

  it("with live holders changes nothing until the last one leaves [L4, L10]", function()
    start()
    local box = rt:acquire { user = "alice", thread = "t1", holder = "parent" }
    rt:retain(box.id, { holder = "fork", release_on_last = false })
    dirty(box)
    assert.is_string(world.records[box.id][box.generation])
    rt:park(box.id)
    assert.is_false((rt:destroy(box.id)))
    local err = support.caught(rt.acquire, rt, { user = "alice", thread = "t1", holder = "third" })
    assert.equal("replacement_deferred", err.kind)
    assert.equal("holders", err.reason)
    assert.is_nil(rt:binding "third")
    rt:release "parent"
    assert.equal("active", world:state_of(box.id))
    assert.equal(0, world:count "destroy")
    rt:release "fork"
    assert.equal(1, world:count "destroy")
    assert.is_nil(rt:get(box.id))
  end)

  in_both("recycles inline for a holder's acquire: its own claim does not stand in the way [K18]", function()
    start()
    local box = acquire(rt, { user = "alice", thread = "t1", holder = "run" })
    dirty(box)
    world:fail("destroy", 1, "engine is down")
    box:release()
    local again = acquire(rt, { user = "alice", thread = "t1", holder = "run" })
    assert.not_equal(box.generation, again.generation)
    assert.equal(again.id, rt:binding "run")
    assert.equal(2, world:count "destroy")
  end)

  it("is deferred while the teardown is refused by a peer's lease [K17]", function()
    world = support.world()
    rt = world:open { journal = world.journal, ownership = world.ownership }
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    dirty(box)
    local mine = world.leases[box.id]
    world.leases[box.id] = { owner = "peer", state = "own", token = 99 }
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("replacement_deferred", err.kind)
    assert.equal("teardown_refused", err.reason)
    assert.equal("active", world:state_of(box.id))
    assert.equal(0, world:count "destroy")
    world.leases[box.id] = mine
  end)

  it("fences a warm generation whose stop failed, known or not [M8]", function()
    start()
    local box = rt:acquire(ALICE)
    box:release()
    rt:advance(601)
    world:fail("destroy", 1, "engine is down")
    rt:tick()
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("replacement_deferred", err.kind)
    assert.is_true(rt:inspect(box.id).retry)
    assert.is_truthy(world.records[box.id])
    assert.is_nil(rt:get(box.id))
  end)

  it("keeps the client open when the stop failed and no record could be written, but hands nothing out [M10]", function()
    world = support.world { fenced = false }
    rt = world:open { journal = world.journal }
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    world:fail("destroy", 1, "engine is down")
    world:fail("journal.record", 2, "disk full")
    local err = support.caught(rt.destroy, rt, box.id)
    assert.equal("io_error", err.kind)
    assert.equal(1, world:open_clients())
    assert.is_nil(rt:get(box.id))
    assert.is_nil(rt:get(box.id, ALICE))
    assert.equal("lost", support.caught(box.exec, box, "echo x").kind)
    assert.is_true(rt:destroy(box.id))
    assert.equal(2, world:count "destroy")
    assert.equal(0, world:open_clients())
    assert.is_nil(world.records[box.id])
  end)
end)
