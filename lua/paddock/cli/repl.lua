--- paddock repl: a live runtime, or a pretended one (--sim), under an operator's hands.
local lineedit = require "paddock.lineedit"
local native = require "paddock.cli.native"
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local world = require "paddock.cli.world"

local M = {
  name = "repl",
  usage = "repl [--config F] [--sim]",
  summary = "A prompt with a live runtime; --sim has a manual clock and a pretended backend.",
  options = world.options {
    { "--sim", nil, "a manual clock and a scripted backend: nothing outside is touched" },
  },
  notes = "At the prompt, :help shows what there is. Lines may also come from a pipe.",
}

local HELP = [[
acquire(user, thread)      a sandbox for that identity        box = acquire("alice", "t1")
  box:exec("ls")  box:write(path, text)  box:read(path)  box:list(path)  box.id  box.source  box.generation
release(box)               give it back; the last release parks it warm (also: box:release())
ps()                       what this runtime knows            explain(user, thread)   what would happen, and why
tick()                     reap, renew, reconcile what is due reload()                load the policies again
rt                         the runtime: rt:destroy(id) rt:inspect(id) rt:park(id) rt:stats() rt:capabilities()
                           rt:get(id) rt:retain(id, {holder=}) rt:list() rt:reconcile() rt:shutdown()
rt:acquire_async{user=}    returns at once: op:poll() op:wait(s) op:cancel(); likewise box:exec_async("ls"), rt:destroy_async(id)
paddock.scheduler()        s:spawn(function() ... end) s:run(): inside, acquire, exec and release yield instead of waiting
paddock                    the module: paddock.open{...} opens another runtime, with options of its own
= expr                     shows a value, as the expression alone does; _ is the last one
:help  :quit  :events on|off   what happens is shown as it happens: * parked 3f1c... reason=last release
TAB completes names, Ctrl-R searches the history, Ctrl-C gives up the line, Ctrl-D ends.
]]

local SIM_HELP = [[
advance(seconds)           lets time pass on the manual clock; then tick()
sim.fail(op, n, message)   the next n calls of op fail: create destroy inspect discover alive ready list connect exec ...
sim.kill(id) sim.sicken(id) sim.cure(id)   it dies; it no longer answers; it answers again
sim.stick(id) sim.replace(id)              stops do nothing; another generation stands there
sim.attest(id, key, value)                 what it reports about itself: sim.attest(id, "image", "other")
sim.script(pattern, result)                what a command answers: { outcome = "unknown", reason = "response" }
sim.show()  sim.calls                      what the engine has; every call it got
Try: box = acquire("alice", "t1")   release(box)   advance(601)   tick()   ps()
]]

---@class paddock.cli.Repl
---@field ctx table
---@field rt table
---@field sim table?
---@field env table
---@field events boolean
---@field boxes table      id -> the last box acquired here
local Repl = {}
Repl.__index = Repl

-- ---- showing ------------------------------------------------------------------------------------------------------

local function is_box(value)
  if type(value) ~= "userdata" and type(value) ~= "table" then return false end
  local ok, yes = pcall(function() return value.exec ~= nil and value.release ~= nil and type(value.id) == "string" end)
  return ok and yes
end

local function box_line(box)
  return ("box %s (%s, generation %s, token %s, holder %s)"):format(box.id, tostring(box.source),
    tostring(box.generation), tostring(box.token), tostring(box.holder))
end

--- An operation says itself how it stands.
local function is_op(value)
  return type(value) == "userdata" and tostring(value):find("^paddock operation") ~= nil
end

local function is_result(value)
  return type(value) == "table" and rawget(value, "outcome") ~= nil and rawget(value, "stdout") ~= nil
end

