-- Mounts and files as a real sandbox sees them: the whole way from the policy through the core to bubblewrap and the guest.
-- There is no archive handling anywhere (uploads are single files), so B022 and B217 have nothing to test.
local support = require "tests.support"

local ALICE, BOB = { user = "alice", thread = "t1" }, { user = "bob", thread = "t1" }
local works, why_not = support.can_sandbox()

describe("in a process sandbox", function()
  if not works then
    it("mounts", function() pending(why_not) end)
    return
  end

  local root, runtimes
  before_each(function() root, runtimes = support.tmpdir(), {} end)
  after_each(function()
    for _, rt in ipairs(runtimes) do rt:shutdown() end
    support.cleanup()
  end)

  --- A runtime whose policy composes `text`, a Lua expression in which `root`, `ctx` and `paths` are known.
  local function open(text, opts)
    local options = {
      backend = "process", clock = "monotonic", mount_roots = { root },
      policies = { mounts = { name = "mounts.lua", source = ([[
        local paths = policy.require "paths"
        local root = %q
        return { compose = function(ctx) local _ = paths return %s end }]]):format(root, text) } },
    }
    for k, v in pairs(opts or {}) do options[k] = v end
    local rt = support.open(options)
    runtimes[#runtimes + 1] = rt
    return rt
  end
  local function sh(...) return (support.sh(string.format(...))) end
  local function out(box, command) return box:exec(command, { timeout = 20 }).stdout end

  it("a folder made with 0777 can be written by the sandbox's own user, under any umask [D2]", function()
    local rt = open [[{ { source = paths.join(root, "threads", ctx.identity.thread), target = "/mnt/out", read_only = false,
      create = "0777" } }]]
    local box = rt:acquire(ALICE)
    assert.equal("ok\n", out(box, "echo result > /mnt/out/f && echo ok"))
    assert.equal("result\n", support.read_file(root .. "/threads/t1/f"))
    assert.equal("777\n", sh("stat -c %%a %s/threads/t1", root))
  end)

  it("a source below a folder that is closed to the sandbox's user is mounted all the same [B016]", function()
    sh("mkdir -p %s/closed/data && echo secret > %s/closed/data/f && chmod 755 %s/closed/data && chmod 700 %s/closed %s", root, root,
      root, root, root)
    local rt = open [[{ { source = root .. "/closed/data", target = "/mnt/data" } }]]
    local box = rt:acquire(ALICE)
    assert.equal("secret\n", out(box, "cat /mnt/data/f"))
    assert.equal("", out(box, ("ls %s %s/closed 2>/dev/null"):format(root, root)))
  end)

  it("a read-only mount is so for the shell and for the file calls, also through a link that leads out of it [B012]", function()
    sh("mkdir -p %s/ro %s/rw && chmod 777 %s/rw && echo old > %s/ro/f && ln -s /mnt/rw %s/ro/link && ln -s /mnt/ro %s/rw/back", root,
      root, root, root, root, root)
    local rt = open [[{ { source = root .. "/ro", target = "/mnt/ro" },
      { source = root .. "/rw", target = "/mnt/rw", read_only = false } }]]
    local box = rt:acquire(ALICE)
    for _, path in ipairs { "/mnt/ro/f", "/mnt/ro/new", "/mnt/ro/link/x", "/mnt/rw/back/x", "/mnt/rw/back/f", "/mnt/rw/../ro/f" } do
      local err = support.caught(box.write, box, path, "new")
      assert.is_truthy(err.kind == "io_error" or err.kind == "invalid_argument", path .. ": " .. tostring(err))
    end
    assert.equal("", out(box, "for f in /mnt/ro/f /mnt/ro/new /mnt/rw/back/x; do (echo x > $f) 2>/dev/null && echo $f; done"))
    assert.equal("old\n", support.read_file(root .. "/ro/f"))
    assert.equal("back\n", sh("ls %s/rw", root))
    box:write("/mnt/rw/x", "new")
    assert.equal("new", box:read("/mnt/rw/x"))
  end)

  it("read, write and list refuse a link that leads out of its mount as first, middle and last part [B023]", function()
    sh([[mkdir -p %s/m/deep %s/out/deep && chmod -R 777 %s/m %s/out && echo secret > %s/out/f && echo secret > %s/out/deep/f
      ln -s /mnt/out %s/m/first; ln -s ../../out %s/m/deep/middle; ln -s /mnt/out/f %s/m/last; ln -s /proc/1/root %s/m/magic]], root, root,
      root, root, root, root, root, root, root, root)
    local rt = open [[{ { source = root .. "/m", target = "/mnt/m", read_only = false },
      { source = root .. "/out", target = "/mnt/out", read_only = false } }]]
    local box = rt:acquire(ALICE)
    assert.equal("secret\n", box:read("/mnt/out/f"))
    for _, path in ipairs { "/mnt/m/first/f", "/mnt/m/deep/middle/f", "/mnt/m/last", "/mnt/m/magic/mnt/out/f" } do
      for _, call in ipairs { { box.read, box, path }, { box.write, box, path, "new" }, { box.list, box, path } } do
        local err = support.caught(table.unpack(call))
        assert.is_truthy(err.kind == "io_error" or err.kind == "invalid_argument", path .. ": " .. tostring(err))
      end
    end
    support.caught(box.list, box, "/mnt/m/first")
    assert.equal("secret\n", support.read_file(root .. "/out/f"))
    -- A shell in the sandbox may follow them: it reaches nothing that is not mounted there anyway.
    assert.equal("secret\n", out(box, "cat /mnt/m/last"))
  end)

  it("a tenant's folder is nowhere in the sandbox of another, though both lie below one root [B018]", function()
    local rt = open([[{ { source = paths.join(root, "tenants", ctx.identity.user), target = "/mnt/own", read_only = false,
      create = "0777" } }]], { data_dir = root .. "/data" })
    local a, b = rt:acquire(ALICE), rt:acquire(BOB)
    out(a, "echo alice > /mnt/own/canary-a; echo alice > /workspace/canary-a")
    out(b, "echo bob > /mnt/own/canary-b; echo bob > /workspace/canary-b")
    local find = "ls -a /mnt/own/.. /workspace/.. /mnt /; find / -xdev -name 'canary-*' 2>/dev/null; "
      .. "find /mnt /workspace /tmp -name 'canary-*'"
    assert.is_nil(out(a, find):find("canary-b", 1, true))
    assert.is_nil(out(b, find):find("canary-a", 1, true))
    assert.is_truthy(out(a, find):find("canary-a", 1, true))
    for _, path in ipairs { root, root .. "/tenants/bob", root .. "/data/" .. b.id, "/proc/1/root" .. root, "/mnt/own/../../" .. root } do
      assert.equal("", out(a, ("ls -a %s 2>/dev/null | grep -v '^[.]*$'"):format(path)), path)
    end
    assert.equal("", out(a, "grep -o '/tenants/[a-z]*' /proc/self/mountinfo | grep -v alice"))
  end)

  it("a file that the runtime writes can be read, appended to and replaced by the sandbox's user [B019]", function()
    local rt = open [[{ { source = root .. "/up", target = "/mnt/up", read_only = false, create = "0777" } }]]
    local box = rt:acquire(ALICE)
    for _, folder in ipairs { "/workspace", "/mnt/up", "/tmp" } do
      box:write(folder .. "/f", "one\n")
      assert.equal("one\n", out(box, "cat " .. folder .. "/f"))
      assert.equal("one\ntwo\n", out(box, ("echo two >> %s/f; cat %s/f"):format(folder, folder)))
      assert.equal("new\n", out(box, ("echo new > %s/g && mv %s/g %s/f && cat %s/f"):format(folder, folder, folder, folder)))
      assert.equal("new\n", box:read(folder .. "/f"))
      assert.equal("0\n", out(box, ("find %s -maxdepth 1 -type f -perm /o+w | wc -l"):format(folder)), "nothing is writable for the world")
    end
    box:write("/workspace/once", "first", { no_overwrite = true })
    assert.equal("already_exists", support.caught(box.write, box, "/workspace/once", "second", { no_overwrite = true }).reason)
    assert.equal("first", box:read("/workspace/once"))
  end)

  it("the operator's own mounts may lie outside of mount_roots, be files, and take the fields of a policy's [B172]", function()
    local other = support.tmpdir()
    sh("echo conf > %s/file && mkdir %s/inner && chmod 755 %s", other, other, other)
    local rt = open("{ { source = root, target = '/mnt/root' } }", { mounts = {
      { source = other .. "/file", target = "/mnt/file" }, { source = other .. "/inner/made", target = "/mnt/made", create = "0777",
        read_only = false }, { source = other .. "/none", target = "/mnt/none", if_exists = true } } })
    local box = rt:acquire(ALICE)
    assert.equal("conf\n", out(box, "cat /mnt/file; touch /mnt/made/x; ls /mnt/none 2>/dev/null"))
    assert.equal("x\n", sh("ls %s/inner/made", other))
    assert.equal("777\n", sh("stat -c %%a %s/inner/made", other))
  end)

  it("a link that is put in after the check does not lead out of the roots, and nothing is left", function()
    sh("mkdir %s/dir", root)
    local rt = open [[{ { source = root .. "/dir", target = "/mnt/dir" } }]]
    local box = rt:acquire(ALICE)
    box:release()
    assert.is_true(rt:destroy(box.id))
    sh("rmdir %s/dir && ln -s /etc %s/dir", root, root)
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.equal("policy_error", err.kind)
    assert.matches("leads out of its mount root", err.message, 1, true)
    assert.same({}, rt:list())
  end)

  it("a refused mount starts nothing, and leaves neither a record nor a folder", function()
    local state = support.tmpdir()
    local rt = open([[{ { source = root .. "/new", target = "/mnt/new", create = "0777" },
      { source = root .. "/none", target = "/mnt/x" } }]], { state_dir = state })
    assert.equal("policy_error", support.caught(rt.acquire, rt, ALICE).kind)
    assert.equal("", sh("ls -A %s", root))
    assert.equal("", sh("ls -A %s/sandboxes %s/sockets 2>/dev/null | grep -v ':$' | grep .", state, state))
  end)
end)
