--- What bubblewrap is told: the namespaces, the file system and the descriptors of one sandbox.
---
--- The arguments travel in a memfd, so that no path of the host and no value shows in the process list. A mount's source is
--- a descriptor that was opened by this process: as root it is attached in a mount namespace of the child's own, where the
--- unprivileged user that bubblewrap runs as reaches it even below a directory that is closed to it; otherwise bubblewrap
--- checks that it mounted what the descriptor names.
local errors = require "paddock.errors"
local io = require "paddock.io"
local proc = io.proc

local M = {}

M.UID = 1000                       -- inside
M.USER = "agent"
M.WORKSPACE = "/workspace"
M.GUEST = "/.paddock/guest"
local FIRST_FREE = 8               -- descriptors below are the guest's (core/guest/guest.h), but 7
local MEMORY_EVENTS = 7
local STAGE = "/tmp"               -- core/proc.h, PDK_STAGE_DIR

-- What container engines hide: it is about the host. Those that only root may read are closed to a sandbox as they are,
-- since its user is never the host's root.
local MASKED = {
  "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug",
  "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
}
local OTHERS_READ = 4

-- What programs of /usr need of /etc: bound, or copied where that is cheaper. (A bind costs bubblewrap 0.07 ms.)
local ETC_BOUND = { "/etc/ld.so.cache", "/etc/alternatives" }
local ETC_COPIED = { "/etc/ssl/openssl.cnf", "/etc/services" }
local COPY_MAX = 32768
local FILES = {
  ["/etc/passwd"] = "root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:1000:1000:agent:/workspace:/bin/sh\n"
    .. "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
  ["/etc/group"] = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
  ["/etc/hosts"] = "127.0.0.1\tlocalhost paddock\n::1\tlocalhost\n",
  ["/etc/resolv.conf"] = "",
  ["/etc/nsswitch.conf"] = "passwd: files\ngroup: files\nhosts: files\n",
}
local FORBIDDEN = { "/proc", "/sys", "/dev", "/.paddock", "/tmp" }
local OWN = { proc = true, sys = true, dev = true, tmp = true, run = true, workspace = true, [".paddock"] = true }

---@class paddock.ProcessJail
---@field args string[]
---@field fds table<integer, userdata>    what the child gets, by number there
---@field stage userdata[]                what root attaches for it
---@field opened userdata[]               ours, to be closed after the spawn
local Jail = {}
Jail.__index = Jail

