--- The HTTP API of an all-in-one image as the plane: over a port that the engine publishes, or, where a sandbox must reach nothing,
--- at its own address in a network that was made for it alone.
local client = require "paddock.client.aio"
local errors = require "paddock.errors"
local io = require "paddock.io"
local places = require "paddock.docker.places"

local M = {}

local ASK_LIMIT = 5                  -- seconds for one question (E14)
local PORT_LIMIT = 0.3               -- seconds to find out whether a port is in use
local PORTS = 10                     -- that are tried from base_port on

---@class paddock.DockerAioPlane
local Plane = {}
Plane.__index = Plane

---@param backend paddock.DockerBackend
function M.new(backend)
  return setmetatable({ backend = backend, taken = {} }, Plane)
end

-- ---- making ---------------------------------------------------------------------------------------------------

function Plane:begin(spec, plan, undo)
  plan.wants_network = plan.network == "none"
  if plan.network == "none" then
    if self.backend.engine.host then
      errors.raise("unsupported", "network \"none\": an all-in-one server on another machine can be reached over a published port only; "
        .. "set the option `network`, or backend_options.plane = \"exec\"")
    end
  end
  if not plan.wants_network and not plan.wants_volume then return places.random(16) end
  local place = self.backend:begin_place(spec, plan, undo)
  if plan.wants_network then
    plan.helper = place.data.networks[1]
    self.backend.leftovers:make_network(plan.helper, place.instance)
  end
  return place.instance
end

function Plane.prepare(_, _, _) end

--- Where to publish: on loopback where sandboxes are reached over it, else on every address of the engine's machine.
function Plane:_address()
  local options = self.backend.options
  if options.publish_address then return options.publish_address end
  local host = options.reach_host or self.backend.engine.host or "127.0.0.1"
  if host:find("^127%.") or host == "localhost" then return "127.0.0.1" end
  if host == "::1" or host == "[::1]" then return "::1" end
  return ""
end

--- Whether somebody answers on a port of this machine already. Asked first, since an engine that has to take a started network down
--- again may take down with it what another container has published there.
local function answers(address, number)
  local host = address == "" and "127.0.0.1" or address:find(":", 1, true) and "[" .. address .. "]" or address
  local response, err = io.http {
    method = "GET", url = ("http://%s:%d/"):format(host, number), timeout = PORT_LIMIT, connect_timeout = PORT_LIMIT, direct = true,
    fresh = true,
  }
  return response ~= nil or (err.kind == "backend_error" and err.reason ~= "connect")
end

--- The next port: from base_port on, past those that are reserved here or that the engine has called taken.
function Plane:port(plan, _)
  if plan.helper then return nil end
  local base = self.backend.options.base_port
  local out = { address = self:_address() }
  if not base then return out end
  local ports, tried = self.backend.ports, plan.tried or {}
  for number = base, 65535 do
    if not ports[number] and not tried[number] then
      if (plan.tries or 0) >= PORTS then break end
      ports[number], tried[number] = true, true
      plan.tried, plan.tries = tried, (plan.tries or 0) + 1
      if self.backend.engine.host or not answers(out.address, number) then
        out.port = number
        return out
      end
      ports[number] = nil
    end
  end
  errors.raise("backend_error", ("no port is free among the %d from backend_options.base_port = %d on"):format(PORTS, base),
    { reason = "port_taken" })
end

--- That attempt's port goes back: whoever has it, it is not ours.
function Plane:port_failed(plan)
  local number = plan.port and plan.port.port
  if number and self.backend.ports[number] == true then self.backend.ports[number] = nil end
end

function Plane:made(plan, state)
  if plan.port and plan.port.port then self.backend.ports[plan.port.port] = state.id end
  self.backend:drop_place(plan)
end

-- ---- speaking -------------------------------------------------------------------------------------------------

function Plane:describe(info, state)
  local options = self.backend.options
  if state.port then
    local host = options.reach_host or self.backend.engine.host or (options.publish_address ~= "" and options.publish_address)
      or "127.0.0.1"
    if host:find(":", 1, true) and not host:find("^%[") then host = "[" .. host .. "]" end
    info.url = ("http://%s:%d"):format(host, state.port)
  elseif state.address and #info.networks > 0 then
    local host = state.address:find(":", 1, true) and "[" .. state.address .. "]" or state.address
    info.url = ("http://%s:%d"):format(host, options.aio_port)
  end
end

function Plane:_headers()
  local key = self.backend.options.aio_key
  return key and { ["X-AIO-API-Key"] = key } or {}
end

--- It is ready when `GET /v1/sandbox` answers 200; anything else means "not yet". (E14)
function Plane:ask(info, seconds)
  if info.url == "" then return nil, "it has no address", "unknown" end
  local limit = math.min(seconds or ASK_LIMIT, ASK_LIMIT)
  local response, err = io.http {
    method = "GET", url = info.url .. "/v1/sandbox", headers = self:_headers(), timeout = limit, connect_timeout = limit,
  }
  if not response then return nil, tostring(err.message), err.reason end
  if response.status ~= 200 then return nil, "HTTP " .. response.status, "status" end
  return {}
end

--- The container runs. Where nobody listens any more its server has ended, and no command will ever reach it again.
function Plane:doubt(info, _)
  local said, message, reason = self:ask(info)
  if said then return true end
  if reason == "connect" then return false end
  errors.raise("backend_error", ("sandbox %s lives but does not answer: %s"):format(info.sandbox_id, message), { reason = "silent" })
end

function Plane:ready(info, seconds, check)
  local deadline = io.now() + seconds
  local interval = math.min(self.backend.runtime.ready_interval or 1, 1)
  local pause = math.min(0.05, interval)
  repeat
    if self:ask(info, math.max(0.05, deadline - io.now())) then return true end
    check()
    io.sleep(math.max(0, math.min(pause, deadline - io.now())))
    pause = math.min(pause * 2, interval)
  until io.now() >= deadline
  return false
end

function Plane:connect(info, opts)
  if info.url == "" then
    errors.raise("backend_error", ("sandbox %s has no address"):format(info.sandbox_id), { reason = "no_address" })
  end
  return client.new {
    url = info.url, headers = self:_headers(), command_timeout = opts.command_timeout or self.backend.runtime.command_timeout,
  }
end

-- ---- ending ---------------------------------------------------------------------------------------------------

--- Ports go back when their generation is gone, once; a newer one's are its own.
function Plane:finish(info)
  for number, generation in pairs(self.backend.ports) do
    if generation == info.generation then self.backend.ports[number] = nil end
  end
end
Plane.forget = Plane.finish
function Plane.close(_) end

return M
