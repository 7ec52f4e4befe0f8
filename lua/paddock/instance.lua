--- The default instance of this Lua state, and implementations other than paddock's own behind a runtime's interface.
---
--- Who makes, resets or shuts one down may call everything here again. So nothing is half done when foreign code runs: the
--- reference is cleared or set first, in one step, and what belongs to the former instance comes after. A state of a host has
--- one thread, but coroutines, and in paddock's own universe other threads run while one waits: a second one may have made an
--- instance meanwhile, and then the first one's is shut down and both get the same.
local config = require "paddock.config"
local core = require "paddock.core"
local errors = require "paddock.errors"

local M = {}

local MAX_NESTED = 8

local current      -- the default instance, or nil
local constructor  -- what makes it, or nil: the configuration says
local nested = setmetatable({}, { __mode = "k" }) -- per coroutine: constructions under way

-- ---- implementations ------------------------------------------------------------------------------------------------

--- What a host supplies. acquire, get and release are needed; each function is called with this table first.
---@class paddock.Functions
---@field acquire fun(self: table, request: paddock.Request): string   the sandbox's id
---@field get fun(self: table, id: string): any                        its client, or nil; from memory alone
---@field release fun(self: table, id: string)
---@field get_scoped (fun(self: table, id: string, who: { user: string?, thread: string? }): any)?  default: nil, fails closed
---@field capabilities table?       overrides of what an implementation says of itself
---@field sync_skills (fun(self: table, skills: table))?                            default: does nothing
---@field network_events (fun(self: table, id: string): table[])?                   default: none
---@field deny_pending (fun(self: table, id: string): boolean)?                     default: false
---@field decide (fun(self: table, id: string, request_id: string, decision: string): boolean)?  default: false
---@field reset fun(self: table)?                                                   default: does nothing
---@field shutdown fun(self: table)?                                                default: does nothing

---@class paddock.Implementation
---@field functions paddock.Functions   what it was made of
local Implementation = {}
local implementation_metatable

--- One holder's grip on a sandbox of an implementation: `client` is what `get` gave, and its methods are the box's.
---@class paddock.ImplementationBox
---@field id string
---@field holder string?
---@field client any
local Box = {}

local box_metatable = {
  __index = function(box, key)
    local method = Box[key]
    if method ~= nil then return method end
    local client = rawget(box, "client")
    local found = client[key]
    if type(found) ~= "function" then return found end
    return function(self, ...)
      if self == box then return found(client, ...) end
      return found(self, ...)
    end
  end,
  __close = function(box) box:release() end,
  __name = "paddock.box",
}

--- Gives the holder up; the last one of a sandbox releases it. Twice does nothing more.
function Box:release()
  local holder = rawget(self, "holder")
  if rawget(self, "released") or holder == nil then return end
  rawset(self, "released", true)
  self.implementation:release(holder)
end

local function new_box(implementation, id, holder, client)
  return setmetatable({ implementation = implementation, id = id, holder = holder, client = client }, box_metatable)
end

local function check_name(what, value)
  if type(value) ~= "string" or value == "" then
    errors.raise("invalid_argument", ("argument `%s` must be a string that is not empty"):format(what))
  end
  return value
end

--- Makes an implementation with a runtime's interface out of three functions; all else has defaults.
---@param functions paddock.Functions
---@return paddock.Implementation
function M.implement(functions)
  if type(functions) ~= "table" then
    errors.raise("invalid_argument", "an implementation is a table with the functions acquire, get and release, not a "
      .. type(functions))
  end
  for _, name in ipairs { "acquire", "get", "release" } do
    if type(functions[name]) ~= "function" then
      errors.raise("invalid_argument", ("an implementation needs the function `%s`"):format(name))
    end
  end
  return setmetatable({ functions = functions, holders = {}, counts = {}, fresh = 0 }, implementation_metatable)
end

--- A function of the host's, or nil: which of the optional ones there are.
local function optional(self, name)
  local fn = self.functions[name]
  return type(fn) == "function" and fn or nil
end

local function bind(self, holder, id)
  local bound = self.holders[holder]
  if bound == id then return end
  if bound ~= nil then
    errors.raise("invalid_argument", ("holder %s has sandbox %s and cannot have another one as well; it must be released first")
      :format(holder, bound))
  end
  self.holders[holder] = id
  self.counts[id] = (self.counts[id] or 0) + 1
end

--- Forgets the binding: the id when it was the last one of it.
local function unbind(self, holder)
  local id = self.holders[holder]
  if id == nil then return nil end
  self.holders[holder] = nil
  local left = self.counts[id] - 1
  self.counts[id] = left > 0 and left or nil
  return left == 0 and id or nil
end

