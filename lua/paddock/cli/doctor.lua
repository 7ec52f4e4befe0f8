--- paddock doctor: what works here, what does not, and what to do about it.
--- Every check looks at the machine through `probe`, so that the tests can show it other machines.
local native = require "paddock.cli.native"
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local world = require "paddock.cli.world"

local M = {
  name = "doctor",
  usage = "doctor [--json]",
  summary = "Says what works here, what does not, and what to do about it.",
  options = {
    { "--config,-c", "F", "a Lua file that returns the options of paddock.open" },
    { "--json", nil, "print one JSON document" },
  },
  notes = "Exit code 0 unless something fails (then 69); warnings do not count.",
}

---@class paddock.doctor.Probe
---@field run fun(argv: string[], timeout: number): table?, string?   { code, out, err }, or nil and the reason
---@field read fun(path: string, bytes: integer?): string?
---@field stat fun(path: string): table?, string?
---@field access fun(path: string, how: string): boolean
---@field statfs fun(path: string): table?, string?
---@field clocks fun(): table
---@field facts fun(): table
---@field find_guest fun(option: string?): string?, string?
---@field privileged fun(path: string): string?   what lends the file rights of its own, if anything
---@field getenv fun(name: string): string?
---@field provisioner fun(options: table): table   its driver, to be asked
---@field own_engine fun(path: string, options: table): table   an engine in a file, made; raises
---@field engine fun(options: table, image: string?): paddock.EngineReport   of the docker backend; raises

