--- The engine's own exec as the plane: any image with a shell, also on an engine of another machine. Nothing inside refuses a former
--- owner: what it left running is ended when somebody else takes the sandbox over, and the rest is the lease's work.
local client = require "paddock.client.engine"
local places = require "paddock.docker.places"

local M = {}

---@class paddock.DockerExecPlane
local Plane = {}
Plane.__index = Plane

---@param backend paddock.DockerBackend
function M.new(backend)
  return setmetatable({ backend = backend, shared = {}, cleared = {} }, Plane)
end

function Plane:begin(spec, plan, undo)
  return plan.wants_volume and self.backend:begin_place(spec, plan, undo).instance or places.random(16)
end

function Plane.prepare(_, _, _) end
function Plane.port(_, _, _) return nil end
function Plane.port_failed(_, _) end

function Plane:made(plan, state)
  self.cleared[state.id] = true        -- nobody had it before
  self.backend:drop_place(plan)
end

function Plane.describe(_, info, _) info.url = "" end

function Plane:ask(info, seconds, _, state)
  if not state and self.backend.events:state(info.generation) == "running" then return {} end
  state = state or self.backend:look(info.generation, seconds)
  if state and state.running and not state.paused then return {} end
  return nil, "it does not run"
end

function Plane.doubt(_, _, state) return state.running end

function Plane.ready(_, _, _, check)
  check()
  return true
end

function Plane:forget(info)
  self.shared[info.generation or ""], self.cleared[info.generation or ""] = nil, nil
end
Plane.finish = Plane.forget
function Plane.close(_) end

function Plane:connect(info, opts)
  local backend = self.backend
  self.shared[info.generation] = self.shared[info.generation] or {}
  local made = client.new {
    engine = backend.engine, container = info.generation, sandbox_id = info.sandbox_id, home = backend.options.workdir,
    command_timeout = opts.command_timeout or backend.runtime.command_timeout, owner = backend.runtime.runtime_id or "paddock",
    shared = self.shared[info.generation], user = backend.options.user,
  }
  if opts.own ~= false and not self.cleared[info.generation] then
    self.cleared[info.generation] = made:drive_out() or nil -- else the next one tries again
  end
  return made
end

return M
