--- Which containers live, as the engine's stream of events says: a death is known without a question.
---
--- The stream is opened first, and the containers are listed once it stands: so there is no moment that neither covers. While it
--- stands, "running" is a fact; when it ends, whatever the reason, nothing is, and whoever wants to know asks the engine.
---
--- A stream on which nothing comes any more, and that never ends, looks like one that has nothing to say. So none is trusted for
--- longer than one call of the engine may take: then it is opened anew, and the list says what it has kept back.
local engines = require "paddock.docker.engine"
local images = require "paddock.docker.images"
local io = require "paddock.io"
local labels = require "paddock.docker.labels"

local M = {}

-- What both engines understand: Podman filters by its own word for a death, and shows Docker's.
local FILTER = { "die", "died", "destroy", "remove" }
local DEATHS = { die = true, died = true, destroy = true, remove = true }
local REMEMBERED = 4096              -- deaths; older ones are forgotten: the engine then says that there is no such container

---@class paddock.DockerEvents
---@field backend paddock.DockerBackend
---@field standing boolean            the stream stands, and the list was read after it
---@field running table<string, string>   by generation: the sandbox's id
---@field dead table<string, boolean>
---@field order string[]              a ring of them
---@field deaths integer              how many there have ever been
---@field expected table<string, boolean>   generations that are being taken down here: their deaths are no news
local Events = {}
Events.__index = Events
M.REMEMBERED = REMEMBERED

---@param backend paddock.DockerBackend
function M.new(backend)
  return setmetatable({ backend = backend, standing = false, running = {}, dead = {}, expected = {}, order = {}, deaths = 0 }, Events)
end

--- What is known of a generation without asking: "dead", "running", or nil.
---@param generation string
---@return "dead"|"running"|nil
function Events:state(generation)
  if self.dead[generation] then return "dead" end
  if self.standing and self.running[generation] then return "running" end
  return nil
end

--- A look at the engine has found it running.
function Events:saw_running(generation, id)
  if self.dead[generation] then return end
  self.running[generation], self.expected[generation] = id, nil
end

--- Its death will be this runtime's own doing: nobody is waiting to hear of it, and the stream need not end for it. Closed, the
--- answer takes that back, unless it is `done`: then it lasts until the generation is forgotten.
---@param generation string
function Events:expect(generation)
  self.expected[generation] = true
  return setmetatable({ done = false }, { __close = function(this)
    if not this.done then self.expected[generation] = nil end
  end })
end

--- It is gone and cleaned up: what the stream has to say of it yet is no news.
function Events:forget(generation)
  self:_bury(generation)
  self.expected[generation] = nil
end

--- Whether that is news.
function Events:_bury(generation)
  if self.dead[generation] then return false end
  self.running[generation], self.dead[generation] = nil, true
  local at = self.deaths % REMEMBERED + 1 -- a ring: the oldest gives way
  local former = self.order[at]
  if former then self.dead[former] = nil end
  self.order[at], self.deaths = generation, self.deaths + 1
  return true
end

function Events:_died(generation, id, reason, deaths)
  if not self:_bury(generation) then return end
  if self.expected[generation] then return end
  deaths[#deaths + 1] = { sandbox_id = id, generation = generation, reason = reason }
end

--- The stream stands: what runs now, and who of those that ran does not any more.
function Events:_take_stock(deaths)
  local backend = self.backend
  local prefix = backend.options.label_prefix
  local now = {}
  for _, state in ipairs(backend:_all { prefix .. "role=sandbox", prefix .. "deployment=" .. backend.deployment }) do
    if backend:whose(state) == "ours" and state.running then now[state.id] = state.labels[prefix .. "sandbox_id"] end
  end
  for generation, id in pairs(self.running) do
    if not now[generation] then
      -- It may have been made after the list was read: only the engine can say.
      local fine, state = pcall(backend.look, backend, generation)
      if fine and (state == nil or not state.running) then self:_died(generation, id, "missing", deaths) end
    end
  end
  for generation, id in pairs(now) do self:saw_running(generation, id) end
  self.standing = true
end

--- One event: a death of ours goes to `deaths`. The label is checked again: engines differ in what they filter.
function Events:_take(event, deaths)
  local backend = self.backend
  local actor = type(event.Actor) == "table" and event.Actor or {}
  local attributes = type(actor.Attributes) == "table" and actor.Attributes or {}
  local prefix = backend.options.label_prefix
  if event.Type ~= "container" or not DEATHS[event.Action] or type(actor.ID) ~= "string" then return end
  if labels.whose(prefix, attributes, backend.deployment) ~= "ours" then return end
  local code = type(attributes.exitCode) == "string" and event.Action == "die" and "exit code " .. attributes.exitCode or event.Action
  self:_died(actor.ID, attributes[prefix .. "sandbox_id"], code, deaths)
end

--- Waits for deaths, for at most that many seconds, or `engine_timeout`. Answers at once with what has died, since the last call
--- too; an empty list when the time is over or the stream was lost.
---@param seconds number
---@return table[] deaths   { sandbox_id, generation, reason }
function Events:watch(seconds)
  local backend, deaths = self.backend, {}
  local filters = {
    type = io.json.array { "container" }, event = io.json.array(FILTER),
    label = io.json.array { backend.options.label_prefix .. "deployment=" .. backend.deployment },
  }
  local take, finish = images.lines(function(event) self:_take(event, deaths) end)
  local failure
  local response, err = backend.engine:send {
    method = "GET", path = "/events", query = { filters = filters }, limit = math.min(seconds, backend.options.engine_timeout),
    fresh = true, announce = true,
    on_body = function(piece)
      if piece == "" then
        local fine, why = pcall(self._take_stock, self, deaths)
        if not fine then failure = why end
        return fine and #deaths == 0
      end
      take(piece)
      return #deaths == 0
    end,
  }
  self.standing = false
  finish()
  if failure then error(failure, 0) end
  if #deaths > 0 then return deaths end
  if not response and err.kind ~= "backend_error" then error(err, 0) end -- it is to end
  if not response and err.reason ~= "read_timeout" then
    io.log("debug", "events_lost", { engine = backend.engine.address, message = tostring(err.message) })
  elseif response and response.status ~= 200 then
    engines.refuse("listen to the engine's events", engines.fault(response))
  end
  return deaths
end

return M
