--- Implementations other than paddock's own, behind a runtime's interface: three functions of a host, and defaults for the rest.
local core = require "paddock.core"
local errors = require "paddock.errors"

local M = {}

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
  return setmetatable({ functions = functions, holders = {}, counts = {}, fresh = 0, ops = {} }, implementation_metatable)
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

-- ---- operations -----------------------------------------------------------------------------------------------------

-- A host's functions run on its own thread only, so an operation is a coroutine: a function that yields (to wait for something
-- without blocking) is gone on with at each poll, wait and dispatch, and the host's loop turns meanwhile; one that blocks, blocks
-- there. It begins at the first of these, and one that was cancelled by then never does.

---@class paddock.ImplementationOp
---@field private fn function
local Op = {}
Op.__index = Op
Op.__name = "paddock.operation"

local function finish(op, ok, ...)
  op.over = true
  if op.cancelled then -- what it produced is given back
    local box = ...
    if ok and op.name == "acquire" then pcall(box.release, box) end
    op.error = errors.new("cancelled", "the operation was cancelled")
  elseif ok then
    op.results = table.pack(...)
  else
    op.error = ...
  end
end

--- Begins it or goes on with it; whether it is over.
local function step(op)
  if op.over or op.stepping then return op.over end
  op.thread = op.thread or coroutine.create(op.fn)
  op.stepping = true
  local results = table.pack(coroutine.resume(op.thread, table.unpack(op.arguments, 1, op.arguments.n)))
  op.stepping, op.arguments = nil, { n = 0 }
  if coroutine.status(op.thread) == "dead" then finish(op, table.unpack(results, 1, results.n)) end
  return op.over
end

--- nil = not over yet; else true and the results. Raises its error.
function Op:poll()
  if not step(self) then return nil end
  if not self.results then error(self.error, 0) end
  return true, table.unpack(self.results, 1, self.results.n)
end

---@param seconds number?   nil = as long as it takes
function Op:wait(seconds)
  local until_ = seconds and core.now() + seconds
  while not step(self) and not (until_ and core.now() >= until_) do
    core.wait({}, core.now() + 0.001) -- what it waits for is its own function's affair: nothing here could tell when it is there
  end
  if not self.over then return nil end
  return self:poll()
end

--- false = it was over already. One that has begun is drained: it ends first, and what it produced is given back.
---@return boolean
function Op:cancel()
  if self.over then return false end
  self.cancelled = true
  if self.thread == nil then finish(self, false) end
  return true
end

--- As cancel, and nobody is told; a box that nobody took is released.
function Op:close()
  self.callback = nil
  if self:cancel() or self.name ~= "acquire" or not self.results then return end
  pcall(self.results[1].release, self.results[1])
end

function Op:kind() return self.name end

function Op:runtime() return self.implementation end

local function submit(self, name, callback, ...)
  if callback ~= nil and type(callback) ~= "function" then
    errors.raise("invalid_argument", "argument `callback` must be a function, not a " .. type(callback))
  end
  local op = setmetatable({ implementation = self, name = name, fn = Implementation[name], callback = callback,
    arguments = table.pack(self, ...) }, Op)
  self.ops[#self.ops + 1] = op
  return op
end

---@param request paddock.Request?
---@param callback fun(op: paddock.ImplementationOp)?   called by dispatch when it is over
---@return paddock.ImplementationOp
function Implementation:acquire_async(request, callback) return submit(self, "acquire", callback, request) end

function Implementation:sync_skills_async(skills, callback) return submit(self, "sync_skills", callback, skills) end

function Implementation:network_events_async(id, callback) return submit(self, "network_events", callback, id) end

function Implementation:deny_pending_async(id, callback) return submit(self, "deny_pending", callback, id) end

function Implementation:decide_async(id, request_id, decision, callback)
  return submit(self, "decide", callback, id, request_id, decision)
end

--- Goes on with the operations that are not over, and calls the callbacks of those that are: how many it called. What a callback
--- raises is raised when all have had their turn.
---@return integer
function Implementation:dispatch()
  local ops, called, failed, why = self.ops, 0, false, nil
  self.ops = {}
  for _, op in ipairs(ops) do
    if not step(op) then
      self.ops[#self.ops + 1] = op
    elseif op.callback then
      local callback = op.callback
      op.callback = nil
      called = called + 1
      local ok, err = pcall(callback, op)
      if not ok and not failed then failed, why = true, err end
    end
  end
  if failed then error(why, 0) end
  return called
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

--- Whether a value is one that `implement` has made.
---@param value any
---@return boolean
function M.is(value)
  return getmetatable(value) == implementation_metatable
end

return M
