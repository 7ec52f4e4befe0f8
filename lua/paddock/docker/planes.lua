--- The three ways into a container: paddock's guest, an all-in-one image's HTTP API, the engine's own exec. Each is a table of the
--- same functions, so that the backend does not ask which one it is.
---
--- A plane:
---   begin(spec, plan, undo) -> instance      what must be there before the container is made
---   prepare(plan, undo)                      the last changes to the plan, once its labels are known
---   port(plan, attempt), port_failed(plan)   what to publish in this attempt; that one was taken
---   made(plan, state)                        it runs
---   describe(info, state)                    fills in how it is reached
---   ask(info, seconds, token, state) -> said what it says of itself, or nil and why not; state: what was just seen
---   doubt(info, state)                       it runs and does not answer: false = it never will; or raises
---   ready(info, seconds, check) -> boolean   check() raises when the container has ended
---   forget(info), finish(info), close()
---   connect(info, opts) -> client
local images = require "paddock.docker.images"
local streams = require "paddock.docker.stream"

local M = {
  guest = require "paddock.docker.plane_guest", exec = require "paddock.docker.plane_exec",
  aio = require "paddock.docker.plane_aio",
}

-- Where all-in-one images come from, and what theirs start.
local AIO_NAMES = { "agent%-infra/sandbox$", "all%-in%-one%-sandbox$" }
local AIO_PROGRAMS = { "^/opt/gem/", "/aio%-[^/]*$" }

local function named_like_aio(reference)
  local repository = images.split(reference)
  for _, name in ipairs(AIO_NAMES) do
    if repository:find(name) then return true end
  end
  return false
end

--- Whether an image starts an all-in-one server: it says that the server's port is one to publish, and has its program or its name.
--- The port alone says nothing: many a web server has the same one.
local function starts_aio(reference, facts, port)
  local config = type(facts.Config) == "table" and facts.Config or {}
  if type(config.ExposedPorts) ~= "table" or config.ExposedPorts[port .. "/tcp"] == nil then return false end
  if named_like_aio(reference) then return true end
  for _, list in ipairs { config.Entrypoint or false, config.Cmd or false } do
    for _, word in ipairs(type(list) == "table" and list or {}) do
      for _, program in ipairs(AIO_PROGRAMS) do
        if type(word) == "string" and word:find(program) then return true end
      end
    end
  end
  return false
end

--- The plane for an image, where the configuration names none, and why. An image may say it itself, in a label; else it is an
--- all-in-one one or not. The guest works in any image, but not on an engine of another machine: there it is the engine's exec.
---@param reference string?   the configured image
---@param facts table?        what the engine knows of it; nil when it has none of that name yet
---@param options paddock.DockerOptions
---@param near boolean        the engine is on this machine
---@return "guest"|"aio"|"exec"
---@return string why
function M.choose(reference, facts, options, near)
  local config = facts and type(facts.Config) == "table" and facts.Config or {}
  local label = options.label_prefix .. "plane"
  local said = type(config.Labels) == "table" and config.Labels[label] or nil
  if said ~= nil and (said == "aio" or said == "exec" or (said == "guest" and near)) then
    return said, ("the image's label %s"):format(label)
  end
  if reference and facts and starts_aio(reference, facts, options.aio_port) then return "aio", "the image has an all-in-one server" end
  if reference and not facts and named_like_aio(reference) then return "aio", "the image's name is that of an all-in-one one" end
  if not near then return "exec", "the engine is on another machine" end
  return "guest", "it works in any image"
end

--- The text in an engine's stream of frames: streams mixed, control characters as spaces, its end when it is long.
---@param bytes string
---@return string
function M.plain_text(bytes)
  local out, at = {}, 1
  while #bytes - at + 1 >= 8 do
    local kind, _, length = string.unpack(">I1 I3 I4", bytes, at)
    if kind > 2 then break end
    out[#out + 1] = bytes:sub(at + 8, at + 7 + length)
    at = at + 8 + length
  end
  local text = streams.one_line(#out > 0 and table.concat(out) or bytes)
  return #text > 300 and "..." .. text:sub(-300) or text
end

return M
