--- Straight code for hosts that may never block: coroutines whose paddock calls yield instead of waiting.
---
---     local scheduler = paddock.scheduler()
---     scheduler:spawn(function()
---       local box <close> = rt:acquire { user = "alice", thread = "t1" } -- yields until it is there
---       print(box:exec("make").stdout)                                   -- so does this
---     end)
---     while playing do
---       scheduler:step() -- once a frame: runs the tasks whose calls have ended; waits for nothing
---       ...
---     end
---
--- Inside a task these yield: rt:acquire, rt:destroy, rt:shutdown, rt:sync_skills, rt:network_events, rt:deny_pending,
--- rt:decide, box:exec, box:read, box:write, box:list, box:release (also by `<close>`), scheduler:sleep and task:wait. Every
--- other call does what it does elsewhere, and so does each of these in a coroutine that the task has made itself (a yield
--- there would go to whoever resumed it, who knows nothing of it) and where Lua cannot yield, such as in table.sort's function.
---
--- Cancelling a task: what it waits for is cancelled and drained, then the call raises `cancelled`, and the task's `<close>`
--- variables and handlers run. That happens once: what a task does after that, to clean up, is not cut short by a second
--- cancellation, and a release is never cancelled at all.
local core = require "paddock.core"
local errors = require "paddock.errors"

---@class paddock.Task
---@field state "ready"|"running"|"waiting"|"done"|"failed"|"cancelled"
---@field scheduler paddock.Scheduler
local Task = {}
Task.__index = Task

---@class paddock.Scheduler
local Scheduler = {}
Scheduler.__index = Scheduler

--- Which task waits for an operation.
---@type table<userdata, paddock.Task>
local waiting = setmetatable({}, { __mode = "k" })

--- The task that runs now, by the thread (coroutine) that it is; a scheduler may itself be run inside a task.
---@type paddock.Task?
local current

local ENDED = { done = true, failed = true, cancelled = true }

local function raise_cancelled()
  errors.raise("cancelled", "the task was cancelled")
end

-- ---- tasks --------------------------------------------------------------------------------------------------------

