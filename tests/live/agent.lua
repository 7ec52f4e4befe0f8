--- A runtime in a process of its own, which a test can ask, stop, let go on and kill.
---
---     local a = agent.start { state_dir = folder, ownership = { type = "file", ttl = 1, renew_interval = 0.3 } }
---     a:call "box = rt:acquire { user = 'alice', thread = 't1' } return box.generation"
---     a:signal "STOP"
local sandboxes = require "tests.live.sandboxes"
local support = require "tests.support"
local sh = support.sh

local M = {}

local PROGRAM = [[
  local folder = arg[1]
  local paddock = require "paddock"
  local env = setmetatable({ paddock = paddock }, { __index = _G })
  local function answer(n, ok, ...)
    local texts = table.pack(...)
    for i = 1, texts.n do
      local v = texts[i]
      texts[i] = not ok and type(v) == "table" and v.kind .. "/" .. (v.reason or "") or tostring(v)
    end
    local file = assert(io.open(folder .. "/answer.new", "w"))
    file:write((ok and "" or "error ") .. table.concat(texts, " "))
    file:close()
    os.rename(folder .. "/answer.new", folder .. "/answer." .. n)
  end
  for n = 1, math.huge do
    local file
    repeat
      file = io.open(folder .. "/call." .. n)
      if not file then os.execute "sleep 0.02" end
    until file
    local text = file:read "a"
    file:close()
    answer(n, pcall(assert(load(text, "=call", "t", env))))
  end
]]

---@class tests.Agent
---@field pid string
local Agent = {}
Agent.__index = Agent

--- A Lua value as text: plain data only.
local function text_of(value)
  if type(value) ~= "table" then return ("%q"):format(value) end
  local parts = {}
  for k, v in pairs(value) do parts[#parts + 1] = ("[%s] = %s"):format(text_of(k), text_of(v)) end
  return "{" .. table.concat(parts, ", ") .. "}"
end

--- Starts one and opens its runtime `rt` on these options; `environment` stands before its command, such as "A=b".
---@param options table
---@param environment? string
---@return tests.Agent
function M.start(options, environment)
  local self = setmetatable({ folder = sandboxes.folder(), calls = 0 }, Agent)
  support.write_file(self.folder .. "/agent.lua", PROGRAM)
  self.pid = sh(("%s %s %s/agent.lua %s >%s/out 2>&1 & echo $!"):format(environment or "",
    sandboxes.LUA, self.folder, self.folder, self.folder)):gsub("%s", "")
  self:call("rt = paddock.open(" .. text_of(options) .. ")")
  return self
end

--- Has it run a Lua text in its own environment: what that returned, as text; "error KIND/REASON" when it raised.
function Agent:call(text, seconds)
  self:ask(text)
  return self:answer(seconds)
end

--- The same without waiting.
function Agent:ask(text)
  self.calls = self.calls + 1
  local name = self.folder .. "/call." .. self.calls
  support.write_file(name .. ".new", text)
  assert(os.rename(name .. ".new", name))
end

function Agent:answer(seconds)
  local name = self.folder .. "/answer." .. self.calls
  local file
  local came = support.eventually(function()
    file = io.open(name)
    return file ~= nil
  end, seconds or 60)
  assert(came, "the agent gave no answer: " .. sh("cat " .. self.folder .. "/out"))
  local text = file:read "a"
  file:close()
  return text
end

function Agent:signal(name) sh("kill -" .. name .. " " .. self.pid) end

function Agent:lives()
  local state = sh("cut -d' ' -f3 /proc/" .. self.pid .. "/stat"):gsub("%s", "")
  return #state == 1 and state ~= "Z"
end

--- Kills it and removes its folder.
function Agent:finish()
  if self:lives() then self:signal "KILL" end
  sh("rm -rf " .. self.folder)
end

return M
