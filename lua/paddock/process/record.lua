--- The records of process sandboxes: one small file per generation, and three locks on its first bytes.
---
--- Byte 0 belongs to the guest, which inherited the locked description: a free lock proves that it is gone. Byte 1 is held
--- (shared) by every process that has a client; destroying needs it alone. Byte 2 is held by the runtime that owns the
--- sandbox; the record's `owner` says who that is, for people. Locks end with their holder, however it ends.
---
--- Nothing is synced to disk: what a power failure takes from the record, it takes from the sandbox too. A record keeps
--- its size, padded with spaces, so that a new owner can be written over the old one in one step.
local errors = require "paddock.errors"
local io = require "paddock.io"
local proc = io.proc

local M = {}

M.ALIVE, M.HELD, M.OWNED = 0, 1, 2         -- bytes

local SIZE = 4096                          -- bytes of a record; larger ones are padded to a multiple
local NAME = "^([a-z0-9-]+)%.(%x+)%.json$"
local FRESH = "^%.([a-z0-9-]+)%.(%x+)%.new$"
local REMAINS_WAIT = 1                     -- seconds for what a creation left to end
local SIGKILL = 9
local SOCKET_MAX = 100                     -- bytes of a socket's path; the kernel takes 107

---@class paddock.ProcessStore
---@field path string      the state directory
---@field dir userdata     its folder of records
---@field sockets userdata its folder of sockets
local Store = {}
Store.__index = Store

---@class paddock.ProcessRecord
---@field id string
---@field generation string
---@field fd userdata      this process's own description
---@field guest_fd userdata?  the one that the guest inherits; only while it is being created
---@field data table

--- Raises io_error for something below `path`.
---@param what string
---@param path string
---@param message string
---@param code string?
function M.io_error(what, path, message, code)
  local advice = code == "ENOSPC" and "; free some space" or code == "EROFS" and "; choose another state_dir"
    or code == "EACCES" and "; it must belong to this user" or ""
  errors.raise("io_error", ("cannot %s %s: %s%s"):format(what, path, message or "unknown", advice), { reason = code })
end

local function make_folder(path)
  local made, message, code = proc.mkdir(nil, path, 448) -- 0700
  if not made and code == "ENOENT" then
    local parent = path:match("^(.+)/[^/]+/*$")
    if parent then
      make_folder(parent)
      made, message, code = proc.mkdir(nil, path, 448)
    end
  end
  if not made and code ~= "EEXIST" then
    M.io_error("create the directory", path, message, code)
  end
end

local function open_folder(path)
  local fd, message, code = proc.open(path, "rd")
  if not fd then M.io_error("open the directory", path, message, code) end
  return fd
end

--- Opens the store, making its folders.
---@param state_dir string
---@return paddock.ProcessStore
function M.open(state_dir)
  make_folder(state_dir .. "/sandboxes")
  make_folder(state_dir .. "/sockets")
  return setmetatable({
    path = state_dir, dir = open_folder(state_dir .. "/sandboxes"), sockets = open_folder(state_dir .. "/sockets"),
    me = proc.self(),
  }, Store)
end

local function record_name(id, generation) return ("%s.%s.json"):format(id, generation) end
local function fresh_name(id, generation) return (".%s.%s.new"):format(id, generation) end

function Store:path_of(name) return self.path .. "/sandboxes/" .. name end

--- Where clients find a generation's socket. A path that would be too long leads through our own descriptor.
---@param generation string
function Store:socket_path(generation)
  local path = ("%s/sockets/%s"):format(self.path, generation)
  return #path <= SOCKET_MAX and path or ("/proc/self/fd/%d/%s"):format(self.sockets:no(), generation)
end

---@param generation string
---@return userdata listening
function Store:listen(generation)
  local fd, message, code = proc.listen(self.sockets, generation)
  if not fd then M.io_error("make the socket", self.path .. "/sockets/" .. generation, message, code) end
  return fd
end

local function hex(bytes)
  return (bytes:gsub(".", function(c) return ("%02x"):format(c:byte()) end))
end

