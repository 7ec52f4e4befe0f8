-- Mounts from the policy to the engine's spec, over the scripted backend and real folders. What the core does with each
-- field is tested in tests/c/test_mounts.c; how a sandbox sees a mount, in mounts_process_spec.lua.
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

describe("mounts", function()
  local world, root
  before_each(function()
    world = support.world()
    root = support.tmpdir()
  end)
  after_each(function() world:assert_quiet() end)

  --- A runtime whose policy composes `text`, a Lua expression; `root` and `ctx` are known in it.
  local function open(text, opts)
    local options = {
      mount_roots = { root },
      policies = { mounts = { name = "mounts.lua", source = ([[
        local paths = policy.require "paths"
        local root = %q
        return { compose = function(ctx) local _ = paths return %s end }]]):format(root, text) } },
    }
    for k, v in pairs(opts or {}) do options[k] = v end
    return world:open(options)
  end
  local function spec_of(box) return world:container(box.id).spec.mounts end
  local function files() return (support.sh("cd " .. root .. " && find . -mindepth 1 -printf '%p %m\\n' | sort")) end

  it("reach the engine as source, target and read_only, in their order", function()
    support.sh(("mkdir %s/a %s/b"):format(root, root))
    local rt = open [[{ { source = root .. "/b", target = "/mnt/b" }, { source = root .. "/a", target = "/mnt/b/a", read_only = false } }]]
    assert.same({ { source = root .. "/b", target = "/mnt/b", read_only = true },
                  { source = root .. "/a", target = "/mnt/b/a", read_only = false } }, spec_of(rt:acquire(ALICE)))
  end)

  it("with create: the folder of each thread is made with its mode, whatever the umask [D2]", function()
    local script = support.tmpdir() .. "/host.lua"
    support.write_file(script, ([[
      local support = require "tests.support"
      local world = support.world()
      local rt = world:open { mount_roots = { %q }, policies = { mounts = { name = "mounts.lua", source = [=[
        local paths = policy.require "paths"
        return { compose = function(ctx)
          return { { source = paths.join(%q, "threads", ctx.identity.thread, "acp"), target = "/mnt/acp", create = "0777" } }
        end }]=] } } }
      rt:acquire { user = "u", thread = "t1" }
      rt:shutdown()
      rt = world:open { mount_roots = { %q } }
      support.cleanup()]]):format(root, root, root))
    for _, mask in ipairs { "0077", "0000", "0027" } do
      local output, status = support.sh(("umask %s; %s %s; cd %s && find threads -name acp -printf '%%m'; rm -r threads")
        :format(mask, os.getenv("LUA") or "lua5.4", script, root))
      assert.equal("777", output, mask)
      assert.equal(0, status)
    end
  end)

  it("of a thread id that could leave the directory are invalid_argument, and no directory is made [D3]", function()
    local rt = open [[{ { source = paths.join(root, "threads", paths.safe_component(ctx.identity.thread, "the thread id"), "acp"),
      target = "/mnt/acp", create = "0777" } }]]
    for _, thread in ipairs { "../escape", "..", "a/b", "a\nb", "x\0y", "", ("x"):rep(65) } do
      local err = support.caught(rt.acquire, rt, { user = "alice", thread = thread })
      assert.equal("invalid_argument", err.kind, ("%q"):format(thread))
    end
    assert.equal("", files())
    assert.equal("", (support.sh(("ls -d %s/../escape %s/../threads 2>/dev/null"):format(root, root))))
    assert.equal(0, world:count "create")
    rt:acquire(ALICE)
    assert.equal("./threads 755\n./threads/t1 755\n./threads/t1/acp 777\n", files())
  end)

  it("whose policy joins without a check still stay below mount_roots [D3]", function()
    local rt = open [[{ { source = root .. "/threads/" .. ctx.identity.thread, target = "/mnt/acp", create = "0777" } }]]
    for _, thread in ipairs { "../escape", "../../" .. root:match("[^/]+$") .. "2" } do
      local err = support.caught(rt.acquire, rt, { user = "alice", thread = thread })
      assert.equal("policy_error", err.kind)
    end
    assert.equal("", files())
    assert.equal(0, world:count "create")
  end)

  it("on /, /proc, /sys and /dev, or crooked, are refused: nothing is made, nothing handed out", function()
    for _, target in ipairs {
      "/", "/proc", "/proc/sys", "/sys", "/sys/fs/cgroup", "/dev", "/dev/shm", "/a/../proc", "//proc", "/proc/", "x", "", "/a\0b",
      "/./dev",
    } do
      local rt = open(([[{ { source = root .. "/new", target = "/fine", create = "0777" },
        { source = root, target = %q } }]]):format(target))
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal("policy_error", err.kind, target)
      assert.matches("mounts.lua:", err.message, 1, true)
      rt:shutdown()
      if target ~= "/a\0b" then
        err = support.caught(open, "{}", { mounts = { { source = root, target = target } } })
        assert.equal("invalid_argument", err.kind)
        assert.matches("mounts[1].target", err.message, 1, true)
      end
    end
    assert.equal("", files())
    assert.equal(0, world:count "create")
  end)

  it("that look like those but are others are not refused", function()
    local rt = open [[{ { source = root, target = "/process" }, { source = root, target = "/system/proc" },
      { source = root, target = "/device" } }]]
    assert.equal(3, #spec_of(rt:acquire(ALICE)))
  end)

  it("that are refused leave nothing half-made, and the identity can be served as soon as they are right", function()
    support.sh(("mkdir %s/real && ln -s / %s/link"):format(root, root))
    local before = files()
    for _, bad in ipairs {
      [[{ source = "/etc", target = "/z" }]], [[{ source = root .. "/../x", target = "/z", create = "0777" }]],
      [[{ source = root .. "/link/etc", target = "/z" }]], [[{ source = root .. "/none", target = "/z" }]],
      [[{ source = root, target = "/z", owner_only = true }]], [[{ source = "relative", target = "/z" }]],
      [[{ source = root, target = "/z", create = "rwx" }]], [[{ source = root, target = "/z", mode = 1 }]], [[5]],
    } do
      local rt = open(("{ { source = root .. '/n/e/w', target = '/a', create = '0777' }, %s }"):format(bad))
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal("policy_error", err.kind, bad)
      assert.equal(rt:explain(ALICE).id, err.sandbox_id, bad)
      assert.same({}, rt:list())
      assert.equal(0, rt:stats().creating)
      rt:shutdown()
      assert.equal(before, files(), bad)
    end
    assert.equal(0, world:count "create")
    local rt = open [[{ { source = root .. "/n/e/w", target = "/a", create = "0777" } }]]
    assert.equal("created", rt:acquire(ALICE).source)
  end)

  it("carry each target once: the policy's earlier one, then the operator's; what is not there takes no target [D9]", function()
    support.sh(("mkdir -p %s/R/public %s/R/custom %s/u/config/locks %s/u/data %s/own"):format(root, root, root, root, root))
    local events = {}
    local rt = open([[{
        { source = root .. "/R/public", target = "/mnt/skills/public" },
        { source = root .. "/R/custom", target = "/mnt/skills/custom" },
        { source = root .. "/R/none", target = "/mnt/skills/integrations", if_exists = true },
        { source = root .. "/u/config", target = "/cred/config", owner_only = true },
        { source = root .. "/u/config/locks", target = "/cred/config/locks", read_only = false, owner_only = true },
        { source = root .. "/u/data", target = "/cred/data", read_only = false, owner_only = true },
        { source = root .. "/R/public", target = "/mnt/skills/custom" },
      }]], {
        mounts = { { source = root .. "/own", target = "/mnt/skills/public" }, { source = root .. "/own", target = "/mnt/own" },
                   { source = root .. "/own", target = "/mnt/skills/integrations" }, { source = root .. "/u", target = "/mnt/own" } },
        log = function(record) events[#events + 1] = record end,
      })
    local got, sources = {}, {}
    for i, mount in ipairs(spec_of(rt:acquire(ALICE))) do
      got[i], sources[mount.target] = mount.target, mount.source:sub(#root + 1)
    end
    assert.same({ "/mnt/skills/public", "/mnt/skills/custom", "/cred/config", "/cred/config/locks", "/cred/data", "/mnt/own",
                  "/mnt/skills/integrations" }, got)
    assert.equal("/R/custom", sources["/mnt/skills/custom"])
    assert.equal("/R/public", sources["/mnt/skills/public"])
    assert.equal("/own", sources["/mnt/own"])
    assert.equal("/own", sources["/mnt/skills/integrations"])
    rt:dispatch()
    local dropped = {}
    for _, record in ipairs(events) do
      if record.event == "mount_dropped" then dropped[#dropped + 1] = record.target end
    end
    table.sort(dropped)
    assert.same({ "/mnt/own", "/mnt/skills/custom", "/mnt/skills/public" }, dropped)
    assert.matches("./u/config 700", files(), 1, true)
    assert.matches("./u/config/locks 700", files(), 1, true)
    assert.matches("./u/data 700", files(), 1, true)
    assert.matches("./u 755", files(), 1, true)
  end)

  it("for their owner only are refused when a link is in the tree, before any mode is changed [D7]", function()
    support.sh(("mkdir -p %s/c/d && touch %s/c/f && chmod 644 %s/c/f && ln -s /etc/passwd %s/c/d/link"):format(root, root, root, root))
    local before = files()
    local rt = open [[{ { source = root .. "/c", target = "/c", owner_only = true } }]]
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("policy_error", err.kind)
    assert.matches("symbolic link", err.message, 1, true)
    assert.equal(before, files())
    support.sh(("rm %s/c/d/link"):format(root))
    rt:acquire(ALICE)
    assert.equal("./c 700\n./c/d 700\n./c/f 600\n", files())
  end)

  it("for their owner only may be at work: what goes away meanwhile is no fault", function()
    support.sh(("mkdir -p %s/c && cd %s/c && for i in 1 2 3 4 5 6 7 8 9; do touch ${i}1 ${i}2 ${i}3 ${i}4 ${i}5; done")
      :format(root, root))
    -- Ends by itself when the folder is gone, or when it is told to.
    support.sh(("(cd %s/c && while [ ! -e ../stop ] && [ -d ../c ]; do for i in a b c d e f; do mkdir $i; : > $i/x; rm -r $i; done; done) "
      .. ">/dev/null 2>&1 &"):format(root))
    local rt = open [[{ { source = root .. "/c", target = "/c", owner_only = true } }]]
    local failure
    for i = 1, 100 do
      local fine, err = pcall(rt.acquire, rt, { user = "alice", thread = "t" .. i })
      failure = failure or (not fine and tostring(err)) or nil
    end
    support.sh(("touch %s/stop"):format(root))
    assert.is_nil(failure)
  end)

  it("are asked for at creation only: one that is reclaimed has those that it was made with", function()
    support.sh(("mkdir %s/a"):format(root))
    local rt = open [[{ { source = root .. "/a", target = "/mnt/a" } }]]
    rt:acquire(ALICE):release()
    support.sh(("rmdir %s/a"):format(root))
    assert.equal("warm", rt:acquire(ALICE).source)
  end)
end)
