--- Asynchronous operations as a Lua host sees them: submitted, polled, waited for, called back by dispatch, cancelled, closed.
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }
local BOB = { user = "bob", thread = "t1" }

--- An engine in a file, with the runtime's own threads: create takes backend_options.create seconds.
local function open_slow(world, seconds, more)
  local options = { backend = "tests/bench/engine.lua", backend_options = { create = seconds }, threads = true, clock = "monotonic" }
  for k, v in pairs(more or {}) do options[k] = v end
  return world:open(options)
end

--- Each test of what an operation answers runs in both ways: with threads, and inside tick without.
for _, threads in ipairs { true, false } do
  describe(("an operation with threads = %s"):format(threads), function()
    local world, rt
    before_each(function()
      world = support.world()
      rt = world:open { threads = threads, clock = "monotonic" }
    end)
    after_each(function() world:assert_quiet() end)

    --- As a frame loop does it: never waits, until the operation is over.
    local function poll(op)
      local results
      support.eventually(function()
        if not threads then rt:tick() end
        rt:dispatch()
        results = table.pack(op:poll())
        return results[1]
      end)
      return table.unpack(results, 2, results.n)
    end

    it("gives the same box as the blocking call does [A3]", function()
      local box = poll(rt:acquire_async(ALICE))
      assert.equal("created", box.source)
      local same = rt:acquire(ALICE)
      assert.equal(same.id, box.id)
      assert.equal("hi\n", box:exec("echo hi").stdout)
    end)

    it("raises the same error as the blocking call does [A3]", function()
      world:fail("create", true, { kind = "capacity_exhausted", message = "the engine is full" })
      local blocking = support.caught(rt.acquire, rt, ALICE)
      local async = support.caught(poll, rt:acquire_async(ALICE))
      assert.equal("capacity_exhausted", async.kind)
      assert.equal(blocking.kind, async.kind)
      assert.equal(blocking.message, async.message)
      assert.equal(blocking.stage, async.stage)
    end)

    it("does every call that may wait", function()
      local box = rt:acquire(ALICE)
      assert.equal(3, poll(box:exec_async("exit 3")).exit_code)
      assert.equal("in", poll(box:exec_async("cat", { stdin = "in" })).stdout)
      assert.is_nil(poll(box:write_async("/workspace/a", "some bytes")))
      assert.equal("some bytes", poll(box:read_async("/workspace/a")))
      assert.equal("a", poll(box:list_async("/workspace"))[1].name)
      local release = box:release_async()
      assert.is_nil(poll(release))
      assert.same({ true, n = 1 }, table.pack(release:poll()))
      assert.equal("warm", rt:inspect(box.id).state)
      assert.equal(true, poll(rt:destroy_async(box.id)))
      assert.is_nil(rt:inspect(box.id))
      assert.is_nil(poll(rt:shutdown_async()))
      assert.equal("closed", support.caught(rt.acquire, rt, ALICE).kind)
    end)

    it("says of a destroy what stands in its way", function()
      local box = rt:acquire(ALICE)
      local done, reason, message = poll(rt:destroy_async(box.id))
      assert.equal(false, done)
      assert.equal("deferred", reason)
      assert.matches("hold", message)
      box:release()
    end)

    it("answers again what it answered before, and the box is the same", function()
      local op = rt:acquire_async(ALICE)
      local box = poll(op)
      local ok, again = op:poll()
      assert.is_true(ok)
      assert.equal(box, again)
      assert.equal(box, select(2, op:wait()))
      local failed = box:read_async("/no/such")
      assert.equal("io_error", support.caught(poll, failed).kind)
      assert.equal("io_error", support.caught(failed.poll, failed).kind)
    end)

    it("is waited for, with a limit or without", function()
      local ok, box = rt:acquire_async(ALICE):wait()
      assert.is_true(ok)
      assert.equal("alice", rt:inspect(box.id).identity.user)
      local op = box:exec_async("echo hi")
      ok = op:wait(30)
      assert.is_true(ok)
      assert.equal("invalid_argument", support.caught(op.wait, op, -1).kind)
      assert.equal("invalid_argument", support.caught(op.wait, op, "1").kind)
    end)

    it("calls its callback once, from dispatch", function()
      local seen = {}
      local op = rt:acquire_async(ALICE, function(o) seen[#seen + 1] = { o, select(2, o:poll()) } end)
      assert.equal(0, #seen)
      support.eventually(function()
        if not threads then rt:tick() end
        rt:dispatch()
        return #seen > 0
      end)
      rt:dispatch()
      assert.equal(1, #seen)
      assert.equal(op, seen[1][1])
      assert.equal("created", seen[1][2].source)
    end)

    it("may be submitted, polled and cancelled in a callback; a call that waits is refused there", function()
      local err, second, polled
      rt:acquire_async(ALICE, function(op)
        local box = select(2, op:poll())
        err = support.caught(box.exec, box, "true")
        second = box:exec_async("echo again", function(o) polled = select(2, o:poll()).stdout end)
        local third = rt:acquire_async(BOB)
        third:cancel()
        third:close()
        assert.is_nil(second:poll())
      end)
      support.eventually(function()
        if not threads then rt:tick() end
        rt:dispatch()
        return polled
      end)
      assert.equal("unsupported", err.kind)
      assert.equal("again\n", polled)
    end)

    it("may be closed by its own functions while it is waited for: the wait says so, and what it had is given back", function()
      local op = rt:acquire_async(ALICE, function(o) o:close() end)
      assert.equal("closed", support.caught(op.wait, op).kind)
      local box = rt:acquire(ALICE)
      world.commands["some"] = function() return { stdout = "output" } end
      op = box:exec_async("some", { on_output = function() op:close() end })
      assert.equal("closed", support.caught(op.wait, op).kind)
      assert.equal("paddock operation (none, closed)", tostring(op))
      box:release()
    end)

    it("tells dispatch what its callback has raised, after the others have run", function()
      local ran = 0
      rt:acquire_async(ALICE, function() error("the host's own fault", 0) end)
      rt:acquire_async(BOB, function() ran = ran + 1 end)
      local raised
      support.eventually(function()
        if not threads then rt:tick() end
        local ok, err = pcall(rt.dispatch, rt)
        if not ok then raised = err end
        return raised and ran == 1
      end)
      assert.equal("the host's own fault", raised)
      assert.equal(1, ran)
      rt:dispatch()
    end)

    it("gives a command's output to on_output before the result", function()
      local box, pieces = rt:acquire(ALICE), {}
      world.commands["both"] = function() return { stdout = "out\0bytes", stderr = "err" } end
      local op
      op = box:exec_async("both", { on_output = function(stream, bytes)
        pieces[#pieces + 1] = stream .. "=" .. bytes
        assert.equal("paddock operation", tostring(op):match("^%w+ %w+"))
      end }, function() pieces[#pieces + 1] = "end" end)
      support.eventually(function()
        if not threads then rt:tick() end
        rt:dispatch()
        return pieces[3]
      end)
      assert.same({ "stdout=out\0bytes", "stderr=err", "end" }, pieces)
      assert.equal("out\0bytes", select(2, op:poll()).stdout)
    end)

    it("gives a command's output to on_output of a blocking exec, too", function()
      local box, pieces = rt:acquire(ALICE), {}
      world.commands["both"] = function() return { stdout = "out\0bytes", stderr = "err" } end
      local function keep(stream, bytes) pieces[#pieces + 1] = stream .. "=" .. bytes end
      assert.equal("err", box:exec("both", { on_output = keep }).stderr)
      assert.same({ "stdout=out\0bytes", "stderr=err" }, pieces)
      local _, result = box:exec_async("both", { on_output = keep }):wait()
      assert.equal("err", result.stderr)
      assert.equal(4, #pieces)
      assert.equal("oops", support.caught(box.exec, box, "both", { on_output = function() error("oops", 0) end }))
    end)

    it("refuses bad arguments at once, and then nothing is submitted [K1]", function()
      local box = rt:acquire(ALICE)
      local calls = #world.calls
      for _, bad in ipairs {
        { rt.acquire_async, rt, { user = 5 } }, { rt.acquire_async, rt, { nonsense = 1 } }, { rt.acquire_async, rt, ALICE, 5 },
        { rt.acquire_async, rt, { timeout = -1 } }, { rt.destroy_async, rt }, { rt.destroy_async, rt, "x", { time = 1 } },
        { rt.destroy_async, rt, box.id, print, print }, { rt.shutdown_async, rt, { timeout = 0 / 0 } },
        { box.exec_async, box }, { box.exec_async, box, "true", { on_output = 5 } }, { box.exec_async, box, "true", { env = 1 } },
        { box.read_async, box, "relative" }, { box.write_async, box, "/a" }, { box.write_async, box, "/a", "b", { x = 1 } },
        { box.release_async, box, { timeout = "1" } }, { box.list_async, box, 7 },
      } do
        assert.equal("invalid_argument", support.caught(table.unpack(bad, 1, 5)).kind)
      end
      if not threads then rt:tick() end
      rt:dispatch()
      for i = calls + 1, #world.calls do assert.not_matches("^client", world.calls[i].name) end
    end)

    it("that is closed gives back what it would have given", function()
      local op = rt:acquire_async(ALICE)
      support.eventually(function()
        if not threads then rt:tick() end
        rt:dispatch()
        return op:poll()
      end)
      local waiting = rt:acquire_async(BOB)
      do
        local _op <close> = waiting
      end
      assert.equal("closed", support.caught(waiting.poll, waiting).kind)
      local box = select(2, op:poll())
      op:close()
      op:close()
      assert.equal("hi\n", box:exec("echo hi").stdout) -- it was taken
      local untaken = rt:acquire_async({ user = "carol", thread = "t1" })
      support.eventually(function()
        if not threads then rt:tick() end
        rt:dispatch()
        return tostring(untaken):find("done", 1, true)
      end)
      local id
      for _, record in ipairs(rt:list()) do
        if record.identity.user == "carol" then id = record.id end
      end
      assert.equal("active", rt:inspect(id).state)
      untaken:close()
      assert.truthy(support.eventually(function()
        if not threads then rt:tick() end
        rt:dispatch()
        return rt:inspect(id).state == "warm"
      end))
    end)

    it("that is forgotten is cancelled and gives back what it held", function()
      for i = 1, 5 do rt:acquire_async { user = "u" .. i, thread = "t" } end
      collectgarbage()
      collectgarbage()
      assert.truthy(support.eventually(function()
        if not threads then rt:tick() end
        rt:dispatch()
        for _, record in ipairs(rt:list()) do
          if record.state == "active" then return false end
        end
        return true
      end))
    end)

    it("may outlive its runtime: closed [F15]", function()
      local op = rt:acquire_async(ALICE)
      local box = poll(op)
      box:release()
      rt:shutdown()
      assert.equal(box, select(2, op:poll()))
      assert.equal("closed", support.caught(box.exec_async, box, "true").kind)
      assert.equal("closed", support.caught(rt.acquire_async, rt, ALICE).kind)
      collectgarbage()
    end)
  end)
end

describe("an acquire that takes its time", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("lets the host's loop turn meanwhile, and a thousand of them run at once [A3]", function()
    local rt = open_slow(world, 0.3)
    local boxes, turns = {}, 0
    for i = 1, 100 do
      rt:acquire_async({ user = "u" .. i, thread = "t" }, function(op) boxes[#boxes + 1] = select(2, op:poll()) end)
    end
    while #boxes < 100 do
      turns = turns + 1
      rt:dispatch()
    end
    assert.truthy(turns > 10, "the loop stood still") -- hundreds of thousands, in fact
  end)

  it("is over at its deadline, whatever the engine does [B201]", function()
    local rt = open_slow(world, 3)
    local start = require("paddock").now()
    local err = support.caught(rt.acquire, rt, { user = "alice", thread = "t1", timeout = 0.2 })
    assert.equal("timeout", err.kind)
    local op = rt:acquire_async { user = "bob", thread = "t1", timeout = 0.2 }
    assert.equal("timeout", support.caught(op.wait, op).kind)
    assert.truthy(require("paddock").now() - start < 2.9, "it waited for the engine")
  end)

  it("is not over after a wait that was too short", function()
    local rt = open_slow(world, 0.5)
    local op = rt:acquire_async(ALICE)
    assert.is_nil(op:wait(0))
    assert.is_nil(op:wait(0.01))
    assert.is_nil(op:poll())
    assert.equal("created", select(2, op:wait()).source)
  end)

  it("is drained when it is cancelled, once and again, and leaves its sandbox to the next one [F11, F12, F14, B049, B178, B179]", function()
    local rt = open_slow(world, 0.5)
    local op = rt:acquire_async(ALICE)
    assert.is_nil(op:wait(0.1))
    local next_one = rt:acquire_async(ALICE)
    assert.is_true(op:cancel())
    assert.is_true(op:cancel())
    assert.equal("cancelled", support.caught(op.wait, op).kind)
    assert.is_false(op:cancel())
    local _, box = next_one:wait()
    assert.equal("warm", box.source)
    assert.equal(1, #rt:list())
  end)

  it("that waits for its turn ends at once when it is cancelled, and the one behind it gets its turn [F3, B179]", function()
    local rt = open_slow(world, 0.5)
    local first, second, third = rt:acquire_async(ALICE), rt:acquire_async(ALICE), rt:acquire_async(ALICE)
    assert.is_true(second:cancel())
    assert.equal("cancelled", support.caught(second.poll, second).kind)
    assert.is_nil(first:poll())
    local a, b = select(2, first:wait()), select(2, third:wait())
    assert.equal(a.id, b.id)
  end)

  it("ends with `closed` when the runtime shuts down while it waits [F15]", function()
    local rt = open_slow(world, 0.5)
    local first = rt:acquire_async(ALICE)
    local second = rt:acquire_async(ALICE)
    first:wait(0.05)
    rt:shutdown()
    assert.equal("closed", support.caught(second.poll, second).kind)
  end)

  it("tells its callback of the shutdown that has ended it, also when the callback asks for the shutdown's result", function()
    local rt = open_slow(world, 0.2)
    local kinds = {}
    for i = 1, 3 do
      rt:acquire_async(ALICE, function(op) kinds[i] = select(2, pcall(op.poll, op)).kind or "a box" end)
    end
    local shutdown = rt:shutdown_async(nil, function(op) kinds[4] = op:poll() error("nobody is left to be told", 0) end)
    pcall(shutdown.wait, shutdown)
    assert.truthy(kinds[1] == "a box" or kinds[1] == "closed")
    assert.same({ "closed", "closed", true }, { kinds[2], kinds[3], kinds[4] })
    assert.equal("closed", support.caught(rt.stats, rt).kind)
  end)

  it("may be one of many whose runtime is left to the garbage collector", function()
    do
      local rt = open_slow(world, 0.2)
      table.remove(world.runtimes)
      for i = 1, 20 do rt:acquire_async({ user = "u" .. i, thread = "t" }, function() end) end
    end
    assert.truthy(support.eventually(function()
      collectgarbage()
      return support.fds() == world.fds
    end))
  end)
end)

describe("skills and network decisions as operations", function()
  local world
  local function open(methods, threads)
    world = support.world { methods = methods }
    return world:open { threads = threads, clock = "monotonic" }
  end
  after_each(function()
    world:assert_quiet()
    world = nil -- its functions know operations, and those know their runtime
  end)

  for _, threads in ipairs { true, false } do
    it(("answer what the blocking ones do, with threads = %s [R5, S1, S2]"):format(threads), function()
      local seen = {}
      local rt = open({
        sync_skills = function(_, info, skills) seen[#seen + 1] = { info.sandbox_id, skills.user, skills.projection.a } end,
        network_events = function() return { { request_id = "r1", host = "example.org", port = 443 } } end,
        deny_pending = function() return true end,
        decide = function(_, _, request, decision) return request == "r1" and decision == "allow_once" end,
      }, threads)
      local box <close> = rt:acquire(ALICE) -- in use, so that it stays active
      local id = box.id
      local skills = { sandbox_id = id, user = "alice", thread = "t1", projection = { a = { 1, "b" } } }
      assert.is_true((rt:sync_skills_async(skills):wait()))
      rt:sync_skills(skills)
      assert.same({ id, "alice", { 1, "b" } }, seen[1])
      assert.same(seen[2], seen[1])
      assert.same({ { request_id = "r1", host = "example.org", port = 443 } }, select(2, rt:network_events_async(id):wait()))
      assert.is_true((select(2, rt:deny_pending_async(id):wait())))
      assert.is_true((select(2, rt:decide_async(id, "r1", "allow_once"):wait())))
      assert.is_false((select(2, rt:decide_async(id, "r2", "deny"):wait())))
      for _, bad in ipairs {
        { rt.sync_skills_async, rt }, { rt.sync_skills_async, rt, {} }, { rt.network_events_async, rt },
        { rt.decide_async, rt, id, "r1", "perhaps" }, { rt.decide_async, rt, id, "r1" }, { rt.deny_pending_async, rt, id, 5 },
      } do
        assert.equal("invalid_argument", support.caught(table.unpack(bad, 1, 5)).kind)
      end
    end)

    it(("have the defaults of an engine without them, with threads = %s [R1, S1]"):format(threads), function()
      local rt = open(nil, threads)
      local box <close> = rt:acquire(ALICE) -- in use, so that it stays active
      local id = box.id
      assert.is_true((rt:sync_skills_async({ sandbox_id = id }):wait()))
      assert.same({}, select(2, rt:network_events_async(id):wait()))
      assert.is_false((select(2, rt:deny_pending_async(id):wait())))
      assert.is_false((select(2, rt:decide_async(id, "r1", "allow"):wait())))
    end)

    it(("tell their error, and yield inside a task, with threads = %s [S2]"):format(threads), function()
      local rt = open({ sync_skills = function() support.raise("io_error", "the projection is not there") end,
        network_events = function() return {} end }, threads)
      local box <close> = rt:acquire(ALICE) -- in use, so that it stays active
      local id = box.id
      local op = rt:sync_skills_async { sandbox_id = id }
      assert.equal("io_error", support.caught(op.wait, op).kind)
      local scheduler <close> = require("paddock").scheduler()
      local task = scheduler:spawn(function()
        local err = support.caught(rt.sync_skills, rt, { sandbox_id = id })
        return err.kind, #rt:network_events(id), rt:deny_pending(id), rt:decide(id, "r", "deny")
      end)
      assert.same({ "io_error", 0, false, false }, { task:wait() })
    end)
  end

  it("are drained when they are cancelled, once or repeatedly [S3]", function()
    for times = 1, 2 do
      local ended, op = false, nil
      local rt = open({ sync_skills = function()
        for _ = 1, times do op:cancel() end -- it runs
        assert.is_nil(op:poll())
        ended = true
        support.raise("io_error", "late")
      end }, true)
      local box <close> = rt:acquire(ALICE) -- in use, so that it stays active
      local id = box.id
      op = rt:sync_skills_async { sandbox_id = id }
      assert.equal("cancelled", support.caught(op.wait, op).kind)
      assert.is_true(ended)
      if times == 1 then world:assert_quiet() end
    end
  end)
end)

describe("many operations", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("that are cancelled, closed, forgotten and taken in any order leave nothing", function()
    local seed = os.time()
    math.randomseed(seed)
    local rt = open_slow(world, 0.002)
    local ops, called, boxes = {}, 0, {}
    local function any(list)
      local i = math.random(#list)
      return list[i], i
    end
    for _ = 1, 600 do
      local roll = math.random(10)
      if roll <= 5 or #ops == 0 then
        local callback = math.random(2) == 1 and function() called = called + 1 end or nil
        if roll == 1 and #boxes > 0 then
          ops[#ops + 1] = any(boxes):exec_async("true", { on_output = callback and function() end }, callback)
        elseif roll == 2 and #boxes > 0 then
          ops[#ops + 1] = any(boxes):release_async(callback)
        elseif roll == 3 and #boxes > 0 then
          ops[#ops + 1] = rt:destroy_async(any(boxes).id, { timeout = 5 }, callback)
        else
          ops[#ops + 1] = rt:acquire_async({ user = "u" .. math.random(20), thread = "t", timeout = 30 }, callback)
        end
      else
        local op, i = any(ops)
        if roll == 6 then
          op:cancel()
        elseif roll == 7 then
          op:close()
          table.remove(ops, i)
        elseif roll == 8 then
          table.remove(ops, i)
        elseif roll == 9 then
          local ok, done, box = pcall(op.poll, op)
          if ok and done and box and type(box) == "userdata" then boxes[#boxes + 1] = box end
        else
          rt:dispatch()
          if math.random(10) == 1 then collectgarbage() end
        end
      end
    end
    for _, op in ipairs(ops) do
      local ok, err = pcall(op.wait, op)
      local kind = ok or err.kind
      assert.truthy(ok or kind == "cancelled" or kind == "lost" or kind == "closed" or kind == "being_destroyed",
        ("seed %d: %s"):format(seed, tostring(err)))
    end
    rt:dispatch()
  end)
end)

describe("a command of a real sandbox", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("gives its output while it runs, and says that it was cancelled [S3]", function()
    local can, why = support.can_sandbox()
    if not can then pending(why) end
    local rt = world:open { backend = "process", threads = true, clock = "monotonic" }
    local box <close> = rt:acquire(ALICE)
    local seen = {}
    local op = box:exec_async("printf 'a\\0\\377'; printf e >&2; sleep 100; echo never", {
      on_output = function(stream, bytes) seen[stream] = (seen[stream] or "") .. bytes end,
    })
    assert.truthy(support.eventually(function()
      rt:dispatch()
      return seen.stdout and seen.stderr
    end))
    assert.is_nil(op:poll())
    assert.is_true(op:cancel())
    local _, result = op:wait(30)
    assert.equal("cancelled", result.outcome)
    assert.equal("a\0\255", result.stdout)
    assert.same({ stdout = "a\0\255", stderr = "e" }, seen)
    assert.equal("still here\n", box:exec("echo still here").stdout)
  end)

  it("whose host does not take its output waits, and loses none of it", function()
    local can, why = support.can_sandbox()
    if not can then pending(why) end
    local rt = world:open { backend = "process", threads = true, clock = "monotonic" }
    local box <close> = rt:acquire(ALICE)
    local size = 0
    local op = box:exec_async("head -c 900000 /dev/zero", { on_output = function(_, bytes) size = size + #bytes end })
    assert.is_nil(op:poll())
    rt:inspect(box.id)
    local _, result = op:wait()
    assert.equal(900000, size)
    assert.equal(900000, #result.stdout)
    size = 0
    box:exec("head -c 900000 /dev/zero", { on_output = function(_, bytes) size = size + #bytes end })
    assert.equal(900000, size)
  end)
end)

describe("rt:fd", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("is readable when dispatch has something to do, for a backend in a file and for one of the host's", function()
    for _, rt in ipairs { open_slow(world, 0.05), world:open { threads = true, clock = "monotonic" } } do
      local fd = rt:fd()
      assert.equal(fd, rt:fd())
      local core, done, waits = require "paddock.core", false, 0
      rt:acquire_async(ALICE, function() done = true end)
      while not done do
        core.wait({ rt }, core.now() + 10) -- polls that descriptor
        waits = waits + 1
        rt:dispatch()
      end
      assert.truthy(waits < 100, "it was readable all the time")
      while rt:dispatch() > 0 do end
      local start = core.now()
      core.wait({ rt }, start + 0.05)
      assert.truthy(core.now() - start >= 0.04, "it is readable while nothing waits")
    end
  end)
end)

describe("inside a function of a host's backend", function()
  local world, rt
  before_each(function()
    world = support.world()
    rt = world:open { threads = true, clock = "monotonic" }
  end)
  after_each(function() world:assert_quiet() end)

  it("submit, poll and cancel are allowed, a wait and a dispatch are refused", function()
    local seen = {}
    world.on.create = function(next, backend, spec)
      local op = rt:acquire_async(BOB)
      seen.poll = table.pack(op:poll())
      seen.wait = support.caught(op.wait, op).kind
      seen.dispatch = support.caught(rt.dispatch, rt).kind
      seen.cancel = op:cancel()
      world.on.create = nil
      return next(backend, spec)
    end
    rt:acquire(ALICE)
    assert.same({ poll = { n = 1 }, wait = "unsupported", dispatch = "unsupported", cancel = true }, seen)
  end)
end)

describe("a time limit", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  for _, call in ipairs { "destroy", "shutdown" } do
    it(("of a blocking %s ends the wait for an engine that hangs [B184, B201]"):format(call), function()
      local path = support.tmpdir() .. "/engine.lua"
      support.write_file(path, [[
        local M = dofile("tests/bench/engine.lua").new({})
        local destroy = M.destroy
        function M.destroy(self, info)
          require("paddock.io").sleep(2.5)
          return destroy(self, info)
        end
        return M
      ]])
      local rt = world:open { backend = path, threads = true, clock = "monotonic" }
      local box = rt:acquire(ALICE)
      box:release()
      local start = require("paddock").now()
      local err = call == "destroy" and support.caught(rt.destroy, rt, box.id, { timeout = 0.1 })
        or support.caught(rt.shutdown, rt, { timeout = 0.1 })
      assert.equal("timeout", err.kind)
      assert.truthy(require("paddock").now() - start < 2.4, "it waited for the engine")
    end)
  end
end)