function Jail:add(...)
  local args = self.args
  for _, arg in ipairs { ... } do args[#args + 1] = tostring(arg) end
end

function Jail:keep(fd)
  self.opened[#self.opened + 1] = fd
  return fd
end

--- Gives the child a descriptor; returns its number there.
function Jail:give(fd)
  local number = self.next
  self.next = number + 1
  self.fds[number] = fd
  return number
end

--- Mounts what `fd` names on `target`. Takes the descriptor.
---@param fd userdata
---@param target string
---@param read_only boolean
function Jail:bind(fd, target, read_only)
  self:keep(fd)
  if self.root then
    self.stage[#self.stage + 1] = fd
    self:add(read_only and "--ro-bind" or "--bind", ("%s/%d"):format(STAGE, #self.stage - 1), target)
  else
    self:add(read_only and "--ro-bind-fd" or "--bind-fd", self:give(fd), target)
  end
end

function Jail:file(path, text)
  local fd, message = proc.memfd(text)
  if not fd then errors.raise("io_error", "cannot make a file for the sandbox: " .. tostring(message)) end
  self:add("--perms", "0644", "--file", self:give(self:keep(fd)), path)
end

function Jail:close()
  for _, fd in ipairs(self.opened) do fd:close() end
  self.opened = {}
end
Jail.__close = Jail.close

-- ---- file systems ---------------------------------------------------------------------------------------------

local function exists(path) return proc.access(path, "exists") end

--- The host's programs: /usr, what leads into it, and a few files of /etc. Asked once per backend.
---@return { args: string[], files: table<string, string> }
function M.host_system()
  local args = { "--ro-bind", "/usr", "/usr", "--dir", "/etc", "--dir", "/etc/ssl" }
  local function add(...)
    for _, arg in ipairs { ... } do args[#args + 1] = arg end
  end
  for _, name in ipairs { "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32" } do
    local link = proc.readlink(name)
    if link then add("--symlink", link, name) elseif exists(name) then add("--ro-bind", name, name) end
  end
  for _, path in ipairs(ETC_BOUND) do
    if exists(path) then add("--ro-bind", path, path) end
  end
  local files = {}
  for path, text in pairs(FILES) do files[path] = text end
  for _, path in ipairs(ETC_COPIED) do
    local fd <close> = proc.open(path, "r")
    local text = fd and fd:pread(COPY_MAX + 1, 0)
    if text and #text <= COPY_MAX then files[path] = text end
  end
  return { args = args, files = files }
end

--- Arguments that cover what /proc says of the host, and make the rest read-only. Asked once per backend.
---@return string[]
function M.proc_cover()
  local args = {}
  local function add(...)
    for _, arg in ipairs { ... } do args[#args + 1] = arg end
  end
  for _, path in ipairs(MASKED) do
    local fd <close> = proc.open(path, "p")
    local stat = fd and fd:stat()
    if stat and stat.mode & OTHERS_READ ~= 0 then
      if stat.type == "directory" then
        add("--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path)
      else
        add("--dev-bind", "/dev/null", path)
      end
    end
  end
  add("--remount-ro", "/proc")
  return args
end

--- A given root file system: each of its entries, read-only, but those that a sandbox has of its own.
---@param path string
function Jail:rootfs(path)
  local dir, message = proc.open(path, "rd")
  if not dir then errors.raise("backend_error", ("cannot open the root file system %s: %s"):format(path, message)) end
  self:keep(dir)
  local names = proc.names(dir) or {}
  table.sort(names)
  for _, name in ipairs(names) do
    local link = not OWN[name] and proc.readlink(name, dir)
    if link then
      self:add("--symlink", link, "/" .. name)
    elseif not OWN[name] and name ~= "lost+found" then
      local fd, why = proc.open(name, "pn", 0, dir)
      if not fd then errors.raise("backend_error", ("cannot open %s of the root file system %s: %s"):format(name, path, why)) end
      self:bind(fd, "/" .. name, true)
    end
  end
end

local function check_target(target)
  if type(target) ~= "string" or target:sub(1, 1) ~= "/" or target:find("[\0\n]") or target:find("//", 1, true)
    or ("/" .. target .. "/"):find("/%.%.?/") or target == "/" then
    errors.raise("invalid_argument", ("mount target %q is not an absolute path without `.` and `..`"):format(tostring(target)))
  end
  for _, prefix in ipairs(FORBIDDEN) do
    if target == prefix or (target:sub(1, #prefix + 1) == prefix .. "/" and prefix ~= "/tmp") then
      errors.raise("invalid_argument", ("mount target %s: %s is the sandbox's own"):format(target, prefix))
    end
  end
end

local function is_below(path, root)
  return path == root or root == "/" or path:sub(1, #root + 1) == root .. "/"
end

--- Where an opened file really is, so that a link which was put in after the core's check does not lead out of the roots.
local function check_roots(fd, source, roots)
  if roots == nil or #roots == 0 then return end
  local real = proc.readlink("/proc/self/fd/" .. fd:no())
  for _, root in ipairs(roots) do
    local dir <close> = proc.open(root, "pd")
    local real_root = dir and proc.readlink("/proc/self/fd/" .. dir:no())
    if real and real_root and is_below(real, real_root) then return end
  end
  errors.raise("invalid_argument", ("mount source %s lies outside mount_roots"):format(source))
end

--- The mounts that a policy composed.
---@param mounts { source: string, target: string, read_only: boolean }[]
---@param roots string[]?
function Jail:mounts(mounts, roots)
  for _, mount in ipairs(mounts) do
    check_target(mount.target)
    local fd, message, code = proc.open(mount.source, "p")
    if not fd then
      errors.raise("backend_error", ("cannot open the mount source %s: %s"):format(mount.source, message), { reason = code })
    end
    self:keep(fd)
    check_roots(fd, mount.source, roots)
    self:bind(fd, mount.target, mount.read_only ~= false)
  end
end

-- ---- the whole ------------------------------------------------------------------------------------------------

local NAMESPACES = {
  "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
  "--uid", tostring(M.UID), "--gid", tostring(M.UID), "--hostname", "paddock", "--cap-drop", "ALL", "--as-pid-1",
  "--new-session",
}

---@class paddock.JailOptions
---@field root boolean              this process is root: sources are attached for the unprivileged user
---@field system table              from host_system; not with rootfs
---@field cover string[]            from proc_cover
---@field rootfs string?
---@field guest userdata            the guest's binary
---@field workspace userdata?       a directory; nil = a tmpfs
---@field mounts table[]
---@field mount_roots string[]?
---@field sizes { workspace: integer, tmp: integer, shm: integer }

--- Builds the arguments and opens what they need; <close> it after the spawn.
---@param o paddock.JailOptions
---@return paddock.ProcessJail
function M.build(o)
  local jail = setmetatable({ args = {}, fds = {}, stage = {}, opened = {}, next = FIRST_FREE, root = o.root }, Jail)
  local done, failure = pcall(function()
    jail:add(table.unpack(NAMESPACES))
    if o.rootfs then jail:rootfs(o.rootfs) else jail:add(table.unpack(o.system.args)) end
    jail:add("--proc", "/proc")
    jail:add(table.unpack(o.cover))
    jail:add("--dev", "/dev", "--perms", "1777", "--size", o.sizes.shm, "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    jail:add("--perms", "1777", "--size", o.sizes.tmp, "--tmpfs", "/tmp", "--dir", "/run")
    if o.workspace then
      jail:bind(o.workspace, M.WORKSPACE, false)
    else
      jail:add("--size", o.sizes.workspace, "--tmpfs", M.WORKSPACE)
    end
    if not o.rootfs then
      jail:add("--dir", "/var", "--symlink", "../tmp", "/var/tmp")
      for path, text in pairs(o.system.files) do jail:file(path, text) end
    end
    jail:add("--dir", "/.paddock")
    jail:bind(o.guest, M.GUEST, true)
    jail:mounts(o.mounts, o.mount_roots)
    jail:add("--remount-ro", "/", "--chdir", M.WORKSPACE)
    jail:add("--seccomp", jail:give(jail:keep(proc.seccomp())))
  end)
  if not done then
    jail:close()
    error(failure, 0)
  end
  return jail
end

--- The spawn's argument list and descriptors, with the guest's own.
---@param bwrap string
---@param guest_fds { settings: userdata, listen: userdata, record: userdata, start: userdata, events: userdata? }
---@param info userdata   where bubblewrap writes the guest's pid
---@param stderr userdata
---@return table for proc.spawn
function Jail:spawn_table(bwrap, guest_fds, info, stderr)
  self:add("--info-fd", self:give(info))
  local args = self:keep(assert(proc.memfd(table.concat(self.args, "\0") .. "\0")))
  local number = self:give(args)
  local fds = self.fds
  fds[2], fds[3], fds[4], fds[5], fds[6] = stderr, guest_fds.settings, guest_fds.listen, guest_fds.record, guest_fds.start
  fds[MEMORY_EVENTS] = guest_fds.events
  return { argv = { bwrap, "--args", tostring(number), "--", M.GUEST }, fds = fds, stage = self.stage, limits = { core = 0 } }
end

--- The guest's settings (core/guest/guest.h), as the text of a memfd.
---@param s { generation: string, orphan_ttl: number, env: table<string, string>, mounts: table[], events: boolean }
---@return string
function M.settings(s)
  local lines = {
    "generation=" .. s.generation, ("orphan_ttl=%.3f"):format(s.orphan_ttl), "workspace=" .. M.WORKSPACE,
    "home=" .. M.WORKSPACE, "user=" .. M.USER,
  }
  for name, value in pairs(s.env) do
    local named = type(name) == "string" and name:find("^[A-Za-z_][A-Za-z0-9_]*$")
    if not named or type(value) ~= "string" or value:find("\0", 1, true) then
      errors.raise("invalid_argument", ("env: %q is no variable name, or its value no text without NUL"):format(tostring(name)))
    end
    lines[#lines + 1] = ("env=%s=%s"):format(name, value)
  end
  for _, mount in ipairs(s.mounts) do lines[#lines + 1] = "mount=" .. mount.target end
  if s.events then lines[#lines + 1] = "memory_events_fd=" .. MEMORY_EVENTS end
  return table.concat(lines, "\0") .. "\0"
end

return M
