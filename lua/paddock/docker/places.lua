--- What a container has on this machine: a folder of its own, with the settings and the socket of its guest, and the secret
--- that the guest wants to hear.
---
---     state_dir/docker/INSTANCE/          0700, this user's alone
---       record.json                       what a later process needs: the secret; whose sandbox it is; what was made for it
---       peer.json                         what was learned of the guest since
---       guest/                            mounted into the container; open to whatever user runs in there until the guest serves
---         settings                        read and unlinked by the guest before it serves anybody
---         socket
---
--- INSTANCE is a random name, in a label of the container, since the container's own id is not known before it is made. On planes
--- without a guest there is a place only while a container is made that has a network or a volume of its own.
---
--- What a crash left is told from what lives by these rules, whatever the order in which processes do their steps:
---   1  a creation locks the record before anything is in it, and until its container is there; the record is never replaced.
---      So one that can be read and is not locked belongs to a container that is in the engine by now, or to nobody.
---   2  a creation has a share in `.making` from before its folder is there until its record is locked. So a folder without a
---      record belongs to nobody while somebody has `.making` alone.
---   3  a place is judged only by who speaks to the engine that it names, for the deployment that it names: in what others see of
---      that engine, or of another one, its container is missing.
---   4  an answer that did not come, or that cannot be read, says nothing.
local errors = require "paddock.errors"
local io = require "paddock.io"
local proc = io.proc

local M = {}

local CREATING = 0                   -- the byte that a creation locks
local MAKING = "/.making"
local MAKING_LIMIT = 10              -- seconds until a sweep of folders without a record is over
local PLACE = "^%x+$"

---@class paddock.DockerPlaces
---@field path string
---@field engine string        the id of the engine that they are for
---@field deployment string    and whose containers there
local Places = {}
Places.__index = Places

---@class paddock.DockerPlace
---@field instance string
---@field secret string
---@field data table
---@field lock userdata?        while it is being created

local function failed(err, what, path)
  local code = type(err) == "table" and err.reason or nil
  local message = tostring(type(err) == "table" and err.message or err)
  if not message:find(path, 1, true) then message = ("cannot %s %s: %s"):format(what, path, message) end
  errors.raise("io_error", message, { reason = code })
end

local function must(done, err, what, path)
  if not done then failed(err, what, path) end
  return done
end

---@param state_dir string
---@param engine string
---@param deployment string
---@return paddock.DockerPlaces
function M.open(state_dir, engine, deployment)
  return setmetatable({ path = state_dir .. "/docker", engine = engine, deployment = deployment }, Places)
end

function Places:_of(instance, name)
  return ("%s/%s%s"):format(self.path, instance, name and "/" .. name or "")
end

--- The folder that is mounted, and the socket in it.
function Places:folder(instance) return self:_of(instance, "guest") end
function Places:socket(instance) return self:_of(instance, "guest/socket") end

local function hex(n) return io.hex(io.random(n)) end
M.random = hex

--- A share in `.making`, or all of it; nil when somebody else's is in the way.
---@param type "r"|"w"
function Places:_making(type)
  local path = self.path .. MAKING
  local fd, message, code = proc.open(path, "wcn", 384)    -- 0600
  if not fd then failed({ message = message, reason = code }, "open", path) end
  if fd:lock(type, 0) then return fd end
  fd:close()
  return nil
end

function Places:_share()
  local deadline = io.now() + MAKING_LIMIT
  repeat
    local fd = self:_making "r"
    if fd then return fd end
    io.sleep(0.005)
  until io.now() >= deadline
  failed({ message = "another process has it for too long" }, "lock", self.path .. MAKING)
end

