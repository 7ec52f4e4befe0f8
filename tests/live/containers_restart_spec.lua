--- Engines that stop, freeze and come back while sandboxes live on them. They are engines of its own.
local agent = require "tests.live.agent"
local containers = require "tests.live.containers"
local core = require "paddock.core"
local engines = require "tests.support.engines"
local support = require "tests.support"

local WHO, OTHER = { user = "alice", thread = "t1" }, { user = "bob", thread = "t1" }

--- The error that fn raises: one that an engine which does not answer is the reason of.
local function failure(fn, ...)
  local fine, err = pcall(fn, ...)
  assert.is_false(fine, "an error was expected")
  assert.is_table(err, tostring(err))
  assert.truthy(err.kind == "backend_error" or err.kind == "timeout", tostring(err))
  return err
end

--- Gives that order when it goes out of scope: before the world is taken down, whatever happened.
local function finally_tell(verb, name)
  return setmetatable({}, { __close = function() pcall(engines.tell, verb, name) end })
end

for _, engine in ipairs(engines.all()) do
  describe("the docker backend, when " .. engine.name, function()
    local on = containers.on(engine)

    on("restarts, keeps its sandboxes and hands them out again [G8]", function(world)
      local rt = world:open { health_ttl = 0 }
      local box = rt:acquire(WHO)
      local generation = box.generation
      box:write("/workspace/a", "kept")
      for _, signal in ipairs { "TERM", "KILL" } do
        engines.tell("restart", engine.name, signal)
        assert.equal("kept", box:read "/workspace/a")
        box:release()
        if signal == "TERM" then rt:reconcile() end
        box = rt:acquire(WHO)
        assert.equal("warm", box.source)
        assert.equal(generation, box.generation)
      end
      local other = rt:acquire(OTHER) -- and makes new ones
      assert.equal("hi\n", other:exec("echo hi").stdout)
      for _, one in ipairs { box, other } do
        local id = one.id
        one:release()
        assert.is_true(rt:destroy(id))
      end
      assert.equal(0, #world:containers())
    end)

    on("is away, says so, and takes nothing for gone [G6, G8, G9]", function(world)
      local rt = world:open { backend_options = { engine_timeout = 10 } }
      local box = rt:acquire(WHO)
      local id, generation = box.id, box.generation
      local _start <close> = finally_tell("start", engine.name)
      engines.tell("stop", engine.name)
      assert.equal("hi\n", box:exec("echo hi").stdout) -- the guest needs no engine
      box:release()
      local err = failure(rt.destroy, rt, id)
      assert.truthy(tostring(err):find(engine.socket, 1, true), tostring(err))
      failure(rt.acquire, rt, OTHER)
      pcall(rt.reconcile, rt)
      engines.tell("start", engine.name)
      assert.equal(generation, world:containers()[1].Id) -- it lives, and was doomed: nobody gets it
      assert.is_true(rt:destroy(id))
      box = rt:acquire(WHO)
      assert.equal("created", box.source)
      assert.equal("hi\n", box:exec("echo hi").stdout)
      id = box.id
      box:release()
      assert.is_true(rt:destroy(id))
      assert.equal(0, #world:containers())
    end)

    on("hangs, is waited for as long as it is told to, and holds nobody else up", function(world)
      local rt = world:open { stop_timeout = 3, backend_options = { engine_timeout = 3 } }
      local box = rt:acquire(WHO)
      local id = box.id
      local _thaw <close> = finally_tell("thaw", engine.name)
      engines.tell("freeze", engine.name)
      local started = core.now()
      failure(rt.acquire, rt, OTHER)
      assert.is_true(core.now() - started < 60)
      assert.equal("hi\n", box:exec("echo hi").stdout)
      box:release()
      box = rt:acquire(WHO)
      assert.equal("warm", box.source)
      box:release()
      started = core.now()
      failure(rt.destroy, rt, id)
      assert.is_true(core.now() - started < 60)
      engines.tell("thaw", engine.name)
      assert.is_not_nil(rt:destroy(id))
      rt:reconcile()
      assert.equal(0, #world:containers())
    end)

    -- The guest of the one plane remembers that it was doomed; without a guest only the record knows.
    local here = engine.name == "docker" and "guest" or "exec"
    for _, plane in ipairs(os.getenv "PDK_THOROUGH" and { "guest", "exec" } or { here }) do
      containers.on(engine, { plane = plane, proxy = true })(("restarts, and its host was killed in the middle of a stop: what was to be "
        .. "stopped serves nobody, whoever asks, until it is gone (plane %s) [K2, K3, B182]"):format(plane), function(world)
        local options = { log = "off", stop_timeout = 1, ownership = { type = "file", ttl = 1.2, renew_interval = 0.4 } }
        local host = agent.start(world:options(options))
        local _host <close> = setmetatable({}, { __close = function() host:finish() end })
        local generation = host:call "box = rt:acquire { user = 'alice', thread = 't1' } return box.generation"
        local stop = world.proxy:hang("DELETE", "^/containers/", "before")
        host:ask "local id = box.id box:release() return rt:destroy(id)"
        world.proxy:await(stop)
        host:signal "KILL"
        world.proxy:drop()                                       -- and with it the stop, which the engine never hears of
        world.proxy:rewrite("DELETE", "^/containers/", { status = 500, body = { message = "no" }, pass = false, times = -1 })
        local function records() return (support.sh("find " .. world.state .. "/quarantine -mindepth 2 -type f")) end
        if plane == "exec" then assert.not_equal("", records()) end -- written before the stop
        local failed
        --- Until the dead host's lease is over, what it was about to stop is said to be under destruction; then nobody can stop it.
        local function refused(rt)
          assert.is_true(support.eventually(function()
            local fine, err = pcall(rt.acquire, rt, WHO)
            assert.is_false(fine, "it was handed out")
            failed = err
            return err.kind ~= "being_destroyed" and err.reason ~= "teardown_refused"
          end, 20))
          assert.equal("replacement_deferred/quarantined", failed.kind .. "/" .. tostring(failed.reason), tostring(failed))
          assert.equal(1, world.proxy:count("POST", "^/containers/create$"))
          assert.not_equal("", records())
          assert.equal(generation, world:containers()[1].Id)
        end
        local rt = world:open(options)
        refused(rt)
        engines.tell("restart", engine.name, "KILL")
        refused(rt)
        rt:reset()
        rt = world:open(options)                                  -- which has nothing in memory
        refused(rt)
        world.proxy:reset()
        local box
        assert.is_true(support.eventually(function()
          local fine
          fine, box = pcall(rt.acquire, rt, WHO)
          return fine
        end, 20), tostring(box))
        assert.equal("created", box.source)
        assert.not_equal(generation, box.generation)
        assert.equal(1, #world:containers())
        assert.equal("", records())
        box:release()
      end)
    end
  end)
end
