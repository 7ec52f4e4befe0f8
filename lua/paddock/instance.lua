--- The default instance of this Lua state.
---
--- Who makes, resets or shuts one down may call everything here again. So nothing is half done when foreign code runs: the
--- reference is cleared or set first, in one step, and what belongs to the former instance comes after. A state of a host has
--- one thread, but coroutines, and in paddock's own universe other threads run while one waits: a second one may have made an
--- instance meanwhile, and then the first one's is shut down and both get the same.
local config = require "paddock.config"
local core = require "paddock.core"
local errors = require "paddock.errors"
local implementation = require "paddock.implementation"

local M = {}

local MAX_NESTED = 8

local current      -- the default instance, or nil
local constructor  -- what makes it, or nil: the configuration says
local nested = setmetatable({}, { __mode = "k" }) -- per coroutine: constructions under way

M.implement = implementation.implement

-- ---- making the default one -----------------------------------------------------------------------------------------

local function is_instance(value)
  return getmetatable(value) == "paddock.runtime" or implementation.is(value)
end

--- What a constructor answered, as an instance.
local function adopt(made, who)
  if is_instance(made) then return made end
  if type(made) == "table" and type(made.acquire) == "function" then return M.implement(made) end
  errors.raise("invalid_argument", ("%s must return a runtime or an implementation (a table with acquire, get and release), not a %s")
    :format(who, type(made)))
end

--- The module that option `use` names: a function that makes one, a table with `new`, or an implementation as it stands.
local function make_named(name, options, ...)
  local found, module = pcall(require, name)
  if not found then
    errors.raise("invalid_argument", ("option `use`: there is no implementation %s: %s"):format(name, tostring(module)))
  end
  local rest = {}
  for key, value in next, options do rest[key] = value end
  rest.use = nil
  local new = type(module) == "table" and module.new or module
  if type(new) == "function" then return adopt(new(rest, ...), name) end
  return adopt(module, name)
end

local function make(options, ...)
  if constructor then return adopt(constructor(options, ...), "the constructor of the default instance") end
  if options == nil then
    local file = os.getenv("PADDOCK_CONFIG")
    options = file and file ~= "" and file or {}
  end
  if type(options) == "string" then options = config.load_file(options) end
  local name = type(options) == "table" and config.use(options) or nil
  if name then return make_named(name, options, ...) end
  local plain, tables = config.split(options)
  return core.open(plain, tables.backend, tables.ownership, tables.journal, tables.log)
end

local function make_guarded(...)
  local thread = coroutine.running()
  local depth = nested[thread] or 0
  if depth == MAX_NESTED then
    errors.raise("unsupported", "what makes the default instance asks for the default instance, again and again")
  end
  nested[thread] = depth + 1
  local made = table.pack(pcall(make, ...))
  nested[thread] = depth > 0 and depth or nil
  if not made[1] then error(made[2], 0) end
  return made[2]
end

-- ---- the default one ------------------------------------------------------------------------------------------------

--- The default instance. When there is none it is made: by the constructor, with these arguments; else by the configuration, a
--- table of options or the name of a file (default: the one that PADDOCK_CONFIG names in the environment, else all defaults),
--- whose option `use` may name a Lua module with an implementation. When there is one, the arguments are not looked at.
---@param options table|string|nil
---@return paddock.Runtime|paddock.Implementation
function M.default(options, ...)
  if current ~= nil then return current end
  local fresh = make_guarded(options, ...)
  if current == nil then
    current = fresh
    return fresh
  end
  local winner = current -- somebody was quicker while this one was made
  if fresh ~= winner then pcall(fresh.shutdown, fresh) end
  return winner
end

--- The default instance, or nil: reads no configuration and makes nothing.
---@return paddock.Runtime|paddock.Implementation|nil
function M.peek_default()
  return current
end

local function discard_holders(instance)
  local ok, why = pcall(instance.discard_holders, instance)
  if not ok and not errors.is(why, "closed") then error(why, 0) end
end

--- Makes `instance` the default one; nil = none. The former one is neither reset nor shut down; its holders are forgotten, unless
--- it is the same.
---@param instance paddock.Runtime|paddock.Implementation|nil
function M.set_default(instance)
  if instance ~= nil and not is_instance(instance) then
    errors.raise("invalid_argument", "the default instance must be a runtime, or what paddock.implement returns, not a "
      .. type(instance))
  end
  local former = current
  current = instance
  if former ~= nil and former ~= instance then discard_holders(former) end
end

local function detach()
  local former = current
  current = nil
  if former ~= nil then discard_holders(former) end
  return former
end

--- Detaches the default instance, forgets its holders and resets it. The next `default` makes a new one.
function M.reset_default()
  local former = detach()
  if former ~= nil then former:reset() end
end

--- The same with its shutdown. Raises what could not be stopped; it is detached all the same: who may want to try again keeps it.
function M.shutdown_default()
  local former = detach()
  if former ~= nil then former:shutdown() end
end

--- What makes the default instance from now on, given the arguments of `default`; nil = the configuration again.
---@param fn (fun(...): paddock.Runtime|paddock.Implementation|paddock.Functions)?
function M.set_constructor(fn)
  if fn ~= nil and type(fn) ~= "function" then
    errors.raise("invalid_argument", "a constructor must be a function, not a " .. type(fn))
  end
  constructor = fn
end

return M
