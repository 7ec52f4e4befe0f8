--- The docker backend on real engines, behind its guest plane: life cycle, clashes, half-answers.
local containers = require "tests.live.containers"
local engines = require "tests.support.engines"
local errors = require "paddock.errors"
local support = require "tests.support"

local ALICE, BOB = { user = "alice", thread = "t1" }, { user = "bob", thread = "t1" }

for _, engine in ipairs(engines.all(ONLY)) do
  describe("the docker backend on " .. engine.name, function()
    local on = containers.on(engine)
    local behind = containers.on(engine, { proxy = true })

    on("hands a container out, keeps it warm, and takes it down", function(world)
      local rt = world:open()
      local box = rt:acquire(ALICE)
      assert.equal("created", box.source)
      assert.equal("hello\n", box:exec("echo hello").stdout)
      box:write("/workspace/a", "x\0y")
      assert.equal("x\0y", box:read "/workspace/a")
      local id, generation = box.id, box.generation
      assert.matches("^%x+$", generation)
      assert.equal(64, #generation)
      box:release()
      box = rt:acquire(ALICE)
      assert.equal("warm", box.source)
      assert.equal(generation, box.generation)
      box:release()
      assert.is_true(rt:destroy(id))
      assert.equal(0, #world:containers())
      assert.equal("0", world:places())
    end)

    on("finds the sandbox of a runtime that went away, with its files [E11, B005]", function(world)
      local rt = world:open()
      local box = rt:acquire(ALICE)
      box:write("/workspace/a", "kept")
      local generation = box.generation
      rt:reset()
      local second = world:open()
      box = second:acquire(ALICE)
      assert.equal("discovered", box.source)
      assert.equal(generation, box.generation)
      assert.equal("kept", box:read "/workspace/a")
      local other <close> = second:acquire { user = "alice", thread = "t2" }
      assert.not_equal(generation, other.generation)
      box:release()
    end)

    on("attests what its labels say, in discover and in list alike, and is judged by it [G1, G2, G11]", function(world)
      local per_turn = { requirements = { name = "r.lua", source = [[return { resolve = function(ctx)
        return { env = { MAX_SHELL_SESSIONS = ctx.request.room } } end }]] } }
      local rt = world:open { policies = per_turn, limits = { memory = 64 << 20, pids = 50 } }
      local made, CAPACITIES = {}, { 4, 9, 13 }
      for _, user in ipairs { "found", "listed" } do
        for _, capacity in ipairs(CAPACITIES) do
          local box = rt:acquire { user = user, thread = "t" .. capacity, requirements = { room = tostring(capacity) } }
          made[user .. capacity] = { id = box.id, generation = box.generation, info = rt:inspect(box.id).info }
        end
      end
      rt:reset()
      local function check(seen, one, capacity)
        local attested = seen.attestation
        assert.same({ "sandbox", one.id, "none", "none", engines.image "busybox", capacity, capacity, false, false, "guest" },
          { attested.role, attested.sandbox_id, attested.network, attested.network_mode, attested.image, attested.max_shell_sessions,
            attested.capacity, attested.broker_mode, attested.broker, attested.plane })
        assert.same({ memory = 64 << 20, pids = 50 }, attested.limits)
        assert.same({}, attested.networks)
        assert.is_nil(attested.published_port)
        assert.equal(one.generation, seen.generation)
      end
      local least = { requirements = { name = "r.lua", source = [[return { resolve = function()
        return { require = { capacity = { at_least = 9 } }, env = { MAX_SHELL_SESSIONS = "9" } } end }]] } }
      rt = world:open { ownership = { type = "memory" }, policies = least, clock = "manual", threads = false, replicas = 10 }
      for _, capacity in ipairs(CAPACITIES) do
        local one = made["found" .. capacity]
        check(one.info, one, capacity)
        local box = rt:acquire { user = "found", thread = "t" .. capacity }
        assert.equal(one.id, box.id)
        assert.same(capacity < 9 and { "created", false } or { "discovered", true }, { box.source, box.generation == one.generation })
        if capacity >= 9 then check(rt:inspect(box.id).info, one, capacity) end
      end
      rt:reconcile()
      for _, capacity in ipairs(CAPACITIES) do
        local one = made["listed" .. capacity]
        local seen = rt:inspect(one.id)
        assert.equal(capacity >= 9, world:look(one.generation) ~= nil)
        assert.equal(capacity >= 9 and "warm" or nil, seen and seen.state)
        if seen then check(seen.info, one, capacity) end
      end
    end)

    -- Not every Podman can make an image of a container without a policy file of the machine's.
    if engine.name == "docker" then on("attests the room that its image has, in a list too, which shows no variables [G1]", function(world)
      local name = "localhost/" .. world.prefix .. ":1"
      local _, base = engine:call("POST", "/containers/create", { Image = engines.image "busybox", Cmd = { "true" } })
      local status, made = engine:call("POST", ("/commit?container=%s&repo=localhost/%s&tag=1&changes=ENV%%20MAX_SHELL_SESSIONS=20")
        :format(base.Id, world.prefix), {})
      world:remove(base.Id)
      assert.equal(201, status, made.message)
      local _image <close> = setmetatable({}, { __close = function()
        engine:call("DELETE", "/images/" .. name .. "?force=true")
      end })
      local rt = world:open { image = name }
      local box = rt:acquire(ALICE)
      local id = box.id
      assert.equal(20, rt:inspect(id).info.attestation.capacity)
      rt:reset()
      rt = world:open { image = name, ownership = { type = "memory" }, clock = "manual", threads = false }
      rt:reconcile()
      assert.equal(20, rt:inspect(id).info.attestation.capacity)
      rt:shutdown()
    end) end

    behind("is answered, where the name is taken meanwhile, with the sandbox that has it; a dead one gives way [G4, H14]", function(world)
      local rt = world:open()
      local first = rt:acquire(ALICE)
      local name = world.prefix .. "-" .. first.id
      rt:reset()
      world.proxy:reset()
      world.proxy:rewrite("GET", "^/containers/" .. name .. "/json$",           -- not there yet, when it is looked for
        { status = 404, body = { message = "No such container: " .. name }, pass = false })
      rt = world:open()
      local box = rt:acquire(ALICE)
      assert.equal(first.generation, box.generation)
      assert.equal("ok\n", box:exec("echo ok").stdout)
      assert.equal(1, world.proxy:count("POST", "^/containers/create$"))
      rt:reset()
      engine:call("POST", "/containers/" .. first.generation .. "/kill?signal=KILL")
      assert.is_true(support.eventually(function() return world:containers()[1].State == "exited" end))
      rt = world:open()
      box = rt:acquire(ALICE)
      assert.equal("created", box.source)
      assert.not_equal(first.generation, box.generation)
      assert.equal(1, #world:containers())
      assert.is_nil(world:look(first.generation))
    end)

    behind("asks the engine nothing for a warm acquire and a release, and twice at most for a list [G3]", function(world)
      local rt = world:open { health_ttl = 0 }
      rt:acquire(BOB):release()
      local box = rt:acquire(ALICE)
      box:exec "true"
      box:release()
      world.proxy:reset()
      box = rt:acquire(ALICE)
      assert.equal("warm", box.source)
      local calls = #world.proxy:calls()
      assert.is_true(calls <= 1, calls .. " calls for a warm acquire")
      box:release()
      assert.equal(calls, #world.proxy:calls())
      world.proxy:reset()
      rt:reconcile()
      assert.is_true(#world.proxy:calls() <= 2)                  -- for all of them
    end)

    on("never touches a container that only has its name [G3, I13]", function(world)
      local rt = world:open()
      local id = rt:explain(ALICE).id
      local name = world.prefix .. "-" .. id
      for _, labels in ipairs {
        {}, { ["paddock.role"] = "sandbox", ["paddock.sandbox_id"] = id }, { ["org.example"] = "mine" },
        { ["paddock.role"] = "sandbox", ["paddock.sandbox_id"] = id, ["paddock.instance"] = "ab", ["paddock.plane"] = "guest",
          ["paddock.deployment"] = "somebody else's" },
      } do
        local status, made = engine:call("POST", "/containers/create?name=" .. name, {
          Image = engines.image "busybox", Cmd = { "sleep", "1000" }, Labels = next(labels) and labels or nil,
        })
        assert.equal(201, status)
        engine:call("POST", "/containers/" .. made.Id .. "/start")
        local err = support.caught(rt.acquire, rt, ALICE)
        assert.equal("backend_error", err.kind)
        assert.equal("name_taken", err.reason)
        assert.matches(name, err.message, 1, true)
        rt:reconcile()
        assert.equal("running", world:look(made.Id).State.Status)
        world:remove(made.Id)
      end
      local box <close> = rt:acquire(ALICE)
      assert.equal("created", box.source)
    end)

    on("replaces a warm one that was removed or killed behind its back [E5, B054]", function(world)
      local rt = world:open { health_ttl = 0 }
      for _, how in ipairs { "remove", "kill" } do
        local box = rt:acquire(ALICE)
        local generation = box.generation
        box:release()
        if how == "remove" then
          world:remove(generation)
        else
          engine:call("POST", "/containers/" .. generation .. "/kill?signal=KILL")
        end
        box = rt:acquire(ALICE)
        assert.equal("created", box.source)
        assert.not_equal(generation, box.generation)
        assert.equal(1, #world:containers())
        box:release()
      end
    end)

    on("says lost, not unknown for ever, when the container goes away under a command", function(world)
      local rt = world:open { health_ttl = 0 }
      local box = rt:acquire(ALICE)
      world:remove(box.generation)
      local fine, result = pcall(box.exec, box, "true")
      if fine then
        assert.equal("unknown", result.outcome)
      else
        assert.is_true(errors.is(result))
      end
      pcall(box.release, box)
      local refused
      assert.is_true(support.eventually(function() -- the runtime may be at its end by itself just now, and says "try again later"
        fine, box = pcall(rt.acquire, rt, ALICE)
        refused = not fine and box
        return fine or (box.kind ~= "replacement_deferred" and box.kind ~= "being_destroyed")
      end, 10))
      assert.is_false(refused)
      assert.equal("ok\n", box:exec("echo ok").stdout)
      box:release()
    end)

    behind("takes a creation whose answer was lost for what it is: one container, never two [B133, B181]", function(world)
      local rt = world:open()
      world.proxy:cut("POST", "^/containers/create$", "after")
      local box = rt:acquire(ALICE)
      assert.equal("created", box.source)
      assert.equal(1, #world:containers())
      assert.equal(1, world.proxy:count("POST", "^/containers/create$"))
      box:release()
    end)

    behind("takes a start whose answer was lost for what it is", function(world)
      local rt = world:open()
      world.proxy:cut("POST", "/start$", "after")
      local box = rt:acquire(ALICE)
      assert.equal(1, world.proxy:count("POST", "/start$"))
      box:release()
    end)

    behind("leaves nothing when a start fails, ten times over [B106, B116, B108]", function(world)
      local rt = world:open { max_sandboxes = 2 }
      world.proxy:rewrite("POST", "/start$", { status = 500, body = { message = "no space left" }, pass = false, times = 10 })
      for _ = 1, 10 do
        local err = support.caught(rt.acquire, rt, ALICE)
        assert.equal("backend_error", err.kind)
        assert.matches("no space left", err.message)
        assert.equal(0, #world:containers())
      end
      local box <close> = rt:acquire(ALICE)
      assert.equal("created", box.source)
    end)

    behind("sweeps later what could not be removed when its start failed [B106]", function(world)
      local rt = world:open { ownership = { type = "memory" } }
      world.proxy:rewrite("POST", "/start$", { status = 500, body = { message = "no space left" }, pass = false })
      local id = world.proxy:rewrite("DELETE", "^/containers/", { status = 500, body = { message = "device busy" }, pass = false })
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.matches("no space left", err.message)
      assert.equal(1, world.proxy:hits(id))
      assert.equal(1, #world:containers())
      support.eventually(function()
        rt:reconcile()
        return #world:containers() == 0
      end, 10)
      assert.equal(0, #world:containers())
      assert.equal("0", world:places())
    end)

    behind("does not call a stop done while the container lives on [G9, K12]", function(world)
      local rt = world:open()
      local box = rt:acquire(ALICE)
      local id, generation = box.id, box.generation
      box:release()
      world.proxy:rewrite("DELETE", "^/containers/", { status = 204, body = "", pass = false })
      local err = support.caught(rt.destroy, rt, id)
      assert.equal("backend_error", err.kind)
      assert.equal("still_present", err.reason)
      assert.equal("running", world:look(generation).State.Status)
      assert.is_true(rt:destroy(id))
      assert.equal(0, #world:containers())
    end)

    behind("raises what it cannot know, and never takes it for absent [G6, G8, B028]", function(world)
      local rt = world:open { health_ttl = 0 }
      local box = rt:acquire(ALICE)
      local id = box.id
      box:release()
      local answers = {
        { status = 404, body = { message = "page not found" } }, { status = 404, body = { message = "No such container: x" } },
        { status = 404, body = "Not Found" }, { status = 500, body = { message = "daemon is busy" } },
        { status = 401, body = "" }, { status = 403, body = "" }, { status = 429, body = "" },
      }
      for _, answer in ipairs(answers) do
        answer.pass, answer.times = false, -1
        world.proxy:rewrite("DELETE", "^/containers/", { status = 500, body = { message = "cannot stop" }, pass = false, times = -1 })
        world.proxy:rewrite("GET", "/json$", answer)
        local err = support.caught(rt.destroy, rt, id)
        assert.equal("backend_error", err.kind)
        world.proxy:reset()
        assert.equal(1, #world:containers())
      end
      assert.is_true(rt:destroy(id))
    end)

    behind("hears of a death without asking, drops a warm one, and asks again when the stream is lost [B054]", function(world)
      local rt = world:open { health_ttl = 0 }
      assert.is_true(support.eventually(function() return world.proxy:count("GET", "^/events$") == 1 end))
      local box = rt:acquire(ALICE)
      local id, generation = box.id, box.generation
      box:release()
      world.proxy:reset()
      engine:call("POST", "/containers/" .. generation .. "/kill?signal=KILL")
      assert.is_true(support.eventually(function() return rt:inspect(id) == nil or rt:inspect(id).state ~= "warm" end, 20))
      assert.is_true(support.eventually(function() return #world:containers() == 0 end, 20))
      assert.equal(0, world.proxy:count("GET", "/top$"))
      -- Once more, with the stream cut while it dies: the list that follows a new stream tells.
      assert.is_true(support.eventually(function() return world.proxy:count("GET", "^/events$") >= 1 end))
      box = rt:acquire(ALICE)
      generation = box.generation
      box:release()
      world.proxy:drop()
      world:remove(generation)
      assert.is_true(support.eventually(function() return rt:inspect(id) == nil or rt:inspect(id).state ~= "warm" end, 20))
      box = rt:acquire(ALICE)
      assert.equal("created", box.source)
      box:release()
    end)

    -- What a runtime does then is the same on either engine.
    local hung = (engine.name == "docker" or os.getenv "PDK_THOROUGH") and containers.on(engine, { plane = "exec", proxy = true })
    if hung then hung("knows of a death within engine_timeout when the stream of events hangs, and "
      .. "goes on meanwhile [B054, B104]", function(world)
      world.proxy:hang("GET", "^/events$", "middle", { bytes = 0, times = -1 }) -- it stands; of the first event nothing comes
      local rt = world:open { health_ttl = 0, backend_options = { engine_timeout = 2 } }
      local function take(who) -- a busy machine may need more than two seconds for a call
        local box
        assert.is_true(support.eventually(function()
          local fine
          fine, box = pcall(rt.acquire, rt, who)
          return fine
        end, 30), tostring(box))
        local id, generation = box.id, box.generation
        box:release()
        return id, generation
      end
      local alice, generation = take(ALICE)
      local bob, second = take(BOB)
      world:remove(generation)
      assert.equal(bob, (take(BOB)))                             -- who is not concerned does not wait
      assert.is_true(support.eventually(function() return rt:inspect(alice) == nil end, 15))
      assert.is_true(world.proxy:count("GET", "^/events$") >= 2)
      world.proxy:reset()                                        -- the next stream is as it should be
      assert.is_true(support.eventually(function() return world.proxy:count("GET", "^/events$") >= 1 end, 15))
      world:remove(second)
      assert.is_true(support.eventually(function() return rt:inspect(bob) == nil end, 15))
      assert.not_equal(generation, select(2, take(ALICE)))
    end) end

    on("replaces one whose guest was cut off or impersonated from inside: it is not discovered [G7, B056, B064, B219]", function(world)
      local rt = world:open { health_ttl = 0 }
      for i, trick in ipairs {
        "rm /.paddock/socket",
        "i=$(sed -n 's|.*/docker/\\([0-9a-f]*\\)/guest /.paddock .*|\\1|p' /proc/self/mountinfo); rm /.paddock/socket; "
          .. "printf 'generation=%s\\0listen=/.paddock/socket\\0' $i > /tmp/s; /.paddock-guest --settings /tmp/s > /dev/null 2>&1 & "
          .. "while ! [ -S /.paddock/socket ]; do sleep 0.05; done",
      } do
        local box = rt:acquire(ALICE)
        local generation = box.generation
        local instance = world:look(generation).Config.Labels["paddock.instance"]
        local done = box:exec(trick, { timeout = 60 })
        assert.same({ "completed", 0 }, { done.outcome, done.exit_code })
        -- The guest answers nobody who does not say its secret; the impostor answers anybody.
        local ask = ("curl -s -m 5 --unix-socket %s/docker/%s/guest/socket http://x/v1/sandbox || true"):format(world.state, instance)
        assert.is_true(support.eventually(function()
          return (support.sh(ask):find(instance, 1, true) ~= nil) == (i == 2)
        end, 20))
        box:release()
        rt:reset()
        rt = world:open { health_ttl = 0, ownership = { type = "memory" } }
        box = nil
        -- It is unowned: whoever finds it must not trust it. An acquire cannot replace it before a reconcile has adopted it, and the one
        -- that begins at the start passes it over while an acquire is under way.
        assert.is_true(support.eventually(function()
          local fine, found = pcall(rt.acquire, rt, ALICE)
          if fine then box = found else rt:reconcile() end
          return fine
        end, 20))
        assert.not_equal(generation, box.generation)
        assert.equal("created", box.source)
        box:release()
      end
    end)

    on("speaks over a socket to the one process that must listen there", function()
      local open = assert(package.loadlib(assert(package.searchpath("paddock.core", package.cpath)), "luaopen_paddock_io"))
      package.preload["paddock.io"] = package.preload["paddock.io"] or open
      local io = require "paddock.io"
      local response = assert(io.http { url = "http://e/_ping", unix = engine.socket, fresh = true })
      assert.is_true(response.peer > 0)
      for _ = 1, 2 do -- the second over the first one's connection
        assert.equal(response.peer, assert(io.http { url = "http://e/_ping", unix = engine.socket }).peer)
      end
      assert.equal(200, assert(io.http { url = "http://e/_ping", unix = engine.socket, peer = response.peer }).status)
      local _, err = io.http { url = "http://e/_ping", unix = engine.socket, peer = io.proc.self().pid }
      assert.equal("peer", err.reason)
      assert.equal("not_sent", err.failure)
    end)

    on("ends a paused container within the bound [B037]", function(world)
      local rt = world:open()
      local box = rt:acquire(ALICE)
      local id, generation = box.id, box.generation
      box:release()
      local status = engine:call("POST", "/containers/" .. generation .. "/pause")
      assert.equal(204, status)
      assert.is_true(rt:destroy(id))
      assert.equal(0, #world:containers())
    end)
  end)
end
