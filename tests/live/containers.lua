--- Runtimes with real container sandboxes, for the specs of this folder: one world per engine and plane.
local busted = require "busted"
local engines = require "tests.support.engines"
local paddock = require "paddock"
local support = require "tests.support"
local sh = support.sh

local M = {}

function M.quiet() end

---@class tests.Containers
---@field engine tests.Engine
---@field state string      the state directory
---@field prefix string     of this world's containers
---@field proxy tests.FaultProxy?
local World = {}
World.__index = World

local made = 0
--- A world in front of that engine. `opts.proxy`: through a fault proxy.
---@param engine tests.Engine
---@param opts { proxy: boolean?, plane: string? }?
---@return tests.Containers
function M.world(engine, opts)
  opts = opts or {}
  made = made + 1
  local self = setmetatable({
    engine = engine, state = (sh("mktemp -d /tmp/pdk-dock-XXXXXX"):gsub("%s", "")), opened = {}, opts = opts,
    prefix = ("pdkt%s%d"):format(tostring({}):match("0x(%x+)"):sub(-6), made),
  }, World)
  if opts.proxy then self.proxy = engine:proxy() end
  self.socket = self.proxy and self.proxy.socket or engine.socket
  return self
end

--- The options of paddock.open, with `more` over them; `more.backend_options` is merged.
function World:options(more)
  local out = {
    backend = "docker", state_dir = self.state, log = M.quiet, image = engines.image "busybox",
    ready_timeout = 30, stop_timeout = 30,
  }
  local own = { host = "unix://" .. self.socket, prefix = self.prefix, plane = self.opts.plane }
  for key, value in pairs(more or {}) do
    if key ~= "backend_options" then out[key] = value end
  end
  for key, value in pairs(more and more.backend_options or {}) do own[key] = value end
  out.backend_options = own
  return out
end

function World:open(more)
  local rt = paddock.open(self:options(more))
  self.opened[#self.opened + 1] = rt
  return rt
end

--- The containers of this world: engine's list items.
function World:containers()
  local _, list = self.engine:call("GET", "/containers/json?all=1&filters=" .. '%7B%22name%22%3A%5B%22' .. self.prefix .. '%22%5D%7D')
  assert(type(list) == "table", "the engine did not list its containers: " .. tostring(list))
  local out = {}
  for _, item in ipairs(list) do
    if (item.Names[1] or ""):find("^/?" .. self.prefix .. "%-") then out[#out + 1] = item end
  end
  return out
end

--- What an engine says of a container.
function World:look(id)
  local status, data = self.engine:call("GET", "/containers/" .. id .. "/json")
  return status == 200 and data or nil, status
end

--- Removes a container behind the runtime's back.
function World:remove(id)
  self.engine:call("DELETE", "/containers/" .. id .. "?force=true&v=true")
end

--- What is left in the state directory of sandboxes.
function World:places()
  return (sh("ls " .. self.state .. "/docker 2>/dev/null | wc -l"):gsub("%s", ""))
end

--- Ends everything. With `clean`, asserts first that the runtimes left nothing behind.
function World:close(clean)
  local failure
  for _, rt in ipairs(self.opened) do
    local fine, err = pcall(rt.shutdown, rt)
    if not fine and clean then failure = tostring(err) end
  end
  self.opened = {}
  if self.proxy then self.proxy:close() end
  local left = self:containers()
  for _, item in ipairs(left) do self:remove(item.Id) end
  local places = self:places()
  sh("rm -rf " .. self.state)
  if clean then
    assert(failure == nil, failure)
    assert(#left == 0, #left .. " containers were left behind")
    assert(places == "0", places .. " places were left in the state directory")
  end
end

--- Like busted's `it`, in a world of its own, which must be empty afterwards; skipped where the engine cannot run.
function M.on(engine, opts)
  return function(name, fn)
    busted.it(name, function()
      if engine.why then
        busted.pending(engine.why)
        return
      end
      local world = M.world(engine, opts)
      local fine, err = xpcall(fn, debug.traceback, world)
      local left, why = pcall(world.close, world, fine)
      if not fine then error(err, 0) end
      if not left then error(why, 0) end
    end)
  end
end

return M
