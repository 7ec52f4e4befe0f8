--- The scheduler: tasks whose paddock calls yield, their cancellation, and what becomes of the boxes that they hold.
local support = require "tests.support"
local paddock = require "paddock"

local ALICE = { user = "alice", thread = "t1" }
local BOB = { user = "bob", thread = "t1" }

for _, threads in ipairs { true, false } do
  describe(("a task, with threads = %s,"):format(threads), function()
    local world, rt, scheduler
    before_each(function()
      world = support.world()
      rt = world:open { threads = threads, clock = "monotonic" }
      scheduler = paddock.scheduler()
    end)
    after_each(function()
      scheduler:close()
      scheduler = nil
      world:assert_quiet()
    end)

    it("writes straight code, and every call of it yields", function()
      local steps = {}
      local task = scheduler:spawn(function(name)
        local box <close> = rt:acquire { user = name, thread = "t1" }
        local result = box:exec("echo hi")
        box:write("/workspace/a", "bytes")
        return box.id, result.stdout, box:read("/workspace/a"), box:list("/workspace")[1].name
      end, "alice")
      repeat steps[#steps + 1] = task.state until scheduler:step() == 0
      local id, out, bytes, name = task:wait()
      assert.same({ "hi\n", "bytes", "a" }, { out, bytes, name })
      assert.equal("warm", rt:inspect(id).state) -- released when its scope ended
      assert.truthy(#steps > 5, "it did not yield")
      assert.equal("done", task.state)
    end)

    it("returns what its function returns, to every waiter", function()
      local a = scheduler:spawn(function(...) return ..., nil end, 1, nil, 3)
      local b = scheduler:spawn(function() return select("#", a:wait()) end)
      assert.equal(2, b:wait())
      assert.equal(1, (a:wait()))
    end)

    it("raises its error at who waits for it, in a task and outside", function()
      world:fail("create", true, { kind = "capacity_exhausted", message = "full" })
      local a = scheduler:spawn(function() return rt:acquire(ALICE) end)
      local b = scheduler:spawn(function() return support.caught(a.wait, a).kind end)
      assert.equal("capacity_exhausted", b:wait())
      assert.equal("capacity_exhausted", support.caught(a.wait, a).kind)
      assert.same({}, scheduler:failures())
      scheduler:spawn(function() error("nobody waits", 0) end)
      assert.equal("nobody waits", support.caught(scheduler.run, scheduler))
      scheduler:spawn(function() error({ "a table" }) end)
      while scheduler:step() > 0 do end
      assert.same({ { "a table" } }, scheduler:failures())
      assert.is_true(scheduler:run())
    end)

    it("that raises nil, as Lua allows, has failed all the same", function()
      local task = scheduler:spawn(function() error(nil) end)
      local other = scheduler:spawn(function() return select("#", pcall(task.wait, task)), pcall(task.wait, task) end)
      assert.same({ 2, false }, { other:wait() })
      assert.same({ false }, { pcall(task.wait, task) })
      assert.equal("failed", task.state)
    end)

    it("that dies of an error has released its box before its error is told", function()
      local id
      local task = scheduler:spawn(function()
        local box <close> = rt:acquire(ALICE)
        id = box.id
        error("halfway", 0)
      end)
      assert.equal("halfway", support.caught(task.wait, task))
      assert.equal("warm", rt:inspect(id).state)
    end)

    it("runs beside others, in turn", function()
      local order = {}
      for i = 1, 3 do
        scheduler:spawn(function()
          for turn = 1, 2 do
            order[#order + 1] = turn .. "." .. i
            coroutine.yield()
          end
        end)
      end
      scheduler:run()
      assert.equal("1.1 1.2 1.3 2.1 2.2 2.3", table.concat(order, " "))
    end)

    it("sleeps without holding the others up", function()
      local woken = {}
      local start = paddock.now()
      for _, seconds in ipairs { 0.06, 0.02, 0.04 } do
        scheduler:spawn(function()
          scheduler:sleep(seconds)
          woken[#woken + 1] = seconds
        end)
      end
      assert.is_true(scheduler:run())
      assert.same({ 0.02, 0.04, 0.06 }, woken)
      woken = {}
      local tasks, due, last = {}, {}, 0 -- many, in any order: each in its time
      for i = 1, 200 do
        tasks[i] = scheduler:spawn(function()
          scheduler:sleep(0.05 + 0.001 * (i * 37 % 50))
          woken[#woken + 1] = due[i]
        end)
      end
      scheduler:step()
      for i, task in ipairs(tasks) do
        due[i] = task.wakes_at
        last = math.max(last, due[i])
      end
      while paddock.now() < last do end
      assert.equal(0, scheduler:step())
      assert.equal(200, #woken)
      for i = 2, #woken do assert.truthy(woken[i - 1] <= woken[i]) end
      assert.truthy(paddock.now() - start >= 0.06)
      assert.equal("unsupported", support.caught(scheduler.sleep, scheduler, 1).kind)
      assert.equal("invalid_argument", support.caught(scheduler.sleep, scheduler, -1).kind)
    end)

    it("of one identity waits for the other's acquire and is given the same sandbox [F1]", function()
      local boxes = {}
      for i = 1, 3 do scheduler:spawn(function() boxes[i] = rt:acquire(ALICE) end) end
      scheduler:run()
      assert.equal(boxes[1].id, boxes[3].id)
      assert.equal(1, world:count "create")
    end)

    it("that has not begun never does when it is cancelled", function()
      local ran = false
      local task = scheduler:spawn(function() ran = true end)
      assert.is_true(task:cancel())
      assert.equal("cancelled", task.state)
      assert.equal(0, scheduler:step())
      assert.is_false(ran)
      assert.equal("cancelled", support.caught(task.wait, task).kind)
      assert.is_false(task:cancel())
      assert.is_true(scheduler:run()) -- a cancelled one is nobody's failure
    end)

    it("is cancelled while it sleeps, while it waits for another, and while it is ready", function()
      local long = scheduler:spawn(function() scheduler:sleep(60) end)
      local waiter = scheduler:spawn(function() long:wait() end)
      local ready = scheduler:spawn(function() coroutine.yield() coroutine.yield() rt:acquire(ALICE) end)
      scheduler:step()
      assert.is_true(scheduler:cancel(waiter))
      assert.is_true(ready:cancel())
      assert.is_true(waiter:cancel())
      assert.equal("cancelled", support.caught(waiter.wait, waiter).kind)
      assert.equal("waiting", long.state)
      assert.equal("cancelled", support.caught(ready.wait, ready).kind)
      long:cancel()
      assert.is_true(scheduler:run(5))
      assert.equal("cancelled", long.state)
    end)

    it("is cancelled once: what it does to clean up is not cut short [B178]", function()
      local kinds, id, gone = {}, nil, nil
      local task = scheduler:spawn(function()
        local box = rt:acquire(ALICE)
        id = box.id
        local ok, err = pcall(scheduler.sleep, scheduler, 60)
        kinds[1] = not ok and err.kind
        box:release()
        gone = rt:destroy(box.id)
        return "cleaned up"
      end)
      while not id do scheduler:step() end
      while task.state ~= "waiting" do scheduler:step() end
      task:cancel()
      repeat task:cancel() until scheduler:step() == 0 -- again and again
      assert.same({ "cancelled" }, kinds)
      assert.is_true(gone)
      assert.equal("cleaned up", task:wait())
      assert.is_nil(rt:inspect(id))
    end)

    it("shows a cancellation as an error, and a failure behind it as nothing [B183]", function()
      local task = scheduler:spawn(function()
        local _box <close> = rt:acquire(ALICE)
        scheduler:sleep(60)
      end)
      while task.state ~= "waiting" or next(scheduler._sleepers) == nil do scheduler:step() end
      world:fail("client.close", true)
      task:cancel()
      assert.equal("cancelled", support.caught(task.wait, task).kind)
      assert.equal("cancelled", task.state)
      for _, client in ipairs(world.clients) do client.open = false end -- the world kept it open, since its close failed
    end)

    it("that another coroutine of its own calls from waits there, and does not yield to the wrong one", function()
      local task = scheduler:spawn(function()
        local produce = coroutine.wrap(function()
          coroutine.yield(rt:acquire(ALICE).id) -- this yield is the generator's own
          return "end"
        end)
        return type(produce()), produce()
      end)
      local kind, last = task:wait()
      assert.same({ "string", "end" }, { kind, last })
    end)

    it("may call what does not yield, and a scheduler of its own", function()
      local task = scheduler:spawn(function()
        local inner = paddock.scheduler()
        local t = inner:spawn(function() return rt:acquire(BOB) end)
        inner:run()
        local box = t:wait()
        return #rt:list(), box.id == rt:acquire(BOB).id
      end)
      local n, same = task:wait()
      assert.equal(1, n)
      assert.is_true(same)
    end)

    it("outlives its runtime: the calls that are under way end with `closed`", function()
      local task = scheduler:spawn(function()
        local box <close> = rt:acquire(ALICE)
        rt:shutdown()
        return support.caught(box.exec, box, "true").kind, support.caught(rt.acquire, rt, BOB).kind
      end)
      local exec, acquire = task:wait()
      assert.same({ "closed", "closed" }, { exec, acquire })
    end)

    it("streams its command's output", function()
      world.commands["both"] = function() return { stdout = "out", stderr = "err" } end
      local seen = {}
      local task = scheduler:spawn(function()
        local box <close> = rt:acquire(ALICE)
        box:exec("both", { on_output = function(stream, bytes) seen[#seen + 1] = stream .. bytes end })
      end)
      task:wait()
      assert.same({ "stdoutout", "stderrerr" }, seen)
    end)

    it("refuses bad arguments where they were given", function()
      local task = scheduler:spawn(function() return support.caught(rt.acquire, rt, { user = 5 }).kind end)
      assert.equal("invalid_argument", task:wait())
      assert.equal("invalid_argument", support.caught(scheduler.spawn, scheduler, 5).kind)
      local own
      own = scheduler:spawn(function() return support.caught(own.wait, own).kind end)
      assert.equal("invalid_argument", own:wait())
    end)

    it("that waits for one that waits for it is told so", function()
      local a, b
      a = scheduler:spawn(function() b:wait() end)
      b = scheduler:spawn(function() a:wait() end)
      assert.equal("unsupported", support.caught(scheduler.run, scheduler).kind)
    end)
  end)
end

describe("a scheduler", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  local function open_slow(seconds)
    return world:open { backend = "tests/bench/engine.lua", backend_options = { create = seconds }, threads = true,
      clock = "monotonic" }
  end

  it("that is closed cancels its tasks and waits until they have drained, with nothing left behind [S3]", function()
    local rt = open_slow(0.3)
    local ended = {}
    do
      local scheduler <close> = paddock.scheduler()
      for i = 1, 10 do
        scheduler:spawn(function()
          local _mark <close> = setmetatable({}, { __close = function() ended[#ended + 1] = i end })
          local box <close> = rt:acquire { user = "u" .. i, thread = "t" }
          box:exec("true")
          scheduler:sleep(60)
        end)
      end
      scheduler:step()
      scheduler:step()
    end
    assert.equal(10, #ended)
    assert.truthy(support.eventually(function()
      for _, record in ipairs(rt:list()) do
        if record.state == "active" then return false end
      end
      return true
    end))
  end)

  it("cancels a task whose create is under way: it is drained first, and the next one has its turn then [F11, F14, B049]", function()
    local rt = open_slow(0.3)
    local scheduler <close> = paddock.scheduler()
    local first = scheduler:spawn(function() return rt:acquire(ALICE) end)
    scheduler:step()
    scheduler:run(0.05)
    local second = scheduler:spawn(function() return rt:acquire(ALICE).source end)
    scheduler:step()
    first:cancel()
    first:cancel()
    assert.equal("waiting", first.state)
    assert.equal("cancelled", support.caught(first.wait, first).kind)
    assert.equal("warm", second:wait())
  end)

  it("does not wait in a step", function()
    local rt = open_slow(0.3)
    local scheduler <close> = paddock.scheduler()
    for i = 1, 50 do scheduler:spawn(function() rt:acquire { user = "u" .. i, thread = "t" } end) end
    local frames = 0
    while scheduler:step() > 0 do frames = frames + 1 end
    assert.truthy(frames > 50, "it stood still")
  end)

  it("runs no longer than it is told to", function()
    local scheduler <close> = paddock.scheduler()
    local task = scheduler:spawn(function() scheduler:sleep(60) end)
    assert.is_false(scheduler:run(0.01))
    assert.is_nil(task:wait(0.01))
    assert.equal("waiting", task.state)
  end)

  it("lets a coroutine that somebody closes from outside give its box back", function()
    local rt = world:open { threads = true, clock = "monotonic" }
    local scheduler = paddock.scheduler()
    local task = scheduler:spawn(function()
      local _box <close> = rt:acquire(ALICE)
      scheduler:sleep(60)
    end)
    while not next(scheduler._sleepers) do scheduler:step() end
    assert.is_true(coroutine.close(task.co))
    assert.equal("warm", rt:list()[1].state)
  end)
end)
