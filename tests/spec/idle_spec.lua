--- Idle expiry on the monotonic clock, replicas, eviction, caps.
local support = require "tests.support"

local function who(n) return { user = "u", thread = "t" .. n } end

describe("idle expiry", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  local function parked(rt, n)
    local box = rt:acquire(who(n))
    box:release()
    return box.id
  end

  it("is on the monotonic clock: a jump of the wall clock expires nothing and keeps nothing [N1, B072]", function()
    local rt = world:open()
    local a = parked(rt, 1)
    for i = 1, 60 do
      rt:advance(0, i % 2 == 0 and 600 or -600)
      rt:advance(0, 7200)
      rt:tick()
    end
    assert.equal("warm", world:state_of(a))
    rt:advance(0, -48 * 3600)
    rt:advance(601)
    rt:tick()
    assert.is_nil(world:state_of(a))
    assert.equal(1, world:count "destroy")
  end)

  it("ends what is due at once where there are threads: a slow engine does not hold the last one for as long as all the others", function()
    local folder = support.tmpdir()
    support.write_file(folder .. "/engine.lua", ([[
      local M = dofile("tests/bench/engine.lua").new({})
      local io = require "paddock.io"
      local destroy, inside = M.destroy, 0
      function M.destroy(self, info) -- each one waits until five are here
        inside = inside + 1
        io.fs.write_atomic(("%s/inside.%%d"):format(inside), "")
        local deadline = io.now() + 20
        while inside < 5 and io.now() < deadline do io.sleep(0.01) end
        return destroy(self, info)
      end
      return M
    ]]):format(folder))
    local rt = world:open { backend = folder .. "/engine.lua", threads = true, reap_interval = 60, replicas = 5 }
    for n = 1, 5 do parked(rt, n) end
    rt:advance(601)
    assert.is_true(support.eventually(function()
      rt:advance(61)                                             -- the pass before this one may just have been at work
      return support.sh("ls " .. folder):find("inside.5", 1, true) ~= nil
    end, 30))
    assert.is_true(support.eventually(function() return rt:stats().warm == 0 end, 10))
    assert.equal(5, rt:stats().expired)
  end)

  it("takes no idle age from created_at [N2]", function()
    local rt = world:open()
    world.on.create = function(next, ...)
      local info = next(...)
      info.created_at = 12345 -- decades ago
      return info
    end
    local a = parked(rt, 1)
    rt:advance(599)
    rt:tick()
    assert.equal("warm", world:state_of(a))
  end)

  it("hands idle active ones to the fence first, then warm ones, each once [N3]", function()
    local rt = world:open()
    local warm = parked(rt, 1)
    local active = rt:acquire { user = "u", thread = "t2", holder = false }.id
    local held = rt:acquire(who(3))
    rt:advance(601)
    local order = {}
    world.on.destroy = function(next, this, info, opts)
      order[#order + 1] = info.sandbox_id
      return next(this, info, opts)
    end
    rt:tick()
    assert.same({ active, warm }, order)
    assert.equal("active", world:state_of(held.id))
    rt:tick()
    assert.equal(2, world:count "destroy")
  end)

  it("spares an active one that is used again meanwhile [N3, B066]", function()
    local rt = world:open()
    rt:acquire { user = "u", thread = "t1", holder = false }
    local b = rt:acquire { user = "u", thread = "t2", holder = false }
    rt:advance(601)
    world.on.destroy = function(next, ...)
      rt:get(b.id) -- a use, while the pass is at work on the other one
      return next(...)
    end
    rt:tick()
    assert.equal(1, world:count "destroy")
    assert.equal("active", world:state_of(b.id))
  end)

  it("begins when the age exceeds the limit, and 0 means never [N6, B077, B15]", function()
    local rt = world:open { idle_timeout = 60 }
    local a = parked(rt, 1)
    rt:advance(60)
    rt:tick()
    assert.equal("warm", world:state_of(a))
    rt:advance(0.001)
    rt:tick()
    assert.is_nil(world:state_of(a))
    local never = world:open { idle_timeout = 0 }
    local b = parked(never, 2)
    never:advance(1e6)
    never:tick()
    assert.equal("warm", world:state_of(b, never))
  end)

  it("keeps an entry in the pool, not reclaimable, until its stop has succeeded; one failure ends no pass [N6]", function()
    local rt = world:open { reap_interval = 60 }
    local a, b = parked(rt, 1), parked(rt, 2)
    rt:advance(601)
    world.on.destroy = function(next, this, info, opts)
      if info.sandbox_id == a then error("engine is down", 0) end
      return next(this, info, opts)
    end
    rt:tick()
    assert.equal("warm", world:state_of(a))
    assert.is_nil(world:state_of(b))
    local err = support.caught(rt.acquire, rt, who(1)) -- M8
    assert.equal("replacement_deferred", err.kind)
    assert.equal("quarantined", err.reason)
    assert.is_nil(rt:get(a))
    world.on.destroy = nil
    rt:advance(61)
    rt:tick() -- tried again
    assert.is_nil(world:state_of(a))
    assert.equal("created", rt:acquire(who(1)).source)
  end)

  it("asks the policy at park, when due, and after a reload [N3]", function()
    local folder = support.tmpdir()
    local function write(limit, log)
      support.write_file(folder .. "/reuse.lua", ([[return {
        decide = function() return "reuse" end,
        idle_timeout = function(ctx) %s return %d end }]]):format(log or "", limit))
    end
    write(100)
    local rt = world:open { policies = folder }
    local a = parked(rt, 1)
    assert.equal(100, rt:inspect(a).idle_timeout)
    rt:advance(50)
    write(10)
    rt:reload()
    rt:advance(0.001)
    rt:tick()
    assert.is_nil(world:state_of(a))
    write(10, "error('x')")
    rt:reload()
    local b = parked(rt, 2) -- a policy that fails makes nothing immortal, and kills nothing: the configured limit holds
    rt:advance(599)
    rt:tick()
    assert.equal("warm", world:state_of(b))
    rt:advance(2)
    rt:tick()
    assert.is_nil(world:state_of(b))
  end)

  it("spares what is being made: its clock starts when it is there [B076]", function()
    local rt = world:open { idle_timeout = 10 }
    world.on.create = function(next, ...)
      rt:advance(30)
      return next(...)
    end
    local box = rt:acquire { user = "u", thread = "t", holder = false }
    rt:tick()
    assert.equal("active", world:state_of(box.id))
  end)
end)

describe("room", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("is made by destroying the oldest warm one, once, with its metadata [N4, B194]", function()
    local rt = world:open { replicas = 2 }
    local a = rt:acquire(who(1))
    local b = rt:acquire(who(2))
    rt:advance(10)
    a:release()
    rt:advance(10)
    b:release()
    local stamp, gone = rt:inspect(b.id).parked_at, nil
    world.on.destroy = function(next, this, info, opts)
      gone = info.generation
      return next(this, info, opts)
    end
    local c = rt:acquire(who(3))
    assert.equal(a.generation, gone)
    assert.equal(1, world:count "destroy")
    assert.is_nil(world:state_of(a.id))
    assert.equal("warm", world:state_of(b.id))
    assert.equal(stamp, rt:inspect(b.id).parked_at)
    assert.equal("active", world:state_of(c.id))
  end)

  it("never comes from an active one: the soft cap is passed with a warning [N5]", function()
    local records = {}
    local rt = world:open { replicas = 1, log = function(r) records[#records + 1] = r end }
    rt:acquire { user = "u", thread = "t1", holder = false }
    rt:acquire(who(2))
    assert.equal(0, world:count "destroy")
    local warned = 0
    for _, r in ipairs(records) do warned = warned + (r.event == "over_replicas" and 1 or 0) end
    assert.equal(1, warned)
  end)

  it("tries the next oldest when the oldest cannot be claimed [N5]", function()
    world = support.world()
    local rt = world:open { replicas = 2, ownership = world.ownership }
    local a = rt:acquire(who(1))
    local b = rt:acquire(who(2))
    a:release()
    rt:advance(1)
    b:release()
    world.on["lease.claim_for_destroy"] = function(next, this, id, ctx)
      if id == a.id then return false end
      return next(this, id, ctx)
    end
    rt:acquire(who(3))
    assert.equal("warm", world:state_of(a.id))
    assert.is_nil(world:state_of(b.id))
  end)

  it("is chosen by the policy among the 32 oldest [N4]", function()
    local rt = world:open { replicas = 40, policies = { reuse = { name = "reuse.lua", source = [[
      return { decide = function() return "reuse" end,
               evict = function(candidates)
                 assert(#candidates == 32)
                 return candidates[#candidates].sandbox_id
               end }]] } } }
    local ids = {}
    for i = 1, 40 do
      local box = rt:acquire(who(i))
      ids[i] = box.id
      box:release()
      rt:advance(1)
    end
    rt:acquire(who(41))
    assert.is_nil(world:state_of(ids[32]))
    assert.equal("warm", world:state_of(ids[1]))
  end)

  it("ends at max_sandboxes: n succeed, the next is refused [B177, B193, B172]", function()
    for _, n in ipairs { 0, 1, 10 } do
      local rt = world:open { max_sandboxes = n }
      for i = 1, n do rt:acquire { user = "cap" .. n, thread = "t" .. i } end
      local err = support.caught(rt.acquire, rt, { user = "cap" .. n, thread = "more" })
      assert.equal("capacity_exhausted", err.kind)
      assert.matches("max_sandboxes", err.message)
    end
    -- one that is parked makes room for another; waking the first takes room from the second
    local rt = world:open { max_sandboxes = 1 }
    rt:acquire(who(1)):release()
    local second = rt:acquire(who(2))
    assert.equal("capacity_exhausted", support.caught(rt.acquire, rt, who(1)).kind)
    second:release()
    assert.equal("created", rt:acquire(who(1)).source)
  end)

  it("is told by stats [B061]", function()
    local rt = world:open { replicas = 3 }
    for i = 1, 9 do rt:acquire(who(i)):release() end
    local stats = rt:stats()
    assert.equal(3, stats.warm)
    assert.equal(6, stats.evicted)
    assert.equal(3, #world:running())
  end)
end)
