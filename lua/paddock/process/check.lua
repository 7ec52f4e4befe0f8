--- What can be said against options for the process backend before there is a sandbox.
---
--- Why here and not at the first acquire: an operator who starts a host wants to hear of a wrong option then, by its name.
--- A policy may still ask for something else at each acquire, so the backend checks what it is asked for as well.
local errors = require "paddock.errors"

local M = {}

local function refuse(kind, name, message)
  errors.raise(kind, ("option `%s` %s"):format(name, message))
end

--- What needs no look at the machine.
---@param options table   normalized
function M.options(options)
  local own = options.backend_options
  if options.network ~= "none" then
    refuse("unsupported", "network", 'must be "none" with the process backend: its sandboxes reach nothing')
  end
  if options.image ~= nil then
    if own.images == nil then
      refuse("unsupported", "image", "needs `backend_options.images`, a folder of root file systems, with the process backend; "
        .. "for one root file system for all, set `backend_options.rootfs` in its place")
    elseif not options.image:find("^[%w_][%w_.:-]*$") then
      refuse("invalid_argument", "image", "must be the name of a folder in `backend_options.images`")
    end
  end
end

local function there(proc, path, how)
  local fd <close> = proc.open(path, how)
  return fd ~= nil
end

--- Asserts that something is at `path`: a folder, or (anything = true) whatever.
local function must_exist(proc, name, path, anything, advice)
  if type(path) ~= "string" or path:sub(1, 1) ~= "/" then return end -- the backend itself says what is wrong with it
  local fd <close>, message = proc.open(path, anything and "p" or "pd")
  if fd == nil then
    refuse("invalid_argument", name, ("names %s, which cannot be used: %s%s"):format(path, message, advice or ""))
  end
end

--- What a look at the machine says: what has to be there.
---@param options table   normalized
function M.places(options)
  local found, io = pcall(require, "paddock.io")
  if not found then return end -- without the core: the runtime's own Lua looks
  local own, proc = options.backend_options, io.proc
  must_exist(proc, "backend_options.rootfs", own.rootfs)
  must_exist(proc, "backend_options.images", own.images)
  must_exist(proc, "backend_options.bwrap", own.bwrap, true)
  must_exist(proc, "backend_options.guest", own.guest, true)
  if options.image and type(own.images) == "string" then must_exist(proc, "image", own.images .. "/" .. options.image) end
  local data = options.data_dir
  if data and not there(proc, data, "pd") then -- it is made when it is first needed, in a folder that is there
    if there(proc, data, "p") then refuse("invalid_argument", "data_dir", ("names %s, which is no folder"):format(data)) end
    if not there(proc, data:match("^(/.*)/[^/]+/*$") or "/", "pd") then
      refuse("invalid_argument", "data_dir", ("names %s, and the folder above it is not there: make it"):format(data))
    end
  end
  for i, mount in ipairs(options.mounts) do
    if not mount.create and not mount.if_exists then
      must_exist(proc, ("mounts[%d].source"):format(i), mount.source, true,
        '; make it, or set create = "0755" (it is made) or if_exists = true (the mount is left out)')
    end
  end
end

return M
