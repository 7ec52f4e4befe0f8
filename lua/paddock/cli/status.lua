--- Exit codes: what a result or an error means to the shell that called paddock.
local M = {
  OK = 0,
  USAGE = 64,
  UNAVAILABLE = 69, -- the backend, or something that it needs
  INTERNAL = 70,    -- also: nobody knows whether the command ran
  DEFERRED = 75,    -- not now: somebody holds it or is at work on it; try again
  CONFIG = 78,      -- configuration or policy
  TIME_LIMIT = 124,
}

local BY_KIND = {
  invalid_argument = M.USAGE,
  policy_error = M.CONFIG, identity_collision = M.CONFIG,
  backend_error = M.UNAVAILABLE, unready = M.UNAVAILABLE, unsupported = M.UNAVAILABLE,
  shared_workspace_unsupported = M.UNAVAILABLE, preservation_unsupported = M.UNAVAILABLE,
  being_destroyed = M.DEFERRED, replacement_deferred = M.DEFERRED, quarantined = M.DEFERRED,
  ownership_unavailable = M.DEFERRED, unverified = M.DEFERRED, capacity_exhausted = M.DEFERRED,
  lost = M.DEFERRED, timeout = M.DEFERRED, cancelled = M.DEFERRED,
  outcome_unknown = M.INTERNAL, io_error = M.INTERNAL, no_memory = M.INTERNAL, closed = M.INTERNAL,
}

--- An error that main.lua prints as it is.
---@param code integer
---@param message string
function M.fail(code, message)
  error(setmetatable({ exit = code, message = message }, { __tostring = function(e) return e.message end }), 0)
end

--- The exit code of any error value.
---@param err any
---@return integer
function M.of_error(err)
  if type(err) ~= "table" then return M.INTERNAL end
  if err.usage then return M.USAGE end
  return err.exit or BY_KIND[err.kind] or M.INTERNAL
end

--- The exit code of a command's result.
---@param result table
---@return integer
function M.of_result(result)
  if result.outcome == "hard_timeout" then return M.TIME_LIMIT end
  if result.outcome == "unknown" then return M.INTERNAL end
  if result.outcome == "completed" then return result.exit_code & 255 end
  local signal = result.signal or 0 -- signalled, oom, cancelled: something ended it
  return 128 + (signal > 0 and signal or 9)
end

--- An error in one line: the message, and what its causes add to it.
---@param err any
---@return string
function M.line(err)
  local text
  if type(err) ~= "table" then
    text = "internal error: " .. tostring(err)
  elseif err.usage or err.exit then
    text = tostring(err)
  else
    text = tostring(err.message or err)
    local cause, depth = err.cause, 0
    while type(cause) == "table" and depth < 8 do
      local more = tostring(cause.message or "")
      -- A message has bounds: where it ends in the midst of its cause's words, those go on in the cause.
      local at = #more > 40 and text:find(more:sub(1, 40), 1, true)
      if at and text:sub(at) == more:sub(1, #text - at + 1) then
        text = text:sub(1, at - 1) .. more
      elseif more ~= "" and not text:find(more, 1, true) then
        text = text .. ": " .. more
      end
      cause, depth = cause.cause, depth + 1
    end
  end
  return (text:gsub("%s*[\r\n]+%s*", "; "):gsub("[%c\127]", "?"))
end

return M
