--- The namespaces, the file system and the descriptors of one sandbox.
---
--- The same few verbs (folder, link, file, tmpfs, bind, ...) describe the file system in two ways. As root they become a
--- stage (core/stage.h): the child builds the tree in a mount namespace of its own before it becomes the unprivileged user
--- that bubblewrap runs as, so that a source below a directory that is closed to that user can be mounted, and bubblewrap
--- only adds what needs the sandbox's own namespaces (/proc). Otherwise they become bubblewrap's arguments.
---
--- Arguments travel in a memfd, so that no path of the host and no value shows in the process list.
local errors = require "paddock.errors"
local guest_settings = require "paddock.guest_settings"
local io = require "paddock.io"
local proc = io.proc

local M = {}

M.UID = 1000                       -- inside
M.USER = "agent"
M.WORKSPACE = "/workspace"
M.GUEST = "/.paddock/guest"
local FIRST_FREE = 8               -- descriptors below are the guest's (core/guest/guest.h), but 7
local MEMORY_EVENTS = 7
local STAGE = "/tmp"               -- core/stage.h, PDK_STAGE_DIR
local NODEV = 4                    -- MS_NODEV
local DEVICES = { null = { 1, 3 }, zero = { 1, 5 }, full = { 1, 7 }, random = { 1, 8 }, urandom = { 1, 9 }, tty = { 5, 0 } }

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
---@field args string[]                   bubblewrap's, as they come
---@field stage table[]?                  as root: what makes the tree, but
---@field trees table[]?                  what is mounted in it last
---@field fds table<integer, userdata>    what the child gets, by number there
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

function Jail:close()
  for _, fd in ipairs(self.opened) do fd:close() end
  self.opened = {}
end
Jail.__close = Jail.close

-- ---- the verbs ------------------------------------------------------------------------------------------------

