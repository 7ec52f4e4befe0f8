--- The process backend: a sandbox is paddock-guest as pid 1 of bubblewrap's namespaces. It needs no daemon.
---
--- What is true at every step of a creation, whatever dies: the guest lives only once its record is in place (it ends
--- itself when its start pipe closes before that), and everything outside it carries its generation in its name, so that
--- `list` of a later process finds and removes what was left. Nobody trusts a pid: a process is signalled through a
--- descriptor that was checked against the start time in the record, and absence is the free lock of that record.
local errors = require "paddock.errors"
local io = require "paddock.io"
local client = require "paddock.client.guest"
local cgroup = require "paddock.process.cgroup"
local jail = require "paddock.process.jail"
local records = require "paddock.process.record"
local undos = require "paddock.undo"
local proc = io.proc

local M = {}

local MIB = 1 << 20
local CREATE_DESCRIPTORS = 20     -- that a creation has open at once: pipes, lock, socket, and a request to the guest
local SIGKILL = 9
local INFO_TIMEOUT = 30          -- seconds for bubblewrap to make namespaces
local STATE_TIMEOUT = 2          -- seconds for a guest to say who it is, when nobody waits for it to start
local MEMORY_MIN = 4 * MIB
local ENDING_WAIT = 1            -- seconds for one whose guest has died to be gone as a whole
local GONE_WAIT = 0.5            -- seconds for a guest whose connection broke to be gone
local DEFAULTS = { tmp_size = 256 * MIB, shm_size = 64 * MIB, workspace_size = 1024 * MIB }

---@class paddock.ProcessOptions
---@field bwrap? string             path of bubblewrap (found in PATH)
---@field guest? string             path of paddock-guest (found beside the library, then in PATH)
---@field rootfs? string            a root file system in place of the host's /usr
---@field images? string            a folder of root file systems: an image is one of its names
---@field cgroup? string            a control group (version 2) that was delegated to this user
---@field workspace_size? integer   bytes of /workspace, where no data_dir is set (1 GiB)
---@field tmp_size? integer         bytes of /tmp (256 MiB)
---@field shm_size? integer         bytes of /dev/shm (64 MiB)
local OPTIONS = {
  bwrap = "path", guest = "path", rootfs = "path", images = "path", cgroup = "path",
  workspace_size = "bytes", tmp_size = "bytes", shm_size = "bytes",
}

---@class paddock.ProcessBackend
local Backend = {}
Backend.__index = Backend

