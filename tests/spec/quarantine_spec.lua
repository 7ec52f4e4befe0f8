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

  --- The calls of these names, in order: "inspect destroy inspect finish".
  local function calls_of(...)
    local wanted, names = {}, {}
    for _, name in ipairs { ... } do wanted[name] = true end
    for _, call in ipairs(world.calls) do
      if wanted[call.name] then names[#names + 1] = call.name end
    end
    return table.concat(names, " ")
  end

  --- Both fences, as seen from inside a call of the engine.
  local function fences(id)
    local seen = rt:inspect(id)
    return tostring(seen.reserved) .. ":" .. tostring(seen.lease and seen.lease.state) .. ":" .. tostring(seen.lease and seen.lease.ours)
  end

  local function is_reserved(id)
    local seen = rt:inspect(id)
    return seen ~= nil and seen.reserved
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

  it("is recorded anew before its stop by whoever found it recorded, who cannot know that it is on the disk [K3, K6]", function()
    start()
    local box = rt:acquire(ALICE)
    dirty(box)
    world:fail("destroy", true, "engine is down")
    box:release()
    rt:reset()
    local second = world:open { journal = world.journal }
    local stops = world:count "destroy"
    world:fail("journal.record", 1, "disk full")
    assert.equal("io_error", support.caught(second.acquire, second, ALICE).kind)
    assert.equal(stops, world:count "destroy")
    local recorded = world:count "journal.record"
    assert.equal("quarantined", support.caught(second.acquire, second, ALICE).reason)
    assert.equal(recorded + 1, world:count "journal.record")
    assert.equal(stops + 1, world:count "destroy")
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
    local again = rt:acquire(ALICE)
    assert.equal("created", again.source)
    assert.is_nil(world.records[box.id])
    dirty(again)
    world:fail("inspect", 1, "engine is down") -- stopped, and nobody can say that it is gone
    again:release()
    assert.is_false(world.containers[again.generation].running)
    assert.is_string(world.records[again.id][again.generation])
    assert.equal("kept", world:state_of(again.id))
    assert.is_true(rt:destroy(again.id))
    assert.is_nil(world.records[again.id])
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
      local under
      world.on.inspect = function(next, ...)
        under = fences(id)
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
      assert.equal("true:del:true", under)
      assert.equal("inspect finish create", calls_of("inspect", "destroy", "finish", "create"))
      assert.same({ "active", false, false }, { rt:inspect(id).state, rt:inspect(id).retry, rt:inspect(id).reserved })
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
      arrange = function(id) world:add(id, { stubborn = true, health = false }) end, probes = 2, destroys = 1 },
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
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal(case.kind, err.kind)
      assert.equal(case.reason, err.reason)
      if case.kind == "backend_error" then assert.equal("inspect", err.stage) end
      assert.equal(case.destroys or 0, world:count "destroy")
      assert.equal(0, world:count "finish")
      assert.equal(0, world:count "create")
      assert.equal("test", world.records[id]["?"])
      assert.equal(case.probes, world:count "inspect")
      assert.is_false(is_reserved(id))
      for _, c in ipairs(world.order) do c.running = false end
      world.leases = {}
    end)
  end

  it("fails closed when the journal cannot be read [K13]", function()
    start()
    world:fail("journal.has", 1, "disk error")
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("io_error", err.kind)
    assert.equal("", calls_of("inspect", "destroy", "finish", "create"))
    -- also when it is asked again, about what was found there
    local id = rt:explain(ALICE).id
    world:add(id, { health = false })
    world.records[id] = { ["?"] = "test" }
    world.on["journal.has"] = function(next, this, sandbox_id, generation)
      if generation then error("disk error", 0) end
      return next(this, sandbox_id, generation)
    end
    assert.equal("io_error", support.caught(rt.acquire, rt, ALICE).kind)
    assert.equal("inspect", calls_of("inspect", "destroy", "finish", "create"))
    assert.same({ ["?"] = "test" }, world.records[id])
    assert.is_false(is_reserved(id))
    world:kill(id)
  end)

  for _, case in ipairs {
    { "already absent", finish = true }, { "already absent", finish = false },
    { "absent after a stop", finish = true, stop = true }, { "absent after a stop", finish = false, stop = true },
  } do
    in_both(("is retired after finish, before create, under both fences: %s, finish %s [K9]"):format(case[1],
        case.finish and "works" or "fails"), function()
      start()
      local id = rt:explain(ALICE).id
      local old = case.stop and world:add(id, { health = false })
      world.records[id] = { [old and old.generation or "?"] = "test" }
      local order = {}
      world.on.finish = function(next, this, sandbox_id, info)
        order[#order + 1] = sandbox_id .. ":" .. fences(id) .. ":" .. tostring(world.records[id] ~= nil)
        if not case.finish then error("cannot clean up", 0) end
        return next(this, sandbox_id, info)
      end
      local recorded
      world.on.create = function(next, ...)
        recorded = world.records[id] ~= nil
        return next(...)
      end
      local looks = case.stop and "inspect destroy inspect finish" or "inspect finish"
      if case.finish then
        local box = acquire(rt, ALICE)
        assert.is_false(recorded)
        assert.is_nil(world.records[id])
        assert.equal(looks .. " create", calls_of("inspect", "destroy", "finish", "create"))
        assert.same({ "active", box.generation }, { rt:inspect(id).state, rt:inspect(id).generation })
      else
        local err = support.caught(acquire, rt, ALICE)
        assert.equal("backend_error", err.kind)
        assert.equal("finish", err.stage)
        assert.is_truthy(world.records[id])
        assert.equal(looks, calls_of("inspect", "destroy", "finish", "create"))
      end
      assert.same({ id .. ":true:del:true:true" }, order)
      assert.is_false(is_reserved(id))
    end)
  end

  for _, generation in ipairs { "recorded", "unknown" } do
    in_both("deletes a recorded one that is present without an endpoint, generation " .. generation .. " [K10]", function()
      start()
      local id = rt:explain(ALICE).id
      local c = world:add(id, { health = false }) -- not discoverable
      world.records[id] = { [generation == "recorded" and c.generation or "?"] = "test" }
      local expected = world:info(c)
      local full, given
      local under = {}
      world.on.destroy = function(next, this, info, opts)
        full, given = opts.full, info
        under[#under + 1] = fences(id)
        return next(this, info, opts)
      end
      world.on.inspect = function(next, ...)
        under[#under + 1] = fences(id)
        return next(...)
      end
      local box = acquire(rt, ALICE)
      assert.equal("created", box.source)
      assert.not_equal(c.generation, box.generation)
      assert.equal(box.generation, rt:inspect(id).generation)
      assert.is_true(full)
      assert.same(expected, given)
      assert.same({ "true:del:true", "true:del:true", "true:del:true" }, under)
      assert.equal("inspect destroy inspect finish create", calls_of("inspect", "destroy", "finish", "create"))
      assert.is_nil(world.records[id])
      assert.is_false(is_reserved(id))
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
    assert.same({ "active", false, false }, { rt:inspect(id).state, rt:inspect(id).retry, rt:inspect(id).reserved })
    c.health = true
    assert.equal("active", acquire(rt, ALICE).source)
  end)

  for _, case in ipairs {
    { "still present", kind = "replacement_deferred", reason = "still_present", arrange = function(c) c.stubborn = true end },
    { "unknown", kind = "backend_error", arrange = function()
      world.on.destroy = function(next, ...)
        world:fail("inspect", 1, "engine is down")
        return next(...)
      end
    end },
  } do
    in_both("stays while an accepted stop is not proven: " .. case[1] ..
        "; a later acquire that finds it absent goes on [K12]", function()
      start()
      local id = rt:explain(ALICE).id
      local c = world:add(id, { health = false })
      world.records[id] = { [c.generation] = "test" }
      case.arrange(c)
      local err = support.caught(acquire, rt, ALICE)
      assert.same({ case.kind, case.reason }, { err.kind, err.reason })
      assert.equal("inspect destroy inspect", calls_of("inspect", "destroy", "finish", "create"))
      assert.is_truthy(world.records[id][c.generation])
      assert.is_false(is_reserved(id))
      world.on.destroy = nil
      c.running = false
      assert.equal("created", acquire(rt, ALICE).source)
      assert.equal(1, world:count "destroy")
      assert.is_nil(world.records[id])
    end)
  end

  it("with live holders changes nothing until the last one leaves [L4, L10]", function()
    start()
    local box = rt:acquire { user = "alice", thread = "t1", holder = "parent" }
    rt:retain(box.id, { holder = "fork", release_on_last = false })
    dirty(box)
    assert.is_string(world.records[box.id][box.generation])
    world.on.destroy = function(next, ...) -- what runs on is still there, as far as anybody can tell
      world:fail("inspect", 1, "engine is down")
      return next(...)
    end
    rt:park(box.id)
    assert.is_false((rt:destroy(box.id)))
    assert.equal(1, world:open_clients())
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
    assert.is_string(world.records[box.id][box.generation]) -- gone it is not until that is proven (K4)
  end)

  it("goes with its last holder although none of them asked for parking [L4, L13]", function()
    start()
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    rt:retain(box.id, { holder = "fork", release_on_last = false })
    rt:release "fork"
    assert.equal("active", world:state_of(box.id)) -- clean: nobody asked
    rt:retain(box.id, { holder = "fork", release_on_last = false })
    dirty(box)
    rt:release "fork"
    assert.equal(1, world:count "destroy")
    assert.is_nil(rt:inspect(box.id))
  end)

  in_both("recycles inline for a holder's acquire: its own claim does not stand in the way [K18]", function()
    start()
    local box = acquire(rt, { user = "alice", thread = "t1", holder = "run" })
    dirty(box)
    world:fail("destroy", 1, "engine is down")
    box:release()
    local newer
    world.on.destroy = function(next, this, info, opts)
      assert.equal(box.generation, info.generation)
      next(this, info, opts)
      newer = world:add(box.id) -- made by somebody else
    end
    local clients = #world.clients
    local again = acquire(rt, { user = "alice", thread = "t1", holder = "run" })
    assert.same({ "discovered", newer.generation }, { again.source, again.generation })
    assert.equal(again.id, rt:binding "run")
    assert.equal(2, world:count "destroy") -- one at the release, one now
    assert.equal(1, world:count "create")
    assert.is_true(#world.clients > clients)
    assert.equal("hi\n", again:exec("echo hi").stdout)
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
    assert.equal(1, world:open_clients())
    assert.equal(0, world:count "destroy")
    assert.is_false(is_reserved(box.id))
    world.leases[box.id] = mine
  end)

  for _, generation in ipairs { "known", "unknown" } do
    it("fences a warm generation whose stop failed: " .. generation .. " [M8]", function()
      start()
      if generation == "unknown" then
        world.on.create = function(next, ...)
          local info = next(...)
          info.generation = nil
          return info
        end
        for _, name in ipairs { "alive", "ready", "client.fence" } do world.on[name] = function() return true end end
        world.on.inspect = function(_, _, id) return world:container(id).running and { sandbox_id = id } or nil end
      end
      local box = rt:acquire(ALICE)
      box:release()
      rt:advance(601)
      world:fail("destroy", 1, "engine is down")
      rt:tick()
      local records = world.records[box.id]
      assert.is_string(records[generation == "known" and box.generation or "?"])
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal("replacement_deferred", err.kind)
      assert.equal("quarantined", err.reason)
      assert.same({ "warm", true }, { world:state_of(box.id), rt:inspect(box.id).retry })
      assert.equal(records, world.records[box.id])
      assert.is_nil(rt:get(box.id))
      assert.is_nil(rt:get(box.id, ALICE))
      assert.equal(1, world:count "destroy")
      for _, c in ipairs(world.order) do c.running = false end
    end)
  end

  it("keeps the client open when the stop failed and no record could be written, but hands nothing out [M10]", function()
    world = support.world { fenced = false }
    rt = world:open { journal = world.journal, ownership = world.ownership }
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    world:fail("destroy", 1, "engine is down")
    world:fail("journal.record", 2, "disk full")
    local err = support.caught(rt.destroy, rt, box.id)
    assert.equal("io_error", err.kind)
    assert.equal(1, world:open_clients())
    assert.is_true(rt:inspect(box.id).retry)
    assert.is_nil(world.records[box.id])
    assert.is_nil(rt:get(box.id))
    assert.is_nil(rt:get(box.id, ALICE))
    assert.equal("lost", support.caught(box.exec, box, "echo x").kind)
    assert.is_true(rt:destroy(box.id))
    assert.equal(2, world:count "destroy")
    assert.equal(0, world:open_clients())
    assert.is_nil(world.records[box.id])
  end)

  it("that could not be recorded is fenced by its `del` lease, which goes on, until a stop is recorded or done [M15]", function()
    world = support.world { fenced = false }
    rt = world:open { journal = world.journal, ownership = world.ownership, reap_interval = 36000 }
    local box = rt:acquire { user = "alice", thread = "t1", holder = false }
    world:fail("destroy", 2, "engine is down")
    world:fail("journal.record", 2, "disk full")
    support.caught(rt.destroy, rt, box.id)
    assert.equal("del", world.leases[box.id].state)
    for _, renewals in ipairs { 1, 2 } do
      if renewals == 2 then world.leases[box.id] = nil end -- the store has lost it
      rt:advance(61)
      rt:tick()
      assert.equal(renewals, world:count "lease.renew")
      assert.equal("del", world.leases[box.id].state)
    end
    assert.equal(1, world:count "destroy")
    support.caught(rt.destroy, rt, box.id) -- now it is recorded
    assert.is_string(world.records[box.id][box.generation])
    assert.is_nil(world.leases[box.id])
    assert.is_true(rt:destroy(box.id))
    assert.same({}, world.leases)
  end)
end)
