--- Warm sandboxes that must not, or cannot, be had again as they are; and claims that two make at once, or that one never ends.
local support = require "tests.support"

local ALICE, BOB = { user = "alice", thread = "t1" }, { user = "bob", thread = "t1" }

describe("a warm sandbox", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  --- Parks one of alice's: its id and generation.
  local function parked(rt)
    local box = rt:acquire(ALICE)
    box:release()
    return box.id, box.generation
  end

  for _, case in ipairs {
    { "that its engine marks as ending", function(c) c.health = false end },
    { "that died", function(c) c.running = false end },
    { "that another generation has replaced", function(c) c.running = false end, add = true },
  } do
    it(case[1] .. " between park and reclaim is not handed out: another one is, and it is gone [B057, E5]", function()
      local rt = world:open()
      local id, old = parked(rt)
      case[2](world:container(old))
      if case.add then world:add(id) end
      local box = rt:acquire(ALICE)
      assert.are_not.equal(old, box.generation)
      assert.equal(case.add and "discovered" or "created", box.source)
      assert.equal(1, #world:running(id))
      assert.is_false(world:container(old).running)
      box:release()
      if case.add then rt:destroy(id) end
    end)
  end

  it("that a policy reads an ending from the attestation of is replaced, not handed out [B057]", function()
    local rt = world:open { policies = { reuse = { source = [[return { decide = function(ctx)
      if ctx.attestation.ending then return "replace", "ending", "its host is being drained" end
      return "reuse" end }]] } } }
    local id, old = parked(rt)
    rt:reset() -- this runtime is gone; another one finds what it left
    world:container(old).attestation = { ending = true }
    local next_rt = world:open { policies = { reuse = { source = [[return { decide = function(ctx)
      if ctx.attestation.ending then return "replace", "ending", "its host is being drained" end
      return "reuse" end }]] } } }
    local box = next_rt:acquire(ALICE)
    assert.equal("created", box.source)
    assert.equal(1, #world:running(id))
    box:release()
  end)

  it("whose health was good a moment ago is asked again when it cannot be reached, and replaced [B064, B054]", function()
    local rt = world:open { health_ttl = 60 }
    local _, old = parked(rt)
    world.on.connect = function(next, backend, info, opts)
      if info.generation == old and opts.own ~= false then
        world:container(old).health = false -- listed as running, its socket closed
        support.raise("backend_error", "connection refused", "connect")
      end
      return next(backend, info, opts)
    end
    local box = rt:acquire(ALICE)
    assert.equal("created", box.source)
    assert.is_false(world:container(old).running)
    box:release()
  end)

  it("that is listed, but whose agent closed its socket, is removed, and the acquire goes on with another [B064]", function()
    local rt = world:open()
    local id, old = parked(rt)
    world:container(old).health = false
    assert.equal(1, #world:running(id)) -- the engine's list still has it
    world.on["client.doom"] = function() support.raise("backend_error", "connection refused", "connect") end
    local box = rt:acquire(ALICE)
    assert.equal("created", box.source)
    assert.is_false(world:container(old).running)
    box:release()
  end)

  it("whose agent closes its socket between the question and the answer costs one failed acquire at most [B064]", function()
    local rt = world:open()
    local _, old = parked(rt)
    world.on.connect = function(next, backend, info, opts)
      if info.generation == old and opts.own ~= false then
        world:container(old).health = false
        support.raise("backend_error", "connection refused", "connect")
      end
      return next(backend, info, opts)
    end
    local ok, box = pcall(rt.acquire, rt, ALICE)
    if not ok then
      assert.equal("backend_error", box.kind)
      box = rt:acquire(ALICE)
    end
    assert.equal("created", box.source)
    assert.is_false(world:container(old).running)
    box:release()
  end)

  it("follows the pool's rules at a stop time of the users: unheld ones go, held ones stay, nothing stopped is left [B063]", function()
    local rt = world:open {
      idle_timeout = 3600,
      policies = { reuse = { source = [[return {
        idle_timeout = function(ctx) return ctx.now.hour >= 18 and 1 or ctx.config.idle_timeout end }]] } },
    }
    local warm, held = rt:acquire(ALICE), rt:acquire(BOB)
    warm:release()
    local now = os.date "*t"
    local to_noon = os.time { year = now.year, month = now.month, day = now.day + (now.hour >= 18 and 1 or 0), hour = 12 } - os.time()
    rt:reload() -- the policy is asked about each at the next pass
    rt:advance(10, to_noon)
    rt:tick()
    assert.equal("warm", world:state_of(warm.id))
    rt:reload()
    rt:advance(60, 7 * 3600) -- seven in the evening
    rt:tick()
    assert.is_nil(rt:inspect(warm.id))
    assert.equal(0, #world:running(warm.id))
    assert.equal("active", world:state_of(held.id))
    assert.equal("true", held:exec("echo true").stdout:match "%a+")
    held:release()
  end)

  it("that an engine only stops, and keeps, is not forgotten: it is stopped again until it is gone [B063, M11]", function()
    local rt = world:open { idle_timeout = 60, reap_interval = 60 }
    local id, generation = parked(rt)
    world:container(generation).stubborn = true
    for _ = 1, 3 do
      rt:advance(61)
      rt:tick()
      local stats = rt:stats()
      assert.same({ 0, 0, 1 }, { stats.active, stats.warm, stats.kept })
      assert.is_true(rt:inspect(id).retry)
    end
    assert.is_true(world:count("destroy") >= 2)
    world:container(generation).stubborn = nil
    rt:advance(61)
    rt:tick()
    assert.is_nil(rt:inspect(id))
    assert.equal(0, #world:running())
  end)
end)

describe("a claim", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function()
    world.leases = {}
    world:assert_quiet()
  end)

  it("that reads an old picture binds nothing: one instance is bound, the other runtime gets an error [B010]", function()
    local first = world:open { ownership = world.ownership, journal = world.journal }
    local second = world:open { ownership = world.ownership, journal = world.journal }
    local box = first:acquire(ALICE)
    world.on.discover = function() return nil end -- as it was before the first one's create
    local ok, err = pcall(second.acquire, second, ALICE)
    assert.is_false(ok)
    assert.equal("backend_error", err.kind)
    assert.equal(1, #world:running(box.id))
    assert.equal(0, world:count "destroy")
    assert.is_nil(second:inspect(box.id))
    assert.equal("x\n", box:exec("echo x").stdout)
    box:release()
  end)

  it("of a warm one by two runtimes in turn binds it once: the later one has it, the earlier one is told [B010, B048]", function()
    local rts = {}
    for i = 1, 2 do rts[i] = world:open { ownership = world.ownership, journal = world.journal } end
    rts[1]:acquire(ALICE):release()
    local other = rts[2]:acquire(ALICE)
    local mine = rts[1]:acquire(ALICE) -- its own picture of it is old: it takes the lease, and the guest knows the newer token
    assert.equal(1, #world:running())
    assert.equal(other.generation, mine.generation)
    assert.equal("lost", support.caught(other.exec, other, "echo x").kind)
    assert.equal("x\n", mine:exec("echo x").stdout)
    mine:release()
    other:release()
    rts[1]:tick()
    assert.equal(1, #world:running())
  end)

  it("that ended while a peer owned it is found out, whatever is trusted of its health, where no guest knows tokens [E5, O8]", function()
    world = support.world { fenced = false }
    local rts, ended = {}, world:count "destroy"
    for i = 1, 2 do
      rts[i] = world:open { ownership = world.ownership, journal = world.journal, health_ttl = 60, idle_timeout = 600 }
    end
    local first = rts[1]:acquire(ALICE)
    local id, old = first.id, first.generation
    first:release()
    rts[2]:acquire(ALICE):release()
    assert.is_true(rts[2]:destroy(id))
    assert.equal(ended + 1, world:count "destroy")
    local box = rts[1]:acquire(ALICE)
    assert.are_not.equal(old, box.generation)
    assert.equal("created", box.source)
    assert.equal("x\n", box:exec("echo x").stdout)
    box:release()
    -- one that a peer had, and left as it was, is had again
    rts[2]:acquire(ALICE):release()
    assert.equal(box.generation, rts[1]:acquire(ALICE).generation)
    assert.equal(2, world:count "create")
  end)

  it("of one that is held, and has ended while a peer owned it, makes another one, whatever is trusted of its health [E5, O8]", function()
    world = support.world { fenced = false }
    local rts = {}
    for i = 1, 2 do
      rts[i] = world:open { ownership = world.ownership, journal = world.journal, health_ttl = 100000, idle_timeout = 0 }
    end
    local held = rts[1]:acquire(ALICE)
    for _, rt in ipairs(rts) do rt:advance(1000) end -- its lease runs out
    rts[2]:acquire(ALICE):release()
    assert.is_true(rts[2]:destroy(held.id))
    local box = rts[1]:acquire(ALICE)
    assert.same({ "created", held.id, false }, { box.source, box.id, box.generation == held.generation })
    assert.equal("lost", support.caught(held.exec, held, "echo x").kind)
    assert.equal("x\n", box:exec("echo x").stdout)
    assert.equal(1, #world:running())
  end)

  it("for a destruction that failed, of a runtime that died: neither free nor available, until another one ends it [B027]", function()
    local gone = world:open { ownership = world.ownership, journal = world.journal }
    local box = gone:acquire(ALICE)
    box:release()
    world:fail("destroy", 1, "the engine is down")
    assert.is_false(pcall(gone.destroy, gone, box.id))
    local stats = gone:stats()
    assert.same({ 0, 0, 1 }, { stats.active, stats.warm, stats.kept })
    local del = { owner = "of the dead", state = "del", token = world.leases[box.id] and world.leases[box.id].token or 9 }
    gone:reset() -- it crashes: its claim stays in the store
    world.leases[box.id] = del
    local rt = world:open { ownership = world.ownership, journal = world.journal, idle_timeout = 60 }
    rt:reconcile()
    stats = rt:stats()
    assert.same({ 0, 0 }, { stats.active, stats.warm }) -- not adopted, not counted as available
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.truthy(err.kind == "replacement_deferred" or err.kind == "being_destroyed")
    assert.equal(1, #world:running(box.id))
    world.leases[box.id] = nil -- it has run out
    for _ = 1, 8 do
      rt:advance(60)
      rt:tick()
    end
    assert.equal(0, #world:running(box.id)) -- the other one has ended it
    local fresh = rt:acquire(ALICE)
    assert.equal("created", fresh.source)
    fresh:release()
  end)
end)
