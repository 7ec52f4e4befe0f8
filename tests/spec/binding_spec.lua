--- The Lua binding: arguments, events, host tables on threads and without, finalizers, and what a callback may do.
local errors = require "paddock.errors"
local paddock = require "paddock"
local sim = require "paddock.sim"

local MODES = { { name = "threads = false", threads = false }, { name = "threads = true", threads = true } }

local folders = {}
local function folder()
  local dir = os.tmpname()
  os.remove(dir)
  assert(os.execute(("mkdir -m 700 '%s'"):format(dir)))
  folders[#folders + 1] = dir
  return dir
end

local function quiet() end

local function open(engine, threads, more)
  local options = {
    backend = engine and engine.backend, state_dir = folder(), threads = threads, user = "ambient", log = quiet,
    reap_interval = 3600,
  }
  if not threads then options.clock = "manual" end
  for key, value in pairs(more or {}) do options[key] = value end
  return paddock.open(options)
end

--- The error that a call raises; fails when there is none, or one of another kind.
local function raised(kind, fn, ...)
  local ok, err = pcall(fn, ...)
  assert.is_false(ok, "nothing was raised")
  assert.is_true(errors.is(err), "no error of paddock: " .. tostring(err))
  assert.equal(kind, err.kind, tostring(err))
  assert.is_nil(tostring(err):find("\n"))
  return err
end

local function invalid(name, fn, ...)
  local err = raised("invalid_argument", fn, ...)
  assert.is_truthy(err.message:find("`" .. name .. "`", 1, true), ("%q does not name %s"):format(err.message, name))
end

teardown(function()
  for _, dir in ipairs(folders) do os.execute(("rm -rf '%s'"):format(dir)) end
end)

describe("the module", function()
  it("has a version, and errors with all the kinds of the C header", function()
    assert.is_truthy(paddock.version:find("^%d+%.%d+%.%d+$"))
    assert.equal(21, #errors.kinds)
    assert.is_true(errors.kinds.shared_workspace_unsupported)
  end)

  it("makes the same errors in Lua as in C", function()
    local err = raised("invalid_argument", paddock.open, { idle_timout = 1 })
    local own = errors.new("lost", "gone", { reason = "stale", cause = err })
    assert.equal(getmetatable(err), getmetatable(own))
    assert.equal("lost: gone", tostring(own))
    assert.is_true(errors.is(own, "lost", "stale"))
    assert.is_false(errors.is(own, "lost", "other"))
    assert.is_false(errors.is({ kind = "lost" }))
    assert.has_error(function() errors.new("no_such_kind", "x") end)
    assert.has_error(function() errors.new("lost", "x", { color = "red" }) end)
  end)

  it("refuses impossible options with their names, whoever checks them", function()
    assert.is_truthy(raised("invalid_argument", paddock.open, { command_timeout = 0 / 0 }).message:find("command_timeout", 1, true))
    assert.is_truthy(raised("invalid_argument", paddock.open, { limits = { memory = print } }).message:find("limits.memory", 1, true))
    assert.is_truthy(raised("invalid_argument", paddock.open, { ownership = { type = "redis" } }).message:find("ownership.url", 1, true))
    assert.is_truthy(raised("invalid_argument", paddock.open, { ownership = { type = "redis", url = "http://x" } }).message
      :find("ownership.url", 1, true))
    raised("invalid_argument", paddock.open, 5)
  end)
end)

for _, mode in ipairs(MODES) do
  describe("a runtime over a host's table, " .. mode.name, function()
    local engine, rt

    before_each(function()
      engine = sim.new()
      rt = open(engine, mode.threads)
    end)
    after_each(function()
      rt:shutdown()
      for _, row in ipairs(engine.show()) do assert.equal("gone", row.condition) end
    end)

    it("acquires, runs, parks, reclaims and destroys", function()
      local box = rt:acquire { user = "alice", thread = "thread-1" }
      assert.equal("created", box.source)
      assert.equal("5f520be8674edf7129a342d712c24367", box.id)
      assert.equal("integer", math.type(box.token))
      assert.is_string(box.holder)
      assert.equal("g1", box.generation)
      assert.is_nil(box.no_such_field)
      assert.is_truthy(tostring(box):find(box.id, 1, true))
      local r = box:exec("echo hi")
      assert.same({ "hi\n", "", 0, "completed", false }, { r.stdout, r.stderr, r.exit_code, r.outcome, r.truncated })
      assert.is_truthy(tostring(r):find("hi", 1, true))
      box:write("/workspace/a", "bytes\0\255")
      assert.equal("bytes\0\255", box:read("/workspace/a"))
      assert.equal("a", box:list("/workspace")[1].name)
      box:release()
      box:release()
      assert.is_nil(rt:get(box.id))
      do
        local again <close> = rt:acquire { user = "alice", thread = "thread-1" }
        assert.equal("warm", again.source)
        assert.equal("bytes\0\255", again:read("/workspace/a"))
      end
      assert.equal("warm", rt:inspect(box.id).state)
      assert.is_true(rt:destroy(box.id))
      assert.is_true(rt:destroy(box.id))
    end)

    it("answers get in memory alone, scoped to the identity when one is given [A4 A5]", function()
      local box = rt:acquire { user = "alice", thread = "t1" }
      local before = #engine.calls
      assert.equal(box.id, rt:get(box.id).id)
      assert.equal(box.id, rt:get(box.id, { user = "alice", thread = "t1" }).id)
      assert.is_nil(rt:get(box.id, { user = "bob", thread = "t1" }))
      assert.is_nil(rt:get(box.id, { user = "alice", thread = "t2" }))
      assert.is_nil(rt:get("nothing-has-this-id"))
      assert.equal(before, #engine.calls)
      box:release()
    end)

    it("uses the ambient user where a call names none [C10]", function()
      local box = rt:acquire { thread = "t1" }
      local other = rt:acquire { user = "ambient", thread = "t1" }
      assert.equal(box.id, other.id)
      box:release()
      other:release()
    end)

    it("binds, retains and releases holders [L10 L12]", function()
      local box = rt:acquire { user = "alice", thread = "t1", holder = "run" }
      assert.equal("run", box.holder)
      assert.equal(box.id, rt:binding "run")
      rt:retain(box.id, { holder = "upload", release_on_last = false })
      assert.equal(box.id, rt:binding "upload")
      rt:release "run"
      assert.is_nil(rt:binding "run")
      assert.equal("active", rt:inspect(box.id).state)
      rt:release "upload"
      rt:release "upload"
      rt:release "unknown"
      assert.equal("warm", rt:inspect { user = "alice", thread = "t1" }.state)
      local none = rt:acquire { user = "alice", thread = "t1", holder = false }
      assert.is_nil(none.holder)
      rt:park(box.id)
      assert.equal("warm", rt:inspect(box.id).state)
    end)

    it("says that a destroy was deferred while a holder is there [L4]", function()
      local box = rt:acquire { user = "alice", thread = "t1" }
      local done, why = rt:destroy(box.id)
      assert.is_false(done)
      assert.equal("deferred", why)
      box:release()
    end)

    it("takes names of any bytes exactly, up to 4096 of them", function()
      local names = { "", "a\0b", "\255\254", "../../etc", "a/b", "line\nbreak", ("x"):rep(4096) }
      local seen = {}
      for _, name in ipairs(names) do
        local box <close> = rt:acquire { user = name, thread = name }
        assert.is_nil(seen[box.id])
        seen[box.id] = true
        assert.is_truthy(box.id:find("^[a-z0-9-]+$"))
        local identity = rt:inspect(box.id).identity
        assert.same({ name, name }, { identity.user, identity.thread })
      end
    end)

    it("refuses names that are none, naming them", function()
      for _, bad in ipairs { 5, true, {}, ("x"):rep(4097), ("x"):rep(1000000) } do
        invalid("user", rt.acquire, rt, { user = bad, thread = "t" })
        invalid("thread", rt.acquire, rt, { user = "u", thread = bad })
      end
      for _, bad in ipairs { 5, true, "", "a\0b", ("x"):rep(300) } do
        invalid("holder", rt.acquire, rt, { thread = "t", holder = bad })
      end
      assert.same({}, rt:list())
    end)

    it("refuses unknown fields, naming them and the known ones", function()
      local err = raised("invalid_argument", rt.acquire, rt, { usr = "alice" })
      assert.is_truthy(err.message:find('"usr"', 1, true))
      assert.is_truthy(err.message:find("user, thread", 1, true))
      invalid("request", rt.acquire, rt, { "alice" })
      invalid("request", rt.acquire, rt, "alice")
      invalid("identity", rt.get, rt, "id", { thred = "x" })
      invalid("options", rt.retain, rt, "id", { holder = "h", last = true })
      invalid("request", rt.explain, rt, { id = "x" })
      invalid("identity", rt.inspect, rt, { id = "x" })
    end)

    it("refuses impossible arguments, naming them [B5]", function()
      for _, bad in ipairs { 0 / 0, math.huge, -math.huge, 0, -1, "5" } do
        invalid("timeout", rt.acquire, rt, { thread = "t", timeout = bad })
      end
      invalid("requirements", rt.acquire, rt, { thread = "t", requirements = 5 })
      invalid("requirements", rt.acquire, rt, { thread = "t", requirements = { f = print } })
      for _, bad in ipairs { 5, "", "a\0b", false } do
        invalid("id", rt.destroy, rt, bad)
        invalid("id", rt.park, rt, bad)
        invalid("holder", rt.release, rt, bad)
        invalid("holder", rt.binding, rt, bad)
      end
      invalid("holder", rt.retain, rt, "id")
      invalid("holder", rt.retain, rt, "id", {})
      invalid("self", rt.acquire, { user = "a" })
      invalid("self", rt.acquire)
      invalid("fn", rt.on, rt, "*", 5)
      for _, bad in ipairs { -1, 0 / 0, math.huge, "x" } do invalid("seconds", rt.advance, rt, bad) end
    end)

    it("refuses impossible commands, naming the argument, and nothing runs", function()
      local box <close> = rt:acquire { thread = "t1" }
      local before = #engine.calls
      for _, bad in ipairs { 0 / 0, math.huge, -1, 0, "5" } do invalid("timeout", box.exec, box, "true", { timeout = bad }) end
      for _, bad in ipairs { 5, "", "a\0b" } do invalid("command", box.exec, box, bad) end
      for _, bad in ipairs { { ["NO-NAME"] = "x" }, { ["1A"] = "x" }, { A = 5 }, { A = "a\0b" }, { "x" }, { [""] = "x" } } do
        local err = raised("invalid_argument", box.exec, box, "true", { env = bad })
        assert.is_truthy(err.message:find("`env`", 1, true))
        assert.is_nil(err.message:find("a\0b", 1, true))
      end
      invalid("env", box.exec, box, "true", { env = "A=1" })
      invalid("stdin", box.exec, box, "true", { stdin = 5 })
      invalid("cwd", box.exec, box, "true", { cwd = "" })
      invalid("scope", box.exec, box, "true", { scope = 5 })
      invalid("options", box.exec, box, "true", { time = 5 })
      invalid("options", box.exec, box, "true", 5)
      invalid("path", box.read, box, "a\0b")
      invalid("path", box.write, box, "", "x")
      invalid("bytes", box.write, box, "/a", 5)
      invalid("self", box.exec, "true")
      assert.equal(before, #engine.calls)
    end)

    it("gives events to the functions that listen, each with a record of its own", function()
      local all, created = {}, 0
      rt:on("*", function(record) all[#all + 1] = record.event record.event = nil end)
      rt:on("created", function(record)
        created = created + 1
        assert(record.event == "created")
      end)
      local box = rt:acquire { thread = "t1" }
      box:release()
      rt:destroy(box.id)
      rt:dispatch()
      assert.is_true(#all > 0)
      local stats = rt:stats()
      assert.equal(0, stats.events_dropped)
      assert.equal(0, stats.event_functions_failed)
    end)

    it("counts functions for events that raise, and goes on", function()
      rt:on("*", function() error("my fault") end)
      rt:acquire({ thread = "t1" }):release()
      rt:dispatch()
      assert.is_true(rt:stats().event_functions_failed > 0)
    end)

    it("refuses a call that may wait inside an event's function, and allows those that look", function()
      local kinds, looked = {}, 0
      rt:on("*", function()
        local ok, err = pcall(rt.acquire, rt, { thread = "t2" })
        kinds[#kinds + 1] = not ok and err.kind
        ok, err = pcall(rt.dispatch, rt)
        kinds[#kinds + 1] = not ok and err.kind
        rt:list()
        rt:stats()
        rt:inspect("nothing")
        looked = looked + 1
      end)
      rt:acquire({ thread = "t1" }):release()
      rt:dispatch()
      assert.is_true(looked > 0)
      for _, kind in ipairs(kinds) do assert.equal("unsupported", kind) end
    end)

    it("refuses a call that may wait inside a backend's function, and allows those that look", function()
      local kinds, seen = {}, nil
      local create = engine.backend.create
      engine.backend.create = function(self, spec)
        for _, call in ipairs {
          function() rt:acquire { thread = "t2" } end, function() rt:destroy(spec.sandbox_id) end, function() rt:tick() end,
          function() rt:shutdown() end, function() rt:park(spec.sandbox_id) end, function() rt:release "x" end,
          function() rt:reload() end, function() rt:dispatch() end, function() paddock.open {} end,
        } do
          local ok, err = pcall(call)
          kinds[#kinds + 1] = ok and "ok" or err.kind
        end
        seen = rt:inspect(spec.sandbox_id) or false
        assert(rt:get(spec.sandbox_id) == nil and rt:binding "x" == nil and rt:list() and rt:stats())
        return create(self, spec)
      end
      rt:acquire({ thread = "t1" }):release()
      assert.equal(9, #kinds)
      for _, kind in ipairs(kinds) do assert.equal("unsupported", kind) end
      assert.is_not_nil(seen)
    end)

    it("keeps the kind of an error that a backend's function raises, and hands nothing out", function()
      engine.fail("create", 1, "the engine is on fire")
      local err = raised("backend_error", rt.acquire, rt, { thread = "t1" })
      assert.is_truthy(err.message:find("on fire", 1, true))
      assert.same({}, rt:list())
      rt:acquire({ thread = "t1" }):release()
    end)

    it("releases a box that is only forgotten", function()
      local id
      do
        local box = rt:acquire { thread = "t1" }
        id = box.id
      end
      collectgarbage()
      collectgarbage()
      local until_time = os.time() + 5
      repeat rt:tick() until rt:inspect(id).state == "warm" or os.time() > until_time
      assert.equal("warm", rt:inspect(id).state)
    end)

    it("releases a box at the end of its scope, on an error as well", function()
      local id
      pcall(function()
        local box <close> = rt:acquire { thread = "t1" }
        id = box.id
        error("leaving")
      end)
      assert.equal("warm", rt:inspect(id).state)
    end)

    it("answers `closed` after shutdown, which may be called again", function()
      local box = rt:acquire { thread = "t1" }
      rt:shutdown()
      rt:shutdown()
      raised("closed", rt.acquire, rt, { thread = "t1" })
      raised("closed", rt.list, rt)
      raised("closed", box.exec, box, "true")
      box:release() -- the shutdown has ended its holder
      assert.is_truthy(tostring(rt):find("shut down", 1, true))
    end)

    it("is given back when it was closed and forgotten, by those that are opened after it", function()
      local live = setmetatable({}, { __mode = "k" }) -- weak: what was finalized is not in there
      for i = 1, 50 do
        local other = open(sim.new(), mode.threads)
        live[other] = i
        other:shutdown()
      end
      local n = 0
      for _ in pairs(live) do n = n + 1 end
      assert.truthy(n < 25, n .. " closed runtimes are still there")
    end)

    it("can be looked into", function()
      local box <close> = rt:acquire { user = "alice", thread = "t1" }
      assert.is_table(rt:capabilities())
      assert.equal(1, #rt:list())
      assert.equal(box.id, rt:list()[1].sandbox_id or rt:list()[1].id)
      assert.is_nil(rt:inspect("nothing-has-this-id"))
      assert.equal(box.id, rt:explain { user = "alice", thread = "t1" }.id)
      assert.equal(0, rt:stats().events_waiting)
      rt:reload()
      rt:reconcile()
      rt:tick()
    end)

    it("hands log lines to a function, in order and with the event's name", function()
      local lines = {}
      local other_engine = sim.new()
      local other = open(other_engine, mode.threads, { log = function(record) lines[#lines + 1] = record end })
      other:acquire({ thread = "t1" }):release()
      other:shutdown()
      assert.is_true(#lines > 0)
      for _, record in ipairs(lines) do assert.is_string(record.event) end
    end)
  end)
end

describe("a runtime with threads over a host's table", function()
  it("reaps by calls that the host's thread takes in dispatch", function()
    local engine = sim.new()
    local rt = open(engine, true, { idle_timeout = 0.05, reap_interval = 0.05 })
    local box = rt:acquire { thread = "t1" }
    local id = box.id
    box:release()
    local last = os.time() + 10
    while rt:inspect(id) and os.time() < last do rt:dispatch() end
    assert.is_nil(rt:inspect(id))
    assert.equal("gone", (engine.show()[1] or { condition = "gone" }).condition)
    rt:shutdown()
  end)

  it("ends an acquire whose time is over by the time that a slow function of the host returns [B201]", function()
    for _, mode in ipairs(MODES) do
      local engine = sim.new()
      local rt = open(engine, mode.threads)
      local slow, ready = 0, engine.backend.ready
      engine.backend.ready = function(...)
        slow = slow + 1
        os.execute("sleep 0.8")
        return ready(...)
      end
      raised("timeout", rt.acquire, rt, { thread = "t1", timeout = 0.6 })
      assert.equal(1, slow)
      if mode.threads then            -- others bring what had begun to its end: it is there for the next one [F11, F14]
        local state, holders
        for _ = 1, 1000 do
          rt:dispatch()
          local one = rt:list()[1]
          state, holders = one and one.state, one and #one.holders
          if state == "warm" then break end
          os.execute("sleep 0.01")
        end
        assert.same({ "warm", 0 }, { state, holders })
      else                            -- nobody else can: it is taken back
        assert.same({}, rt:list())
      end
      rt:shutdown()
    end
  end)
end)

describe("a Lua state that ends", function()
  local function run(text)
    local file = os.tmpname()
    local out = assert(io.open(file, "w"))
    out:write(text)
    out:close()
    local pipe = assert(io.popen(("timeout 30 %s %s 2>&1; echo \"status $?\""):format(os.getenv("LUA") or "lua5.4", file)))
    local output = pipe:read("a")
    pipe:close()
    os.remove(file)
    return output
  end

  for _, mode in ipairs(MODES) do
    it("with an open runtime and a held box neither hangs nor crashes, " .. mode.name, function()
      local output = run(([[
        local paddock, sim = require "paddock", require "paddock.sim"
        local engine = sim.new()
        rt = paddock.open { backend = engine.backend, state_dir = %q, threads = %s, log = function() end }
        rt:on("*", function() end)
        box = rt:acquire { user = "a", thread = "t" }
        print(box:exec("echo alive").stdout)
      ]]):format(folder(), tostring(mode.threads)))
      assert.is_truthy(output:find("alive", 1, true), output)
      assert.is_truthy(output:find("status 0", 1, true), output)
    end)

    it("after many runtimes were only forgotten neither hangs nor crashes, " .. mode.name, function()
      local output = run(([[
        local paddock, sim = require "paddock", require "paddock.sim"
        for i = 1, 10 do
          local engine = sim.new()
          local rt = paddock.open { backend = engine.backend, state_dir = %q, threads = %s, log = function() end }
          engine.rt = rt -- a cycle through the backend's table
          rt:on("*", function() return rt end)
          rt:acquire { user = "a", thread = "t" .. i }
          rt, engine = nil, nil
          collectgarbage()
        end
        print("done")
      ]]):format(folder(), tostring(mode.threads)))
      assert.is_truthy(output:find("done", 1, true), output)
      assert.is_truthy(output:find("status 0", 1, true), output)
    end)
  end
end)