function Jail:folder(path)
  if self.stage then
    self.stage[#self.stage + 1] = { "folder", path = STAGE .. path, mode = 493 } -- 0755
  else
    self:add("--dir", path)
  end
end

function Jail:link(target, path)
  if self.stage then
    self.stage[#self.stage + 1] = { "link", path = STAGE .. path, text = target }
  else
    self:add("--symlink", target, path)
  end
end

function Jail:file(path, text)
  if self.stage then
    self.stage[#self.stage + 1] = { "file", path = STAGE .. path, text = text }
  else
    local fd, message = proc.memfd(text)
    if not fd then errors.raise("io_error", "cannot make a file for the sandbox: " .. tostring(message)) end
    self:add("--perms", "0644", "--file", self:give(self:keep(fd)), path)
  end
end

--- A tmpfs on a folder that is made for it.
function Jail:tmpfs(path, size, mode)
  if self.stage then
    self:folder(path)
    self.stage[#self.stage + 1] = {
      "tmpfs", path = STAGE .. path, text = ("size=%d,mode=%s,uid=%d,gid=%d"):format(size, mode, self.uid, self.uid), mode = NODEV,
    }
  else
    self:add("--perms", mode, "--size", size, "--tmpfs", path)
  end
end

--- Mounts a source on `target`: a path of the host that anybody may read, or a descriptor (taken).
---@param source string|userdata
---@param target string
---@param read_only boolean
function Jail:bind(source, target, read_only)
  local fd = type(source) ~= "string" and self:keep(source) or nil
  if self.trees then
    local parent, name = target:match("^(.*)/([^/]+)$")
    -- Folders on the way are made where they are the sandbox's own; inside another mount they have to be there.
    for at in parent:gmatch("()/") do
      if at > 1 then self:folder(parent:sub(1, at - 1)) end
    end
    if parent ~= "" then self:folder(parent) end
    self.trees[#self.trees + 1] = {
      "tree", path = STAGE .. target, parent = parent == "" and "." or parent:sub(2), name = name, fd = fd,
      text = not fd and source or nil, read_only = read_only,
    }
  elseif fd then
    self:add(read_only and "--ro-bind-fd" or "--bind-fd", self:give(fd), target)
  else
    self:add(read_only and "--ro-bind" or "--bind", source, target)
  end
end

--- /dev: a few devices, terminals of its own, shared memory of a limited size; itself read-only.
function Jail:devices(shm_size)
  if not self.stage then
    self:add("--dev", "/dev", "--perms", "1777", "--size", shm_size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    return
  end
  self:folder("/dev")
  self.stage[#self.stage + 1] = { "tmpfs", path = STAGE .. "/dev", text = "size=64k,mode=755", mode = 0 }
  for name, number in pairs(DEVICES) do
    self.stage[#self.stage + 1] = {
      "node", path = STAGE .. "/dev/" .. name, text = "/dev/" .. name, major = number[1], minor = number[2],
    }
  end
  for name, target in pairs { fd = "/proc/self/fd", stdin = "/proc/self/fd/0", stdout = "/proc/self/fd/1",
                              stderr = "/proc/self/fd/2", ptmx = "pts/ptmx" } do
    self:link(target, "/dev/" .. name)
  end
  self:folder("/dev/pts")
  self.stage[#self.stage + 1] = { "pts", path = STAGE .. "/dev/pts" }
  self:tmpfs("/dev/shm", shm_size, "1777")
end

-- ---- file systems ---------------------------------------------------------------------------------------------

local function exists(path) return proc.access(path, "exists") end

--- The host's programs: /usr, what leads into it, and a few files of /etc. Asked once per backend.
---@return { links: table<string, string>, binds: string[], files: table<string, string> }
function M.host_system()
  local system = { links = {}, binds = { "/usr" }, files = {} }
  for _, name in ipairs { "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32" } do
    local link = proc.readlink(name)
    if link then system.links[name] = link elseif exists(name) then table.insert(system.binds, name) end
  end
  for _, path in ipairs(ETC_BOUND) do
    if exists(path) then table.insert(system.binds, path) end
  end
  for path, text in pairs(FILES) do system.files[path] = text end
  for _, path in ipairs(ETC_COPIED) do
    local fd <close> = proc.open(path, "r")
    local text = fd and fd:pread(COPY_MAX + 1, 0)
    if text and #text <= COPY_MAX then system.files[path] = text end
  end
  return system
end

function Jail:system(system)
  for _, folder in ipairs { "/etc", "/etc/ssl", "/run", "/var" } do self:folder(folder) end
  self:link("../tmp", "/var/tmp")
  for path, target in pairs(system.links) do self:link(target, path) end
  for path, text in pairs(system.files) do self:file(path, text) end
  for _, path in ipairs(system.binds) do self:bind(path, path, true) end
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
        add("--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path) -- its owner is the user inside
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
      self:link(link, "/" .. name)
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
    local dir <close> = proc.open(root, "p")       -- the source of an option mount may be a file
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
---@field uid integer?              as root: the unprivileged user that the sandbox becomes on the host
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
  local jail = setmetatable({ args = {}, fds = {}, opened = {}, next = FIRST_FREE, uid = o.uid }, Jail)
  if o.uid then
    jail.stage, jail.trees = { { "root", path = STAGE, text = "size=4m,mode=755" } }, {}
  end
  local done, failure = pcall(function()
    jail:add(table.unpack(NAMESPACES))
    for _, folder in ipairs { "/proc", "/run", "/.paddock" } do jail:folder(folder) end
    if o.rootfs then jail:rootfs(o.rootfs) else jail:system(o.system) end
    jail:devices(o.sizes.shm)
    jail:tmpfs("/tmp", o.sizes.tmp, "1777")
    if o.workspace then
      jail:bind(o.workspace, M.WORKSPACE, false)
    else
      jail:tmpfs(M.WORKSPACE, o.sizes.workspace, "0755")
    end
    jail:bind(o.guest, M.GUEST, true)
    jail:mounts(o.mounts, o.mount_roots)
    if jail.stage then
      for _, tree in ipairs(jail.trees) do table.insert(jail.stage, tree) end
      table.insert(jail.stage, { "seal", path = STAGE .. "/dev" })
      table.insert(jail.stage, { "seal", path = STAGE })
      jail:add("--dev-bind", STAGE, "/")
    end
    jail:add("--proc", "/proc")
    jail:add(table.unpack(o.cover))
    if not jail.stage then jail:add("--remount-ro", "/") end
    jail:add("--chdir", M.WORKSPACE, "--seccomp", jail:give(jail:keep(proc.seccomp())))
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
---@param reader userdata  the other end of that: bubblewrap keeps it, or it would die of SIGPIPE when we are gone, and leave
---  the process that it has cloned waiting for it forever. The guest closes what it was not told of.
---@param stderr userdata
---@return table for proc.spawn
function Jail:spawn_table(bwrap, guest_fds, info, reader, stderr)
  self:add("--info-fd", self:give(info))
  self:give(reader)
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
  if s.events then lines[#lines + 1] = "memory_events_fd=" .. MEMORY_EVENTS end
  return guest_settings.text(lines, s.env, s.mounts)
end

return M
