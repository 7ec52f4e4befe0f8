--- paddock doctor: each check on machines that are invented here, then the real one.
local support = require "tests.support"
local cli = require "tests.support.cli"
local doctor = require "paddock.cli.doctor"

--- A machine where all is well; `changes` replaces some of it.
local function machine(changes)
  local m = {
    files = {
      ["/usr/bin/bwrap"] = { mode = 493, uid = 0 }, ["/opt/paddock-guest"] = { mode = 493, uid = 0 },
      ["/"] = { mode = 493, uid = 0, directory = true }, ["/state"] = { mode = 448, uid = 1000, directory = true },
    },
    texts = {
      ["/proc/sys/user/max_user_namespaces"] = "15000\n", ["/proc/sys/kernel/unprivileged_userns_clone"] = "1\n",
      ["/proc/self/cgroup"] = "0::/user.slice\n",
      ["/sys/fs/cgroup/user.slice/cgroup.controllers"] = "cpu memory pids\n",
      ["/opt/paddock-guest"] = "\127ELF\2\1" .. ("\0"):rep(26) .. string.pack("<I8", 64) .. ("\0"):rep(14)
        .. string.pack("<I2I2", 56, 1) .. ("\0"):rep(6) .. string.pack("<I4", 1) .. ("\0"):rep(60),
    },
    system = { magic = 0xef53, free = 10 << 30, total = 20 << 30, files_free = 100000 },
    clocks = { { monotonic = 5, boottime = 5, wall = 1800000000 }, { monotonic = 6, boottime = 6, wall = 1800000001 } },
    uid = 1000, readonly = {}, ran = {},
    run = function(argv)
      if argv[2] == "--version" then
        return { code = 0, out = argv[1]:find("bwrap") and "bubblewrap 0.8.0\n" or "paddock-guest 0.1.0\n", err = "" }
      end
      return { code = 0, out = "", err = "" }
    end,
    policies = function() return 5 end,
  }
  for key, value in pairs(changes or {}) do m[key] = value end
  local reads = 0
  m.probe = {
    run = function(argv, timeout)
      assert(timeout > 0 and timeout <= 30)
      m.ran[#m.ran + 1] = table.concat(argv, " ")
      return m.run(argv)
    end,
    read = function(path) return m.texts[path] end,
    stat = function(path) return m.files[path] end,
    access = function(path, how) return how == "x" or not m.readonly[path] end,
    statfs = function() return m.system end,
    clocks = function()
      reads = reads + 1
      return m.clocks[(reads - 1) % 2 + 1]
    end,
    facts = function() return { uid = m.uid, pid = 1, exe = "/opt/paddock" } end,
    privileged = function() return nil end,
    find_guest = function(option)
      local path = option or "/opt/paddock-guest"
      if m.files[path] then return path end
      return nil, "paddock-guest is not at " .. path
    end,
    getenv = function(name) return name == "PATH" and "/usr/local/bin:/usr/bin" or nil end,
  }
  return m
end

--- The answer of one check.
local function check(name, m, config)
  config = config or {}
  config.state_dir = config.state_dir or "/state"
  for _, one in ipairs(doctor.examine(m.probe, config, { policies = m.policies })) do
    if one.name == name then return one end
  end
  error("no check is called " .. name)
end

describe("doctor", function()
  it("finds nothing to say about a good machine", function()
    local m = machine()
    local report = doctor.examine(m.probe, { state_dir = "/state" }, { policies = m.policies })
    assert.is_true(#report >= 12)
    for _, one in ipairs(report) do
      assert.is_true(one.status == "ok" or one.status == "info", one.name .. ": " .. one.message)
    end
  end)

  it("says what to do with everything that it warns of or fails", function()
    local m = machine { files = {}, texts = {}, readonly = setmetatable({}, { __index = function() return true end }) }
    m.policies = function() error({ kind = "policy_error", message = "reuse.lua:3: no" }, 0) end
    local failed = 0
    for _, one in ipairs(doctor.examine(m.probe, { state_dir = "/state" }, { policies = m.policies })) do
      if one.status == "fail" then failed = failed + 1 end
      if one.status == "fail" or one.status == "warn" then
        assert.is_true(type(one.advice) == "string" and one.advice ~= "", one.name)
      end
      assert.is_nil(one.message:find("\n"))
    end
    assert.is_true(failed >= 4)
  end)

  it("refuses a bubblewrap that is missing, setuid or broken", function()
    local m = machine()
    m.files["/usr/bin/bwrap"] = nil
    assert.equal("fail", check("bubblewrap", m).status)
    assert.matches("apt install bubblewrap", check("bubblewrap", m).advice)
    assert.equal("fail", check("namespaces", m).status)
    m.files["/usr/bin/bwrap"] = { mode = 0x800 | 493, uid = 0 }
    assert.matches("setuid", check("bubblewrap", m).message)
    assert.matches("chmod u%-s /usr/bin/bwrap", check("bubblewrap", m).advice)
    m.files["/usr/bin/bwrap"] = { mode = 493, uid = 0 }
    m.run = function() return nil, "no such file" end
    assert.equal("fail", check("bubblewrap", m).status)
    m.run = function() return { code = 0, out = "bubblewrap 0.4.1\n", err = "" } end
    assert.equal("warn", check("bubblewrap", m).status)
  end)

  it("tells a masked /proc from missing namespaces by trying both", function()
    local m = machine()
    m.run = function(argv)
      local with_proc = table.concat(argv, " "):find("--proc", 1, true)
      return { code = with_proc and 1 or 0, out = "", err = with_proc and "bwrap: Can't mount proc: EPERM\n" or "" }
    end
    assert.matches("/proc cannot be mounted", check("namespaces", m).message)
    m.run = function() return { code = 1, out = "", err = "bwrap: No permissions to create new namespace\nmore\n" } end
    local answer = check("namespaces", m)
    assert.equal("fail", answer.status)
    assert.matches("No permissions to create new namespace$", answer.message)
    assert.matches("sysctl", answer.advice)
  end)

  it("reads the switches of user namespaces, and lets root off", function()
    local m = machine()
    m.texts["/proc/sys/kernel/unprivileged_userns_clone"] = "0\n"
    assert.equal("fail", check("user namespaces", m).status)
    m.uid = 0
    assert.equal("warn", check("user namespaces", m).status)
    m.texts["/proc/sys/user/max_user_namespaces"] = "0\n"
    assert.equal("fail", check("user namespaces", m).status)
  end)

  it("tells cgroups that are delegated, of version 1, and absent", function()
    local m = machine()
    assert.matches("version 2, delegated", check("cgroups", m).message)
    m.readonly["/sys/fs/cgroup/user.slice"] = true
    assert.matches("rlimits", check("cgroups", m).message)
    m = machine { texts = { ["/proc/self/cgroup"] = "5:memory:/\n3:pids:/\n" } }
    assert.matches("version 1, writable: memory, pids, cpu", check("cgroups", m).message)
    for _, name in ipairs { "memory", "pids", "cpu" } do m.readonly["/sys/fs/cgroup/" .. name] = true end
    assert.equal("warn", check("cgroups", m).status)
  end)

  it("looks at the guest's file and runs it", function()
    local m = machine()
    assert.matches("static, paddock%-guest 0.1.0", check("guest", m).message)
    m.texts["/opt/paddock-guest"] = m.texts["/opt/paddock-guest"]:gsub(string.pack("<I4", 1) .. ("\0"):rep(60) .. "$",
      string.pack("<I4", 3) .. ("\0"):rep(60))
    assert.matches("not linked statically", check("guest", m).message)
    m.texts["/opt/paddock-guest"] = "#!/bin/sh\n"
    assert.matches("no program for this machine", check("guest", m).message)
    m.files["/opt/paddock-guest"] = nil
    assert.matches("not at /opt/paddock%-guest", check("guest", m).message)
  end)

  it("warns of state directories that are open to others, volatile or remote, and fails those it cannot write", function()
    local m = machine()
    m.files["/state"].mode = 493
    assert.matches("chmod 700 /state", check("state directory", m).advice)
    m.system.magic = 0x01021994
    assert.matches("tmpfs", check("state directory", m).message)
    m.system.magic = 0x6969
    assert.matches("locks", check("state directory", m).message)
    m.readonly["/state"] = true
    assert.equal("fail", check("state directory", m).status)
    m = machine()
    m.files["/state"] = { mode = 420, uid = 0 }
    assert.matches("not a directory", check("state directory", m).message)
    assert.matches("will be made", check("state directory", machine(), { state_dir = "/new/place" }).message)
  end)

  it("counts free space and free inodes", function()
    local m = machine()
    m.system.free = 100 << 20
    assert.equal("warn", check("free space", m).status)
    m.system.free = 1 << 20
    assert.equal("fail", check("free space", m).status)
    m.system.free, m.system.files_free = 10 << 30, 3
    assert.equal("fail", check("free space", m).status)
    m.system.files_free = -1 -- a file system that does not count them
    assert.equal("ok", check("free space", m).status)
  end)

  it("notices a clock that goes back, an unset wall clock and a suspend", function()
    local m = machine()
    m.clocks[2] = { monotonic = 4, boottime = 6, wall = 1800000000 }
    assert.equal("fail", check("clock", m).status)
    m = machine { clocks = { { monotonic = 5, boottime = 5, wall = 10 }, { monotonic = 6, boottime = 6, wall = 11 } } }
    assert.equal("warn", check("clock", m).status)
    m = machine { clocks = { { monotonic = 5, boottime = 3605, wall = 18e8 }, { monotonic = 6, boottime = 3606, wall = 18e8 } } }
    assert.matches("suspended for 1h00m", check("clock", m).message)
  end)

  it("only mentions engines, also when they do not answer", function()
    local m = machine()
    assert.equal("info", check("docker", m).status)
    m.files["/usr/bin/docker"] = { mode = 493 }
    m.run = function() return { code = 1, out = "", err = "Cannot connect\n" } end
    assert.matches("does not answer: Cannot connect", check("docker", m).message)
    assert.equal("info", check("docker", m).status)
  end)

  it("runs no command of podman's: any makes a store for its user and leaves a process", function()
    local m = machine()
    m.files["/usr/bin/podman"] = { mode = 493 }
    m.run = function() return { code = 0, out = "podman version 4.3.1\n", err = "" } end
    assert.equal("/usr/bin/podman, podman version 4.3.1", check("podman", m).message)
    for _, command in ipairs(m.ran) do
      assert.is_true(not command:find("podman", 1, true) or command == "/usr/bin/podman --version", command)
    end
  end)

  it("reports a check that breaks as a failed check", function()
    local m = machine()
    m.probe.clocks = function() error("boom") end
    assert.equal("fail", check("clock", m).status)
    assert.equal("ok", check("free space", m).status)
  end)
end)

describe("the doctor of an engine of one's own", function()
  after_each(support.cleanup)

  it("loads it with its options, and names what it lacks", function()
    local folder = support.tmpdir()
    local m = machine()
    m.probe.own_engine = require("paddock.cli.world").load_engine
    local function engine(text)
      support.write_file(folder .. "/e.lua", text)
      return check("engine", m, { backend = folder .. "/e.lua", backend_options = { root = "/x" } })
    end
    local none = check("engine", m, { backend = "/no/such/engine.lua" })
    assert.equal("fail", none.status)
    assert.matches("/no/such/engine.lua: No such file", none.message)
    assert.matches("has no function `create`", engine("return {}").message)
    assert.matches("root is /x", engine("return { new = function(o) error('root is ' .. o.root) end }").message)
    local whole = "local e = {} for n in ('create destroy inspect discover alive ready connect'):gmatch '%a+' do "
      .. "e[n] = function() end end return e"
    assert.equal("ok", engine(whole).status)
  end)
end)

describe("the program's doctor", function()
  local have, why = cli.have_program()
  after_each(support.cleanup)

  it("prints a report whose exit code says whether something failed", function()
    if not have then pending(why) return end
    local folder = support.tmpdir()
    local code, out, err = cli.program({ env = "XDG_STATE_HOME=" .. folder }, "doctor")
    assert.equal("", err)
    assert.equal(out:find("\nfail ") or out:find("^fail ") and 69 or 0, code)
    for _, name in ipairs { "bubblewrap", "namespaces", "cgroups", "state directory", "clock", "policies", "docker", "guest" } do
      assert.matches("\n%a+ +" .. name, "\n" .. out)
    end
  end)

  it("says at its end how many checks failed", function()
    if not have then pending(why) return end
    local folder = support.tmpdir()
    support.write_file(folder .. "/c.lua", 'return { backend = "docker", backend_options = { host = "unix:///nowhere/x.sock" } }')
    local code, out = cli.program({ env = "XDG_STATE_HOME=" .. folder }, "doctor", "--config", folder .. "/c.lua")
    assert.equal(69, code)
    local _, failed = ("\n" .. out):gsub("\nfail ", "")
    assert.matches(failed == 1 and "\n1 check failed\n$" or "\n" .. failed .. " checks failed\n$", out)
  end)

  it("prints one JSON document, and fails with 69 without bubblewrap", function()
    if not have then pending(why) return end
    local folder = support.tmpdir()
    support.sh("mkdir " .. folder .. "/bin; ln -s $(command -v paddock) $(command -v env) " .. folder .. "/bin/")
    local code, out = cli.program({ env = ("XDG_STATE_HOME=%s PATH=%s/bin"):format(folder, folder) }, "doctor", "--json")
    assert.equal(69, code)
    local report = require("cjson").decode(out)
    assert.is_false(report.ok)
    assert.equal("fail", report.checks[1].status)
  end)
end)
