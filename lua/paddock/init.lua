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
--- Waits so many seconds, without doing anything: plain Lua cannot. Inside a task it is scheduler:sleep that yields.
---@param seconds number
function M.sleep(seconds)
  core.wait({}, core.now() + seconds)
end

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
---@field on_output fun(stream: "stdout"|"stderr", bytes: string)?   is given the output as it comes; the result has it, too

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
---@field write fun(self: paddock.Box, path: string, bytes: string, opts: { no_overwrite: boolean?, timeout: number? }?)
---@field read fun(self: paddock.Box, path: string, opts: paddock.Limit?): string
---@field list fun(self: paddock.Box, path: string, opts: paddock.Limit?): table[]
---@field release fun(self: paddock.Box, opts: paddock.Limit?)
---@field exec_async fun(self: paddock.Box, command: string, opts: paddock.Command?, callback: paddock.Callback?): paddock.Op
---@field write_async fun(self: paddock.Box, path: string, bytes: string, opts: table?, callback: paddock.Callback?): paddock.Op
---@field read_async fun(self: paddock.Box, path: string, opts: paddock.Limit?, callback: paddock.Callback?): paddock.Op
---@field list_async fun(self: paddock.Box, path: string, opts: paddock.Limit?, callback: paddock.Callback?): paddock.Op
---@field release_async fun(self: paddock.Box, opts: paddock.Limit?, callback: paddock.Callback?): paddock.Op

---@class paddock.Limit
---@field timeout number?       seconds, waiting included; what has begun is drained behind it

--- Called by rt:dispatch() (or by op:wait()) when the operation is over. It may poll it, submit and cancel others, but not wait.
---@alias paddock.Callback fun(op: paddock.Op)

--- One asynchronous operation. One that is collected, or leaves the scope of a `<close>` variable, is cancelled and drained; a
--- result that nobody took is given back.
---@class paddock.Op
---@field poll fun(self: paddock.Op): true?, ...           nil = not over yet; else true and the results; raises its error
---@field wait fun(self: paddock.Op, seconds: number?): true?, ...   as poll, after waiting (that long at most)
---@field cancel fun(self: paddock.Op): boolean            false = it was over already; what has begun is drained
---@field close fun(self: paddock.Op)
---@field kind fun(self: paddock.Op): string               "acquire", "exec", ...
---@field runtime fun(self: paddock.Op): paddock.Runtime

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
---@field acquire_async fun(self: paddock.Runtime, request: paddock.Request?, callback: paddock.Callback?): paddock.Op
---@field release fun(self: paddock.Runtime, holder: string, opts: paddock.Limit?)
---@field release_async fun(self: paddock.Runtime, holder: string, opts: paddock.Limit?, callback: paddock.Callback?): paddock.Op
---@field binding fun(self: paddock.Runtime, holder: string): string?
---@field park fun(self: paddock.Runtime, id: string)
---@field destroy fun(self: paddock.Runtime, id: string, opts: paddock.Limit?): boolean, string?, string?
---                                                       false, "deferred"|"replaced", what is in the way
---@field destroy_async fun(self: paddock.Runtime, id: string, opts: paddock.Limit?, callback: paddock.Callback?): paddock.Op
---@field lease fun(self: paddock.Runtime, id: string): { state: "own"|"del", owner: string, ours: boolean, token: integer }?
---@field quarantine fun(self: paddock.Runtime): { sandbox_id: string, generation: string?, why: string }[]
---@field retire fun(self: paddock.Runtime, id: string): boolean, string?, string?
---@field tick fun(self: paddock.Runtime)
---@field dispatch fun(self: paddock.Runtime): integer     runs callbacks, event functions, functions of the host's backend; never waits
---@field fd fun(self: paddock.Runtime): integer           readable while dispatch has something to do
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
---@field sync_skills_async fun(self: paddock.Runtime, skills: table, callback: paddock.Callback?): paddock.Op
---@field network_events_async fun(self: paddock.Runtime, id: string, callback: paddock.Callback?): paddock.Op
---@field deny_pending_async fun(self: paddock.Runtime, id: string, callback: paddock.Callback?): paddock.Op
---@field decide_async fun(self: paddock.Runtime, id: string, request_id: string, decision: string, callback: paddock.Callback?): paddock.Op
---@field discard_holders fun(self: paddock.Runtime)  forgets who holds what; releases nothing
---@field reset fun(self: paddock.Runtime)
---@field shutdown fun(self: paddock.Runtime, opts: paddock.Limit?)
---@field shutdown_async fun(self: paddock.Runtime, opts: paddock.Limit?, callback: paddock.Callback?): paddock.Op

--- Opens a runtime. Every option has a default; an unknown or impossible one raises `invalid_argument`, naming it.
---@param options (table|string)?   or the name of a file that returns them
---@return paddock.Runtime
function M.open(options)
  if type(options) == "string" then options = config.load_file(options) end
  local plain, tables = config.split(options)
  return core.open(plain, tables.backend, tables.ownership, tables.journal, tables.log)
end

--- Tasks whose paddock calls yield instead of waiting: lua/paddock/scheduler.lua.
---@return paddock.Scheduler
function M.scheduler()
  return require("paddock.scheduler").new()
end

for _, name in ipairs { "implement", "default", "peek_default", "set_default", "reset_default", "shutdown_default", "set_constructor" } do
  M[name] = instance[name]
end

return M