---@return paddock.doctor.Probe
local function this_machine()
  local env = {}
  for _, name in ipairs { "PATH", "HOME", "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "XDG_RUNTIME_DIR" } do
    local value = os.getenv(name)
    if value then env[#env + 1] = name .. "=" .. value end
  end
  local function run(argv, timeout)
    local fine, result = pcall(require("paddock.io").proc.run, { argv = argv, timeout = timeout, env = env })
    if not fine then return nil, status.line(result) end
    return { code = result.status or 128 + result.signal, out = result.out, err = result.err }
  end
  local function read(path, bytes)
    local file <close> = io.open(path, "rb")
    return file and file:read(bytes or 4096)
  end
  --- Where the process backend would find its guest.
  local function find_guest(option)
    local fine, path = pcall(require("paddock.backend.process").find_guest, option)
    if fine then return path end
    return nil, status.line(path)
  end
  return {
    run = run, read = read, find_guest = find_guest, privileged = require("paddock.io").proc.privileged,
    stat = native.stat, access = native.access, statfs = native.statfs, clocks = native.clocks,
    facts = native.facts, getenv = os.getenv,
    provisioner = function(options) return require("paddock.backend.provisioner").new(options) end,
    engine = function(options, image) return require("paddock.docker.doctor").examine(options, image) end,
    own_engine = function(path, options) return world.load_engine(path, options) end,
  }
end

local function ok(message) return { status = "ok", message = message } end
local function info(message) return { status = "info", message = message } end
local function warn(message, advice) return { status = "warn", message = message, advice = advice } end
local function fail(message, advice) return { status = "fail", message = message, advice = advice } end

--- The first line of a text that says something.
local function first_line(text)
  return render.plain((text:match("[^\r\n]+") or ""):sub(1, 200))
end

local function which(probe, name)
  for folder in (probe.getenv("PATH") or "/usr/bin:/bin"):gmatch("[^:]+") do
    local path = folder .. "/" .. name
    local facts = probe.stat(path)
    if facts and not facts.directory and probe.access(path, "x") then return path, facts end
  end
end

-- ---- isolation ----------------------------------------------------------------------------------------------------

local CHECKS = {}

--- The bubblewrap that the process backend would use.
local function bubblewrap(probe, config)
  local named = config.backend_options and config.backend_options.bwrap
  if type(named) == "string" then
    local facts = probe.stat(named)
    if facts then return named, facts end
    return nil
  end
  return which(probe, "bwrap")
end

function CHECKS.bubblewrap(probe, config)
  local path, facts = bubblewrap(probe, config)
  if not path then
    return fail("not found", "install it: apt install bubblewrap")
  end
  local rights = facts.mode & 0x800 ~= 0 and "setuid" or probe.privileged(path) -- 04000
  if rights then
    return fail(("%s is %s, which paddock refuses"):format(path, rights),
      ("chmod u-s %s; setcap -r %s; and allow unprivileged user namespaces instead"):format(path, path))
  end
  local result, why = probe.run({ path, "--version" }, 5)
  local version = result and result.out:match("(%d+%.[%d%.]+)")
  if not version then
    return fail(path .. " does not run: " .. (why or first_line(result.err)),
      "install it again: apt install --reinstall bubblewrap")
  end
  local major, minor = version:match("^(%d+)%.(%d+)")
  if tonumber(major) == 0 and tonumber(minor) < 5 then
    return warn(("%s is version %s"):format(path, version), "0.5 or later is what paddock is tested with")
  end
  return ok(("%s, version %s, not setuid"):format(path, version))
end

CHECKS["namespaces"] = function(probe, config)
  local path = bubblewrap(probe, config)
  if not path then return fail("not tried: there is no bubblewrap", "install it: apt install bubblewrap") end
  local base = { path, "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--dev", "/dev" }
  local full = table.move({ "--proc", "/proc", "/bin/true" }, 1, 3, #base + 1, { table.unpack(base) })
  local result, why = probe.run(full, 10)
  if result and result.code == 0 then return ok("user, mount, pid, net, ipc and uts namespaces, /proc mounted") end
  local said = why or first_line(result.err)
  local without = probe.run(table.move({ "/bin/true" }, 1, 1, #base + 1, { table.unpack(base) }), 10)
  if without and without.code == 0 then
    return fail("/proc cannot be mounted in a new pid namespace: " .. said,
      "paddock runs in a container that masks /proc: start that one with --security-opt systempaths=unconfined, "
      .. "or use the docker backend")
  end
  return fail("bubblewrap cannot make namespaces: " .. said,
    "allow them: sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=15000; in a container, start it "
    .. "with --security-opt seccomp=unconfined --cap-add SYS_ADMIN, or use the docker backend")
end

CHECKS["user namespaces"] = function(probe)
  local root = probe.facts().uid == 0
  local function number(path) return tonumber((probe.read("/proc/sys/" .. path) or ""):match("%d+")) end
  if number("user/max_user_namespaces") == 0 then
    return fail("user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces=15000")
  end
  local severity = root and warn or fail
  if number("kernel/unprivileged_userns_clone") == 0 then
    return severity("kernel.unprivileged_userns_clone is 0: only root can make sandboxes",
      "sysctl -w kernel.unprivileged_userns_clone=1")
  end
  if number("kernel/apparmor_restrict_unprivileged_userns") == 1 then
    return warn("AppArmor restricts unprivileged user namespaces",
      "if \"namespaces\" fails: give bwrap a profile with `userns,`, or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0")
  end
  local most = number("user/max_user_namespaces")
  return ok(most and ("allowed, at most %d"):format(most) or "allowed")
end

local RLIMITS = "limits are kept by rlimits, for each process and not for the sandbox as a whole"

CHECKS["cgroups"] = function(probe)
  local own = probe.read("/proc/self/cgroup", 16384)
  if not own then return warn("/proc/self/cgroup cannot be read; " .. RLIMITS, "mount /proc") end
  local path = own:match("0::([^\n]*)")
  local folder = path and ("/sys/fs/cgroup" .. path):gsub("/$", "")
  local controllers = folder and probe.read(folder .. "/cgroup.controllers")
  if controllers then
    if controllers:find("memory") and controllers:find("pids") and probe.access(folder .. "/cgroup.procs", "w")
        and probe.access(folder, "w") then
      return ok(("version 2, delegated at %s: %s"):format(folder, first_line(controllers)))
    end
    return warn("version 2, not delegated to this user; " .. RLIMITS,
      "run the host as a systemd service with Delegate=yes, or try: systemd-run --user --scope -p Delegate=yes paddock doctor")
  end
  local have = {}
  for _, name in ipairs { "memory", "pids", "cpu" } do
    if probe.access("/sys/fs/cgroup/" .. name, "w") then have[#have + 1] = name end
  end
  if #have > 0 then
    return (#have == 3 and ok or info)(("version 1, writable: %s"):format(table.concat(have, ", ")))
  end
  return warn("none that this process may write; " .. RLIMITS,
    "as root: mount cgroup2, or run as a systemd service with Delegate=yes")
end

-- ---- guest --------------------------------------------------------------------------------------------------------

--- Whether an ELF file names an interpreter (that is, needs shared libraries). nil: it is no ELF file of this kind.
---@param bytes string   its beginning
---@return boolean?
function M.needs_interpreter(bytes)
  if #bytes < 64 or bytes:sub(1, 5) ~= "\127ELF\2" then return nil end
  local order = bytes:byte(6) == 2 and ">" or "<"
  local offset = string.unpack(order .. "I8", bytes, 33)
  local size, count = string.unpack(order .. "I2I2", bytes, 55)
  for i = 0, count - 1 do
    local at = offset + i * size + 1
    if at + 3 > #bytes then return nil end
    if string.unpack(order .. "I4", bytes, at) == 3 then return true end
  end
  return false
end

CHECKS["guest"] = function(probe, config)
  local path, missing = probe.find_guest(config.backend_options and config.backend_options.guest)
  if not path then return fail(missing, "build it with `make build`, or install it beside the paddock program") end
  local dynamic = M.needs_interpreter(probe.read(path, 65536) or "")
  if dynamic == nil then return fail(path .. " is no program for this machine", "build it again: make build") end
  if dynamic then
    return fail(path .. " is not linked statically, so that it cannot run in other root file systems",
      "build it with `make build`, which links it with -static")
  end
  local result, why = probe.run({ path, "--version" }, 5)
  if not result then return fail(path .. " does not run: " .. why, "build it for this machine: make build") end
  if result.code ~= 0 then
    return fail(("%s answers --version with exit code %d: %s"):format(path, result.code, first_line(result.err)),
      "build it again: make build")
  end
  return ok(("%s, static, %s"):format(path, first_line(result.out)))
end

-- ---- places -------------------------------------------------------------------------------------------------------

local FILE_SYSTEMS = {
  [0x01021994] = "tmpfs", [0x6969] = "nfs", [0xff534d42] = "cifs", [0xfe534d42] = "smb2", [0x65735546] = "fuse",
  [0x01021997] = "9p", [0x858458f6] = "ramfs", [0x73717368] = "squashfs", [0xef53] = "ext4", [0x58465342] = "xfs",
  [0x9123683e] = "btrfs", [0x794c7630] = "overlayfs", [0x2fc12fc1] = "zfs",
}
local VOLATILE = { tmpfs = true, ramfs = true }
local REMOTE = { nfs = true, cifs = true, smb2 = true, ["9p"] = true, fuse = true }

local function existing_parent(probe, path)
  while #path > 1 and not probe.stat(path) do path = path:gsub("/+[^/]*$", "") end
  return path == "" and "/" or path
end

local function check_place(probe, path)
  local facts = probe.stat(path)
  if facts and not facts.directory then
    return fail(path .. " is not a directory", "remove it, or name another one as state_dir")
  end
  local there = facts and path or existing_parent(probe, path)
  if not probe.access(there, "w") then
    return fail(there .. " is not writable", ("chown or chmod it, or name another one (the option state_dir, or XDG_STATE_HOME)"))
  end
  local system = probe.statfs(there)
  local kind = system and FILE_SYSTEMS[system.magic]
  if kind and REMOTE[kind] then
    return warn(("%s is on %s, where locks may not hold"):format(path, kind), "name a directory on a local disk as state_dir")
  elseif kind and VOLATILE[kind] then
    return warn(("%s is on %s: records of what must not be used again vanish at a reboot"):format(path, kind),
      "name a directory on a disk as state_dir")
  end
  if facts and facts.mode & 63 ~= 0 then -- 0077
    return warn(("%s has mode %o: others can look into it"):format(path, facts.mode), "chmod 700 " .. path)
  end
  return ok(path .. (facts and ", writable" or ", will be made") .. (kind and ", " .. kind or ""))
end

CHECKS["state directory"] = function(probe, config) return check_place(probe, config.state_dir) end
CHECKS["data directory"] = function(probe, config)
  if not config.data_dir then return info("not set: /workspace lives and dies with the sandbox") end
  return check_place(probe, config.data_dir)
end

CHECKS["free space"] = function(probe, config)
  local there = existing_parent(probe, config.data_dir or config.state_dir)
  local system, why = probe.statfs(there)
  if not system then return warn(("%s: %s"):format(there, why), "name another state_dir") end
  local text = ("%s free at %s"):format(render.bytes(system.free), there)
  if system.free < 10 << 20 or system.files_free >= 0 and system.files_free < 100 then
    return fail(text .. ", too little to write records", "free some space or inodes, or name another state_dir")
  elseif system.free < 200 << 20 then
    return warn(text, "free some space, or name another state_dir")
  end
  return ok(text)
end

-- ---- the rest -----------------------------------------------------------------------------------------------------

CHECKS["clock"] = function(probe)
  local a = probe.clocks()
  local b = probe.clocks()
  if b.monotonic < a.monotonic or b.boottime < a.boottime then
    return fail("the monotonic clock goes backwards", "report it to whoever runs this machine; paddock cannot keep time here")
  end
  if a.wall < 1704067200 then
    return warn(("the wall clock says %s"):format(os.date("!%Y-%m-%d", a.wall // 1 | 0)), "set it; records and ctx.now use it")
  end
  local suspended = a.boottime - a.monotonic
  if suspended > 1 then
    return info(("sane; this machine was suspended for %s since it started (leases count that time)")
      :format(render.duration(suspended)))
  end
  return ok("monotonic; never suspended")
end

CHECKS["policies"] = function(_, _, checkers)
  local fine, files = pcall(checkers.policies)
  if not fine then
    return fail(status.line(files), "correct it; `paddock policy check` shows the same")
  end
  return ok(("%d loaded and asked once"):format(files))
end

--- `arguments`: of a command that changes nothing.
local function engine(name, arguments, before)
  return function(probe)
    local path = which(probe, name)
    if not path then return info("not installed (only needed for that backend)") end
    local result, why = probe.run({ path, table.unpack(arguments) }, 5)
    if result and result.code == 0 then return info(("%s, %s%s"):format(path, before, first_line(result.out))) end
    return info(("%s, but it does not answer: %s"):format(path, why or first_line(result.err ~= "" and result.err or result.out)))
  end
end
CHECKS["docker"] = engine("docker", { "version", "--format", "{{.Server.Version}}" }, "server ")
-- Any command of podman's makes a store for a user that is not root, and leaves a process behind that holds namespaces.
CHECKS["podman"] = engine("podman", { "--version" }, "")

--- Whether a key that is sent there in clear text stays within a machine or a cluster.
local function stays_near(host)
  return not host:find(".", 1, true) or host:find("^127%.") or host:find("^10%.") or host:find("^192%.168%.")
    or host:find("%.svc$") or host:find("%.local$") or host:find("%.internal$") or host:find("^%[")
end

CHECKS["provisioner"] = function(probe, config)
  if config.backend ~= "provisioner" then return nil end
  local options = config.backend_options
  local made, driver = pcall(probe.provisioner, options)
  if not made then return fail(status.line(driver), "correct the configuration") end
  local began = os.time()
  local asked, can = pcall(driver.probe, driver)
  if not asked then
    return fail(status.line(can), "is it running, and reachable from here? backend_options.url and api_key name it; "
      .. "capabilities are asked for at /api/capabilities")
  end
  local looked, found = pcall(driver.inspect, driver, "paddock-doctor") -- nobody's id
  if not looked then
    return fail(status.line(found), "update the provisioner: without its presence route no stop can be confirmed")
  end
  local listed, sandboxes = pcall(driver.list, driver)
  if not listed then return fail(status.line(sandboxes), "see the provisioner's own log") end
  local seconds = os.time() - began
  local scheme, host = driver.options.url:match("^(https?)://([^/:]+)")
  if scheme == "http" and options.api_key and not stays_near(host) then
    return warn(("%s answers; its key travels there in clear text"):format(driver.options.url), "use https")
  elseif seconds > 5 then
    return warn(("%s takes %d s for three questions"):format(driver.options.url, seconds), "see the provisioner's own log")
  end
  return ok(("%s, %d sandboxes, helper runtime %s, broker %s"):format(driver.options.url, #sandboxes,
    can.lark_cli_init_image and "yes" or "no", can.lark_cli_broker_image and "yes" or "no"))
end

local ENGINE_HAS = { "create", "destroy", "inspect", "discover", "alive", "ready", "connect" }

--- An engine in a file: it loads, takes its options, and has what it must have.
local function own_engine(probe, config)
  local fine, made = pcall(probe.own_engine, config.backend, config.backend_options)
  if not fine then return fail(status.line(made), "correct the option backend or backend_options, or the engine's file") end
  for _, name in ipairs(ENGINE_HAS) do
    if type(made[name]) ~= "function" then
      return fail(("%s has no function `%s`"):format(config.backend, name), "write it; the README says what it is to answer")
    end
  end
  return ok(config.backend .. " loads, and takes its options")
end

CHECKS["engine"] = function(probe, config)
  if type(config.backend) == "string" and config.backend:find("%.lua$") then return own_engine(probe, config) end
  if config.backend ~= "docker" then return nil end
  local fine, report = pcall(probe.engine, config.backend_options, config.image)
  if not fine then
    local said = report.kind == "invalid_argument" or report.reason == "tls" -- what to do is in the line itself
    return fail(status.line(report), said and "correct backend_options, or the environment's DOCKER_HOST and DOCKER_CERT_PATH"
      or "start Docker or `podman system service`, or name the engine in backend_options.host or DOCKER_HOST")
  end
  local text = ("%s%s at %s%s, API %s%s"):format(report.product, report.rootless and ", rootless," or "", report.address,
    report.over and " over " .. report.over or "", report.api, report.image and ", image " .. report.image or "")
  if #report.lacks > 0 then
    return warn(text .. "; " .. table.concat(report.lacks, "; "), "correct the configuration, or give the engine what it lacks")
  end
  return ok(text)
end

-- What only some backends need: for the others it is worth knowing, and no reason to stop.
local NEEDED_BY = {
  bubblewrap = { process = true }, namespaces = { process = true }, ["user namespaces"] = { process = true },
  cgroups = { process = true }, guest = { process = true, docker = true },
}

local ORDER = { "bubblewrap", "namespaces", "user namespaces", "cgroups", "guest", "state directory", "data directory",
  "free space", "clock", "policies", "provisioner", "engine", "docker", "podman" }

--- Runs every check. One that breaks is a failed check, not a broken report.
---@param probe paddock.doctor.Probe
---@param config table     normalized options
---@param checkers table   policies: function() -> number of files, raises
---@return table[] report  { name, status, message, advice }
function M.examine(probe, config, checkers)
  local report = {}
  for _, name in ipairs(ORDER) do
    local fine, answer = pcall(CHECKS[name], probe, config, checkers)
    if not fine then answer = fail("the check itself failed: " .. status.line(answer), "report this line") end
    local needed = NEEDED_BY[name]
    if needed and config.backend and not needed[config.backend] and answer.status ~= "ok" then
      answer = info(("%s (not needed by the backend %s)"):format(answer.message, config.backend))
    end
    if answer then
      answer.name = name
      report[#report + 1] = answer
    end
  end
  return report
end

function M.run(ctx, options)
  local report = M.examine(this_machine(), world.normalized(world.config(options)), {
    policies = function() return #require("paddock.cli.policy").load(world.config(options)) end,
  })
  local failed = 0
  for _, one in ipairs(report) do
    if one.status == "fail" then failed = failed + 1 end
  end
  if options.json then
    ctx.out(render.json { ok = failed == 0, checks = render.list(report) })
  else
    for _, one in ipairs(report) do
      ctx.out(("%-5s %-16s %s\n"):format(one.status, one.name, render.plain(one.message)))
      if one.advice then ctx.out(("%-22s -> %s\n"):format("", render.plain(one.advice))) end
    end
    ctx.out(failed == 0 and "paddock can work here\n" or ("%d check%s failed\n"):format(failed, failed == 1 and "" or "s"))
  end
  return failed == 0 and status.OK or status.UNAVAILABLE
end

return M