local function encode(data)
  local text = io.json.encode(data)
  return text .. (" "):rep(-#text % SIZE)
end

--- Begins a record under a name that nobody takes for a sandbox yet, locked for the guest and for us.
---@param id string
---@return paddock.ProcessRecord
function Store:begin(id)
  for _ = 1, 8 do
    local generation = hex(io.random(16))
    local name = fresh_name(id, generation)
    local guest_fd, message, code = proc.open(name, "wcx", 384, self.dir) -- 0600
    if not guest_fd then M.io_error("create the record", self:path_of(name), message, code) end
    local fd
    fd, message, code = proc.open(name, "wn", 0, self.dir)
    if not fd and code ~= "ENOENT" then
      proc.unlink(self.dir, name)
      guest_fd:close()
      M.io_error("create the record", self:path_of(name), message, code)
    end
    -- Somebody who tidies up may have come between the file and its locks: then it is theirs, and we begin anew. OWNED comes
    -- first: who has it alone may end whatever holds ALIVE, so that must never be us.
    if fd and fd:lock("w", M.OWNED) and guest_fd:lock("w", M.ALIVE) and fd:stat().links > 0 then
      return { id = id, generation = generation, fd = fd, guest_fd = guest_fd, fresh = true, clients = 0, owned = true }
    end
    if fd then fd:close() end
    guest_fd:close()
  end
  errors.raise("io_error", "cannot keep a new record in " .. self.path .. "/sandboxes: something there keeps removing it")
end

--- Writes the record and gives it its name: from here on others see the sandbox.
---@param record paddock.ProcessRecord
---@param data table
function Store:publish(record, data)
  local fresh, name = fresh_name(record.id, record.generation), record_name(record.id, record.generation)
  local done, message, code = record.fd:pwrite(encode(data), 0)
  if not done then M.io_error("write the record", self:path_of(fresh), message, code) end
  done, message, code = proc.rename(self.dir, fresh, name)
  if not done then M.io_error("name the record", self:path_of(name), message, code) end
  record.data, record.fresh = data, nil
end

--- Names this process as the owner, if it is (byte 2).
---@param record paddock.ProcessRecord
---@param owner table
function Store:own(record, owner)
  if record.owned or not record.fd:is_open() or not record.fd:lock("w", M.OWNED) then return record.owned end
  record.owned = true
  record.data.owner = owner
  record.fd:pwrite(encode(record.data), 0)   -- for people only; the lock is what counts
  return true
end

local function whole(value) return type(value) == "number" and math.tointeger(value) or nil end

--- Reads a record that another process may be writing over right now. What is damaged gives an empty one: its lock still
--- says whether it lives.
local function read_data(fd)
  for try = 1, 5 do
    local text = fd:pread(1 << 20, 0)
    local ok, data = pcall(io.json.decode, text or "")
    if ok and type(data) == "table" then
      data.pid, data.start, data.created_at = whole(data.pid), whole(data.start), whole(data.created_at)
      data.groups = type(data.groups) == "table" and data.groups or {}
      local complete = data.pid and data.pid > 0 and data.pid < 1 << 31 and data.start and type(data.boot) == "string"
      return complete and data or {}
    end
    if try < 5 then io.sleep(0.001) end
  end
  return {}
end

--- The record of one generation; nil when there is none.
---@param id string
---@param generation string
---@return paddock.ProcessRecord?
function Store:find(id, generation)
  local name = record_name(id, generation)
  local fd, message, code = proc.open(name, "wn", 0, self.dir)
  if not fd then
    if code == "ENOENT" then return nil end
    M.io_error("open the record", self:path_of(name), message, code)
  end
  return { id = id, generation = generation, fd = fd, data = read_data(fd), clients = 0, owned = false }
end

--- Calls fn(id, generation, kind, name) for what is in the folder; kind: "record" or "fresh".
function Store:each(fn)
  local names, message, code = proc.names(self.dir)
  if not names then M.io_error("read the directory", self.path .. "/sandboxes", message, code) end
  table.sort(names)
  for _, name in ipairs(names) do
    local id, generation = name:match(NAME)
    local fresh_id, fresh_generation = name:match(FRESH)
    if id then
      fn(id, generation, "record", name)
    elseif fresh_id then
      fn(fresh_id, fresh_generation, "fresh", name)
    end
  end
end

--- "alive", "ending" (its lock is free, its processes are still going away) or "absent"; raises when it cannot be known.
---@param record paddock.ProcessRecord
function Store:state(record)
  if record.fd:locked("w", M.ALIVE) then return "alive" end
  local data, me = record.data, self.me
  if data.boot == nil then return "absent" end  -- half lost with the machine's power, as the sandbox was
  local function unknown(where)
    errors.raise("backend_error", ("whether sandbox %s is gone cannot be known here: its record is of another %s; remove %s "
      .. "when it is gone there"):format(record.id, where, self:path_of(record_name(record.id, record.generation))),
      { reason = "unknown_place", sandbox_id = record.id })
  end
  if data.boot ~= me.boot then
    if data.machine ~= me.machine then unknown("machine") end
    return "absent"                             -- nothing survives a reboot
  elseif data.pid_ns ~= me.pid_ns then
    unknown("pid namespace")
  elseif data.time_ns ~= me.time_ns then
    unknown("time namespace")
  end
  -- A dying process closes its files first, and ends the rest of its namespace after that.
  local start, kind = proc.start_of(data.pid)
  if start == data.start and kind ~= "Z" and kind ~= "X" then return "ending" end
  return "absent"
end

--- Removes what a generation left in the state directory; its record last. Call only when it is absent.
---@param id string
---@param generation string
function Store:remove(id, generation)
  local function unlink(dir, folder, name)
    local done, message, code = proc.unlink(dir, name)
    if not done and code ~= "ENOENT" then
      M.io_error("remove", ("%s/%s/%s"):format(self.path, folder, name), message, code)
    end
  end
  unlink(self.sockets, "sockets", generation)
  unlink(self.dir, "sandboxes", fresh_name(id, generation))
  unlink(self.dir, "sandboxes", record_name(id, generation))
end

--- Ends the processes that hold this record's ALIVE lock, each through a descriptor that was taken before it was found to
--- hold it. Only for who has the OWNED lock: then they are the remains of a creation, which nobody waits for.
local function end_remains(fd)
  local stat, me = fd:stat(), proc.self().pid
  local held = (":%d 0 0\n"):format(stat.ino)
  local all <close> = proc.open("/proc", "rd")
  for _, name in ipairs(all and proc.names(all) or {}) do
    local pid = math.tointeger(tonumber(name))
    local start = pid and pid ~= me and proc.start_of(pid)
    local pidfd <close> = start and proc.pidfd(pid, start) or nil
    local infos <close> = pidfd and proc.open(name .. "/fdinfo", "rd", 0, all) or nil
    for _, number in ipairs(infos and proc.names(infos) or {}) do
      local info <close> = proc.open(number, "r", 0, infos)
      for line in (info and info:pread(8192, 0) or ""):gmatch("lock:[^\n]*OFDLCK[^\n]*WRITE[^\n]*\n") do
        if line:sub(-#held) == held then proc.kill(pidfd, SIGKILL) end
      end
    end
  end
end

--- Takes away a creation that was cut off. Whoever holds its OWNED lock is still at work on it; what holds only the other
--- one is a sandbox that never began, and which may wait for its maker forever.
---@param id string
---@param generation string
function Store:sweep_fresh(id, generation)
  local fd <close> = proc.open(fresh_name(id, generation), "wn", 0, self.dir)
  if not fd or not fd:lock("w", M.OWNED) then return false end
  local deadline, asked = io.now() + REMAINS_WAIT, false
  while not fd:lock("w", M.ALIVE) do
    if io.now() >= deadline then return false end
    if not asked then end_remains(fd) end
    asked = true
    io.sleep(0.002)
  end
  self:remove(id, generation)
  return true
end

--- Removes sockets that no record names. The folder of sockets is read first: a record is always there before its socket.
function Store:sweep_sockets()
  local names = proc.names(self.sockets) or {}
  local known = {}
  self:each(function(_, generation) known[generation] = true end)
  for _, name in ipairs(names) do
    if not known[name] then proc.unlink(self.sockets, name) end
  end
end

return M
