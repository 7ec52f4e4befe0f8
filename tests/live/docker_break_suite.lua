--- What a hostile sandbox, or an engine that lies, does to the docker backend: each test is the smallest sequence that once broke
--- something, or a way that must stay closed.
local containers = require "tests.live.containers"
local engines = require "tests.support.engines"
local json = require "cjson"
local paddock = require "paddock"
local support = require "tests.support"

local ALICE, BOB = { user = "alice", thread = "t1" }, { user = "bob", thread = "t1" }

for _, engine in ipairs(engines.all(ONLY)) do
  describe("the docker backend on " .. engine.name .. ", attacked,", function()
    local on = containers.on(engine)
    local exec = containers.on(engine, { plane = "exec" })
    local behind = containers.on(engine, { proxy = true })
    local aio_behind = containers.on(engine, { proxy = true, plane = "aio" })

    on("removes whatever a sandbox has left in its guest's folder, however deep", function(world)
      local rt = world:open()
      local box = rt:acquire(ALICE)
      local r = box:exec("cd /.paddock && for i in $(seq 300); do mkdir d e$i && ln -s /etc d/l && mkfifo d/p && cd d || exit 1; done")
      assert.equal(0, r.exit_code)
      box:release()
      assert.is_true(rt:destroy(box.id))
      assert.equal("0", world:places())
    end)

    on("lets no user but root write in its guest's folder, on the disk of the state directory", function(world)
      local rt = world:open { backend_options = { user = "1000:1000" } }
      local box <close> = rt:acquire(ALICE)
      local r = box:exec("id -u; touch /.paddock/x /workspace/x; rm -f /.paddock/socket; mv /.paddock/socket /.paddock/y; ls -A /.paddock")
      assert.equal("1000\nsocket\n", r.stdout)
      assert.matches("/.paddock/x", r.stderr, 1, true)
      assert.is_nil(r.stderr:find("/workspace/x", 1, true))
      assert.equal("ok\n", box:exec("echo ok").stdout)
    end)

    exec("is not kept busy by what a sandbox prints in place of its shell", function(world)
      local rt = world:open()
      local box, bob = rt:acquire(ALICE), rt:acquire(BOB)
      -- Half a megabyte of spaces, and a word: what trims its end must not look at each of them again and again.
      local made = box:exec("(echo -n x; head -c 500000 /dev/zero | tr '\\0' ' '; echo x) > /s; cp /bin/busybox /ash; "
        .. "printf '#!/ash\\ncat /s; exit 1\\n' > /new; chmod 755 /new; mv /new /bin/sh")
      assert.equal(0, made.exit_code, made.stderr)
      local began = paddock.now()
      local op = box:exec_async("true")
      assert.equal("ok\n", bob:exec("echo ok").stdout)
      pcall(op.wait, op, 60)
      assert.is_true(paddock.now() - began < 20)
      box:release()
      bob:release()
    end)

    on("gives a command no way to the guest's secret, and no right that it was not given", function(world)
      local rt = world:open { environment = { API_TOKEN = "hush-4711" } }
      local box <close> = rt:acquire(ALICE)
      local secret = support.sh("cat " .. world.state .. "/docker/*/record.json"):match '"secret":"(%x+)"'
      assert.is_string(secret)
      local function run(command) return box:exec(command, { timeout = 20 }) end
      assert.equal("hush-4711\n", run("echo $API_TOKEN").stdout)
      -- Not in what runs or lies inside, whoever looks for it; and not in what the engine shows to whoever asks it.
      local r = run("cat /proc/1/environ /proc/1/mem; "
        .. "grep -r -e " .. secret:sub(1, 24) .. "[0-9a-f] /proc/[0-9]*/environ /.paddock /run /tmp")
      assert.equal("", r.stdout)
      local _, _, raw = engine:call("GET", "/containers/" .. box.generation .. "/json")
      for _, word in ipairs { secret, "hush-4711" } do assert.is_nil(raw:find(word, 1, true)) end
      assert.equal("", support.sh("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -e hush-47[1]1 -e " .. secret:sub(1, 20)
        .. "[" .. secret:sub(21, 21) .. "]" .. secret:sub(22)))
      local status = run("cat /proc/self/status").stdout
      assert.matches("NoNewPrivs:%s*1", status)
      assert.matches("Seccomp:%s*2", status)
      assert.equal(0, tonumber(status:match("CapBnd:%s*(%x+)"), 16) & ~0xeb)  -- what options.lua gives to a root, and no more
      for _, command in ipairs { "touch /.paddock-guest", "mount -t tmpfs x /mnt", "mknod /dev/disk b 8 0",
        "echo 1 > /proc/sys/kernel/sysrq",
        "echo x > /proc/sysrq-trigger", "head -c 1 /proc/kcore | grep .", "chroot /proc/1/root true" } do
        assert.not_equal(0, run(command).exit_code, command)
      end
    end)

    on("has no sandbox in the machine's own network", function(world)
      local rt = world:open()
      for _, network in ipairs { "host", "Host", "container:" .. ("a"):rep(64), "ns:/proc/1/ns/net", "a b", "../x" } do
        local err = support.caught(rt.acquire, rt, { user = "alice", thread = "t1", requirements = { network = network } })
        assert.is_true(err.kind == "invalid_argument" or err.kind == "policy_error")
        assert.matches("network", err.message, 1, true)
      end
      assert.equal(0, #world:containers())
    end)

    on("mounts nothing over its guest, or among its settings", function(world)
      for _, target in ipairs { "/.paddock", "/.paddock/settings", "/.paddock/socket", "/.paddock-guest" } do
        local rt = world:open { mounts = { { source = "/etc/hostname", target = target } } }
        local err = support.caught(rt.acquire, rt, ALICE)
        assert.equal("invalid_argument", err.kind)
        assert.matches(target, err.message, 1, true)
        rt:shutdown()
      end
    end)

    aio_behind("leaves no network and no volume whose making was not answered, or was answered with a failure", function(world)
      local rt = world:open { image = engines.image "aio", backend_options = { workspace = "volume" } }
      for _, path in ipairs { "^/networks/create$", "^/volumes/create$" } do
        for _, spoil in ipairs { function() world.proxy:cut("POST", path, "after") end,
          function() world.proxy:rewrite("POST", path, { status = 500, body = { message = "no" } }) end } do
          spoil()
          assert.equal("backend_error", support.caught(rt.acquire, rt, ALICE).kind)
          local _, networks = engine:call("GET", "/networks")
          local _, volumes = engine:call("GET", "/volumes")
          for _, list in ipairs { networks, type(volumes.Volumes) == "table" and volumes.Volumes or {} } do
            for _, one in ipairs(list) do assert.is_nil(one.Name:find(world.prefix, 1, true), one.Name) end
          end
        end
      end
    end)

    aio_behind("shows no value of an environment that the engine repeats in a refusal [B213]", function(world)
      local said = {}
      local rt = world:open { image = engines.image "aio", environment = { API_TOKEN = "hush-4711" },
        log = function(event) said[#said + 1] = json.encode(event) end }
      world.proxy:rewrite("POST", "^/containers/create$", { status = 400, pass = false,
        body = { message = "invalid environment variable: API_TOKEN=hush-4711, hush-4711" .. (" x"):rep(130) .. "hush-4711" } })
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.matches("API_TOKEN=$API_TOKEN", err.message, 1, true)
      said[#said + 1] = tostring(err)
      assert.is_nil(table.concat(said):find("hush-", 1, true))
    end)

    behind("takes no image for another thing of the engine's", function(world)
      local rt = world:open()
      local bob = rt:acquire(BOB)
      for _, image in ipairs { "../containers/" .. bob.generation, "x/../../containers/json?" } do
        local err = support.caught(rt.acquire, rt, { user = "alice", thread = "t1", requirements = { image = image } })
        assert.equal("invalid_argument", err.kind)
      end
      assert.equal(0, world.proxy:count("GET", "/images/.*%.%."))
      bob:release()
    end)

    behind("believes no answer about another container, and completes no id", function(world)
      local rt = world:open()
      local bob = rt:acquire(BOB)
      -- What the engine says is made is a part of another one's id: nothing may be started or removed by it.
      world.proxy:rewrite("POST", "^/containers/create$", { body = { Id = bob.generation:sub(1, 12) } })
      local fine, box = pcall(rt.acquire, rt, ALICE)
      if fine then
        assert.not_equal(bob.generation, box.generation)
        box:release()
      end
      world.proxy:reset()
      world.proxy:rewrite("GET", "^/containers/[0-9a-f]+/json$", { body = world:look(bob.generation), times = 2 })
      fine, box = pcall(rt.acquire, rt, { user = "carol", thread = "t1" })
      if fine then box:release() end
      world.proxy:reset()
      assert.equal("ok\n", bob:exec("echo ok").stdout)
      bob:release()
    end)
  end)
end
