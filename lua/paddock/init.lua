--- paddock: hands out agent sandboxes, keeps them warm, and takes them down behind a fence.
---
---     local paddock = require "paddock"
---     local rt = paddock.open { backend = "process" }
---     local box <close> = rt:acquire { user = "alice", thread = "t1" }
---     print(box:exec("echo hello").stdout)
---
--- In a plain Lua host this is a thin binding of the C API: plain data is copied across, and the runtime's own Lua (the
--- policies, the backends) lives in a universe of its own. Inside that universe the same module shares it.
local config = require "paddock.config"
local core = require "paddock.core"
local errors = require "paddock.errors"
local instance = require "paddock.instance"

local M = {}

M.errors = errors
M.version = core.version()
--- Seconds on a monotonic clock, for measuring: plain Lua has none.
M.now = core.now

---@class paddock.Request
---@field user string?          up to 4096 bytes, anything in them; default: the option `user`
---@field thread string?        up to 4096 bytes; nil = a fresh sandbox that nothing can find again
---@field holder string|false|nil  nil = a fresh holder, a name = that one, false = none
---@field requirements table?   plain data for policies/requirements.lua
---@field timeout number?       seconds for the whole call, waiting included

---@class paddock.Command
---@field timeout number?       seconds; default: the option `command_timeout`
---@field env table<string, string>?
---@field cwd string?
---@field stdin string?
---@field scope string?         commands of one scope share a shell session
---@field session string?       a session's own name

---@class paddock.Result
---@field stdout string
---@field stderr string
---@field exit_code integer     128 + signal when signalled, 124 at the time limit, -1 = unknown
---@field signal integer?       nil when no signal ended it
---@field truncated boolean
---@field duration number       seconds
---@field outcome "completed"|"signalled"|"hard_timeout"|"oom"|"cancelled"|"unknown"
---@field reason string?        of "unknown": "response" or "session_creation"; of "oom": "sandbox" when all of it died
---@field session_reset boolean

---@class paddock.Box
---@field id string
---@field generation string?
---@field token integer
---@field holder string?
---@field source "active"|"warm"|"discovered"|"created"
---@field exec fun(self: paddock.Box, command: string, opts: paddock.Command?): paddock.Result
---@field write fun(self: paddock.Box, path: string, bytes: string, opts: { no_overwrite: boolean? }?)
---@field read fun(self: paddock.Box, path: string): string
---@field list fun(self: paddock.Box, path: string): table[]
---@field release fun(self: paddock.Box)

---@class paddock.Question           what rt:explain is asked
---@field user string?
---@field thread string?
---@field requirements table?        as acquire takes them
---@field candidate { source: string?, attestation: table?, holders: integer?, idle_seconds: number?, capability: table? }?
---                                  a sandbox to be judged in place of what is tracked
---@field trial boolean?             the functions that have nothing to decide now are asked too, about an invented sandbox

---@class paddock.Runtime
---@field acquire fun(self: paddock.Runtime, request: paddock.Request?): paddock.Box
---@field get fun(self: paddock.Runtime, id: string, who: { user: string?, thread: string? }?): paddock.Box?
---@field retain fun(self: paddock.Runtime, id: string, opts: { holder: string, user: string?, thread: string?, release_on_last: boolean? })
---@field release fun(self: paddock.Runtime, holder: string)
---@field binding fun(self: paddock.Runtime, holder: string): string?
---@field park fun(self: paddock.Runtime, id: string)
---@field destroy fun(self: paddock.Runtime, id: string): boolean, string?, string?  false, "deferred"|"replaced", what is in the way
---@field lease fun(self: paddock.Runtime, id: string): { state: "own"|"del", owner: string, ours: boolean, token: integer }?
---@field quarantine fun(self: paddock.Runtime): { sandbox_id: string, generation: string?, why: string }[]
---@field retire fun(self: paddock.Runtime, id: string): boolean, string?, string?
---@field tick fun(self: paddock.Runtime)
---@field dispatch fun(self: paddock.Runtime): integer
---@field reconcile fun(self: paddock.Runtime)
---@field reload fun(self: paddock.Runtime)
---@field capabilities fun(self: paddock.Runtime): table
---@field advance fun(self: paddock.Runtime, seconds: number, wall_seconds: number?)
---@field list fun(self: paddock.Runtime): table[]
---@field stats fun(self: paddock.Runtime): table
---@field explain fun(self: paddock.Runtime, request: paddock.Question): table
---@field inspect fun(self: paddock.Runtime, what: string|{ user: string?, thread: string? }): table?
---@field on fun(self: paddock.Runtime, name: string, fn: fun(record: table))
---@field sync_skills fun(self: paddock.Runtime, skills: { sandbox_id: string, user: string?, thread: string?, projection: table? })
---@field network_events fun(self: paddock.Runtime, id: string): { request_id: string, host: string, port: integer, method: string? }[]
---@field deny_pending fun(self: paddock.Runtime, id: string): boolean
---@field decide fun(self: paddock.Runtime, id: string, request_id: string, decision: "deny"|"allow_once"|"allow"): boolean
---@field discard_holders fun(self: paddock.Runtime)  forgets who holds what; releases nothing
---@field reset fun(self: paddock.Runtime)
---@field shutdown fun(self: paddock.Runtime)

--- Opens a runtime. Every option has a default; an unknown or impossible one raises `invalid_argument`, naming it.
---@param options table?
---@return paddock.Runtime
function M.open(options)
  local plain, tables = config.split(options)
  return core.open(plain, tables.backend, tables.ownership, tables.journal, tables.log)
end

for _, name in ipairs { "implement", "default", "peek_default", "set_default", "reset_default", "shutdown_default", "set_constructor" } do
  M[name] = instance[name]
end

return M
