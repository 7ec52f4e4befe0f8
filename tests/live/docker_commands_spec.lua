--- The docker backend's configurations, policies and commands on real engines.
local containers = require "tests.live.containers"
local engines = require "tests.support.engines"
local support = require "tests.support"

for _, engine in ipairs(engines.all()) do
  describe("with containers of " .. engine.name, function()
    local on = containers.on(engine)

    --- Runs the program with a configuration of that world.
    local function program(world, more, words)
      local path = world.state .. "/config.lua"
      support.write_file(path, ("return { backend = 'docker', state_dir = %q, %s backend_options = { host = %q, prefix = %q } }"):format(
        world.state, more, "unix://" .. world.socket, world.prefix))
      return support.sh("paddock " .. words:gsub("@", "--config " .. path))
    end

    on("exec makes one, runs, and takes it down; ps and destroy find one that was kept", function(world)
      local image = ("image = %q,"):format(engines.image "busybox")
      local out, status = program(world, image, "exec @ -- sh -c 'echo hello; exit 3'")
      assert.equal("hello", (out:gsub("%s+$", "")))
      assert.equal(3, status)
      assert.equal(0, #world:containers())
      out, status = program(world, image, "exec @ --keep -- echo kept")
      assert.equal("kept", (out:gsub("%s+$", "")))
      assert.equal(0, status)
      assert.matches("free", (program(world, image, "ps @")))
      out, status = program(world, image, "destroy @ --all")
      assert.equal(0, status, out)
      assert.equal(0, #world:containers())
    end)

    on("doctor says which engine answers and what is missing", function(world)
      local out, status = program(world, ("image = %q,"):format(engines.image "busybox"), "doctor @")
      assert.equal(0, status, out)
      assert.matches((engine.name == "docker" and "Docker " or "Podman ") .. engine.version, out, 1, true)
      assert.matches("image there", out, 1, true)
      assert.matches("no image is configured", (program(world, "", "doctor @")))
      world.socket = "/no/such.sock"
      out, status = program(world, "", "doctor @")
      assert.equal(69, status)
      assert.matches("no container engine answers", out)
      out, status = program(world, "image = 'x',", "exec @ -- true")
      assert.equal(69, status, out)
      assert.matches("no container engine answers", out)
    end)

    on("an image is asked for by name, and what is missing is named", function(world)
      local rt = world:open { image = "localhost/pdk-no-such-image:1", backend_options = { pull = "never" } }
      local err = support.caught(rt.acquire, rt, { user = "a", thread = "t" })
      assert.equal("no_image", err.reason)
      assert.matches("localhost/pdk-no-such-image:1", err.message, 1, true)
      local fresh = world:open { image = "" and nil }
      fresh:shutdown()
    end)

    on("a policy picks images by what a turn requires; another one replaces the sandbox", function(world)
      local rt = world:open {
        policies = "examples/images/policies",
        policy_options = { images = { web = engines.image "aio", shell = engines.image "busybox" } },
      }
      local who = { user = "alice", thread = "t1" }
      local box = rt:acquire { user = "alice", thread = "t1", requirements = { tools = { "shell" } } }
      local first = box.generation
      box:release()
      box = rt:acquire(who)
      assert.equal(first, box.generation)
      box:release()
      box = rt:acquire { user = "alice", thread = "t1", requirements = { tools = { "web" } } }
      assert.not_equal(first, box.generation)
      assert.equal(engines.image "aio", rt:inspect(box.id).info.attestation.image)
      box:release()
      assert.equal("invalid_argument",
        support.caught(rt.acquire, rt, { user = "alice", thread = "t1", requirements = { tools = { "none" } } }).kind)
    end)

    on("the environment of a sandbox with a guest is in no inspection, and no other sandbox sees it [B215, B212]", function(world)
      local rt = world:open { environment = { PDK_SECRET = "s3cr3t-canary" } }
      local box = rt:acquire { user = "alice", thread = "t1" }
      assert.equal("s3cr3t-canary", box:exec("printf %s \"$PDK_SECRET\"").stdout)
      local _, _, raw = engine:call("GET", "/containers/" .. box.generation .. "/json")
      assert.is_nil(raw:find("s3cr3t-canary", 1, true))
      assert.equal("1\n", box:exec("cat /.paddock/settings 2>/dev/null; echo $?").stdout)
      box:release()
    end)

    on("runs without capabilities to speak of, without new privileges, and without a network [G5, B211]", function(world)
      local rt = world:open { backend_options = { cap_add = {} } }
      local box = rt:acquire { user = "alice", thread = "t1" }
      local status = box:exec("grep -E '^(CapEff|NoNewPrivs)' /proc/self/status; ls /sys/class/net").stdout
      assert.matches("CapEff:%s+0000000000000000", status)
      assert.matches("NoNewPrivs:%s+1", status)
      assert.matches("\nlo\n", status)
      assert.is_nil(status:find("eth0", 1, true))
      box:release()
    end)

    on("mounts in the long form, and keeps a workspace in data_dir beyond the sandbox [G5]", function(world)
      local place = support.tmpdir()
      local odd = place .. (engine.name == "podman" and "/a b" or "/a:b,c d") -- Podman's compatible API splits at : and ,
      support.sh("mkdir -p '" .. odd .. "' '" .. world.state .. "/data'; echo hi > '" .. odd .. "/f'")
      local rt = world:open {
        data_dir = world.state .. "/data", mounts = { { source = odd, target = "/odd" } },
      }
      local who = { user = "alice", thread = "t1" }
      local box = rt:acquire(who)
      assert.equal("hi\n", box:exec("cat /odd/f; touch /odd/x 2>/dev/null").stdout)
      assert.equal("", support.sh("ls '" .. odd .. "/x' 2>/dev/null"):gsub("%s", ""))
      box:write("/workspace/kept", "1")
      local id = box.id
      box:release()
      rt:destroy(id)
      box = rt:acquire(who)
      assert.equal("1", box:read "/workspace/kept")
      box:release()
      support.sh("rm -rf '" .. world.state .. "/data'")
      support.cleanup()
    end)

    on("gives a user that is not root, and a read-only root, a workspace of its own", function(world)
      for _, own in ipairs { { user = "1000:1000" }, { read_only_root = true }, { workspace = "volume" } } do
        local rt = world:open { backend_options = own }
        local box = rt:acquire { user = "alice", thread = "t1" }
        local r = box:exec "id -u; echo x > f && cat f; touch /bin/x 2>/dev/null && echo writable"
        assert.equal(own.user and "1000\nx\n" or own.read_only_root and "0\nx\n" or "0\nx\nwritable\n", r.stdout)
        local id = box.id
        box:release()
        rt:destroy(id)
        rt:shutdown()
      end
      local _, volumes = engine:call("GET", "/volumes")
      for _, one in ipairs(volumes.Volumes or {}) do
        assert.is_nil(one.Name:find(world.prefix, 1, true), "a volume was left behind")
      end
    end)
  end)
end