--- Makes a place. Its lock is held until `settle`, or until this process ends.
---@param sandbox_id string
---@param settings? fun(secret: string, instance: string): string   the guest's, where there is one
---@param more? fun(instance: string): table   what else is to be in the record
---@return paddock.DockerPlace
function Places:begin(sandbox_id, settings, more)
  local instance, secret = hex(16), hex(24)
  local path = self:_of(instance)
  local done, err = io.fs.mkdir(self.path, 448)          -- 0700
  must(done, err, "make the folder", self.path)
  local _share <close> = self:_share()
  done, err = io.fs.mkdir(path, 448)
  must(done, err, "make the folder", path)
  local record = path .. "/record.json"
  local lock, message, code = proc.open(record, "wcx", 384) -- 0600
  if not lock then
    io.fs.rmdir(path)
    failed({ message = message, reason = code }, "make the record", record)
  end
  local fine, failure = pcall(function()
    if not lock:lock("w", CREATING) then failed({ message = "somebody else has it" }, "lock the record", record) end
    local data = { version = 1, sandbox_id = sandbox_id, instance = instance, secret = secret, created_at = os.time(),
                   engine = self.engine, deployment = self.deployment }
    for name, value in pairs(more and more(instance) or {}) do data[name] = value end
    done, message, code = lock:pwrite(io.json.encode(data), 0)
    must(done, { message = message, reason = code }, "write the record", record)
    if settings then
      done, err = io.fs.mkdir(path .. "/guest", 511)      -- 0777: whoever the image's user is; the folder above keeps others out
      must(done, err, "make the folder", path .. "/guest")
      done, err = io.fs.write_atomic(path .. "/guest/settings", settings(secret, instance), 420) -- 0644
      must(done, err, "write the settings", path .. "/guest/settings")
    end
    return data
  end)
  if not fine then
    lock:close()
    pcall(self.remove, self, instance)
    error(failure, 0)
  end
  return { instance = instance, secret = secret, data = failure, lock = lock }
end

--- The container is there, and its label says whose place this is.
---@param place paddock.DockerPlace
function Places:settle(place)
  if place.lock then place.lock:close() end
  place.lock = nil
end

--- A file of a place, decoded: nil and the reason when there is none ("ENOENT") or nobody can tell what is in it ("garbled").
function Places:_read(instance, name)
  local path = self:_of(instance, name)
  local text, err = io.fs.read(path, 65536)
  if not text then
    if err.reason == "ENOENT" then return nil, "ENOENT" end
    failed(err, "read", path)
  end
  local fine, data = pcall(io.json.decode, text)
  if fine and type(data) == "table" then return data end
  return nil, "garbled"
end

--- The record of an instance, with what was learned since; nil and why when this machine has none that can be read. It raises
--- nothing: whose guest cannot be spoken to can be stopped all the same, and is no hindrance to the others.
---@param instance string
---@return table?
---@return string? why
function Places:find(instance)
  local function read(name)
    local fine, data, why = pcall(self._read, self, instance, name)
    if fine then return data, why end
    return nil, tostring(type(data) == "table" and data.message or data)
  end
  local data, why
  if instance:find(PLACE) then data, why = read "record.json" end
  if data and (type(data.secret) ~= "string" or data.instance ~= instance) then data, why = nil, "garbled" end
  local learned, unknown
  if data then learned, unknown = read "peer.json" end
  if learned then
    data.peer, data.pid_ns = learned.peer, learned.pid_ns
  elseif data and unknown ~= "ENOENT" then -- without it, whoever listens there would be believed
    data, why = nil, unknown
  end
  if data then return data end
  if why == "garbled" then return nil, "its record in this state directory is garbled" end
  return nil, why and why ~= "ENOENT" and why or "its record is not in this state directory"
end

--- The guest has read its settings and serves its socket: nothing is to be written in its folder any more. Whoever is neither its
--- owner on this machine nor has a right to ignore modes could fill the disk there, or put another socket in place of the guest's.
---@param instance string
function Places:close_folder(instance)
  local path = self:folder(instance)
  local done, err = io.fs.chmod(path, 493)                   -- 0755
  if not done and err.reason ~= "ENOENT" then failed(err, "change the mode of", path) end
end

--- Writes down what was learned of the guest. Where the place is gone meanwhile nobody needs it.
---@param instance string
---@param facts { peer: integer, pid_ns: any }
function Places:note(instance, facts)
  local path = self:_of(instance, "peer.json")
  local done, err = io.fs.write_atomic(path, io.json.encode(facts), 384)
  if not done and err.reason ~= "ENOENT" then failed(err, "write", path) end
end

