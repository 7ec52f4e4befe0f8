--- The guest's plane: paddock-guest, mounted into the container as its entry point, so that any image will do. It serves a socket
--- in a mounted folder, so that a sandbox without any network is reached too, and enforces tokens.
local client = require "paddock.client.guest"
local errors = require "paddock.errors"
local io = require "paddock.io"
local process = require "paddock.backend.process"
local spec_of = require "paddock.docker.spec"

local M = {}

local ASK_LIMIT = 2                  -- seconds for a guest to say who it is
-- Between two looks whether it answers: an eighth of the time that it has taken so far, so that no acquire waits much longer than it
-- has to; a guest is mostly there when the start is answered, or a millisecond later.
local LEAST_PAUSE, MOST_PAUSE, PART = 0.0005, 0.05, 8
local FIRST_CHECK, LAST_CHECK = 0.1, 1

---@class paddock.DockerGuestPlane
local Plane = {}
Plane.__index = Plane

---@param backend paddock.DockerBackend
function M.new(backend)
  if not backend.engine.unix then
    errors.raise("invalid_argument", ("option `backend_options.plane` must be \"aio\" or \"exec\" with an engine on another machine (%s): "
      .. "the guest is mounted from this one"):format(backend.engine.address))
  end
  return setmetatable({ backend = backend, places = backend.places, secrets = {}, peers = {}, fresh = {}, closed = {},
    guest = nil }, Plane)
end

-- ---- making ---------------------------------------------------------------------------------------------------

function Plane:begin(spec, plan, undo)
  local options, runtime = self.backend.options, self.backend.runtime
  self.guest = self.guest or process.find_guest(options.guest or runtime.guest_path)
  local place = self.backend:begin_place(spec, plan, undo, function(secret, name)
    return spec_of.settings {
      generation = name, secret = secret, orphan_ttl = runtime.orphan_ttl or 3600, workspace = options.workdir, env = plan.env,
      mounts = plan.mounts,
    }
  end)
  local instance = place.instance
  undo:add(function() self:_forget(instance) end)
  self.secrets[instance], self.fresh[instance] = place.secret, true
  plan.guest, plan.folder = self.guest, self.places:folder(instance)
  plan.env = {}                        -- its commands get it from the settings, where no `inspect` shows it
  return instance
end

function Plane.prepare(_, _, _) end
function Plane.port(_, _, _) return nil end
function Plane.port_failed(_, _) end

function Plane:made(plan, _)
  self.places:settle(plan.place)
end

-- ---- speaking -------------------------------------------------------------------------------------------------

function Plane:describe(info, _)
  info.url, info.unix = "http://sandbox", self.places:socket(info.instance)
end

function Plane:_forget(instance)
  self.secrets[instance], self.peers[instance], self.fresh[instance], self.closed[instance] = nil, nil, nil, nil
end

--- The secret of an instance, or nil when this machine does not have it; and its guest's pid where that is known here.
function Plane:_secret(instance)
  local secret, peer = self.secrets[instance], self.peers[instance]
  if secret and (peer or self.fresh[instance]) then return secret, peer end -- else whoever made it may have met the guest by now
  local data, why = self.places:find(instance)
  if not data then return nil, nil, why end
  self.secrets[instance] = data.secret
  -- A pid means something only to those who number processes alike.
  if type(data.peer) == "number" and data.pid_ns == io.proc.self().pid_ns then self.peers[instance] = math.tointeger(data.peer) end
  return data.secret, self.peers[instance]
end

--- The first answer of all: nothing but the guest runs in there yet, so whoever listens is the guest. From now on it must be that one:
--- what runs inside could take the socket away and listen there itself, and so say that it was fenced.
function Plane:_meet(info, talk)
  local instance = info.instance
  if not self.closed[instance] then    -- whoever made it may have died before it could
    self.places:close_folder(instance)
    self.closed[instance] = true
  end
  if not self.fresh[instance] then return end
  if talk.seen_peer then               -- where it cannot be written down it is no guest that was met
    self.places:note(instance, { peer = talk.seen_peer, pid_ns = io.proc.self().pid_ns })
    self.peers[instance] = talk.seen_peer
  end
  self.fresh[instance] = nil
end

function Plane:_client(info, opts)
  local secret, peer, why = self:_secret(info.instance)
  if not secret then return nil, why end
  return client.new {
    url = "http://sandbox", unix = self.places:socket(info.instance), headers = { ["X-Paddock-Secret"] = secret }, peer = peer,
    token = opts.token, command_timeout = opts.command_timeout, oom_kills = opts.oom_kills, gone = opts.gone,
  }
end

--- What the guest says of itself, or nil, a message, and the transport's reason.
function Plane:ask(info, seconds, token)
  local talk, why = self:_client(info, { token = token })
  if not talk then return nil, why, "unknown" end
  local said, message, reason = talk:state(seconds or ASK_LIMIT)
  if said and said.generation ~= info.instance then return nil, "another generation answers", "peer" end
  if said then
    local mine = self.fresh[info.instance]
    local fine, failure = pcall(self._meet, self, info, talk)
    if not fine and mine then error(failure, 0) end -- its creation fails
    if not fine then return nil, type(failure) == "table" and failure.message or tostring(failure), "unknown" end
  end
  return said, message, reason
end

--- A guest that runs serves its socket: where nobody listens any more, something inside has taken the socket away, and no command
--- will ever reach it again. Anything else is unknown.
function Plane:doubt(info, _)
  local said, message, reason = self:ask(info)
  if said then return true end
  if reason == "connect" or reason == "peer" then return false end
  errors.raise("backend_error", ("sandbox %s lives but does not answer: %s"):format(info.sandbox_id, message), { reason = "silent" })
end

function Plane:ready(info, seconds, check)
  local started = io.now()
  local deadline, next_check, gap = started + seconds, started + FIRST_CHECK, FIRST_CHECK
  repeat
    if self:ask(info, math.max(0.05, math.min(ASK_LIMIT, deadline - io.now()))) then return true end
    if io.now() >= next_check then
      check()
      gap = math.min(gap * 2, LAST_CHECK)
      next_check = io.now() + gap
    end
    io.sleep(math.max(LEAST_PAUSE, math.min((io.now() - started) / PART, MOST_PAUSE)))
  until io.now() >= deadline
  check()
  return false
end

function Plane:connect(info, opts)
  local backend, last = self.backend, nil
  local talk, why = self:_client(info, {
    token = opts.token, command_timeout = opts.command_timeout or backend.runtime.command_timeout,
    -- Asked only when an answer was lost: whether the whole container has ended, and of what.
    gone = function()
      local fine, state = pcall(backend.look, backend, info.generation)
      last = fine and state or nil
      return fine and (state == nil or not state.running)
    end,
    oom_kills = function() return last and last.oom and 1 or 0 end,
  })
  if not talk then
    -- Not `lost`: that would say that somebody else has taken it.
    errors.raise("backend_error", ("sandbox %s cannot be spoken to: %s"):format(info.sandbox_id, why), { reason = "unknown" })
  end
  return talk
end

-- ---- ending ---------------------------------------------------------------------------------------------------

function Plane:finish(info)
  if type(info.instance) == "string" then self:_forget(info.instance) end
end
Plane.forget = Plane.finish

function Plane.close(_) end

return M