local function make_ready(task)
  if task.state ~= "waiting" then return end
  task.state, task.op, task.wakes_at, task.wants = "ready", nil, nil, nil
  local queue = task.scheduler._ready
  queue[#queue + 1] = task
end

--- The runtime of an operation that a task waits for is looked at by each step.
local function watch(scheduler, op, change)
  local rt = op:runtime()
  local count = (scheduler._runtimes[rt] or 0) + change
  scheduler._runtimes[rt] = count > 0 and count or nil
end

core.on_wake(function(op)
  local task = waiting[op]
  if not task then return end
  waiting[op] = nil
  watch(task.scheduler, op, -1)
  make_ready(task)
end)

local function settle(task, ok, ...)
  local scheduler = task.scheduler
  scheduler._live[task], scheduler._count = nil, scheduler._count - 1
  if ok then
    task.state, task.results = "done", table.pack(...)
  else
    task.error = ...
    task.state = task.was_cancelled and errors.is(task.error, "cancelled") and "cancelled" or "failed"
    if task.state == "failed" then table.insert(scheduler._failed, task) end
  end
  for _, other in ipairs(task.joined) do
    if other.wants == task then make_ready(other) end
  end
  task.joined = {}
end

--- What a task yielded: an operation of one of paddock's calls, or a table of this file, or whatever its own code yields.
local function wait_for(task, what)
  local scheduler = task.scheduler
  task.state = "waiting"
  if core.is_op(what) then
    task.op = what
    waiting[what] = task
    watch(scheduler, what, 1)
    if task.cancelling then task:_interrupt() end
  elseif getmetatable(what) == Scheduler then -- sleep
    if task.cancelling then make_ready(task) end
  elseif getmetatable(what) == Task then
    if task.cancelling then make_ready(task) end
  else -- its own coroutine.yield(): until the next step, and there is no call here that could raise `cancelled`
    task.own_yield = true
    make_ready(task)
  end
end

--- Runs it until it yields or ends.
local function resume(task)
  local former, cancelled = current, task.cancelling and not task.own_yield
  if cancelled then task.cancelling, task.was_cancelled = nil, true end
  task.own_yield = nil
  task.state, current = "running", task
  core.set_task(task.co)
  local ok, what
  if task.args then
    local args = task.args
    task.args = nil
    ok, what = coroutine.resume(task.co, table.unpack(args, 1, args.n))
  else
    ok, what = coroutine.resume(task.co, cancelled)
  end
  current = former
  core.set_task(former and former.co)
  if coroutine.status(task.co) == "suspended" then
    wait_for(task, what)
  elseif not ok then -- not the task's own error, which its body has caught: no memory, or an overrun stack
    core.set_task(task.co) -- a box that is closed here is released without a wait
    coroutine.close(task.co)
    core.set_task(former and former.co)
    settle(task, false, what)
  end
end

--- Cuts short what it waits for; it goes on when that has drained.
function Task:_interrupt()
  if self.op then
    if self.op:kind() ~= "release" then self.op:cancel() end
  else
    make_ready(self)
  end
end

--- Asks for its end. What it waits for is drained; the call that it is in then raises `cancelled`, once. A task that has not
--- begun never does. Cancelling again changes nothing.
---@return boolean  whether there was something to cancel
function Task:cancel()
  if ENDED[self.state] then return false end
  if self.was_cancelled or self.cancelling then return true end
  if self.args then
    self.was_cancelled, self.args = true, nil
    settle(self, pcall(raise_cancelled))
    return true
  end
  self.cancelling = true
  if self.state == "waiting" then self:_interrupt() end
  return true
end

--- Waits for its end and returns what its function returned, or raises what it raised. Inside a task this yields; elsewhere
--- it runs the scheduler meanwhile.
---@param seconds number?   no longer than that: nil when it has not ended by then (outside of tasks only)
---@return any ...
function Task:wait(seconds)
  if not ENDED[self.state] then
    if current and coroutine.running() == current.co then
      if self == current then errors.raise("invalid_argument", "a task cannot wait for itself") end
      current.wants = self
      self.joined[#self.joined + 1] = current
      if coroutine.yield(self) then raise_cancelled() end
    elseif not self.scheduler:_run_until(self, seconds) then
      return nil
    end
  end
  local failed = self.scheduler._failed
  for i = #failed, 1, -1 do
    if failed[i] == self then table.remove(failed, i) end
  end
  if not self.results then error(self.error, 0) end
  return table.unpack(self.results, 1, self.results.n)
end

-- ---- who sleeps: a heap, the next one to wake first; of two with the same time, who came first ---------------------

local function before(a, b)
  return a.time < b.time or a.time == b.time and a.order < b.order
end

local function add_sleeper(scheduler, task)
  local heap, sleeper = scheduler._sleepers, { time = task.wakes_at, task = task, order = scheduler._slept }
  scheduler._slept = sleeper.order + 1
  local at = #heap + 1
  while at > 1 and before(sleeper, heap[at // 2]) do
    heap[at] = heap[at // 2]
    at = at // 2
  end
  heap[at] = sleeper
end

local function take_sleeper(heap)
  local first, last, at = heap[1], table.remove(heap), 1
  local count = #heap
  while 2 * at <= count do
    local down = 2 * at
    if down < count and before(heap[down + 1], heap[down]) then down = down + 1 end
    if not before(heap[down], last) then break end
    heap[at] = heap[down]
    at = down
  end
  if count > 0 then heap[at] = last end
  return first
end

-- ---- schedulers ---------------------------------------------------------------------------------------------------

--- Starts fn(...) as a task: at the next step.
---@param fn function
---@param ... any
---@return paddock.Task
function Scheduler:spawn(fn, ...)
  if type(fn) ~= "function" then
    errors.raise("invalid_argument", "argument `fn` must be a function, not a " .. type(fn))
  end
  local task = setmetatable({ scheduler = self, state = "ready", joined = {}, args = table.pack(...) }, Task)
  -- The task's own protected call, so that an error runs its `<close>` variables where they may still yield.
  task.co = coroutine.create(function(...) settle(task, pcall(fn, ...)) end)
  self._live[task], self._count = true, self._count + 1
  self._ready[#self._ready + 1] = task
  return task
end

--- Inside a task: yields for that long. Elsewhere an error.
---@param seconds number
function Scheduler:sleep(seconds)
  if type(seconds) ~= "number" or seconds ~= seconds or seconds < 0 or seconds == math.huge then
    errors.raise("invalid_argument", "argument `seconds` must be a number, 0 or more")
  end
  local task = current
  if not task or coroutine.running() ~= task.co then
    errors.raise("unsupported", "sleep is for tasks of a scheduler, called in the task's own coroutine")
  end
  task.wakes_at = core.now() + seconds
  add_sleeper(task.scheduler, task)
  if coroutine.yield(task.scheduler) then raise_cancelled() end
end

--- Takes the results of a runtime's operations in, which makes their tasks ready.
local function dispatch(rt)
  if not core.threads(rt) then rt:tick() end -- there is nobody else to run what was submitted
  rt:dispatch()
end

--- A runtime that was shut down meanwhile delivers nothing more: its operations say so themselves.
local function wake_all_of(scheduler, rt)
  for op, task in pairs(waiting) do
    if task.scheduler == scheduler and op:runtime() == rt then
      waiting[op] = nil
      watch(scheduler, op, -1)
      make_ready(task)
    end
  end
end

local function look_at_runtimes(scheduler)
  local runtimes = {}
  for rt in pairs(scheduler._runtimes) do runtimes[#runtimes + 1] = rt end
  for _, rt in ipairs(runtimes) do
    local ok, err = pcall(dispatch, rt)
    if not ok then
      if not errors.is(err, "closed") then error(err, 0) end
      wake_all_of(scheduler, rt)
    end
  end
end

local function wake_sleepers(scheduler)
  local sleepers, now = scheduler._sleepers, core.now()
  while sleepers[1] and sleepers[1].time <= now do
    local sleeper = take_sleeper(sleepers)
    if sleeper.task.wakes_at == sleeper.time then make_ready(sleeper.task) end -- else it was cancelled meanwhile
  end
end

--- Runs every task that can go on, once. For frame loops: it waits for nothing (with threads = true).
---@return integer  how many tasks have not ended
function Scheduler:step()
  if next(self._runtimes) then look_at_runtimes(self) end
  if self._sleepers[1] then wake_sleepers(self) end
  local ready = self._ready
  if ready[1] then
    self._ready = {}
    for _, task in ipairs(ready) do
      if task.state == "ready" then resume(task) end -- else it was cancelled before it began
    end
  end
  return self._count
end

--- Waits until a step has something to do, at most until `deadline`.
local function pause(scheduler, deadline)
  if scheduler._ready[1] then return end
  local runtimes, threadless = {}, false
  for rt in pairs(scheduler._runtimes) do
    runtimes[#runtimes + 1] = rt
    threadless = threadless or not core.threads(rt)
  end
  local until_when = math.min(deadline, scheduler._sleepers[1] and scheduler._sleepers[1].time or math.huge)
  if #runtimes == 0 and until_when == math.huge then
    errors.raise("unsupported", "no task can ever go on: they wait for each other")
  end
  if threadless then until_when = math.min(until_when, core.now() + 0.001) end
  core.wait(runtimes, until_when)
end

--- Steps until that task (nil = every one) has ended, or the seconds are over. Whether it has.
function Scheduler:_run_until(task, seconds)
  local deadline = seconds and core.now() + seconds or math.huge
  local function over()
    if task then return ENDED[task.state] end
    return self._count == 0
  end
  while not over() do
    self:step()
    if over() then break end
    if core.now() >= deadline then return false end
    pause(self, deadline)
  end
  return true
end

--- Steps until every task has ended, waiting in between. Raises then what a task has raised that nobody has waited for.
---@param seconds number?   no longer than that
---@return boolean  whether all have ended
function Scheduler:run(seconds)
  if not self:_run_until(nil, seconds) then return false end
  local task = self._failed[1]
  self._failed = {}
  if task then error(task.error, 0) end
  return true
end

--- The errors of tasks that have failed and that nobody has waited for; each is given out once.
---@return any[]
function Scheduler:failures()
  local list = {}
  for i, task in ipairs(self._failed) do list[i] = task.error end
  self._failed = {}
  return list
end

--- As task:cancel().
---@param task paddock.Task
---@return boolean
function Scheduler:cancel(task)
  return task:cancel()
end

--- Cancels every task and waits until they have drained. `local scheduler <close> = paddock.scheduler()` does it, too.
function Scheduler:close()
  local tasks = {}
  for task in pairs(self._live) do tasks[#tasks + 1] = task end
  for _, task in ipairs(tasks) do task:cancel() end
  self:_run_until(nil)
end
Scheduler.__close = Scheduler.close

local M = {}

--- A scheduler. Tasks are its own; it is used on one thread.
---@return paddock.Scheduler
function M.new()
  return setmetatable({ _ready = {}, _sleepers = {}, _slept = 0, _runtimes = {}, _live = {}, _count = 0, _failed = {} }, Scheduler)
end

return M
