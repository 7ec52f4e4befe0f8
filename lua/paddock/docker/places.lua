--- What a container has on this machine: a folder of its own, with the settings and the socket of its guest, and the secret
--- that the guest wants to hear.
---
---     state_dir/docker/INSTANCE/          0700, this user's alone
---       record.json                       what a later process needs: the secret; whose sandbox it is
---       guest/                            mounted into the container; open to whatever user runs in there
---         settings                        read and unlinked by the guest before it serves anybody
---         socket
---
--- INSTANCE is a random name, in a label of the container, since the container's own id is not known before it is made. A
--- creation holds a lock on the record until the container is there, so that what a crash left can be told from what is just
--- being made: no lock, and no container with that label.
local errors = require "paddock.errors"
local io = require "paddock.io"
local proc = io.proc

local M = {}

local CREATING = 0                   -- the byte that a creation locks
local PLACE = "^%x+$"

---@class paddock.DockerPlaces
---@field path string
local Places = {}
Places.__index = Places

---@class paddock.DockerPlace
---@field instance string
---@field secret string
---@field data table
---@field lock userdata?        while it is being created

local function failed(err, what, path)
  local code = type(err) == "table" and err.reason or nil
  local message = type(err) == "table" and err.message or tostring(err)
  errors.raise("io_error", ("cannot %s %s: %s"):format(what, path, message), { reason = code })
end

local function must(done, err, what, path)
  if not done then failed(err, what, path) end
  return done
end

---@param state_dir string
---@return paddock.DockerPlaces
function M.open(state_dir)
  return setmetatable({ path = state_dir .. "/docker" }, Places)
end

function Places:_of(instance, name)
  return ("%s/%s%s"):format(self.path, instance, name and "/" .. name or "")
end

--- The folder that is mounted, and the socket in it.
function Places:folder(instance) return self:_of(instance, "guest") end
function Places:socket(instance) return self:_of(instance, "guest/socket") end

local function hex(n) return io.hex(io.random(n)) end
M.random = hex

--- Makes a place. Its lock is held until `settle`, or until this process ends.
---@param sandbox_id string
---@param settings fun(secret: string, instance: string): string   the guest's
---@return paddock.DockerPlace
function Places:begin(sandbox_id, settings)
  local instance, secret = hex(16), hex(24)
  local path = self:_of(instance)
  local done, err = io.fs.mkdir(self.path, 448)          -- 0700
  must(done, err, "make the folder", self.path)
  done, err = io.fs.mkdir(path, 448)
  must(done, err, "make the folder", path)
  local record = path .. "/record.json"
  local lock, message, code = proc.open(record, "wcx", 384) -- 0600
  if not lock then failed({ message = message, reason = code }, "make the record", record) end
  local fine, failure = pcall(function()
    if not lock:lock("w", CREATING) then failed({ message = "somebody else has it" }, "lock the record", record) end
    local data = { version = 1, sandbox_id = sandbox_id, instance = instance, secret = secret, created_at = os.time() }
    done, message, code = lock:pwrite(io.json.encode(data), 0)
    must(done, { message = message, reason = code }, "write the record", record)
    done, err = io.fs.mkdir(path .. "/guest", 511)        -- 0777: whoever the image's user is; the folder above keeps others out
    must(done, err, "make the folder", path .. "/guest")
    done, err = io.fs.write_atomic(path .. "/guest/settings", settings(secret, instance), 420) -- 0644
    must(done, err, "write the settings", path .. "/guest/settings")
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

--- The record of an instance; nil when this machine has none.
---@param instance string
---@return table?
function Places:find(instance)
  if not instance:find(PLACE) then return nil end
  local text, err = io.fs.read(self:_of(instance, "record.json"), 65536)
  if not text then
    if err.reason == "ENOENT" then return nil end
    failed(err, "read the record", self:_of(instance, "record.json"))
  end
  local fine, data = pcall(io.json.decode, text)
  if not fine or type(data) ~= "table" or type(data.secret) ~= "string" or data.instance ~= instance then return nil end
  return data
end

--- Writes down what was learned of the guest.
---@param data table   of `find`, changed
function Places:note(data)
  local path = self:_of(data.instance, "record.json")
  local done, err = io.fs.write_atomic(path, io.json.encode(data), 384)
  must(done, err, "write the record", path)
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
  for _, name in ipairs(io.fs.list(self:_of(instance)) or {}) do io.fs.unlink(self:_of(instance, name)) end
  done, err = io.fs.rmdir(self:_of(instance))
  gone(done, err, "remove the folder", self:_of(instance))
end

--- Whether a creation is at work on it; nil while it has no record yet, when nobody can tell.
local function being_made(path)
  local text = io.fs.read(path, 65536)
  if not text or text == "" then return nil end
  local fd <close> = proc.open(path, "wn")
  if not fd then return nil end
  return not fd:lock("w", CREATING)
end

--- The instances that have a place here and are not being made: by name, "made", or "bare" without a record.
---@return table<string, "made"|"bare">
function Places:instances()
  local names, err = io.fs.list(self.path)
  if not names then
    if err.reason == "ENOENT" then return {} end
    failed(err, "read the folder", self.path)
  end
  local out = {}
  for _, name in ipairs(names) do
    local at_work = name:find(PLACE) and being_made(self:_of(name, "record.json"))
    if name:find(PLACE) and not at_work then out[name] = at_work == nil and "bare" or "made" end
  end
  return out
end

--- Removes the places that no container names: what a crash between the folder and the container left. `known` must have been
--- read from the engine after `before`, what `instances` said. Whether one is being made is asked there and not here: a creation
--- that ended in between has a container that `known` lacks. For the same reason one that has its record only since is left alone.
---@param before table<string, "made"|"bare">
---@param known table<string, boolean>
function Places:sweep(before, known)
  for instance, state in pairs(before) do
    if not known[instance] and (state == "made" or being_made(self:_of(instance, "record.json")) == nil) then self:remove(instance) end
  end
end

return M
