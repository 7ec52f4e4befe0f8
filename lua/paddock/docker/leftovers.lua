--- Networks and volumes that were made for one sandbox alone: made, found by label, removed with it.
---
--- Each carries the sandbox's instance in its name and in a label; only what has both is ever removed.
local engines = require "paddock.docker.engine"
local io = require "paddock.io"
local view = require "paddock.docker.view"

local M = {}

local LIMIT = 10                     -- seconds for one call, at most
local SETTLED = 300                  -- seconds after which what no container names is no creation under way

---@class paddock.Leftovers
---@field backend paddock.DockerBackend
local Leftovers = {}
Leftovers.__index = Leftovers

---@param backend paddock.DockerBackend
function M.new(backend)
  return setmetatable({ backend = backend, engine = backend.engine }, Leftovers)
end

function Leftovers:_labels(instance)
  local prefix = self.backend.options.label_prefix
  return { [prefix .. "instance"] = instance, [prefix .. "deployment"] = self.backend.deployment }
end

--- Makes a network that leads nowhere but to this machine.
---@param name string
---@param instance string
function Leftovers:make_network(name, instance)
  local what = "make the network " .. name
  local response, fault = self.engine:call({
    method = "POST", path = "/networks/create", limit = self.engine:within(LIMIT),
    json = { Name = name, Driver = "bridge", Internal = true, CheckDuplicate = true, Labels = self:_labels(instance) },
  }, what)
  if not response then engines.refuse(what, fault) end
end

--- Makes a volume, by itself: not every engine gives one that a mount asks for the labels that it should have.
---@param name string
---@param instance string
function Leftovers:make_volume(name, instance)
  local what = "make the volume " .. name
  local response, fault = self.engine:call({
    method = "POST", path = "/volumes/create", limit = self.engine:within(LIMIT), json = { Name = name, Labels = self:_labels(instance) },
  }, what)
  if not response then engines.refuse(what, fault) end
end

--- Whether what the engine shows is ours, and of that instance.
function Leftovers:_ours(data, instance)
  local labels = type(data) == "table" and data.Labels
  if type(labels) ~= "table" then return false end
  for name, value in pairs(self:_labels(instance)) do
    if labels[name] ~= value then return false end
  end
  return true
end

local function is_gone(response, name)
  local fault = response.status >= 400 and engines.fault(response, name)
  return fault and (fault.status == 404 or fault.message:lower():find("not found", 1, true) ~= nil
    or fault.message:lower():find("no such", 1, true) ~= nil)
end

--- Removes one of them by name, when it is ours. Raises what the engine says otherwise; what is not there is fine.
---@param kind "networks"|"volumes"
---@param name string
---@param instance string
function Leftovers:remove(kind, name, instance)
  local path, what = ("/%s/%s"):format(kind, engines.percent(name)), ("remove the %s %s"):format(kind:sub(1, -2), name)
  local response, err = self.engine:send { method = "GET", path = path, limit = self.engine:within(LIMIT) }
  if not response then engines.unreachable(self.engine, what, err) end
  if is_gone(response, name) then return end
  if response.status >= 400 then engines.refuse(what, engines.fault(response, name)) end
  if not self:_ours(response.data, instance) then return end -- somebody else's, by that name
  response, err = self.engine:send { method = "DELETE", path = path, limit = self.engine:within(LIMIT) }
  if not response then engines.unreachable(self.engine, what, err) end
  if response.status >= 400 and not is_gone(response, name) then engines.refuse(what, engines.fault(response, name)) end
end

--- Removes all that a sandbox's info names.
---@param info table
function Leftovers:finish(info)
  local instance = info.instance
  if type(instance) ~= "string" then return end
  for _, name in ipairs(type(info.networks) == "table" and info.networks or {}) do self:remove("networks", name, instance) end
  if type(info.volume) == "string" then self:remove("volumes", info.volume, instance) end
end

--- What of that kind carries our deployment's label: a list of the engine's items.
function Leftovers:_all(kind)
  local prefix = self.backend.options.label_prefix
  local response, err = self.engine:send {
    method = "GET", path = "/" .. kind, limit = self.engine:within(LIMIT),
    query = { filters = { label = io.json.array { prefix .. "deployment=" .. self.backend.deployment } } },
  }
  if not response then engines.unreachable(self.engine, "list the " .. kind, err) end
  if response.status >= 400 then engines.refuse("list the " .. kind, engines.fault(response)) end
  local list = kind == "volumes" and type(response.data) == "table" and response.data.Volumes or response.data
  return type(list) == "table" and list or {}
end

--- Removes what no container names any more and no creation can be at work on. What fails is a warning: the next pass tries again.
---@param known table<string, boolean>   instances
function Leftovers:sweep(known)
  local prefix = self.backend.options.label_prefix
  for _, kind in ipairs { "networks", "volumes" } do
    for _, item in ipairs(self:_all(kind)) do
      local labels = type(item.Labels) == "table" and item.Labels or {}
      local instance = labels[prefix .. "instance"]
      local made = view.time(item.Created) or view.time(item.CreatedAt) or 0
      if type(instance) == "string" and not known[instance] and os.time() - made > SETTLED then
        local fine, failure = pcall(self.remove, self, kind, item.Name, instance)
        if not fine then io.log("warn", "left_behind", { what = kind, name = tostring(item.Name), message = tostring(failure) }) end
      end
    end
  end
end

return M
