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
---   instances() -> names, sweep(names, known), forget(info), finish(info), close()
---   connect(info, opts) -> client
local streams = require "paddock.docker.stream"

local M = {
  guest = require "paddock.docker.plane_guest", exec = require "paddock.docker.plane_exec",
  aio = require "paddock.docker.plane_aio",
}

--- The text in an engine's stream of frames: streams mixed, control characters as spaces, its end when it is long.
---@param bytes string
---@return string
function M.plain_text(bytes)
  local out, at = {}, 1
  while #bytes - at + 1 >= 8 do
    local kind, length = string.unpack(">B xxx I4", bytes, at)
    if kind > 2 then break end
    out[#out + 1] = bytes:sub(at + 8, at + 7 + length)
    at = at + 8 + length
  end
  local text = streams.one_line(#out > 0 and table.concat(out) or bytes)
  return #text > 300 and "..." .. text:sub(-300) or text
end

return M
