--- Errors as values: one table per error, the same whether C or Lua made it.
---
--- What a caller does next depends on `kind`, and on `reason` where there is one; `message` is a line for a person.
--- Why the metatable comes from C: an error that the core raises and one that a script makes must be the same kind of
--- thing, or `errors.is` would have to know two.
local core = require "paddock.core"

local M = {}

---@class paddock.Error
---@field kind string         one of `errors.kinds`
---@field message string      a line for a person: the thing, the reason, what to do
---@field reason string?      a stable code
---@field sandbox_id string?
---@field stage string?       of a backend_error: create, stop, ...
---@field attempt integer?    which attempt failed, from 1
---@field cause paddock.Error?

local metatable = core.error_metatable()

--- All kinds, in the order of the C header, and by name.
---@type table<string|integer, string|boolean>
M.kinds = {}
for i, kind in ipairs(core.error_kinds()) do
  M.kinds[i] = kind
  M.kinds[kind] = true
end

local FIELDS = { reason = "string", sandbox_id = "string", stage = "string", attempt = "number", cause = "table" }

--- Makes an error; it is not raised.
---@param kind string
---@param message string
---@param fields { reason: string?, sandbox_id: string?, stage: string?, attempt: integer?, cause: paddock.Error? }?
---@return paddock.Error
function M.new(kind, message, fields)
  if not M.kinds[kind] or type(kind) ~= "string" then
    error("errors.new: no such kind of error: " .. tostring(kind), 2)
  end
  local err = { kind = kind, message = tostring(message) }
  for key, value in pairs(fields or {}) do
    if type(value) ~= FIELDS[key] then
      error(("errors.new: field %s must be %s"):format(tostring(key), FIELDS[key] or "left out: there is no such field"), 2)
    end
    err[key] = value
  end
  return setmetatable(err, metatable)
end

--- Makes an error and raises it.
---@param kind string
---@param message string
---@param fields table?
function M.raise(kind, message, fields)
  error(M.new(kind, message, fields), 0)
end

--- Whether a value is an error of paddock, and of that kind and reason when they are given.
---@param value any
---@param kind string?
---@param reason string?
---@return boolean
function M.is(value, kind, reason)
  return type(value) == "table" and getmetatable(value) == metatable
    and (kind == nil or value.kind == kind)
    and (reason == nil or value.reason == reason)
end

return M
