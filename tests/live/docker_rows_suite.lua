--- The docker backend on real engines: which plane an image gets, how many calls a life costs, and what protects a sandbox whose
--- readiness never comes, that is an orphan, or that is quarantined.
local containers = require "tests.live.containers"
local engines = require "tests.support.engines"
local paddock = require "paddock"
local support = require "tests.support"

local ALICE, BOB = { user = "alice", thread = "t1" }, { user = "bob", thread = "t1" }

for _, engine in ipairs(engines.all(ONLY)) do
  describe("the docker backend on " .. engine.name .. ",", function()
    local on = containers.on(engine)
    local behind = containers.on(engine, { proxy = true })
    local aio = containers.on(engine, { plane = "aio" })

    --- The plane that a runtime without one in its configuration has taken, seen in what it makes.
    local function plane_of(world, more)
      local rt = world:open(more)
      local box = rt:acquire(ALICE)
      assert.matches("hello", box:exec("echo hello").stdout)
      local plane, id = rt:inspect(box.id).info.attestation.plane, box.id
      box:release()
      assert(rt:destroy(id))
      rt:shutdown()
      return plane
    end

    on("takes the plane that the configured image is made for, where none is named", function(world)
      assert.equal("guest", plane_of(world))
      if engines.image "aio" then
        assert.equal("aio", plane_of(world, { image = engines.image "aio", network = "open" }))
        assert.equal("guest", plane_of(world, { image = engines.image "aio", backend_options = { plane = "guest" } }))
      end
    end)

    on("where it has chosen an all-in-one image's plane, refuses an image without one; a plane that changed is named", function(world)
      if not engines.image "aio" then return end
      local rt = world:open { image = engines.image "aio", network = "open" }
      local err = support.caught(rt.acquire, rt, { user = "alice", thread = "t2", requirements = { image = engines.image "busybox" } })
      assert.matches("plane", err.message, 1, true)
      local box = rt:acquire(ALICE)
      box:release()
      rt:reset()
      local other = world:open { image = engines.image "aio", network = "open", backend_options = { plane = "guest" } }
      err = support.caught(other.acquire, other, ALICE)
      assert.matches("backend_options.plane", err.message, 1, true)
      assert.equal(1, #world:containers())
      world:remove(box.generation)
    end)

    behind("needs four calls for a cold acquire, one of them for the image, none for a warm one, two for its end", function(world)
      local rt = world:open()
      assert.is_true(support.eventually(function() return world.proxy:count("GET", "^/events$") == 1 end))
      local function calls(fn)
        local before = world.proxy:count()
        local result = fn()
        return world.proxy:count() - before, result
      end
      local n, box = calls(function() return rt:acquire(ALICE) end)
      assert.is_true(n <= 5, n .. " calls")                       -- a list of the event stream's start may fall in
      assert.equal(0, (calls(function() return box:exec "true" end)))
      assert.equal(0, (calls(function() box:release() end)))
      assert.equal(0, (calls(function() box = rt:acquire(ALICE) end)))
      local id = box.id
      box:release()
      assert.equal(2, (calls(function() assert(rt:destroy(id)) end)))
      n, box = calls(function() return rt:acquire(BOB) end)
      assert.equal(3, n)                                          -- the image is known
      id = box.id
      box:release()
      rt:destroy(id)
      assert.equal(1, world.proxy:count("GET", "^/events$"))      -- a death of our own making ends no stream
      local polite = world:open { backend_options = { stop_grace = 1 }, scope = "polite" }
      assert.is_true(support.eventually(function() return world.proxy:count("GET", "^/events$") == 2 end))
      box = polite:acquire(ALICE)
      id = box.id
      box:release()
      assert.equal(3, (calls(function() assert(polite:destroy(id)) end)))
      assert.equal(2, world.proxy:count("GET", "^/events$"))      -- nor does one by a polite stop
    end)

    -- ---- readiness that never comes ----------------------------------------------------------------------------

    --- A runtime whose containers run and never answer, with scripted leases.
    local function unready(world, leases, more)
      local options = { image = engines.image "busybox", network = "open", ready_timeout = 1, ownership = leases.ownership,
                        backend_options = { command = { "sleep", "1000" } } }
      for key, value in pairs(more or {}) do options[key] = value end
      return world:open(options)
    end

    for name, refuse in pairs {
      ["a peer owns"] = function(leases, id) leases.leases[id] = { owner = "peer", state = "own", token = 9 } end,
      ["the store cannot answer for"] = function() support.raise("io_error", "store down") end,
    } do
      aio("leaves a container that never answered alone when " .. name .. " it [O9]", function(world)
        local leases = support.world()
        leases.on["lease.claim_for_destroy"] = function(next, this, id, ...)
          refuse(leases, id)
          return next(this, id, ...)
        end
        local rt = unready(world, leases)
        assert.equal("unready", support.caught(rt.acquire, rt, ALICE).kind)
        local left = world:containers()
        assert.equal(1, #left)
        assert.equal("running", left[1].State)
        leases.on["lease.claim_for_destroy"], leases.leases = nil, {}
        world:remove(left[1].Id)
      end)
    end

    containers.on(engine, { plane = "aio", proxy = true })(
      "has both fences when it takes down what never answered, and does not adopt it meanwhile [O8, O10, O11]", function(world)
        local rt = unready(world, { ownership = { type = "memory" } },
          { backend_options = { command = { "sleep", "1000" }, stop_grace = 0 } })
        local id = rt:explain(ALICE).id
        world.proxy:hang("DELETE", "^/containers/", "before", { times = 1 })
        local op = rt:acquire_async(ALICE)
        assert.is_true(support.eventually(function() return world.proxy:count("DELETE", "^/containers/") == 1 end, 30))
        local seen, made = rt:inspect(id), world:containers()[1]
        assert.same({ true, true, "del" }, { seen.reserved, seen.lease.ours, seen.lease.state })
        rt:reconcile()
        assert.not_equal("warm", (rt:inspect(id) or {}).state)
        assert.equal("running", world:containers()[1].State)
        assert.equal(1, world.proxy:count("DELETE", "^/containers/" .. made.Id .. "$"))
        world.proxy:release()
        assert.equal("unready", support.caught(op.wait, op, 60).kind)
        assert.equal(1, world.proxy:count("DELETE", "^/containers/"))
        assert.equal(0, #world:containers())
        assert.is_nil(rt:inspect(id))                            -- nothing is reserved any more
      end)

    -- ---- orphans -----------------------------------------------------------------------------------------------

    --- A container that nobody tracks: its runtime has gone.
    local function orphan(world, more)
      local rt = world:open(more)
      local box = rt:acquire(ALICE)
      local id, generation = box.id, box.generation
      box:release()
      rt:reset()
      return id, generation
    end

    on("adopts an orphan after one whole TTL without an owner, waits again when one shows up, and hands it to its identity [O12, O13]",
      function(world)
        local leases = support.world()
        local id, generation = orphan(world, { ownership = leases.ownership })
        leases.leases = {}
        local rt = world:open { ownership = leases.ownership, clock = "manual", threads = false }
        rt:reconcile()
        rt:advance(179)
        rt:reconcile()
        assert.is_nil(rt:inspect(id))
        leases.leases[id] = { owner = "peer", state = "own", token = 3 }
        rt:reconcile()
        leases.leases[id] = nil
        rt:advance(2)
        rt:reconcile()
        assert.is_nil(rt:inspect(id))
        rt:advance(181)
        leases:fail("lease.owner", 1, "store down")
        rt:reconcile()                                             -- unreadable: deferred
        assert.is_nil(rt:inspect(id))
        rt:advance(181)
        rt:reconcile()
        rt:advance(181)
        rt:reconcile()
        assert.equal("warm", rt:inspect(id).state)
        assert.equal(generation, rt:inspect(id).generation)
        local box = rt:acquire(ALICE)
        assert.same({ "warm", generation }, { box.source, box.generation })
      end)

    on("destroys an orphan that is to be replaced, under both fences [O13]", function(world)
      local leases = support.world()
      local id = orphan(world, { ownership = leases.ownership })
      leases.leases = {}
      local rt = world:open { ownership = leases.ownership, clock = "manual", threads = false, policies = { reuse = {
        name = "reuse.lua", source = "return { decide = function() return 'replace' end }" } } }
      local fences
      leases.on["lease.release"] = function(next, this, ...)
        local seen = rt:inspect(id)
        fences = seen and seen.reserved and leases.leases[id].state
        return next(this, ...)
      end
      rt:reconcile()
      assert.equal(1, #world:containers())                       -- not before it was unowned for one TTL
      rt:advance(181)
      rt:reconcile()
      assert.equal(0, #world:containers())
      assert.is_nil(rt:inspect(id))
      if fences ~= nil then assert.equal("del", fences) end
    end)

    -- ---- engines that hang -------------------------------------------------------------------------------------

    local LIMIT = 40
    --- Each call that hangs: the plane, the options, and what is done then; every one ends with an answer or an error.
    local HANGS = {
      { "create", "POST", "^/containers/create$" }, { "start", "POST", "/start$" },
      { "inspection by name", "GET", "^/containers/pdkt[^/]*/json$" },
      { "image", "GET", "^/images/" }, { "list", "GET", "^/containers/json$", act = "reconcile", most = 8 },
      { "removal", "DELETE", "^/containers/", act = "destroy" },
      { "inspection of what is gone", "GET", "^/containers/[^/]*/json$", act = "destroy" },
      { "stop", "POST", "/stop$", act = "destroy", own = { stop_grace = 1 } },
      { "volume", "POST", "^/volumes/create$", own = { workspace = "volume" } },
      { "volume's removal", "DELETE", "^/volumes/", act = "destroy", own = { workspace = "volume" } },
      { "exec's creation", "POST", "^/containers/[^/]*/exec$", plane = "exec", act = "exec" },
      -- command_timeout and the 3 s that its killing has: not the 10 s that killing has where the command is known to have begun
      { "exec's start", "POST", "^/exec/[^/]*/start$", plane = "exec", act = "exec", most = 11, outcome = "unknown" },
      { "exec's inspection", "GET", "^/exec/[^/]*/json$", plane = "exec", act = "exec" },
      { "network", "POST", "^/networks/create$", plane = "aio" },
      { "network's removal", "DELETE", "^/networks/", plane = "aio", act = "destroy" },
    }
    --- An engine that answers everything else: that a command is not there does not say that it will not come.
    if engine.name == "docker" then
      containers.on(engine, { plane = "exec", proxy = true })("says `unknown` of a command that was not started within its limit",
        function(world)
          local box = world:open():acquire(ALICE)
          local start = world.proxy:hang("POST", "^/exec/[^/]*/start$", "before", { times = 1 })
          local result = box:exec("true", { timeout = 0.5 })
          assert.equal(1, world.proxy:hits(start))
          assert.same({ "unknown", "response" }, { result.outcome, result.reason })
          world.proxy:reset()
          box:release()
        end)
    end
    -- What a hung call does is the same on either engine, and takes seconds: each is tried on one of them, or on both if asked.
    local THOROUGH = os.getenv "PDK_THOROUGH" == "1"
    for i, hang in ipairs(HANGS) do
      local here = THOROUGH or (i % 2 == 0) == (engine.name == "podman")
      if here then
        containers.on(engine, { plane = hang.plane or "guest", proxy = true })(
          ("is bounded when the call for the %s hangs, and the rest goes on [B104, B201]"):format(hang[1]), function(world)
            local own = { engine_timeout = 2 }
            for key, value in pairs(hang.own or {}) do own[key] = value end
            local image = hang.plane == "aio" and engines.image "aio" or nil
            local rt = world:open { image = image, backend_options = own, stop_timeout = 3, ready_timeout = 10, command_timeout = 3 }
            local other = world:open { image = image, backend_options = { host = "unix://" .. engine.socket }, scope = "other" }
            local box = hang.act and rt:acquire(ALICE)
            local id = box and box.id
            if hang.act == "destroy" or hang.act == "reconcile" then box:release() end
            world.proxy:hang(hang[2], hang[3], "before", { times = -1 })
            local began = paddock.now()
            local fine, err
            if hang.act == "destroy" then fine, err = pcall(rt.destroy, rt, id)
            elseif hang.act == "reconcile" then fine, err = pcall(rt.reconcile, rt)
            elseif hang.act == "exec" then fine, err = pcall(box.exec, box, "true")
            else fine, err = pcall(rt.acquire, rt, ALICE) end
            assert.is_true(paddock.now() - began < (hang.most or LIMIT), "it took " .. paddock.now() - began .. " s")
            assert.is_true(world.proxy:count(hang[2], (hang[3]:gsub("%[%^/%]%*", "[^/]*"))) >= 1, "nothing hung")
            local kind = fine or err.kind
            if hang.outcome then assert.equal(hang.outcome, err.outcome) end
            assert.is_truthy(fine or kind == "backend_error" or kind == "timeout" or kind == "unready", tostring(err))
            local bob = other:acquire(BOB)                         -- nobody else waits
            assert.matches("ok", bob:exec("echo ok").stdout)
            bob:release()
            world.proxy:release()
            world.proxy:reset()
            if hang.act == "exec" then box:release() end
            local again, one
            support.eventually(function()                          -- and it works again
              if hang.act == "destroy" then pcall(rt.destroy, rt, id) end -- a stop that failed is repeated
              again, one = pcall(rt.acquire, rt, ALICE)
              return again
            end, 20)
            assert.is_true(again, tostring(one))
            one:release()
          end)
      end
    end
  end)
end
