--- Several runtimes in processes of their own, on one state directory and real process sandboxes: clocks that differ, runtimes that
--- stand still, vanish or die; who owns what then.
local agent = require "tests.live.agent"
local sandboxes = require "tests.live.sandboxes"
local support = require "tests.support"
local sh = support.sh

local WHO = { user = "alice", thread = "t1" }
local ACQUIRE = "box = rt:acquire { user = 'alice', thread = 't1' } return box.generation"

local function options(state, more)
  local out = { state_dir = state, scope = "owners", health_ttl = 0, log = "off", user = "u",
    ownership = { type = "file", ttl = 2, renew_interval = 0.5 } }
  for k, v in pairs(more or {}) do out[k] = v end
  return out
end

describe("runtimes in processes of their own", function()
  if not sandboxes.works then
    it("share sandboxes [B042, B046, B050]", function() pending(sandboxes.why_not) end)
    return
  end
  local state, agents, world
  before_each(function()
    state, agents, world = sandboxes.folder(), {}, sandboxes.new()
  end)
  after_each(function()
    for _, a in ipairs(agents) do a:finish() end
    world:close()
    sh(("rm -rf %s %s-wall*"):format(state, state))
  end)

  local function start(more, environment)
    local a = agent.start(options(state, more), environment)
    agents[#agents + 1] = a
    return a
  end

  --- Takes down what there is: nothing may be left.
  local function nothing_is_left(rt, id)
    if id then assert.is_true(support.eventually(function() return rt:destroy(id) == true end, 20)) end
    rt:reconcile()
    rt:shutdown()
    assert.equal("", (sh("ls " .. state .. "/sandboxes"):gsub("%s", "")))
  end

  it("whose wall clocks are an hour or two apart steal nothing from one that renews [B042]", function()
    local preload, offsets = state .. "-wall.so", {}
    local out, status = sh(("${CC:-gcc} -O2 -shared -fPIC tests/live/wallclock.c -o %s"):format(preload))
    if status ~= 0 then return pending("no C compiler: " .. out) end
    if os.getenv "MODE" == "asan" or os.getenv "MODE" == "tsan" then
      return pending "a sanitizer wants to be loaded first"
    end
    --- The environment of a process whose wall clock is `seconds` off.
    local function at(seconds)
      local path = ("%s-wall.%d"):format(state, #offsets + 1)
      offsets[#offsets + 1] = path
      support.write_file(path, ("<i8"):pack(seconds * 1000000000))
      return ("LD_PRELOAD=%s SOAK_WALL=%s"):format(preload, path)
    end
    local owner = start({}, at(3600))
    local generation = owner:call(ACQUIRE)
    local id = owner:call "return box.id"
    local times = tonumber(owner:call "return os.time()") - os.time()
    assert.is_true(times > 3500, "the clock of the owner is apart")
    for _, apart in ipairs { -3600, 7200 } do -- the second one starts anew, with another clock
      local other = start({}, at(apart))
      for _ = 1, 8 do -- longer than a lease, which is renewed meanwhile
        assert.equal("nil", other:call "rt:reconcile() return nil")
        assert.equal("nil", other:call(("return rt:inspect '%s'"):format(id)))
        os.execute "sleep 0.3"
      end
      assert.equal("false own", other:call(("local l = rt:lease '%s' return l.ours, l.state"):format(id)))
      assert.equal("false deferred", other:call(("local ok, why = rt:destroy '%s' return ok, why"):format(id)))
      assert.equal("completed", owner:call "return box:exec('true').outcome")
      other:call "rt:shutdown()"
      other:finish()
    end
    assert.equal(generation, owner:call "return box.generation")
    owner:call "box:release() rt:shutdown()"
    nothing_is_left(world:open(options(state)))
  end)

  it("one that stood still for longer than its lease, which nobody has: it has it again, and goes on [B046]", function()
    local a = start { ownership = { type = "file", ttl = 1, renew_interval = 0.3 } }
    local generation, id = a:call(ACQUIRE), a:call "return box.id"
    a:signal "STOP"
    os.execute "sleep 1.6"
    a:signal "CONT"
    assert.is_true(support.eventually(function()
      return a:call(("local l = rt:lease '%s' return l and l.ours"):format(id)) == "true"
    end, 20))
    assert.equal(generation, a:call(ACQUIRE))
    assert.equal("completed", a:call "return box:exec('true').outcome")
    assert.is_true(a:lives())
    a:call "rt:shutdown()"
    nothing_is_left(world:open(options(state)))
  end)

  it("one that stood still for longer than its lease, which another has: it drops its grip and touches nothing [B046, B045]", function()
    local a = start { ownership = { type = "file", ttl = 1, renew_interval = 0.3 } }
    local generation, id = a:call(ACQUIRE), a:call "return box.id"
    a:signal "STOP"
    os.execute "sleep 1.3"
    local rt = world:open(options(state, { ownership = { type = "file", ttl = 60, renew_interval = 20 } }))
    local box = rt:acquire(WHO)
    assert.equal(generation, box.generation)
    assert.equal("completed", box:exec("echo mine > /workspace/mine").outcome)
    a:signal "CONT"
    assert.matches("^error lost/", a:call "return box:exec('echo stale > /workspace/mine').outcome")
    assert.is_true(support.eventually(function() return a:call(("return rt:inspect '%s'"):format(id)) == "nil" end, 20))
    a:call "rt:shutdown()"
    assert.equal("mine\n", box:exec("cat /workspace/mine").stdout)
    assert.is_true(a:lives())
    box:release()
    nothing_is_left(rt, id)
  end)

  for _, store in ipairs { "file", "redis" } do
    it(("one whose host vanished without a word: a peer has its sandbox after the lease and one grace (%s) [B050]"):format(store),
      function()
        local root, server = state .. "/folders", nil
        local ownership = { type = "file", ttl = 1, renew_interval = 0.3 }
        if store == "redis" then
          if select(2, sh "command -v redis-server") ~= 0 then return pending "no redis-server is installed" end
          server = sh(("redis-server --port 0 --unixsocket %s/redis --save '' --dir %s >%s/redis.log 2>&1 & echo $!"):format(state, state,
            state)):match "%d+"
          assert(support.eventually(function() return sh(("redis-cli -s %s/redis ping"):format(state)):find "PONG" ~= nil end, 10))
          ownership.type, ownership.url = "redis", "unix://" .. state .. "/redis"
        end
        sh("mkdir " .. root)
        --- Of a machine of its own, where redis keeps the leases; both see the engine.
        local function of(machine)
          return { state_dir = store == "redis" and state .. "/" .. machine or state, ownership = ownership,
            backend = sh("pwd"):gsub("%s", "") .. "/examples/engine/workdir.lua", backend_options = { root = root } }
        end
        local a = start(of "one")
        local generation, id = a:call(ACQUIRE), a:call "return box.id"
        assert.equal("completed", a:call "return box:exec('echo kept > /workspace/kept').outcome")
        a:call "box:release()"
        a:signal "STOP" -- no end of a connection, no exit: it is simply not heard of any more
        local more = of "two"
        more.threads = false
        local rt = world:open(options(more.state_dir, more))
        rt:reconcile()
        assert.is_nil(rt:inspect(id)) -- not at once: its lease may still hold
        assert.is_true(support.eventually(function()
          rt:reconcile()
          local record = rt:inspect(id)
          return record ~= nil and record.state == "warm"
        end, 30))
        local box = rt:acquire(WHO)
        assert.same({ generation, "warm" }, { box.generation, box.source })
        assert.equal("kept\n", box:exec("cat /workspace/kept").stdout)
        box:release()
        a:signal "CONT" -- it comes back, and touches nothing that is not its own any more
        assert.is_true(support.eventually(function() return a:call(("return rt:inspect '%s'"):format(id)) == "nil" end, 20))
        assert.equal("kept\n", rt:acquire(WHO):exec("cat /workspace/kept").stdout)
        a:call "rt:shutdown()"
        rt:shutdown()
        assert.equal("", (sh("ls " .. root):gsub("%s", "")))
        if server then sh("kill -9 " .. server) end
      end)
  end

  it("one that dies inside a stop: the sandbox is neither handed out nor counted, and another one ends it [B027, B032]", function()
    local engine = sh("pwd"):gsub("%s", "") .. "/tests/live/stopping_engine.lua"
    local a = start { backend = engine, backend_options = { folder = state, step = "before destroy", signal = "KILL" } }
    local generation, id = a:call(ACQUIRE), a:call "return box.id"
    a:call "box:release()"
    support.write_file(state .. "/armed", "")
    a:ask(("return rt:destroy '%s'"):format(id)) -- claimed and doomed; the stop never comes
    assert.is_true(support.eventually(function() return not a:lives() end, 20))
    local rt = world:open(options(state, { threads = false, backend = engine, backend_options = { folder = state } }))
    local stats = rt:stats()
    assert.same({ 0, 0 }, { stats.active, stats.warm })
    local box
    assert.is_true(support.eventually(function()
      rt:tick()
      local ok, got = pcall(rt.acquire, rt, WHO)
      box = ok and got
      return ok or assert(got.kind == "replacement_deferred" or got.kind == "being_destroyed", got) == nil
    end, 30))
    assert.equal("created", box.source)
    assert.are_not.equal(generation, box.generation)
    assert.equal("1", (sh("ls " .. state .. "/sandboxes/*.json | wc -l"):gsub("%s", "")))
    box:release()
    nothing_is_left(rt, id)
  end)

  for _, step in ipairs { "after create", "before ready", "after ready", "before connect", "after connect", "before client.fence",
    "after client.fence" } do
    it(("one that dies %s: no orphan and no duplicate of what it was making [B182, B181]"):format(step), function()
      local engine = sh("pwd"):gsub("%s", "") .. "/tests/live/stopping_engine.lua"
      local a = start { backend = engine, backend_options = { folder = state, step = step, signal = "KILL" } }
      support.write_file(state .. "/armed", "")
      a:ask(ACQUIRE)
      assert.is_true(support.eventually(function() return not a:lives() end, 30))
      local rt = world:open(options(state, { threads = false, backend = engine, backend_options = { folder = state } }))
      rt:reconcile()
      local box
      assert.is_true(support.eventually(function()
        local ok, got = pcall(rt.acquire, rt, WHO)
        box = ok and got
        return ok
      end, 30))
      assert.equal("completed", box:exec("true").outcome)
      assert.equal("1", (sh("ls " .. state .. "/sandboxes/*.json | wc -l"):gsub("%s", "")))
      box:release()
      nothing_is_left(rt, box.id)
    end)
  end
end)