local function result_text(result)
  local lines = {}
  for _, stream in ipairs { result.stdout, result.stderr } do
    for line in stream:gmatch("[^\n]+") do
      if #lines < 200 then lines[#lines + 1] = "  | " .. render.plain(line) end
    end
  end
  local how = result.outcome == "completed" and ("exit code %d"):format(result.exit_code)
    or ("%s, exit code %s"):format(result.outcome, tostring(result.exit_code))
  if result.reason then how = how .. " (" .. result.reason .. ")" end
  if result.truncated then how = how .. ", output cut" end
  lines[#lines + 1] = ("%s, %.3f s"):format(how, result.duration or 0)
  return table.concat(lines, "\n")
end

--- A value for the operator: boxes, results, errors and the runtime in their own way, the rest as Lua.
function Repl:show(value)
  if value == self.rt and value ~= nil then
    return ("runtime, %d sandboxes; ps() lists them, :help shows its methods"):format(#self.rt:list())
  end
  if is_box(value) then return box_line(value) end
  if is_op(value) then return tostring(value) end
  if is_result(value) then return result_text(value) end
  return render.value(value)
end

function Repl:print(...)
  local out = {}
  for i = 1, select("#", ...) do
    local value = select(i, ...)
    out[i] = type(value) == "string" and value or self:show(value)
  end
  self.ctx.out(table.concat(out, "\t") .. "\n")
end

-- ---- events -------------------------------------------------------------------------------------------------------

local EVENT_FIRST = { event = true, sandbox_id = true, level = true, time = true, ts = true }

function Repl:on_event(record)
  if not self.events then return end
  local words = { "*", render.plain(tostring(record.event)) }
  if record.sandbox_id then words[#words + 1] = render.plain(tostring(record.sandbox_id)) end
  for _, key in ipairs(render.sorted_keys(record)) do
    if not EVENT_FIRST[key] then
      local value = record[key]
      local text = type(value) == "string" and render.plain(value)
        or math.type(value) == "float" and ("%.3f"):format(value) or self:show(value)
      words[#words + 1] = key .. "=" .. text
    end
  end
  self.ctx.out(table.concat(words, " ") .. "\n")
end

-- ---- what is at the prompt ----------------------------------------------------------------------------------------

local function identity_text(record)
  local who = record.identity
  if type(who) ~= "table" then return record.user and ("%s/%s"):format(record.user, record.thread or "-") or nil end
  return ("%s/%s"):format(tostring(who.user), who.thread and tostring(who.thread) or "-")
end

local function holder_count(record)
  if type(record.holders) == "table" then return #record.holders end
  return record.holders
end

function Repl:ps()
  local rows = {}
  for i, record in ipairs(self.rt:list()) do
    rows[i] = {
      record.id, record.state, identity_text(record), record.generation, holder_count(record),
      render.duration(record.idle_seconds), record.lease and record.lease.token,
    }
  end
  if #rows == 0 then
    self:print("no sandboxes")
    return
  end
  self:print(render.columns({ "SANDBOX", "STATE", "IDENTITY", "GENERATION", "HOLDERS", "IDLE", "TOKEN" }, rows))
end

--- Functions of the prompt; each is documented in HELP.
function Repl:globals()
  local rt, env = self.rt, { paddock = require "paddock", rt = self.rt, sim = self.sim }
  function env.print(...) self:print(...) end
  function env.acquire(user, thread, more)
    if user == nil and thread == nil then error("acquire wants a user and a thread: acquire(\"alice\", \"t1\")", 0) end
    local request = { user = user, thread = thread }
    for key, value in pairs(more or {}) do request[key] = value end
    local box = rt:acquire(request)
    self.boxes[#self.boxes + 1] = box
    return box
  end
  function env.release(what)
    if is_box(what) then return what:release() end
    if type(what) ~= "string" or what == "" then
      error("release wants a box, a sandbox id (or its beginning), or a holder", 0)
    end
    local found = false
    for i = #self.boxes, 1, -1 do
      local box = self.boxes[i]
      if box.id:sub(1, #what) == what then
        found = true
        box:release()
        table.remove(self.boxes, i)
      end
    end
    if not found then rt:release(what) end
  end
  function env.tick() rt:tick() end
  function env.advance(seconds, wall)
    if type(seconds) ~= "number" then error("advance wants a number of seconds", 0) end
    rt:advance(seconds, wall)
  end
  function env.ps() self:ps() end
  function env.explain(user, thread, requirements, candidate)
    return rt:explain { user = user, thread = thread, requirements = requirements, candidate = candidate }
  end
  function env.reload()
    rt:reload()
    self:print("the policies are loaded again")
  end
  return setmetatable(env, { __index = _G })
end

-- ---- completion ---------------------------------------------------------------------------------------------------

local function add_names(names, seen, source, prefix)
  for key in next, source do
    if type(key) == "string" and key:match("^[%a_][%w_]*$") and key:sub(1, #prefix) == prefix and not seen[key]
        and (key:sub(1, 2) ~= "__" or prefix:sub(1, 2) == "__") then
      seen[key] = true
      names[#names + 1] = key
    end
  end
end

--- Fields that boxes answer to beside their methods.
local BOX_FIELDS = { id = true, generation = true, token = true, holder = true, source = true }

--- What a value's metatable looks names up in: a table, or the table that its function in C carries.
local function lookup_of(value)
  local meta = debug.getmetatable(value)
  local found = type(meta) == "table" and rawget(meta, "__index") or nil
  if type(found) == "function" then
    local _, carried = debug.getupvalue(found, 1)
    found = carried
  end
  return type(found) == "table" and found or nil
end

--- The names that a value answers to and that begin with `prefix`.
local function names_of(value, prefix)
  local names, seen, depth = {}, {}, 0
  if is_box(value) then add_names(names, seen, BOX_FIELDS, prefix) end
  while value ~= nil and depth < 8 do
    if type(value) == "table" then add_names(names, seen, value, prefix) end
    value = lookup_of(value)
    depth = depth + 1
  end
  table.sort(names)
  return names
end

local META = { ":help", ":quit", ":events" }
local PLAIN = { help = true, quit = true, exit = true } -- as good without the colon, where no variable has that name

--- Candidates for the text before the cursor.
---@param env table
---@param text string
---@return string prefix
---@return string[] names
function M.candidates(env, text)
  if text:match("^:%a*$") then
    local names = {}
    for _, name in ipairs(META) do
      if name:sub(1, #text) == text then names[#names + 1] = name end
    end
    return text, names
  end
  local chain = text:match("[%a_][%w_%.:]*$") or ""
  if chain == "" and text:find("%S$") and not text:find("[%(%{%[,=]$") then return "", {} end
  local path, prefix = chain:match("^(.*)[%.:]([%w_]*)$")
  if not path then
    prefix = chain
    local names, seen = {}, {}
    add_names(names, seen, env, prefix)
    if prefix ~= "" then add_names(names, seen, _G, prefix) end
    table.sort(names)
    return prefix, names
  end
  local value = env
  for name in path:gmatch("[^%.:]+") do
    local ok, inner = pcall(function() return value[name] end)
    if not ok or inner == nil then return prefix, {} end
    value = inner
  end
  return prefix, names_of(value, prefix)
end

local function common_prefix(names)
  local common = names[1] or ""
  for _, name in ipairs(names) do
    local n = 0
    while n < #common and common:byte(n + 1) == name:byte(n + 1) do n = n + 1 end
    common = common:sub(1, n)
  end
  return common
end

--- For lineedit: what to insert, and what to show.
function M.complete(env, text)
  local prefix, names = M.candidates(env, text)
  local common = common_prefix(names)
  if #common > #prefix then return common:sub(#prefix + 1) end
  if #names < 2 then return nil end
  if #names > 100 then return nil, ("(%d names)"):format(#names) end
  return nil, table.concat(names, "  ")
end

-- ---- reading and running ------------------------------------------------------------------------------------------

--- Compiles what was typed: an expression where it is one. nil, true: more lines are needed.
---@param text string
---@return function?
---@return boolean|string
function M.compile(text, env)
  local body = text:match("^%s*=(.*)$") or text
  local chunk = load("return " .. body, "=input", "t", env)
  if chunk then return chunk, true end
  local why
  chunk, why = load(text:match("^%s*=") and "return " .. body or text, "=input", "t", env)
  if chunk then return chunk, false end
  if why:find("<eof>['\"]?$") then return nil, true end
  return nil, why
end

local function one_line(err)
  if type(err) == "table" and err.kind then
    return ("%s: %s"):format(err.kind, status.line(err))
  end
  return (tostring(err):gsub("^input:(%d+): ", function(n) return n == "1" and "" or "line " .. n .. ": " end)
    :gsub("%s*\n%s*", "; "))
end

function Repl:complain(err)
  self.ctx.err("paddock: " .. render.plain(one_line(err)) .. "\n")
  self.failed = true
end

--- Hands over what happened meanwhile.
function Repl:dispatch()
  local ok, err = pcall(self.rt.dispatch, self.rt)
  if not ok and not (type(err) == "table" and err.kind == "closed") then self:complain(err) end
end

function Repl:run(chunk)
  native.watch(true)
  local results = table.pack(pcall(chunk))
  native.watch(false)
  native.calm()
  io.stdout:flush()
  self:dispatch()
  if not results[1] then
    self:complain(results[2])
    return
  end
  for i = 2, results.n do
    if i == 2 then self.env._ = results[2] end
    if results.n > 2 or results[2] ~= nil then self.ctx.out(self:show(results[i]) .. "\n") end
  end
end

--- A line that begins with a colon. False = end the session.
function Repl:meta(line)
  local word, rest = line:match("^:?(%S*)%s*(.-)%s*$")
  if word == "quit" or word == "q" or word == "exit" then return false end
  if word == "help" or word == "h" then
    self.ctx.out(HELP .. (self.sim and SIM_HELP or ""))
  elseif word == "events" and (rest == "on" or rest == "off") then
    self.events = rest == "on"
  else
    self:complain((":%s is not known; there are %s"):format(word, table.concat(META, ", ")))
  end
  return true
end

--- Reads until the session ends. Text that does not end is continued on the next line.
function Repl:loop()
  local pending
  while true do
    self:dispatch()
    local line, why = lineedit.readline(pending and "      >> " or "paddock> ",
      function(text) return M.complete(self.env, text) end)
    if line then
      lineedit.remember(line)
      local text = pending and pending .. "\n" .. line or line
      pending = nil
      if text:find("^%s*:") or PLAIN[text] and self.env[text] == nil then
        if not self:meta(text:match("^%s*(.*)$")) then return end
      elseif text:find("%S") then
        local chunk, more = M.compile(text, self.env)
        if chunk then
          self:run(chunk)
        elseif more == true then
          pending = text
        else
          self:complain(more)
        end
      end
    elseif why == "interrupt" then
      pending = nil
    else
      if why == "too long" then self:complain("a line is longer than 1 MiB") end
      if pending then self:complain("the input ends in the middle of a statement") end
      return
    end
  end
end

-- ---- opening and closing ------------------------------------------------------------------------------------------

local function open_history()
  local base = os.getenv("XDG_STATE_HOME")
  if not base or base:sub(1, 1) ~= "/" then
    local home = os.getenv("HOME")
    if not home or home:sub(1, 1) ~= "/" then return end
    base = home .. "/.local/state"
  end
  lineedit.history(base .. "/paddock/history")
end

local function sim_options(options, sim)
  local config = world.config(options)
  config.backend, config.clock, config.threads = sim.backend, "manual", false
  config.backend_options, config.ownership, config.journal = nil, { type = "memory" }, "memory"
  return config
end

--- What the runtime holds is taken down at the end, as in every host that ends in order.
local function close(ctx, rt)
  native.calm()
  local ok, err = pcall(rt.shutdown, rt)
  if ok or (type(err) == "table" and err.kind == "closed") then return status.OK end
  ctx.warn(status.line(err))
  return status.of_error(err)
end

function M.run(ctx, options)
  local sim = options.sim and require("paddock.sim").new() or nil
  local rt = world.open(ctx, options, sim and sim_options(options, sim) or nil)
  local self = setmetatable({ ctx = ctx, rt = rt, sim = sim, events = true, boxes = {} }, Repl)
  self.env = self:globals()
  rt:on("*", function(record) self:on_event(record) end)
  native.repl(true)
  if lineedit.interactive() then
    open_history()
    ctx.out(("paddock %s, %s; :help shows what there is\n"):format(require("paddock").version,
      sim and "simulated: a manual clock, a pretended backend" or "live"))
  end
  self:loop()
  native.repl(false)
  return close(ctx, rt)
end

return M