--- Removes a place, the record last. What is gone already is fine.
---@param instance string
function Places:remove(instance)
  if not instance:find(PLACE) then return end
  local function gone(done, err, what, path)
    if not done and err.reason ~= "ENOENT" then failed(err, what, path) end
  end
  local folder = self:_of(instance, "guest")
  -- What ran inside could write here: whatever it left is unlinked by name, and no link is followed. A folder in a folder is moved
  -- up, so that there is no depth that a path could not name.
  local function listed(path)
    local names, err = io.fs.list(path)
    if not names and err.reason ~= "ENOENT" then failed(err, "read the folder", path) end
    return names or {}
  end
  local function unlinked(at)
    local done, why = io.fs.unlink(at)
    if not done and (why.reason == "EISDIR" or why.reason == "EPERM") then return false end
    gone(done, why, "remove", at)
    return true
  end
  local again
  repeat
    again = false
    for _, name in ipairs(listed(folder)) do
      local at = folder .. "/" .. name
      if not unlinked(at) then
        for _, inner in ipairs(listed(at)) do
          if not unlinked(at .. "/" .. inner) then
            local done, why = io.fs.rename(at .. "/" .. inner, folder .. "/" .. hex(16))
            gone(done, why, "move", at .. "/" .. inner)
            again = true
          end
        end
        local done, why = io.fs.rmdir(at)
        gone(done, why, "remove the folder", at)
      end
    end
  until not again
  local done, err = io.fs.rmdir(folder)
  gone(done, err, "remove the folder", folder)
  done, err = io.fs.unlink(self:_of(instance, "record.json"))
  gone(done, err, "remove the record", self:_of(instance, "record.json"))
  for _ = 1, 3 do -- somebody may have written down just now what he learned of the guest
    for _, name in ipairs(io.fs.list(self:_of(instance)) or {}) do io.fs.unlink(self:_of(instance, name)) end
    done, err = io.fs.rmdir(self:_of(instance))
    if done or err.reason ~= "ENOTEMPTY" then break end
  end
  gone(done, err, "remove the folder", self:_of(instance))
end

--- What a place is: its record, when its container is made or never will be; "bare", without a record; or nil: a creation is at work
--- on it, it is not for us to judge, or nobody can tell.
---@param instance string
---@return table|"bare"|nil
function Places:_state(instance)
  local path = self:_of(instance, "record.json")
  local fd <close>, _, code = proc.open(path, "wn")
  if not fd then return code == "ENOENT" and "bare" or nil end
  local fine, data, why = pcall(function()
    if fd:locked("w", CREATING) then return nil, "locked" end
    return self:_read(instance, "record.json")
  end)
  if not fine or why == "locked" then return nil end
  -- Empty, or cut short by the end of the machine: rule 2 says whether anybody is still to write it.
  if not data then return "bare" end
  if data.engine ~= self.engine or data.deployment ~= self.deployment or data.instance ~= instance then return nil end
  return data
end

--- The instances that have a place here which may be one that a crash left: each one's record, or "bare".
---@return table<string, table|"bare">
function Places:instances()
  local names, err = io.fs.list(self.path)
  if not names then
    if err.reason == "ENOENT" then return {} end
    failed(err, "read the folder", self.path)
  end
  local out = {}
  for _, name in ipairs(names) do
    if name:find(PLACE) then out[name] = self:_state(name) end
  end
  return out
end

--- Removes the places that no container names: what a crash left of a creation. `known` must have been read from the engine after
--- `before`, what `instances` said. Whether one is being made was asked there and is not here: a creation that has ended in between
--- has a container that `known` lacks.
---@param before table<string, table|"bare">
---@param known table<string, boolean>
---@param judge fun(record: table): boolean   whether one is to go; takes what else was made for it. It may raise: then it is kept
function Places:sweep(before, known, judge)
  local bare = {}
  local function attempt(instance, fn, ...)
    local fine, failure = pcall(fn, ...)
    if not fine then io.log("warn", "left_behind", { what = "place", name = instance, message = tostring(failure) }) end
  end
  for instance, record in pairs(before) do
    if not known[instance] and record == "bare" then
      bare[#bare + 1] = instance
    elseif not known[instance] then
      attempt(instance, function()
        if judge(record) then self:remove(instance) end
      end)
    end
  end
  if #bare == 0 then return end
  local fine, all = pcall(self._making, self, "w")
  local _alone <close> = fine and all or nil
  if not _alone then return end -- somebody is making one: the next pass will do
  for _, instance in ipairs(bare) do
    if self:_state(instance) == "bare" then attempt(instance, self.remove, self, instance) end
  end
end

return M
