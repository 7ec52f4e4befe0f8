--- What paddock-guest is told when it starts: settings of the form name=value, each ended by NUL (core/guest/guest.h).
local errors = require "paddock.errors"

local M = {}

--- Adds what every sandbox has: its environment and its mounts' targets.
---@param lines string[]   what comes before; it is added to
---@param env table<string, string>
---@param mounts { target: string }[]
---@return string
function M.text(lines, env, mounts)
  for name, value in pairs(env) do
    local named = type(name) == "string" and name:find("^[A-Za-z_][A-Za-z0-9_]*$")
    if not named or type(value) ~= "string" or value:find("\0", 1, true) then
      errors.raise("invalid_argument", ("env: %q is no variable name, or its value no text without NUL"):format(tostring(name)))
    end
    lines[#lines + 1] = ("env=%s=%s"):format(name, value)
  end
  for _, mount in ipairs(mounts) do lines[#lines + 1] = "mount=" .. mount.target end
  return table.concat(lines, "\0") .. "\0"
end

return M
