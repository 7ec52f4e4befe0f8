--- The docker backend when a real engine is slow, hangs, restarts, or has no port to give.
local agent = require "tests.live.agent"
local containers = require "tests.live.containers"
local engines = require "tests.support.engines"
local paddock = require "paddock"
local support = require "tests.support"

local ALICE, BOB = { user = "alice", thread = "t1" }, { user = "bob", thread = "t1" }

for _, engine in ipairs(engines.all(ONLY)) do
  describe("the docker backend on " .. engine.name .. ", troubled,", function()
    local on = containers.on(engine)
    local behind = containers.on(engine, { proxy = true })
    local aio = containers.on(engine, { plane = "aio" })
    local aio_behind = containers.on(engine, { plane = "aio", proxy = true })

    behind("returns from an acquire with a limit when the limit is over [B201]", function(world)
      local rt = world:open()
      world.proxy:hang("GET", "/json$", "before", { times = -1 })
      local began = paddock.now()
      local err = support.caught(rt.acquire, rt, { user = "alice", thread = "t1", timeout = 2 })
      assert.equal("timeout", err.kind)
      assert.is_true(paddock.now() - began < 15) -- and not engine_timeout
      world.proxy:reset()
    end)

    behind("ends a shutdown when a stop hangs, and says so; the next one does it [B104, G9]", function(world)
      local rt = world:open { stop_timeout = 2 }
      local box = rt:acquire(ALICE)
      local bob = rt:acquire(BOB)
      box:release()
      bob:release()
      world.proxy:hang("DELETE", "^/containers/", "before", { times = 1 })
      local began = paddock.now()
      local fine = pcall(rt.shutdown, rt)
      assert.is_true(paddock.now() - began < 30)
      assert.is_false(fine)
      world.proxy:reset()
      assert.is_true(support.eventually(function() return (pcall(rt.shutdown, rt)) end, 20))
      assert.equal(0, #world:containers())
    end)

    behind("whose dead sandbox the engine will not remove just now says so, and that it is tried again: then there is another [M8]",
      function(world)
        local rt = world:open { health_ttl = 0, threads = false, clock = "manual" }
        local box = rt:acquire(ALICE)
        local id, generation = box.id, box.generation
        box:release()
        world.proxy:rewrite("DELETE", "^/containers/", { status = 500, body = { message = "cleaning up" }, pass = false })
        engine:call("POST", "/containers/" .. generation .. "/kill?signal=KILL")
        for _, words in ipairs { "could not be stopped yet; try again later", "repeated within reap_interval; try again later" } do
          local err = support.caught(rt.acquire, rt, ALICE)
          assert.same({ "replacement_deferred", "quarantined" }, { err.kind, err.reason })
          for _, text in ipairs { id, words } do assert.matches(text, err.message, 1, true) end
        end
        rt:advance(60.1)
        rt:tick()
        assert.equal(0, #world:containers())
        box = rt:acquire(ALICE)
        assert.equal("created", box.source)
        box:release()
      end)

    on("leaves the places of who has another scope in the same state directory alone", function(world)
      local one = world:open { scope = "one" }
      local box = one:acquire(ALICE)
      local other = world:open { scope = "two", backend_options = { prefix = world.prefix .. "-two" } }
      other:reconcile()
      assert.equal("1", world:places())
      assert.equal("ok\n", box:exec("echo ok").stdout)
      box:release()
      one:reset()
      box = world:open({ scope = "one" }):acquire(ALICE)          -- nobody has its secret in memory
      assert.equal("discovered", box.source)
      box:release()
    end)

    --- A runtime in a process of its own, behind the proxy.
    local function host_of(world, more)
      local host = agent.start(world:options(more))
      return host, setmetatable({}, { __close = function() host:finish() end })
    end
    --- One in this process, on the engine itself.
    local function open_beside(world, more)
      local options = { backend_options = { host = "unix://" .. engine.socket } }
      for key, value in pairs(more) do options[key] = value end
      return world:open(options)
    end

    behind("removes no place of a sandbox that was made while another process waited for the engine's list", function(world)
      local more = { log = "off", threads = false }
      local host, _host <close> = host_of(world, more)
      local rt = open_beside(world, more)
      local boxes = {}
      for at, who in pairs { before = ALICE, after = BOB } do        -- before the engine has seen the question, and after its answer
        world.proxy:reset()
        local rule = world.proxy:hang("GET", "^/containers/json$", at)
        host:ask "rt:reconcile()"
        world.proxy:await(rule)
        boxes[#boxes + 1] = rt:acquire(who)
        world.proxy:release()
        assert.equal("", host:answer(30))
        assert.equal(tostring(#boxes), world:places())
      end
      for i, box in ipairs(boxes) do
        local id = box.id
        box:release()
        if i == 1 then assert.is_true(rt:destroy(id)) end
      end
      -- A list that lacks a live one, for whatever reason, is not believed either.
      world.proxy:reset()
      world.proxy:rewrite("GET", "^/containers/json$", { body = {}, replace = { "{}", "[]" } })
      host:call "rt:reconcile()"
      assert.equal("1", world:places())
    end)

    if engines.image "aio" or engine.why then
      aio_behind("takes what a killed host had made for a sandbox at the next look, and nothing of a creation under way [B032, B182]",
        function(world)
          local more = { log = "off", image = engines.image "aio", threads = false, backend_options = { workspace = "volume" } }
          local host, _host <close> = host_of(world, more)
          local rt = open_beside(world, { image = more.image, threads = false })
          local function helpers()
            local _, networks = engine:call("GET", "/networks")
            local _, volumes = engine:call("GET", "/volumes")
            local n = 0
            for _, list in ipairs { networks, type(volumes.Volumes) == "table" and volumes.Volumes or {} } do
              for _, one in ipairs(list) do n = n + (one.Name:find(world.prefix, 1, true) and 1 or 0) end
            end
            return n
          end
          local creation = world.proxy:hang("POST", "^/containers/create$", "before", { times = -1 })
          host:ask "box = rt:acquire { user = 'alice', thread = 't1' } return box.source"
          world.proxy:await(creation)
          rt:reconcile()
          assert.equal(2, helpers())                             -- it is at work
          assert.equal("1", world:places())
          world.proxy:release()
          assert.equal("created", host:answer(60))
          assert.equal("0", world:places())                      -- its container says what belongs to it
          host:ask "return rt:acquire { user = 'bob', thread = 't1' }.source"
          world.proxy:await(creation, 2)
          assert.equal(4, helpers())
          host:signal "KILL"
          assert.is_true(support.eventually(function() return not host:lives() end))
          world.proxy:drop()
          rt:reconcile()
          assert.equal(2, helpers())                             -- those of the one that lives
          assert.equal("0", world:places())
          rt:acquire(ALICE):release()
          rt:shutdown()
          assert.equal(0, helpers())
        end)
    end

    on("keeps nothing open of many calls [B117, B204]", function(world)
      local rt = world:open { health_ttl = 0 }
      local function cycle(n)
        for i = 1, n do
          local box = rt:acquire { user = "u" .. i % 2, thread = "t" }
          box:exec "true"
          local id = box.id
          box:release()
          if i % 2 == 0 then rt:destroy(id) end
        end
      end
      cycle(4)
      local function open() return select(2, support.fds():gsub("[^\n]+", "")) end
      local before = open()
      cycle(16)
      local after = open()
      assert.is_true(after <= before + 8, ("descriptors grew from %d to %d: %s"):format(before, after, support.fds()))
    end)

    on("makes eight at once for eight identities, and one for eight acquires of one [B007, B011]", function(world)
      local rt = world:open { replicas = 16 }
      local ops = {}
      for i = 1, 8 do ops[i] = rt:acquire_async { user = "u" .. i, thread = "t" } end
      local boxes, seen = {}, {}
      for i, op in ipairs(ops) do
        boxes[i] = select(2, op:wait(120))
        assert.is_nil(seen[boxes[i].generation])
        seen[boxes[i].generation] = true
      end
      assert.equal(8, #world:containers())
      for i = 1, 8 do ops[i] = rt:acquire_async { user = "one", thread = "t" } end
      local first
      for _, op in ipairs(ops) do
        local _, box = op:wait(120)
        first = first or box.generation
        assert.equal(first, box.generation)
        box:release()
      end
      assert.equal(9, #world:containers())
      for _, box in ipairs(boxes) do box:release() end
    end)

    if engines.image "aio" or engine.why then
      aio("publishes on loopback, and moves on from a port that is taken [G4, G5, B102]", function(world)
        local base = 23000 + (os.time() % 500) * 10 + (engine.name == "podman" and 5 or 0)
        local holder = world:open { image = engines.image "aio", network = "open", backend_options = { base_port = base } }
        local box = holder:acquire(ALICE)
        local info = holder:inspect(box.id).info
        assert.equal(("http://127.0.0.1:%d"):format(base), info.url)
        assert.equal(base, info.attestation.published_port)
        local other = world:open { image = engines.image "aio", network = "open", backend_options = { base_port = base } }
        local second = other:acquire(BOB)                      -- another runtime does not know what the first has reserved
        assert.equal(base + 1, other:inspect(second.id).info.attestation.published_port)
        local third = holder:acquire { user = "carol", thread = "t1" }
        assert.equal(base + 2, holder:inspect(third.id).info.attestation.published_port)
        local data = world:look(box.generation)
        assert.equal("127.0.0.1", data.HostConfig.PortBindings["8080/tcp"][1].HostIp)
        assert.matches("hello", box:exec("echo hello").stdout)
        local id = box.id
        box:release()
        holder:destroy(id)                                     -- released with its generation, once
        box = holder:acquire(ALICE)
        assert.equal(base, holder:inspect(box.id).info.attestation.published_port)
        box:release()
        second:release()
        third:release()
      end)

      aio_behind("gives up after ten ports, and ends at any other failure [G4]", function(world)
        local rt = world:open { image = engines.image "aio", network = "open", backend_options = { base_port = 29000 } }
        world.proxy:rewrite("POST", "/start$", { status = 500, body = { message = "port is already allocated" }, pass = false, times = -1 })
        local err = support.caught(rt.acquire, rt, ALICE)
        assert.equal("port_taken", err.reason)
        assert.equal(10, world.proxy:count("POST", "/start$"))
        assert.equal(0, #world:containers())
        world.proxy:reset()
        world.proxy:rewrite("POST", "/start$", { status = 500, body = { message = "no such device" }, pass = false, times = -1 })
        assert.equal("backend_error", support.caught(rt.acquire, rt, ALICE).kind)
        assert.equal(1, world.proxy:count("POST", "/start$"))
        world.proxy:reset()
      end)

      aio("waits until its server answers, and takes down what does not [E14, O8, B108]", function(world)
        local rt = world:open {
          image = engines.image "busybox", network = "open", ready_timeout = 1, backend_options = { command = { "sleep", "1000" } },
        }
        for _ = 1, 2 do
          assert.equal("unready", support.caught(rt.acquire, rt, ALICE).kind)
          assert.equal(0, #world:containers())
        end
      end)

      aio_behind("gives a sandbox without a network one that leads nowhere, which goes with it [G1, G10, B032, B130]", function(world)
        local rt = world:open { image = engines.image "aio" }
        local function networks()
          local _, list = engine:call("GET", "/networks")
          local n = 0
          for _, one in ipairs(list) do n = n + (one.Name:find(world.prefix, 1, true) and 1 or 0) end
          return n
        end
        local fine, box = pcall(rt.acquire, rt, ALICE)
        assert.is_true(fine, tostring(box))
        assert.equal(1, networks())
        assert.matches("hello", box:exec("echo hello").stdout)
        local id, generation = box.id, box.generation
        assert.same({ world.prefix .. "-" .. rt:inspect(id).info.instance }, rt:inspect(id).info.attestation.networks)
        box:release()
        world.proxy:rewrite("DELETE", "^/networks/", { status = 500, body = { message = "cleaning up" }, pass = false })
        local err = support.caught(rt.destroy, rt, id)           -- that container is gone, and this is no success
        assert.same({ "backend_error", "finish" }, { err.kind, err.stage })
        assert.matches("cleaning up", err.message, 1, true)
        assert.is_nil(world:look(generation))
        assert.equal(1, networks())
        assert.is_true(rt:destroy(id))
        assert.equal(0, networks())
      end)
    end

    on("pulls an image from a registry, and says why it cannot", function(world)
      local registry, why = engines.registry()
      if not registry or why then return end
      local image = registry .. "/pdk/busybox:1"
      local rt = world:open { image = image, log = "off" }
      local box = rt:acquire(ALICE)
      assert.equal("ok\n", box:exec("echo ok").stdout)
      local id = box.id
      box:release()
      rt:destroy(id)
      engine:call("DELETE", "/images/" .. image .. "?force=true")
      rt = world:open { image = registry .. "/pdk/no-such:1" }
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal("backend_error", err.kind)
      assert.matches("pdk/no-such:1", err.message, 1, true)
    end)
  end)
end