--- Less than this a shell and the guest cannot even start in.
local function check_memory(limits)
  local memory = type(limits) == "table" and limits.memory
  if memory and memory < MEMORY_MIN then
    errors.raise("invalid_argument", ("limits.memory is too small (%d bytes): a process sandbox needs at least %d MiB")
      :format(memory, MEMORY_MIN // MIB), { reason = "limits" })
  end
end

local function check_options(options)
  local out = {}
  for key, value in pairs(options or {}) do
    local kind = OPTIONS[key]
    local name = "option `backend_options." .. tostring(key) .. "`"
    if not kind then
      errors.raise("invalid_argument", name .. " is not known to the process backend")
    elseif kind == "path" and (type(value) ~= "string" or value:sub(1, 1) ~= "/" or value:find("\0", 1, true)) then
      errors.raise("invalid_argument", name .. " must be an absolute path")
    elseif kind == "bytes" and (math.type(value) ~= "integer" or value < 65536 or value > 1 << 50) then
      errors.raise("invalid_argument", name .. " must be a number of bytes, 65536 or more")
    end
    out[key] = value
  end
  if out.cgroup and not proc.access(out.cgroup .. "/cgroup.procs") then
    errors.raise("invalid_argument", ("option `backend_options.cgroup`: %s is not a control group: make it and delegate it to this "
      .. "user, or leave the option out"):format(out.cgroup))
  end
  for key, value in pairs(DEFAULTS) do out[key] = out[key] or value end
  return out
end

--- Makes the backend.
---@param options paddock.ProcessOptions?
---@param runtime { state_dir: string, data_dir: string?, mount_roots: string[]?, orphan_ttl: number?, stop_timeout: number?,
---  ready_timeout: number?, discover_timeout: number?, command_timeout: number?, runtime_id: string?, guest_path: string?,
---  limits: table? }
---@return paddock.ProcessBackend
function M.new(options, runtime)
  if type(runtime) ~= "table" or type(runtime.state_dir) ~= "string" then
    errors.raise("invalid_argument", "the process backend needs a state_dir")
  end
  check_memory(runtime.limits)
  return setmetatable({
    name = "process",
    capabilities = { mounts = true, thread_data_mounts = true, pause = false, snapshot = false, limits = true, fenced = true,
      stops_at_once = true },
    options = check_options(options), runtime = runtime, me = proc.self(),
    grips = {},       -- by generation: this process's record with its locks
    answered = {},    -- by generation: the guest has answered once
  }, Backend)
end

-- ---- what is needed -------------------------------------------------------------------------------------------

local function search(name)
  for folder in (os.getenv("PATH") or "/usr/local/bin:/usr/bin:/bin"):gmatch("[^:]+") do
    if folder:sub(1, 1) == "/" and proc.access(folder .. "/" .. name, "execute") then return folder .. "/" .. name end
  end
  return nil
end

--- The bubblewrap to use, or it raises what to install.
---@param option string?
---@return string path
function M.find_bwrap(option)
  local path = option or search("bwrap")
  if not path or not proc.access(path, "execute") then
    errors.raise("backend_error", path and ("bubblewrap is not at %s: install it, or correct backend_options.bwrap"):format(path)
      or "bubblewrap is not installed: install the package `bubblewrap` (0.8.0 or newer)", { reason = "no_bwrap" })
  end
  local privileged = proc.privileged(path)
  if privileged then
    errors.raise("backend_error", ("%s is %s, which lends its rights to whoever finds a hole in it: remove that (chmod u-s), "
      .. "and allow user namespaces instead"):format(path, privileged), { reason = "setuid_bwrap" })
  end
  return path
end

--- The guest's binary, or it raises where it was looked for.
---@param path string?  where the configuration says it is
---@return string path
function M.find_guest(path)
  if path then
    if proc.access(path, "read") then return path end
    errors.raise("backend_error", "paddock-guest is not at " .. path .. ": build or install paddock", { reason = "no_guest" })
  end
  local library, program = proc.homes()
  for _, home in ipairs { library, program } do
    local folder = home:match("^(/.*)/[^/]+$")
    for _, step in ipairs { "", "/../bin", "/../../bin", "/../../../bin", "/../../../../bin", "/../../../../../bin" } do
      local candidate = folder and folder .. step .. "/paddock-guest"
      if candidate and proc.access(candidate, "execute") then return candidate end
    end
  end
  return search("paddock-guest") or errors.raise("backend_error",
    "paddock-guest was found neither beside the library nor in PATH: build or install paddock", { reason = "no_guest" })
end

-- What bubblewrap says, and what a person can do about it.
local ADVICE = {
  { "Resource temporarily unavailable", "there are as many processes of this user, or in all, as may be: end some, or raise "
    .. "limits.pids" },
  { "[Nn]o permissions to creat", "user namespaces are switched off: set the sysctls user.max_user_namespaces above 0, "
    .. "kernel.unprivileged_userns_clone=1 and, where AppArmor restricts them, "
    .. "kernel.apparmor_restrict_unprivileged_userns=0" },
  { "[Cc]reating new namespace failed", "user namespaces are switched off or used up: raise the sysctl "
    .. "user.max_user_namespaces" },
  { "mount proc", "this place is itself a container that hides parts of /proc: run paddock outside of it, or start the "
    .. "container with an unmasked /proc" },
  { "Unknown option", "this bubblewrap is too old: install 0.8.0 or newer" },
  { "setting up uid map", "user namespaces may not map ids here: allow user namespaces for this user" },
}

local function start_failed(stderr, child)
  child:wait(1)              -- until it has said all
  local text = (stderr:pread(4096, 0) or ""):gsub("%z.*$", ""):gsub("%s+$", "")
  local first = text:match("[^\n]+") or "bubblewrap or the guest ended without a message"
  for _, entry in ipairs(ADVICE) do
    if first:find(entry[1]) then
      errors.raise("backend_error", ("cannot start a sandbox: %s; %s"):format(first, entry[2]), { reason = "no_namespaces" })
    end
  end
  errors.raise("backend_error", "cannot start a sandbox: " .. first, { reason = "start" })
end

--- The store, opened at the first use.
---@return paddock.ProcessStore
function Backend:_store()
  self.store = self.store or records.open(self.runtime.state_dir)
  return self.store
end

--- What does not change between creations.
function Backend:_fixed()
  if not self.fixed then
    local root = self.me.uid == 0
    self.fixed = {
      root = root, bwrap = M.find_bwrap(self.options.bwrap),
      guest = M.find_guest(self.options.guest or self.runtime.guest_path),
      system = jail.host_system(), cover = jail.proc_cover(),
    }
  end
  return self.fixed
end

-- ---- creating -------------------------------------------------------------------------------------------------

function Backend:_check_spec(spec)
  if type(spec) ~= "table" or type(spec.sandbox_id) ~= "string" or not spec.sandbox_id:find("^[a-z0-9-]+$")
    or #spec.sandbox_id > 63 then
    errors.raise("invalid_argument", "sandbox_id must be 1 to 63 characters of a-z, 0-9 and -")
  end
  if spec.network ~= nil and spec.network ~= "none" then
    errors.raise("unsupported", ("network %q: the process backend has network \"none\" only"):format(tostring(spec.network)))
  end
  check_memory(spec.limits)
end

--- The root file system to use: an image's, the configured one, or nil for the host's programs.
function Backend:_rootfs(image)
  if image == nil then return self.options.rootfs end
  if not self.options.images then
    errors.raise("unsupported", ("image %q: the process backend has images only where backend_options.images names their "
      .. "folder"):format(tostring(image)))
  end
  if type(image) ~= "string" or not image:find("^[%w_][%w_.:-]*$") then
    errors.raise("invalid_argument", ("image %q is not the name of a folder in %s"):format(tostring(image), self.options.images))
  end
  return self.options.images .. "/" .. image
end

--- data_dir/ID, made for its uid. The same id always gets the same uid, so files of an earlier generation stay usable.
function Backend:_workspace(id, uid)
  if not self.runtime.data_dir then return nil end
  local path = self.runtime.data_dir .. "/" .. id
  local made, message, code = proc.mkdir(nil, path, 448) -- 0700
  if not made and code == "ENOENT" then
    proc.mkdir(nil, self.runtime.data_dir, 448)
    made, message, code = proc.mkdir(nil, path, 448)
  end
  if not made and code ~= "EEXIST" then records.io_error("create the workspace", path, message, code) end
  local fd
  fd, message, code = proc.open(path, "rdn")
  if not fd then records.io_error("open the workspace", path, message, code) end
  if uid and fd:stat().uid ~= uid then
    made, message, code = fd:chown(uid, uid)
    if not made then
      fd:close()
      records.io_error("give the workspace to its sandbox:", path, message, code)
    end
  end
  return fd
end

function Backend:_open_guest(path)
  local fd, message = proc.open(path, "p")
  if not fd then errors.raise("backend_error", ("cannot open %s: %s"):format(path, message), { reason = "no_guest" }) end
  return fd
end

--- The guest's host pid, from what bubblewrap writes once it has made the namespaces.
local function read_pid(info, child, stderr)
  local text = ""
  repeat
    local piece, message = info:read(4096, INFO_TIMEOUT)
    if not piece then
      errors.raise("backend_error", "cannot start a sandbox: bubblewrap says nothing" .. (message and ": " .. message or ""),
        { reason = "start" })
    end
    text = text .. piece
  until piece == "" or text:find("}", 1, true)
  local pid = math.tointeger(tonumber(text:match('"child%-pid"%s*:%s*(%d+)')))
  if not pid then start_failed(stderr, child) end
  return pid
end

local function close_all(...)
  for i = 1, select("#", ...) do
    local fd = select(i, ...)
    if fd then fd:close() end
  end
end

--- Starts bubblewrap with the guest in it. Returns the child, the guest's pid and the pipe's end that tells it to go.
function Backend:_launch(spec, record, listen, limits, undo, stderr)
  local fixed, id = self:_fixed(), record.id
  local uid = fixed.root and proc.sandbox_uid(id) or nil
  local box <close> = jail.build {
    uid = uid, system = fixed.system, cover = fixed.cover, rootfs = self:_rootfs(spec.image),
    guest = self:_open_guest(fixed.guest), workspace = self:_workspace(id, uid),
    mounts = spec.mounts or {}, mount_roots = self.runtime.mount_roots,
    sizes = { workspace = self.options.workspace_size, tmp = self.options.tmp_size, shm = self.options.shm_size },
  }
  local settings = box:keep(assert(proc.memfd(jail.settings {
    generation = record.generation, orphan_ttl = self.runtime.orphan_ttl or 3600, env = spec.env or {},
    mounts = spec.mounts or {}, events = limits.events ~= nil,
  })))
  local start_read, start = proc.pipe()
  local info, info_write = proc.pipe()
  undo:add(function() close_all(start_read, start, info, info_write) end)
  if not start_read or not info then errors.raise("io_error", "cannot start a sandbox: no descriptors left") end
  local spawn = box:spawn_table(fixed.bwrap,
    { settings = settings, listen = listen, record = record.guest_fd, start = start_read, events = limits.events },
    info_write, info, stderr)
  spawn.uid, spawn.gid = uid, uid
  if fixed.root then
    -- The uid is this sandbox's alone, so its processes are counted rightly from the start. A container's root may lack the
    -- right to set the limits of a process of another uid later.
    for name, value in pairs(limits.rlimits) do spawn.limits[name] = value end
  end
  local child = proc.spawn(spawn)
  undo:add(function()
    child:kill()             -- with the process that it may have cloned: that would wait for it forever
    child:wait(1)
    child:close()
  end)
  -- From here on only the guest holds its lock and its socket; a copy of ours would prove a life that is over.
  close_all(record.guest_fd, listen, start_read, info_write)
  local pid = read_pid(info, child, stderr)
  info:close()
  return child, pid, start, uid
end

--- Waits for the first answer. False: it lives but has not answered in time.
function Backend:_first_answer(record, child, stderr)
  local seconds = self.runtime.ready_timeout or 60
  local deadline = io.now() + seconds
  local talk = client.new { url = "http://sandbox", unix = self:_store():socket_path(record.generation) }
  repeat
    local state = talk:state(math.max(0.05, deadline - io.now()))
    if state and state.generation == record.generation then
      self.answered[record.generation] = true
      return state
    elseif state then
      errors.raise("backend_error", "another generation answers on the socket of sandbox " .. record.id, { reason = "start" })
    elseif not record.fd:locked("w", records.ALIVE) then
      start_failed(stderr, child)
    end
    io.sleep(0.005)
  until io.now() >= deadline
  return nil
end

--- Makes a sandbox. It answers when it is returned, or `ready` says that it does not.
---@param spec table
---@return table info
function Backend:create(spec)
  self:_check_spec(spec)
  return io.descriptors(CREATE_DESCRIPTORS, self._create, self, spec)
end

function Backend:_create(spec)
  self:_fixed()
  local store, undo <close> = self:_store(), undos.new()
  local record = store:begin(spec.sandbox_id)
  local generation = record.generation
  undo:add(function()
    store:remove(record.id, generation)
    close_all(record.fd, record.guest_fd)
  end)
  local limits = cgroup.prepare(self:_cgroups(), generation, spec.limits)
  undo:add(function()
    cgroup.remove(limits.groups)
    close_all(limits.events)
  end)
  local listen = store:listen(generation)
  undo:add(function() listen:close() end)
  local stderr = assert(proc.capture(4096))
  undo:add(function() stderr:close() end)
  local child, pid, start, uid = self:_launch(spec, record, listen, limits, undo, stderr)
  if limits.events then limits.events:close() end
  local started = proc.start_of(pid)
  local guest = started and proc.pidfd(pid, started)
  if not guest then start_failed(stderr, child) end
  undo:add(function()
    proc.kill(guest, SIGKILL)
    guest:close()
  end)
  local failed = limits:apply(pid, self.fixed.root)
  if failed then errors.raise("backend_error", "cannot limit sandbox " .. record.id .. ": " .. failed, { reason = "limits" }) end
  store:publish(record, {
    version = 1, sandbox_id = record.id, generation = generation, created_at = os.time(), identity = spec.identity,
    labels = spec.labels, pid = pid, start = started, uid = uid, boot = self.me.boot, machine = self.me.machine,
    pid_ns = self.me.pid_ns, time_ns = self.me.time_ns, groups = limits.groups, owner = self:_owner(),
    attestation = {
      image = spec.image, network = "none", limits = limits.hold, isolation = "bubblewrap",
      workspace = self.runtime.data_dir and "data_dir" or "tmpfs",
    },
  })
  assert(start:write("g"))
  local state = self:_first_answer(record, child, stderr)
  undo:keep()
  close_all(start, guest, child, stderr)
  self.grips[generation] = record
  return self:_info(record, state)
end

-- ---- records and their locks -----------------------------------------------------------------------------------

function Backend:_owner()
  return { runtime_id = self.runtime.runtime_id, pid = self.me.pid, start = self.me.start }
end

--- A generation's record, opened only to look through it, unless this process has a grip on it already; nil when there is
--- none. Give it back to _look_away.
---@return paddock.ProcessRecord?
function Backend:_look(id, generation)
  return self.grips[generation] or self:_store():find(id, generation)
end

function Backend:_look_away(record)
  if record and self.grips[record.generation] ~= record then record.fd:close() end
end

--- This process's grip on a generation: the record, opened once and kept, because its locks belong to the opened file.
---@return paddock.ProcessRecord?
function Backend:_grip(id, generation)
  local record = self:_look(id, generation)
  -- Another thread may have come first while the mutex was given up: a second opening would be in the way of its locks.
  local grip = self.grips[generation] or record
  self.grips[generation] = grip
  self:_look_away(record)
  return grip
end

function Backend:_let_go(generation)
  local grip = self.grips[generation]
  self.grips[generation], self.answered[generation] = nil, nil
  if grip then grip.fd:close() end
end

local function held_elsewhere(grip)
  return grip.fd:is_open() and grip.fd:locked("w", records.HELD) -- it is closed when another thread has just finished it
end

--- Whether a runtime that lives owns it, other than this one.
local function owned_elsewhere(record)
  return not record.owned and record.fd:is_open() and record.fd:locked("w", records.OWNED)
end

---@param record paddock.ProcessRecord
---@param state table?   what the guest said
function Backend:_info(record, state)
  local data = record.data
  return {
    sandbox_id = record.id, url = "http://sandbox", unix = self:_store():socket_path(record.generation),
    generation = record.generation, token = state and state.token and tostring(state.token) or nil,
    name = "paddock-" .. record.id, created_at = data.created_at or 0, identity = data.identity,
    owner = data.owner, owned = owned_elsewhere(record), held = record.clients > 0 or held_elsewhere(record),
    attestation = data.attestation or {},
    labels = data.labels, doomed = state and state.doomed == true or nil,
  }
end

--- What the guest says of itself, or nil.
function Backend:_ask(record, seconds, token)
  local talk = client.new { url = "http://sandbox", unix = self:_store():socket_path(record.generation), token = token }
  local state, message, reason = talk:state(seconds)
  if state and state.generation ~= record.generation then
    return nil, "another generation answers"
  end
  return state, message, reason
end

local function generation_of(info, what)
  local generation = type(info) == "table" and info.generation
  if type(generation) ~= "string" or not generation:find("^%x+$") or type(info.sandbox_id) ~= "string" then
    errors.raise("invalid_argument", what .. ": info must carry sandbox_id and generation")
  end
  return generation
end

--- The state of a generation ("absent" when it has no record), and its record, to be given to _look_away.
function Backend:_state(id, generation)
  local record = self:_look(id, generation)
  if not record then return "absent", nil end
  local known, state = pcall(self._store(self).state, self.store, record)
  if known then return state, record end
  self:_look_away(record)
  error(state, 0)
end

-- ---- looking ---------------------------------------------------------------------------------------------------

--- One look: the state, whether it answered (true without a token), and whether it seems to be dying, which takes a moment:
--- it closes its files one by one before its lock is free, and its namespace ends after that.
function Backend:_pulse(id, generation, token)
  local state, record = self:_state(id, generation)
  local answer, message, reason = true, nil, nil
  if state == "alive" and token then
    answer, message, reason = self:_ask(record, STATE_TIMEOUT, token)
  end
  self:_look_away(record)
  return state, answer, message, state == "ending" or (not answer and reason ~= nil and reason ~= "read_timeout")
end

--- Whether that generation lives. With opts.token it is also spoken to, which stops its orphan clock.
---@param info table
---@param opts { token: string? }?
---@return boolean
function Backend:alive(info, opts)
  local generation, deadline = generation_of(info, "alive"), io.now() + ENDING_WAIT
  local state, answer, message, dying = self:_pulse(info.sandbox_id, generation, opts and opts.token)
  while dying and io.now() < deadline do
    io.sleep(0.005)
    state, answer, message, dying = self:_pulse(info.sandbox_id, generation, opts and opts.token)
  end
  if state == "ending" then
    errors.raise("backend_error", "sandbox " .. info.sandbox_id .. " is ending", { reason = "ending" })
  elseif not answer then
    errors.raise("backend_error", ("sandbox %s lives but does not answer: %s"):format(info.sandbox_id, message),
      { reason = "silent" })
  end
  return state == "alive"
end

--- What is there now: a statement about info's generation when it is given.
---@param id string
---@param info table?
---@return table?
function Backend:inspect(id, info)
  if info and info.generation then
    local state, record = self:_state(id, generation_of(info, "inspect"))
    local found
    if state ~= "absent" then
      local answer = state == "alive" and self:_ask(record, STATE_TIMEOUT) or nil
      found = self:_info(record, answer)
    end
    self:_look_away(record)
    return found
  end
  return self:_newest(id, function(record) return self:_info(record, (self:_ask(record, STATE_TIMEOUT))) end)
end

--- Calls fn with the newest living generation of an id; nil when there is none.
function Backend:_newest(id, fn)
  local seen, best = {}, nil
  self:_store():each(function(found, generation, kind)
    if found == id and kind == "record" then seen[#seen + 1] = generation end
  end)
  for _, generation in ipairs(seen) do
    local state, record = self:_state(id, generation)
    if state ~= "absent" and (not best or (record.data.created_at or 0) > (best.data.created_at or 0)) then
      record, best = best, record
    end
    self:_look_away(record)
  end
  if not best then return nil end
  local done, result = pcall(fn, best)
  self:_look_away(best)
  if not done then error(result, 0) end
  return result
end

--- A healthy sandbox of that id, made by whichever process; nil when there is none. What lives but does not answer is
--- neither: it raises. One that was doomed serves nobody, and says so: whoever doomed it may have died.
---@param id string
---@return table?
function Backend:discover(id)
  return self:_newest(id, function(record)
    local answer, message = self:_ask(record, self.runtime.discover_timeout or 5)
    if not answer then
      errors.raise("backend_error", ("sandbox %s lives but does not answer: %s"):format(id, message), { reason = "silent" })
    end
    -- Nobody's so far: it is ours now, for as long as this process lives.
    if self:_store():own(record, self:_owner()) then
      self.grips[record.generation] = self.grips[record.generation] or record
    end
    self.answered[record.generation] = true
    return self:_info(record, answer)
  end)
end

--- Whether the guest answers within that many seconds.
---@param info table
---@param seconds number
---@return boolean
function Backend:ready(info, seconds)
  local generation = generation_of(info, "ready")
  if self.answered[generation] then return true end
  local deadline = io.now() + seconds
  repeat
    local state, record = self:_state(info.sandbox_id, generation)
    local answer = state == "alive" and self:_ask(record, math.max(0.05, deadline - io.now()))
    self:_look_away(record)
    if state ~= "alive" then
      errors.raise("backend_error", "sandbox " .. info.sandbox_id .. " ended before it was ready", { reason = "start" })
    elseif answer then
      self.answered[generation] = true
      return true
    end
    io.sleep(0.01)
  until io.now() >= deadline
  return false
end

function Backend:_list_one(record, found)
  local known, state = pcall(self.store.state, self.store, record)
  if not known then state = "unknown" end       -- of another place: shown, since nobody here may say that it is gone
  if state ~= "absent" then
    found[#found + 1] = self:_info(record, state == "alive" and self:_ask(record, STATE_TIMEOUT) or nil)
  elseif not record.owned and record.fd:lock("w", records.OWNED) then
    pcall(self._clean, self, record.id, record.generation, record) -- nobody's: whoever made it is gone too
  end
end

--- All that live in this state directory. What an interrupted creation or teardown left is removed on the way.
---@return table[]
function Backend:list()
  local store, found = self:_store(), {}
  local records_seen, fresh_seen = {}, {}
  store:each(function(id, generation, kind)
    local list = kind == "record" and records_seen or fresh_seen
    list[#list + 1] = { id, generation }
  end)
  for _, one in ipairs(records_seen) do
    local record = self:_look(one[1], one[2])
    if record then
      self:_list_one(record, found)
      self:_look_away(record)
    end
  end
  for _, one in ipairs(fresh_seen) do
    if store:sweep_fresh(one[1], one[2]) then cgroup.remove(self:_groups_of(one[2])) end
  end
  store:sweep_sockets()
  cgroup.sweep(self:_cgroups())
  return found
end

-- ---- ending ----------------------------------------------------------------------------------------------------

function Backend:_cgroups()
  self.cgroups = self.cgroups or cgroup.detect(self.options.cgroup)
  return self.cgroups
end

--- The groups that a generation may have, when no record says so.
function Backend:_groups_of(generation)
  return cgroup.guess(self:_cgroups(), generation)
end

--- Makes sure that no other process holds it, and that none begins to (byte 1). False = it is held.
local function take_alone(grip)
  return grip.fd:lock("w", records.HELD)
end

local function give_back_alone(grip)
  if grip.clients > 0 then grip.fd:lock("r", records.HELD) else grip.fd:lock("u", records.HELD) end
end

local function owner_text(data)
  local owner = type(data.owner) == "table" and data.owner or {}
  return owner.pid and ("process %d"):format(owner.pid) or "another process"
end

--- Ends that generation, with everything in it. It answers when it is gone; `inspect` confirms.
---@param info table
---@param opts { timeout: number?, doomed: boolean? }?   doomed: its guest refuses everybody
---@return boolean
function Backend:destroy(info, opts)
  local generation, id = generation_of(info, "destroy"), info.sandbox_id
  local grip = self:_grip(id, generation)
  if not grip or self:_store():state(grip) == "absent" then return true end
  -- A doomed guest serves nobody: who holds it has not noticed yet that it was taken over, and may be a process that was stopped.
  if not take_alone(grip) and not (opts and opts.doomed) then
    errors.raise("replacement_deferred", ("sandbox %s is held by %s"):format(id, owner_text(grip.data)),
      { reason = "holders", sandbox_id = id })
  end
  local deadline = io.now() + (opts and opts.timeout or self.runtime.stop_timeout or 120)
  local done, failure = pcall(self._stop, self, grip, deadline)
  if not done then
    give_back_alone(grip)
    error(failure, 0)
  end
  return true
end

function Backend:_stop(grip, deadline)
  local data, store = grip.data, self:_store()
  if not data.pid then
    errors.raise("backend_error", ("sandbox %s lives, but its record is damaged and does not say which process it is: find and "
      .. "end its paddock-guest"):format(grip.id), { reason = "damaged_record" })
  end
  local pidfd <close> = proc.pidfd(data.pid, data.start)
  local _, _, parent = proc.start_of(data.pid)
  local parent_start = pidfd and parent and parent > 1 and proc.start_of(parent)
  local outer <close> = parent_start and proc.pidfd(parent, parent_start) or nil
  -- The guest's lock is asked again after its process is pinned: then it is this guest that the descriptor names.
  if pidfd and grip.fd:locked("w", records.ALIVE) then
    local sent, message = proc.kill(pidfd, SIGKILL)
    if not sent then
      errors.raise("backend_error", ("cannot end sandbox %s: %s"):format(grip.id, message), { reason = "signal" })
    end
    pidfd:ended(math.max(0, deadline - io.now()))
    -- bubblewrap's own process waits for it and ends by itself.
    if outer then outer:ended(math.min(1, math.max(0, deadline - io.now()))) end
  end
  local pause = 0.0005
  while store:state(grip) ~= "absent" do
    if io.now() >= deadline then
      errors.raise("backend_error", ("sandbox %s did not end within its limit: one of its processes may be stuck in the kernel")
        :format(grip.id), { reason = "stop_timeout" })
    end
    io.sleep(pause)
    pause = math.min(pause * 2, 0.05)
  end
end

--- Removes what an absent generation left outside itself: socket, groups, record. A workspace in data_dir stays.
---@param id string
---@param info table
function Backend:finish(id, info)
  if not (info and info.generation) then return end
  local generation = generation_of(info, "finish")
  local state, grip = self:_state(id, generation)
  if state ~= "absent" then
    errors.raise("backend_error", ("sandbox %s is not gone yet"):format(id), { reason = "alive", sandbox_id = id })
  end
  self:_clean(id, generation, grip)
  self:_look_away(grip)
end

function Backend:_clean(id, generation, grip)
  local left = cgroup.remove(grip and grip.data.groups or self:_groups_of(generation)) -- a damaged record may name none
  if left then errors.raise("io_error", "cannot remove the control group " .. left, { sandbox_id = id }) end
  self:_store():remove(id, generation)
  self:_let_go(generation)
end

--- Forgets a sandbox that goes on without this process: another one may own it from now on.
---@param info table
function Backend:disown(info)
  local generation = generation_of(info, "disown")
  self:_let_go(generation)
end

-- ---- speaking to it --------------------------------------------------------------------------------------------

--- Whether its guest has ended. It closes its connections a moment before it lets go of its lock.
local function ended(grip)
  local deadline = io.now() + GONE_WAIT
  repeat
    if not grip.fd:is_open() then return false end
    if not grip.fd:locked("w", records.ALIVE) then return true end
    io.sleep(0.005)
  until io.now() >= deadline
  return false
end

--- A client of that generation. As long as it is open, no other process may end the sandbox, unless opts.own is false.
---@param info table
---@param opts { token: integer|string, command_timeout: number?, own: boolean? }
---@return paddock.GuestClient
function Backend:connect(info, opts)
  local generation, id = generation_of(info, "connect"), info.sandbox_id
  local grip = self:_grip(id, generation)
  if not grip then
    errors.raise("lost", ("sandbox %s is gone"):format(id), { reason = "absent", sandbox_id = id })
  end
  local hold = not (opts and opts.own == false)
  if hold and grip.clients == 0 and not grip.fd:lock("r", records.HELD) then
    errors.raise("being_destroyed", ("sandbox %s is being destroyed by another process"):format(id), { sandbox_id = id })
  end
  if hold then grip.clients = grip.clients + 1 end
  local groups = grip.data.groups or {}
  return client.new {
    url = "http://sandbox", unix = self:_store():socket_path(generation), token = opts and opts.token,
    command_timeout = opts and opts.command_timeout or self.runtime.command_timeout,
    oom_kills = #groups > 0 and function() return cgroup.oom_kills(groups) end or nil,
    gone = function() return ended(grip) end,
    on_close = hold and function()
      grip.clients = grip.clients - 1
      if grip.clients == 0 and self.grips[generation] == grip then grip.fd:lock("u", records.HELD) end
    end or nil,
  }
end

return M
