--- The ready-made set policies/deerflow, and a configuration in that project's own words (sections sandbox, subagent_runtime,
--- skills): ids, folders, mounts, requirements. How it judges running sandboxes is in reuse_spec.lua.
local config = require "paddock.config"
local errors = require "paddock.errors"
local support = require "tests.support"

local LARK = "/mnt/integrations/lark-cli"

local function normalize(options) return config.normalize((config.split(options))) end

--- The message of the invalid_argument that these options give.
local function refused(options)
  local ok, err = pcall(normalize, options)
  assert.is_false(ok, "these options were accepted")
  assert.is_true(errors.is(err), "no error of paddock: " .. tostring(err))
  assert.equal("invalid_argument", err.kind)
  return err.message
end

--- The command that runs this Lua text: of a file, as the interpreter of a sanitizer takes no -e.
local function interpreted(text)
  local path = os.tmpname()
  finally(function() os.remove(path) end)
  support.write_file(path, text)
  return "${LUA:-lua5.4} " .. path .. " 2>&1"
end

describe("a deer-flow", function()
  local world, root
  before_each(function()
    world = support.world()
    root = support.tmpdir()
  end)
  after_each(function() world:assert_quiet() end)

  --- A runtime of that configuration over the scripted engine. `more`: options beside it; policy_options are merged.
  local function open(sections, more)
    local options = { backend = world.backend, policy_options = { base_dir = root } }
    for key, value in pairs(sections or { sandbox = {} }) do options[key] = value end
    for key, value in pairs(more or {}) do
      if key == "policy_options" then
        for k, v in pairs(value) do options.policy_options[k] = v end
      else
        options[key] = value
      end
    end
    return world:open(options)
  end
  local REMOTE = { sandbox = { provisioner_url = "http://provisioner:8002" } }

  local function who(user, thread, requirements) return { user = user, thread = thread, requirements = requirements } end
  local function spec_of(box) return world:container(box.id).spec end
  local function by_target(box)
    local out = {}
    for i, mount in ipairs(spec_of(box).mounts) do
      assert.is_nil(out[mount.target], "twice: " .. mount.target)
      out[mount.target] = { source = mount.source, read_only = mount.read_only, at = i }
    end
    return out
  end
  local function targets(box)
    local out = {}
    for i, mount in ipairs(spec_of(box).mounts) do out[i] = mount.target end
    return out
  end
  local function tree(path) return (support.sh(("cd %s && find . -mindepth 1 -printf '%%p %%m\n' | sort"):format(path or root))) end

  -- ---- identity ------------------------------------------------------------------------------------------

  describe("identity", function()
    it("is 16 characters of SHA-256 over user:thread, the same in every runtime [C1]", function()
      local first, second = open(), open()
      for _, case in ipairs { { "u-1", "t-1", "8ee1a188a789a4f6" }, { "alice", "thread-1", "dc977b840cb8638e" },
        { "", "t", "983743815e8fe2ac" }, { "u", "", "27e14d2b41b03178" } } do
        for _ = 1, 2 do
          assert.equal(case[3], first:explain(who(case[1], case[2])).id)
          assert.equal(case[3], second:explain(who(case[1], case[2])).id)
        end
      end
    end)

    it("keeps two pairs apart that met at 8 characters [C2, B001]", function()
      local rt = open()
      assert.equal("7f7b984ccf326330", rt:explain(who("user-9721", "thread-9721")).id)
      assert.equal("7f7b984c6fc4f156", rt:explain(who("user-94361", "thread-94361")).id)
    end)

    it("of two pairs that meet all the same is one sandbox, refused to the second [C1, B001]", function()
      local rt = open()
      local first = rt:acquire(who("a", "b"))
      first:write("/tmp/secret", "of a")
      world.on.create = function() error("nothing may be created") end
      -- "a:b" is no user of that project; the identity policy alone would give ("a:b", "c") and ("a", "b:c") one id.
      local err = support.caught(rt.acquire, rt, who("a\0", "b"))
      assert.equal("invalid_argument", err.kind)
      assert.equal(rt:explain(who("a:b", "c")).id, rt:explain(who("a", "b:c")).id)
      world.on.create = nil
    end)

    local function id(rt, requirements) return rt:explain(who("alice", "thread-policy", requirements)).id end
    local PROJECTION = { skills_projection = true }

    it("of a thread with a projection of its own differs from the shared one, and is the same at every call [C6]", function()
      local rt = open()
      local scoped = id(rt, PROJECTION)
      assert.not_equal(id(rt), scoped)
      assert.equal(scoped, id(open(), PROJECTION))
      assert.matches("^%x+$", scoped)
      assert.equal(16, #scoped)
    end)

    it("is separated by construction, and not by a thread's name [C7]", function()
      local rt = open()
      local scoped = id(rt, PROJECTION)
      for _, thread in ipairs { "thread-policy:agent-skills-v1", "thread-policy:agent-skills-v2", "thread-policy\0/mnt/skills" } do
        local answer = rt:explain(who("alice", thread))
        if thread:find "\0" then -- NUL bytes keep the tags apart: no name may have one
          assert.matches("NUL byte", answer.id.message, 1, true)
        else
          assert.not_equal(scoped, answer.id)
        end
      end
      -- SHA-256 over tag, user, thread, root, joined by NUL bytes.
      local digest = support.sh([[printf 'agent-skills-v2\0alice\0thread-policy\0/mnt/skills' | sha256sum]])
      assert.equal(digest:sub(1, 16), scoped)
    end)

    it("of a projection changes with the skills root [C8]", function()
      assert.not_equal(id(open(), PROJECTION), id(open { skills = { container_path = "/custom-skills" } }, PROJECTION))
    end)

    it("that changes between two turns of a thread: the former sandbox goes, unless it is held [C6, E7, E8]", function()
      local rt = open()
      local held = rt:acquire(who("alice", "t1"))
      local err = support.caught(rt.acquire, rt, who("alice", "t1", PROJECTION))
      assert.same({ "replacement_deferred", "identity_outdated" }, { err.kind, err.reason })
      assert.equal("ok\n", held:exec("echo ok").stdout)
      assert.equal(0, world:count "destroy")
      local loose = rt:acquire { user = "alice", thread = "t2", holder = false }
      local box = rt:acquire(who("alice", "t2", PROJECTION))
      assert.not_equal(loose.id, box.id)
      assert.equal(1, world:count("destroy", loose.id))
      assert.is_nil(rt:inspect(loose.id))
    end)

    it("changes with a custom skills root, and is the plain one with the default root [C9]", function()
      local a, b = open { skills = { container_path = "/custom-skills-a" } }, open { skills = { container_path = "/custom-skills-b" } }
      local plain = id(open())
      assert.not_equal(id(a), id(b))
      assert.not_equal(plain, id(a))
      for _, same in ipairs { "/mnt/skills", "/mnt/skills/" } do
        assert.equal(plain, id(open { skills = { container_path = same } }))
      end
      local digest = support.sh([[printf 'skills-root-v1\0alice\0thread-policy\0/custom-skills-a' | sha256sum]])
      assert.equal(digest:sub(1, 16), id(a))
    end)
  end)

  -- ---- folders and mounts --------------------------------------------------------------------------------

  describe("thread's folders", function()
    it("are made, open to everybody whatever the umask, and made again they change nothing [D1, D2]", function()
      local rt = open()
      local box = rt:acquire(who("alice", "t1"))
      local folder = root .. "/users/alice/threads/t1"
      local made = tree(folder)
      assert.equal("./acp-workspace 777\n./user-data 755\n./user-data/outputs 777\n./user-data/uploads 777\n./user-data/workspace 777\n",
        made)
      support.write_file(folder .. "/user-data/outputs/kept", "x")
      box:release()
      assert.is_true(rt:destroy(box.id))
      rt:acquire(who("alice", "t1"))
      assert.equal("x", support.read_file(folder .. "/user-data/outputs/kept"))
      assert.equal(made, (tree(folder):gsub("%./user%-data/outputs/kept %d+\n", "")))
    end)

    it("are mounted: the agents' own read-only, the three of user data writable [D4]", function()
      local rt = open()
      for _, user in ipairs { "alice", "" } do
        local folder = root .. (user == "" and "" or "/users/" .. user) .. "/threads/t1/"
        local mounts = by_target(rt:acquire(who(user, "t1")))
        assert.same({ source = folder .. "acp-workspace", read_only = true, at = 4 }, mounts["/mnt/acp-workspace"])
        for i, name in ipairs { "workspace", "uploads", "outputs" } do
          assert.same({ source = folder .. "user-data/" .. name, read_only = false, at = i }, mounts["/mnt/user-data/" .. name])
        end
      end
    end)

    it("are those of the explicit user, not of the ambient one [D5]", function()
      local rt = open(nil, { user = "default" })
      local mounts = by_target(rt:acquire(who("ou-user", "t1")))
      for _, name in ipairs { "workspace", "uploads", "outputs" } do
        assert.equal(root .. "/users/ou-user/threads/t1/user-data/" .. name, mounts["/mnt/user-data/" .. name].source)
      end
      assert.equal("", (support.sh("ls " .. root .. "/users | grep -v ou-user || true")))
    end)

    it("of names that could leave the directory are refused, and nothing is made [D3]", function()
      local rt = open()
      for _, case in ipairs { { "alice", "../escape" }, { "alice", "a/b" }, { "..", "t1" }, { "a b", "t1" }, { "alice", ("x"):rep(65) } } do
        local err = support.caught(rt.acquire, rt, who(case[1], case[2]))
        assert.equal("invalid_argument", err.kind)
      end
      assert.equal("", tree())
      assert.equal(0, world:count "create")
    end)

    it("are another's to make when a provisioner makes them [D10]", function()
      local rt = open(REMOTE)
      rt:acquire(who("alice", "t1"))
      assert.equal("./acp-workspace 777\n", tree(root .. "/users/alice/threads/t1"))
    end)
  end)

  local SKILLS = { "public", "custom", "legacy", "integrations" }
  local function lark_files()
    support.sh(("mkdir -p %s/users/alice/integrations/lark-cli/config/locks %s/integrations/lark-cli/sandbox-cli"):format(root, root))
    support.sh(("cd %s/users/alice/integrations/lark-cli && echo s > config/config.json && chmod 644 config/*.json && chmod 755 . config")
      :format(root))
  end

  describe("mount", function()
    it("list is in the order of the project, each target once [D9]", function()
      lark_files()
      local rt = open()
      local box = rt:acquire(who("alice", "t1", { lark_cli = true }))
      assert.same({
        "/mnt/user-data/workspace", "/mnt/user-data/uploads", "/mnt/user-data/outputs", "/mnt/acp-workspace",
        "/mnt/skills/public", "/mnt/skills/custom", "/mnt/skills/legacy", "/mnt/skills/integrations",
        LARK .. "/config", LARK .. "/config/locks", LARK .. "/data", LARK .. "/runtime",
      }, targets(box))
      local mounts = by_target(box)
      local expected = {
        ["/mnt/skills/public"] = { "skills_view/public", true }, ["/mnt/skills/custom"] = { "users/alice/skills_view/custom", true },
        ["/mnt/skills/legacy"] = { "users/alice/skills_view/legacy", true },
        ["/mnt/skills/integrations"] = { "users/alice/skills_view/integrations", true },
      }
      for target, want in pairs(expected) do
        assert.same({ root .. "/" .. want[1], want[2] }, { mounts[target].source, mounts[target].read_only }, target)
      end
    end)

    it("of credentials: config read-only, its locks behind it and writable, data writable, the runtime read-only [D6]", function()
      lark_files()
      local mounts = by_target(open():acquire(who("alice", "t1", { lark_cli = true })))
      local own = root .. "/users/alice/integrations/lark-cli/"
      assert.same({ own .. "config", true }, { mounts[LARK .. "/config"].source, mounts[LARK .. "/config"].read_only })
      assert.same({ own .. "config/locks", false }, { mounts[LARK .. "/config/locks"].source, mounts[LARK .. "/config/locks"].read_only })
      assert.same({ own .. "data", false }, { mounts[LARK .. "/data"].source, mounts[LARK .. "/data"].read_only })
      assert.same({ root .. "/integrations/lark-cli/sandbox-cli", true },
        { mounts[LARK .. "/runtime"].source, mounts[LARK .. "/runtime"].read_only })
      assert.is_true(mounts[LARK .. "/config"].at < mounts[LARK .. "/config/locks"].at)
    end)

    it("of the runtime is there only when its source is [D6]", function()
      local mounts = by_target(open():acquire(who("alice", "t1", { lark_cli = true })))
      assert.is_nil(mounts[LARK .. "/runtime"])
      assert.is_truthy(mounts[LARK .. "/data"])
    end)

    it("of credentials makes the tree its owner's alone [D7]", function()
      lark_files()
      open():acquire(who("alice", "t1", { lark_cli = true }))
      assert.equal("./config 700\n./config/config.json 600\n./config/locks 700\n./data 700\n",
        tree(root .. "/users/alice/integrations/lark-cli"))
    end)

    it("of credentials with a link in the tree is left out with the others, before any mode is changed; the turn goes on [D7, D14, B019]",
      function()
        lark_files()
        support.sh(("cd %s/users/alice/integrations/lark-cli && ln -s /etc/passwd config/link && mkdir data && chmod 755 data config/locks")
          :format(root))
        local seen = {}
        local rt = open(nil, { log = function(record) seen[#seen + 1] = record end })
        local mounts = by_target(rt:acquire(who("alice", "t1", { lark_cli = true })))
        rt:dispatch()
        for _, name in ipairs { "/config", "/config/locks", "/data" } do assert.is_nil(mounts[LARK .. name]) end
        assert.is_truthy(mounts["/mnt/skills/custom"])
        assert.matches("%./config 755", tree(root .. "/users/alice/integrations/lark-cli"))
        assert.matches("config.json 644", tree(root .. "/users/alice/integrations/lark-cli"))
        assert.matches("./data 755", tree(root .. "/users/alice/integrations/lark-cli"), 1, true)
        local warned
        for _, record in ipairs(seen) do
          if record.event == "mounts_left_out" then warned = record end
        end
        assert.equal("credentials", warned.group)
        assert.matches("symbolic link", warned.reason)
      end)

    it("of skills that cannot be made is left out with the others, and the turn goes on [D14]", function()
      support.write_file(root .. "/skills_view", "no folder")
      local rt = open()
      local mounts = by_target(rt:acquire(who("alice", "t1")))
      for _, kind in ipairs(SKILLS) do assert.is_nil(mounts["/mnt/skills/" .. kind]) end
      assert.is_truthy(mounts["/mnt/acp-workspace"])
      assert.equal("", (support.sh(("ls %s/users/alice/skills_view 2>/dev/null || true"):format(root))))
    end)

    it("of integrations is each user's own view [D8]", function()
      local rt = open()
      local seen = {}
      for _, user in ipairs { "alice", "bob" } do
        local box, n = rt:acquire(who(user, "t1")), 0
        for _, mount in ipairs(spec_of(box).mounts) do
          if mount.target == "/mnt/skills/integrations" then
            n = n + 1
            seen[user] = mount.source
          end
        end
        assert.equal(1, n)
        assert.equal(root .. "/users/" .. user .. "/skills_view/integrations", seen[user])
      end
      assert.not_equal(seen.alice, seen.bob)
    end)

    it("list for a provisioner has its nine targets, config before its locks, and no user data [D10]", function()
      lark_files()
      world = support.world { methods = { probe = function() return { lark_cli_broker_image = false, lark_cli_init_image = false } end } }
      world.on.create = function(next, this, spec)
        next(this, spec)
        world:container(spec.sandbox_id).attestation = { broker = false }
        return world:info(world:container(spec.sandbox_id))
      end
      local box = open(REMOTE):acquire(who("alice", "t1", { lark_cli = true }))
      assert.same({ "/mnt/acp-workspace", "/mnt/skills/public", "/mnt/skills/custom", "/mnt/skills/legacy", "/mnt/skills/integrations",
        LARK .. "/config", LARK .. "/config/locks", LARK .. "/data", LARK .. "/runtime" }, targets(box))
    end)

    it("sources of a thread with a projection are the projection's, all read-only, with one integrations mount [D11]", function()
      local rt = open()
      local view = root .. "/users/alice/threads/t1/skills_view/"
      local box = rt:acquire(who("alice", "t1", { skills_projection = true }))
      local mounts = by_target(box)
      for _, kind in ipairs(SKILLS) do
        assert.same({ view .. kind, true }, { mounts["/mnt/skills/" .. kind].source, mounts["/mnt/skills/" .. kind].read_only })
      end
      assert.is_nil((support.sh("ls " .. root .. "/users/alice")):find("skills_view"))
      box:release()
      mounts = by_target(rt:acquire(who("alice", "t2", { skills_projection = "projections/p1" })))
      assert.equal(root .. "/projections/p1/custom", mounts["/mnt/skills/custom"].source)
      for _, bad in ipairs { "../out", "/etc", "a/../../b" } do
        local box_of = by_target(rt:acquire(who("alice", "t" .. #bad, { skills_projection = bad })))
        for _, kind in ipairs(SKILLS) do assert.is_nil(box_of["/mnt/skills/" .. kind]) end
      end
      for _, bad in ipairs { 3, "" } do
        assert.equal("invalid_argument", support.caught(rt.acquire, rt, who("alice", "t9", { skills_projection = bad })).kind)
      end
    end)

    it("of the configuration at or below the skills root is kept away from a projection, on this machine [D12]", function()
      local extra = support.tmpdir()
      local sections = { sandbox = { mounts = {
        { host_path = extra, container_path = "/mnt/skills/secret", read_only = true },
        { host_path = extra, container_path = "/mnt/skills" },
        { host_path = extra, container_path = "/mnt/skills-too" }, { host_path = extra, container_path = "/data" } } } }
      local rt = open(sections)
      local mounts = by_target(rt:acquire(who("alice", "t1", { skills_projection = true })))
      assert.is_nil(mounts["/mnt/skills/secret"])
      assert.is_nil(mounts["/mnt/skills"])
      assert.same({ extra, false }, { mounts["/mnt/skills-too"].source, mounts["/mnt/skills-too"].read_only })
      assert.is_truthy(mounts["/data"])
      mounts = by_target(rt:acquire(who("alice", "t2")))                  -- without a projection nothing is excluded
      assert.is_truthy(mounts["/mnt/skills/secret"])
      assert.is_truthy(mounts["/mnt/skills"])
      rt = open(REMOTE, { mounts = { { source = extra, target = "/mnt/skills/secret" } } }) -- nor on a machine that is not this one
      assert.is_truthy(by_target(rt:acquire(who("alice", "t3", { skills_projection = true })))["/mnt/skills/secret"])
    end)

    it("sources in Windows form keep it throughout, and the folders are made below the process's own base [D13]", function()
      local rt = open(nil, { policy_options = { host_base_dir = [[D:\state\deer-flow]] }, mount_roots = { root, [[D:\state]] } })
      local box = rt:acquire(who("alice", "t1", { lark_cli = true }))
      local mounts = by_target(box)
      local folder = [[D:\state\deer-flow\users\alice\threads\t1\]]
      for _, name in ipairs { "workspace", "uploads", "outputs" } do
        assert.equal(folder .. [[user-data\]] .. name, mounts["/mnt/user-data/" .. name].source)
      end
      assert.equal(folder .. "acp-workspace", mounts["/mnt/acp-workspace"].source)
      assert.equal([[D:\state\deer-flow\users\alice\integrations\lark-cli\config\locks]], mounts[LARK .. "/config/locks"].source)
      assert.matches("%./user%-data/outputs 777", tree(root .. "/users/alice/threads/t1"))
      assert.equal("./config 700\n./config/locks 700\n./data 700\n", tree(root .. "/users/alice/integrations/lark-cli"))
    end)

    it("sources are where the engine sees the base directory; the folders are made where this process does [D13]", function()
      local rt = open(nil, { policy_options = { host_base_dir = "/nodes/deer-flow" }, mount_roots = { root, "/nodes/deer-flow" } })
      local mounts = by_target(rt:acquire(who("alice", "t1")))
      assert.equal("/nodes/deer-flow/users/alice/threads/t1/user-data/outputs", mounts["/mnt/user-data/outputs"].source)
      assert.matches("%./user%-data/outputs 777", tree(root .. "/users/alice/threads/t1"))
    end)

    it("sources that the engine would see outside of mount_roots are refused [D13]", function()
      for _, elsewhere in ipairs { "/etc", [[D:\state-too\x]], [[D:\stat]], [[\\nas\share\x]] } do
        local rt = open(nil, { policy_options = { host_base_dir = elsewhere }, mount_roots = { root, [[D:\state]] } })
        local err = support.caught(rt.acquire, rt, who("alice", "t1"))
        assert.equal("policy_error", err.kind)
        assert.matches("mount_roots", err.message)
        assert.equal("", tree())
      end
    end)
  end)

  -- ---- configuration -------------------------------------------------------------------------------------

  describe("configuration", function()
    it("selects the driver by a provisioner's address; of containers, the labels are that project's [B13, G1]", function()
      local remote = config.split(REMOTE)
      assert.equal("provisioner", remote.backend)
      assert.equal("http://provisioner:8002", remote.backend_options.url)
      local here = config.split { sandbox = { port = 9090 }, backend_options = { stop_grace = 3 } }
      assert.equal("docker", here.backend)
      assert.same({ plane = "aio", base_port = 9090, prefix = "deer-flow-sandbox", label_prefix = "deerflow.", stop_grace = 3 },
        here.backend_options)
      assert.equal("mine.", (config.split { sandbox = {}, backend_options = { label_prefix = "mine." } }).backend_options.label_prefix)
      assert.is_truthy(normalize { sandbox = { image = "sandbox:1" } })
      assert.is_truthy(normalize(REMOTE))
      assert.equal("process", (config.split { sandbox = {}, backend = "process" }).backend)
      assert.equal("builtin:deerflow", remote.policies)
    end)

    it("keeps the override of thread data mounts as given [B1]", function()
      for _, value in ipairs { true, false, "unset" } do
        local given = value
        if value == "unset" then given = nil end
        assert.equal(given, (config.split { sandbox = { thread_data_mounts = given } }).thread_data_mounts)
        local out = normalize { sandbox = { thread_data_mounts = given }, backend = "process", network = "none" }
        assert.equal(given, out.thread_data_mounts)
      end
      assert.matches("`sandbox.thread_data_mounts`", refused { sandbox = { thread_data_mounts = "yes" } }, 1, true)
    end)

    it("says whether thread data is seen through mounts: by the driver, unless it is said [B2]", function()
      local cases = { { true, nil, true }, { false, nil, false }, { true, false, false }, { false, true, true },
        { true, true, true }, { false, false, false } }
      for _, case in ipairs(cases) do
        world = support.world { capabilities = { thread_data_mounts = case[1] } }
        local rt = open { sandbox = { thread_data_mounts = case[2] } }
        assert.equal(case[3], rt:capabilities().thread_data_mounts)
        rt:shutdown()
      end
      local rt = support.open { backend = "process" }      -- a driver of this machine
      assert.is_true(rt:capabilities().thread_data_mounts)
      rt:shutdown()
    end)

    it("has one skills root for ids, mounts and create requests, read when it is loaded [B3]", function()
      local roots = { unset = "/mnt/skills", ["/custom-skills"] = "/custom-skills", ["/custom-skills/"] = "/custom-skills" }
      for root_given, seen in pairs(roots) do
        local skills = { container_path = root_given ~= "unset" and root_given or nil }
        local rt = open { skills = skills }
        skills.container_path = "/changed-since"
        local box = rt:acquire(who("alice", "t1"))
        assert.equal(rt:explain(who("alice", "t1")).id, box.id)
        assert.equal(seen, spec_of(box).requirements.options.skills_container_path)
        assert.is_truthy(by_target(box)[seen .. "/public"])
        if root_given ~= "unset" then assert.not_equal(open():explain(who("alice", "t1")).id, box.id) end
      end
      for _, bad in ipairs { "relative", "/", "/a/../b", "/proc/x", 3 } do
        assert.matches("`skills.container_path`", refused { skills = { container_path = bad } }, 1, true)
      end
    end)

    it("takes its command timeout for commands, as it is, and refuses what is not positive and finite [B4, B5, B6]", function()
      assert.equal(42.5, normalize { sandbox = { bash_command_timeout = 42.5 }, backend = "process", network = "none" }.command_timeout)
      assert.equal(600, normalize { sandbox = {}, backend = "process", network = "none" }.command_timeout)
      for _, bad in ipairs { 0 / 0, math.huge, -math.huge, 0, -1 } do
        local message = refused { sandbox = { bash_command_timeout = bad } }
        assert.matches("`sandbox.bash_command_timeout`", message, 1, true)
        assert.matches("must be positive", message, 1, true)
      end
      local rt = open { sandbox = { bash_command_timeout = 42.5 } }
      local box = rt:acquire(who("alice", "t1"))
      assert.equal(42.5, world.clients[1].opts.command_timeout)
      for _, bad in ipairs { 0 / 0, math.huge, -math.huge } do
        assert.equal("invalid_argument", support.caught(box.exec, box, "echo x", { timeout = bad }).kind)
      end
    end)

    --- What is requested of a new sandbox, and injected into it, with that many subagents and that value of the operator's.
    local function capacity(most, value, sections)
      local sandbox = { environment = { MAX_SHELL_SESSIONS = value } }
      for key, one in pairs(sections or {}) do sandbox[key] = one end
      local rt = open { sandbox = sandbox, subagent_runtime = most and { max_running = most } }
      local id = rt:explain(who("alice", "t1")).id
      world.attested = nil
      world.on.create = function(next, this, spec)
        next(this, spec)
        world:container(id).attestation = { capacity = spec.requirements.options.max_shell_sessions }
        return world:info(world:container(id))
      end
      local needs = spec_of(rt:acquire(who("alice", "t1")))
      rt:shutdown()
      local least = needs.requirements.require and needs.requirements.require.capacity
      return needs.requirements.options.max_shell_sessions, (needs.env or {}).MAX_SHELL_SESSIONS, least and least.at_least
    end

    it("requests no room for sessions when nothing runs in parallel [B8]", function()
      assert.same({}, { capacity(nil, nil) })
    end)

    it("requests one more than may run at once, where that is more than the image has [B9]", function()
      assert.same({ 13, "13", 13 }, { capacity(12, nil) })
      assert.same({ 11, "11", 11 }, { capacity(10, nil) })
      assert.same({ 13, "13", 13 }, { capacity(12, nil, { provisioner_url = "http://p:1" }) })
      world.on.create = function(next, this, spec)
        next(this, spec)
        world:container(spec.sandbox_id).attestation = { capacity = spec.requirements.options.max_shell_sessions }
        return world:info(world:container(spec.sandbox_id))
      end
      local rt = open { subagent_runtime = { max_running = 12 } }          -- which no request can talk it out of
      assert.equal("13", spec_of(rt:acquire(who("alice", "t2", { env = { MAX_SHELL_SESSIONS = "2" } }))).env.MAX_SHELL_SESSIONS)
    end)

    it("requests nothing where the image has enough, but needs it all the same [B10]", function()
      local requested, injected, least = capacity(8, nil)
      assert.same({ nil, nil, 9 }, { requested, injected, least })
      requested, injected, least = capacity(9, nil)
      assert.same({ nil, nil, 10 }, { requested, injected, least })
    end)

    it("takes the operator's own number [B11]", function()
      assert.same({ 4, "4", 4 }, { capacity(3, "4") })
      assert.same({ 4, "4", 4 }, { capacity(3, 4) })
      assert.same({ 20, "20", 13 }, { capacity(12, "20") })
    end)

    it("refuses the operator's number when it is too small for what may run, naming both [B12]", function()
      local message = refused { sandbox = { environment = { MAX_SHELL_SESSIONS = "12" } }, subagent_runtime = { max_running = 12 } }
      assert.matches("MAX_SHELL_SESSIONS` (12)", message, 1, true)
      assert.matches("max_running + 1 (13)", message, 1, true)
      local looked_up = interpreted [[
        print(require("paddock.config").split {
          sandbox = { environment = { MAX_SHELL_SESSIONS = "$PDK_ROOM" } }, subagent_runtime = { max_running = 12 } }
          .policy_options.max_shell_sessions)]]
      assert.equal("20\n", (support.sh("PDK_ROOM=20 " .. looked_up)))
      assert.matches("(12) must be at least", support.sh("PDK_ROOM=12 " .. looked_up), 1, true)
      for _, bad in ipairs { "", "x", "0", "-3", "4.5", "1e400", "$PADDOCK_NO_SUCH" } do
        assert.matches("MAX_SHELL_SESSIONS", refused { sandbox = { environment = { MAX_SHELL_SESSIONS = bad } } })
      end
    end)

    it("takes values of the environment as text, and looks up those with a dollar [B14]", function()
      local out = normalize { sandbox = { environment = { A = 1, B = true, C = "$PADDOCK_NO_SUCH", D = "x", E = "$HOME" } },
        backend = "process", network = "none" }
      assert.same({ A = "1", B = "true", C = "", D = "x", E = os.getenv("HOME") or "" }, out.environment)
      assert.matches("sandbox.environment.A", refused { sandbox = { environment = { A = {} } } }, 1, true)
    end)

    it("with an idle timeout of 0 still renews its leases [B15]", function()
      world = support.world()
      local rt = open({ sandbox = { idle_timeout = 0 } }, { ownership = world.ownership })
      local box = rt:acquire(who("alice", "t1"))
      box:release()
      rt:advance(100000)
      rt:tick()
      assert.equal("warm", world:state_of(box.id, rt))
      assert.is_true(world:count "lease.renew" > 0)
    end)

    it("refuses what its sections do not take, and what is said twice, by name", function()
      assert.matches("`sandbox` does not take idle_timeot", refused { sandbox = { idle_timeot = 1 } }, 1, true)
      assert.matches("`sandbox` must be a table", refused { sandbox = true }, 1, true)
      assert.matches("`subagent_runtime.max_running`", refused { subagent_runtime = { max_running = "12" } }, 1, true)
      assert.matches("`sandbox.idle_timeout` is given twice", refused { sandbox = { idle_timeout = 1 }, idle_timeout = 2 }, 1, true)
      assert.matches("`sandbox.mounts[1].host_path` is missing", refused { sandbox = { mounts = { { container_path = "/x" } } } }, 1, true)
      assert.matches("`sandbox.mounts[1]` does not take source", refused { sandbox = { mounts = { { source = "/x" } } } }, 1, true)
      assert.matches("`sandbox.provisioner_url`", refused { sandbox = { provisioner_url = 3 } }, 1, true)
      assert.matches("`sandbox.port` is given twice", refused { sandbox = { port = 1 }, backend_options = { base_port = 2 } }, 1, true)
    end)

    it("refuses what would have no effect, by name [B172]", function()
      assert.matches("`sandbox.use`", refused { sandbox = { use = "deerflow.community.boxlite:BoxliteProvider" } }, 1, true)
      assert.is_truthy(normalize { sandbox = { use = "deerflow.community.aio_sandbox:AioSandboxProvider", image = "x" } })
      for key, value in pairs { image = "x", port = 8080, container_prefix = "x", mounts = {}, environment = { A = "b" } } do
        local message = refused { sandbox = { provisioner_url = "http://p:1", [key] = value } }
        assert.matches("`sandbox." .. key, message, 1, true)
        assert.matches("no effect with sandbox.provisioner_url", message, 1, true)
      end
    end)

    it("finds the project's directory by its own variables", function()
      local script = interpreted [[
        local c = require "paddock.config"
        local o = c.split { sandbox = {} }
        print(o.policy_options.base_dir, o.policy_options.host_base_dir, table.concat(o.mount_roots, ":"))]]
      local out = support.sh("DEER_FLOW_HOME=/srv/df DEER_FLOW_HOST_BASE_DIR=/nodes/df " .. script)
      assert.equal("/srv/df\t/nodes/df\t/srv/df:/nodes/df\n", out)
      local rt = open(nil, { policy_options = {} })
      assert.is_truthy(rt)
      local bare = world:open { policies = "builtin:deerflow" }
      local err = support.caught(bare.acquire, bare, who("alice", "t1"))
      assert.equal("policy_error", err.kind)
      assert.matches("base_dir is missing", err.message)
    end)

    it("computes the legacy skills of exactly the user in question, and a request may say it for itself", function()
      local rt = open(nil, { user = "bob", policy_options = { legacy_skills = { "alice" }, lark_cli = { "carol" } } })
      local function options(request) return spec_of(rt:acquire(request)).requirements.options end
      assert.is_true(options(who("alice", "t1")).include_legacy_skills)
      assert.is_false(options { thread = "t1" }.include_legacy_skills)
      assert.is_true(options(who("dave", "t1", { include_legacy_skills = true })).include_legacy_skills)
      assert.is_true(options(who("carol", "t1")).provision_lark_cli_runtime)
      assert.is_false(options(who("carol", "t2", { lark_cli = false })).provision_lark_cli_runtime)
      assert.equal("invalid_argument", support.caught(rt.acquire, rt, who("a", "t", { lark_cli = "yes" })).kind)
      assert.equal("invalid_argument", support.caught(rt.acquire, rt, who("a", "t", { skils = true })).kind)
    end)
  end)

  it("turn without a thread has the shared skills, no folders of a thread, and an id of its own [C11]", function()
    local rt = open()
    local a, b = rt:acquire { user = "alice" }, rt:acquire { user = "alice" }
    assert.not_equal(a.id, b.id)
    assert.same({ "/mnt/skills/public", "/mnt/skills/custom", "/mnt/skills/legacy", "/mnt/skills/integrations" }, targets(a))
    assert.equal("", (support.sh("find " .. root .. " -name threads")))
  end)

  it("set is checked and explained on the command line, as the example has it", function()
    local out, status = support.sh("paddock policy check --config examples/config/deerflow.lua")
    assert.equal(0, status, out)
    assert.matches("ok: all loaded", out)
    out, status = support.sh("paddock policy explain --config examples/config/deerflow.lua -u alice -t t1 --attest capacity=4")
    assert.equal(0, status, out)
    assert.matches("1  warm +looked at", out)
    assert.matches("2  policy +replace  %(insufficient_capacity: room for 4 shell sessions, and 13 are needed", out)
    assert.matches("3  then +torn down", out)
    out, status = support.sh("paddock policy explain --config examples/config/deerflow.lua -u alice -t t1 --attest capacity")
    assert.equal(64, status, out)
  end)
end)

describe("a deer-flow's folders in a real sandbox", function()
  local possible, why = support.can_sandbox()

  it("are seen on both sides, and the read-only ones are read-only [D1, D4, B2]", function()
    if not possible then return pending(why) end
    local root = support.tmpdir()
    os.execute(("mkdir -p %s/skills_view/public && echo hello > %s/skills_view/public/s.md && chmod -R a+rX %s"):format(root, root, root))
    local rt = support.open {
      backend = "process", clock = "monotonic", threads = true, network = "none", sandbox = {}, policy_options = { base_dir = root },
    }
    finally(function() rt:shutdown() end)
    local box = rt:acquire { user = "alice", thread = "t1" }
    assert.equal(rt:explain({ user = "alice", thread = "t1" }).id, box.id)
    local r = box:exec([[echo out > /mnt/user-data/outputs/o.txt && cat /mnt/skills/public/s.md
      touch /mnt/skills/public/x 2>/dev/null && echo writable; touch /mnt/acp-workspace/x 2>/dev/null && echo writable
      ls /mnt/user-data]])
    assert.equal("hello\noutputs\nuploads\nworkspace\n", r.stdout)
    assert.equal("out\n", support.read_file(root .. "/users/alice/threads/t1/user-data/outputs/o.txt"))
    assert.is_true(rt:capabilities().thread_data_mounts)
    assert.equal("active", rt:acquire({ user = "alice", thread = "t1" }).source)
  end)

  it("of credentials lie one in the other: the locks writable in a configuration that is not [D6]", function()
    if not possible then return pending(why) end
    local root = support.tmpdir()
    local rt = support.open {
      backend = "process", clock = "monotonic", threads = true, network = "none", sandbox = {},
      policy_options = { base_dir = root, lark_cli = true },
    }
    finally(function() rt:shutdown() end)
    local mounted = rt:acquire({ user = "alice", thread = "t1" })
      :exec([[sed -n 's|^[^ ]* \(/mnt/integrations[^ ]*\) [^ ]* \(r[ow]\).*|\1 \2|p' /proc/mounts]]).stdout
    assert.equal(("%s/config ro\n%s/config/locks rw\n%s/data rw\n"):gsub("%%s", LARK), mounted)
  end)
end)

describe("a deer-flow's provisioner, over HTTP", function()
  local provisioner = require "tests.support.provisioner"
  local double, root
  setup(function() double = provisioner.start() end)
  teardown(function() double:stop() end)
  before_each(function()
    double:tell { reset = true }
    root = support.tmpdir()
  end)
  after_each(support.cleanup)

  local function open(opts)
    local options = {
      sandbox = { provisioner_url = double.url, provisioner_api_key = "k" }, ready_interval = 0.05, ready_timeout = 5,
      policy_options = { base_dir = root, lark_cli = { "alice" }, legacy_skills = { "alice" } },
    }
    for key, value in pairs(opts or {}) do options[key] = value end
    local rt = support.open(options)
    finally(function() pcall(rt.shutdown, rt) end)
    return rt
  end

  it("is asked for what the configuration says, with the nine mounts that it takes [B9, D10, H1, H3, H4, H5, H6]", function()
    support.sh("mkdir -p " .. root .. "/integrations/lark-cli/sandbox-cli")
    double:tell { set = { capabilities = { lark_cli_init_image = true, lark_cli_broker_image = true } } }
    local rt = open { subagent_runtime = { max_running = 12 }, skills = { container_path = "/custom-skills" } }
    local box = rt:acquire { user = "alice", thread = "t1" }
    local body = double:requests "create"[1].body
    local targets = {}
    for i, mount in ipairs(body.extra_mounts) do targets[i] = mount.container_path .. (mount.read_only and "" or " rw") end
    body.extra_mounts = nil
    assert.same({
      sandbox_id = rt:explain({ user = "alice", thread = "t1" }).id, thread_id = "t1", user_id = "alice", include_legacy_skills = true,
      skills_container_path = "/custom-skills", provision_lark_cli_runtime = true, provision_lark_cli_broker = true,
      max_shell_sessions = 13,
    }, body)
    -- The runtime is the provisioner's to supply, when it is asked to.
    assert.same({ "/mnt/acp-workspace", "/custom-skills/public", "/custom-skills/custom", "/custom-skills/legacy",
      "/custom-skills/integrations", LARK .. "/config", LARK .. "/config/locks rw", LARK .. "/data rw" }, targets)
    assert.same({ true, 13 }, { rt:inspect(box.id).info.attestation.broker, rt:inspect(box.id).info.attestation.capacity })
    box:release()
    assert.equal("warm", rt:acquire({ user = "alice", thread = "t1" }).source)
    assert.equal(1, double:count "capabilities")
  end)

  it("is asked for nothing of an integration that the user has not, and not what it can do [H5, I9]", function()
    local rt = open()
    rt:acquire { user = "bob", thread = "t1" }
    local body = double:requests "create"[1].body
    assert.same({ false, false, false },
      { body.include_legacy_skills, body.provision_lark_cli_runtime, body.provision_lark_cli_broker })
    assert.is_nil(body.max_shell_sessions)
    assert.equal(0, double:count "capabilities")
  end)

  it("that cannot say what it can do gets no create request [I10]", function()
    local rt = open()
    double:tell { faults = { { route = "capabilities", status = 503 } } }
    local err = support.caught(rt.acquire, rt, { user = "alice", thread = "t1" })
    assert.same({ "unverified", "capability" }, { err.kind, err.reason })
    assert.equal(0, double:count "create")
    assert.equal("", (support.sh("ls " .. root .. "/users 2>/dev/null || true")))
  end)

  it("is down, and wants a broker when it is back: the sandbox serves, and is then replaced [I7]", function()
    local rt = open { policy_options = { base_dir = root } }
    double:tell { set = { capabilities = { lark_cli_init_image = true, lark_cli_broker_image = false } } }
    local function turn() return rt:acquire { user = "alice", thread = "t1", requirements = { lark_cli = true } } end
    local box = turn()
    local id, generation = box.id, box.generation
    box:release()
    rt:advance(301)
    double:tell { faults = { { route = "capabilities", status = 500 } } }
    box = turn()
    assert.same({ "warm", generation }, { box.source, box.generation })
    box:release()
    double:tell {
      faults = require("cjson").decode "[]", set = { capabilities = { lark_cli_init_image = true, lark_cli_broker_image = true } },
    }
    rt:advance(31)
    box = turn()
    assert.equal("created", box.source)
    assert.equal(id, box.id)
    assert.not_equal(generation, box.generation)
    assert.is_true(double:requests "create"[2].body.provision_lark_cli_broker)
  end)
end)