local function client_of(self, id)
  local client = self.functions:get(id)
  if client == nil then
    errors.raise("lost", ("the implementation acquired sandbox %s and does not have it"):format(id), { sandbox_id = id })
  end
  return client
end

--- As a runtime's acquire: a box of a fresh holder, of the one that is named, or of none.
---@param request paddock.Request?
---@return paddock.ImplementationBox
function Implementation:acquire(request)
  request = request or {}
  local holder = request.holder
  if holder == true or (holder ~= nil and type(holder) ~= "boolean" and type(holder) ~= "string") then
    errors.raise("invalid_argument", "argument `holder` must be a name, or false for none; leave it out for a fresh one")
  end
  if holder == nil then
    self.fresh = self.fresh + 1
    holder = ("holder-%d"):format(self.fresh)
  end
  local bound = holder and self.holders[holder]
  if bound then return new_box(self, bound, holder, client_of(self, bound)) end
  local id = self.functions:acquire(request)
  if type(id) ~= "string" or id == "" then
    errors.raise("backend_error", "an implementation's acquire must return a sandbox's id, not " .. type(id), { stage = "acquire" })
  end
  local client = client_of(self, id)
  if holder then bind(self, holder, id) end
  return new_box(self, id, holder or nil, client)
end

--- The box of an id, or nil; memory only. With `who`, only when the id is theirs: nil where that is not known (fails closed).
---@param id string
---@param who { user: string?, thread: string? }?
---@return paddock.ImplementationBox?
function Implementation:get(id, who)
  check_name("id", id)
  local client
  if who == nil then
    client = self.functions:get(id)
  elseif optional(self, "get_scoped") then
    client = self.functions:get_scoped(id, who)
  end
  if client == nil then return nil end
  return new_box(self, id, nil, client)
end

---@param id string
---@param options { holder: string }
function Implementation:retain(id, options)
  bind(self, check_name("holder", type(options) == "table" and options.holder or nil), check_name("id", id))
end

--- Releases a holder; the last one of a sandbox releases the sandbox. An unknown one does nothing.
---@param holder string
function Implementation:release(holder)
  local id = unbind(self, check_name("holder", holder))
  if id ~= nil then self.functions:release(id) end
end

---@param holder string
---@return string?
function Implementation:binding(holder)
  return self.holders[check_name("holder", holder)]
end

--- Releases a sandbox by id; changes nothing while it has holders.
---@param id string
function Implementation:park(id)
  if self.counts[check_name("id", id)] == nil then self.functions:release(id) end
end

--- Forgets who holds what, and releases nothing.
function Implementation:discard_holders()
  self.holders, self.counts = {}, {}
end

---@return table
function Implementation:capabilities()
  local out = {
    thread_data_mounts = false, upload_permission_adjustment = true, agent_skill_isolation = false,
    network_mode = "open", network_grant = 300, backend = "custom",
  }
  for key, value in pairs(self.functions.capabilities or {}) do out[key] = value end
  return out
end

---@param skills { sandbox_id: string, user: string?, thread: string?, projection: table? }
function Implementation:sync_skills(skills)
  local fn = optional(self, "sync_skills")
  if fn then fn(self.functions, skills) end
end

---@param id string
---@return { request_id: string, host: string, port: integer, method: string? }[]
function Implementation:network_events(id)
  local fn = optional(self, "network_events")
  return fn and fn(self.functions, id) or {}
end

---@param id string
---@return boolean
function Implementation:deny_pending(id)
  local fn = optional(self, "deny_pending")
  return fn ~= nil and fn(self.functions, id) == true
end

---@param id string
---@param request_id string
---@param decision "deny"|"allow_once"|"allow"
---@return boolean
function Implementation:decide(id, request_id, decision)
  local fn = optional(self, "decide")
  return fn ~= nil and fn(self.functions, id, request_id, decision) == true
end

function Implementation:reset()
  local fn = optional(self, "reset")
  if fn then fn(self.functions) end
end

function Implementation:shutdown()
  local fn = optional(self, "shutdown")
  if fn then fn(self.functions) end
end

-- Whatever else the host's table can do is reached by its name.
implementation_metatable = {
  __index = function(self, key)
    local method = Implementation[key]
    if method ~= nil then return method end
    local functions = rawget(self, "functions")
    local fn = functions[key]
    if type(fn) ~= "function" then return fn end
    return function(who, ...)
      return fn(who == self and functions or who, ...)
    end
  end,
  __name = "paddock.implementation",
  __tostring = function() return "paddock implementation" end,
}

-- ---- making the default one -----------------------------------------------------------------------------------------

local function is_instance(value)
  return getmetatable(value) == "paddock.runtime" or getmetatable(value) == implementation_metatable
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
