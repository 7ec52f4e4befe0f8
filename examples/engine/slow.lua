--- An engine that pretends, slowly: for hosts that want to know what they do while an engine takes its time, or hangs.
---
---     return { backend = "examples/engine/slow.lua", backend_options = { create = 0.3, hang_every = 40, hang = 5 } }
---
--- create: seconds that a create takes; exec: seconds that a command takes; every hang_every-th create, and every
--- hang_every-th command, takes `hang` seconds instead. Nothing runs anywhere: a command prints its own text, in two pieces.
local errors = require "paddock.errors"
local io = require "paddock.io"

local DEFAULTS = { create = 0.3, exec = 0.05, stop = 0.001, hang_every = 0, hang = 5 }

--- Seconds that the next call of this kind takes.
local function takes(self, kind)
  local count = (self.counts[kind] or 0) + 1
  self.counts[kind] = count
  local every = self.options.hang_every
  return every > 0 and count % every == 0 and self.options.hang or self.options[kind]
end

local Client = {}
Client.__index = Client

function Client:exec(req)
  local seconds, started = takes(self.engine, "exec"), io.now()
  local half = req.command:sub(1, #req.command // 2)
  io.output(1, half)
  io.sleep(math.min(seconds, req.timeout))
  local late = seconds > req.timeout
  if not late then io.output(1, req.command:sub(#half + 1)) end
  return { outcome = late and "hard_timeout" or "completed", exit_code = late and 124 or 0,
    stdout = late and half or req.command, stderr = "", duration = io.now() - started }
end

function Client:open_session(_, id) return id end
function Client:close_session() return true end
function Client:fence() return true end
function Client:doom() return true end
function Client:close() end

local Engine = {}
Engine.__index = Engine

function Engine:create(spec)
  io.sleep(takes(self, "create"))
  self.made = self.made + 1
  local info = { sandbox_id = spec.sandbox_id, generation = ("g%d"):format(self.made), url = "slow://" .. spec.sandbox_id }
  self.there[info.generation] = info
  return info
end

function Engine:destroy(info)
  io.sleep(self.options.stop)
  self.there[info.generation] = nil
end

function Engine:inspect(_, info) return info and self.there[info.generation] end
function Engine:discover() return nil end
function Engine:alive(info) return self.there[info.generation] ~= nil end
function Engine:ready(info) return self.there[info.generation] ~= nil end
function Engine:finish() end
function Engine:connect() return setmetatable({ engine = self }, Client) end

function Engine:list()
  local infos = {}
  for _, info in pairs(self.there) do infos[#infos + 1] = info end
  return infos
end

return {
  new = function(options)
    local chosen = {}
    for name, value in pairs(DEFAULTS) do chosen[name] = options[name] or value end
    for name, value in pairs(options) do
      if DEFAULTS[name] == nil or type(value) ~= "number" or value < 0 then
        errors.raise("invalid_argument", ("option `backend_options.%s` must be one of create, exec, stop, hang_every and hang, "
          .. "a number of 0 or more"):format(tostring(name)))
      end
    end
    return setmetatable({ name = "slow", capabilities = { fenced = true }, options = chosen, counts = {}, there = {}, made = 0 },
      Engine)
  end,
}
