--- Runtimes with real process sandboxes, for the specs of this folder.
local paddock = require "paddock"
local support = require "tests.support"
local sh = support.sh

local M = {}

--- The interpreter, for programs of a test's own: what it leaves unfreed at its end is no leak of ours.
M.LUA = "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 " .. (os.getenv("LUA") or "lua5.4")

function M.quiet() end

function M.folder() return (sh("mktemp -d /tmp/pdk-live-XXXXXX"):gsub("%s", "")) end

--- Whether a sandbox can be had here; else why not.
M.works, M.why_not = pcall(function()
  local state = M.folder()
  local rt = paddock.open { state_dir = state, log = M.quiet }
  local ok, err = pcall(rt.acquire, rt, { user = "probe", thread = "t" })
  rt:shutdown()
  sh("rm -rf " .. state)
  if not ok then error(err.message, 0) end
end)

--- The host's pid of the newest guest of a sandbox.
function M.guest_of(state, id)
  local text = sh(("cat %s/sandboxes/%s.*.json"):format(state, id))
  local record = text:gsub('"owner":%b{}', ""):gsub('"identity":%b{}', "")
  return assert(math.tointeger(tonumber(record:match('"pid":(%d+)'))), text)
end

---@class tests.Sandboxes
---@field state string    the state directory of a test
local Sandboxes = {}
Sandboxes.__index = Sandboxes

--- What one test opens.
---@return tests.Sandboxes
function M.new()
  return setmetatable({ state = M.folder(), opened = {} }, Sandboxes)
end

--- paddock.open, in the test's state directory and without a log unless the options say otherwise.
function Sandboxes:open(options)
  options = options or {}
  options.state_dir, options.log = options.state_dir or self.state, options.log or M.quiet
  local rt = paddock.open(options)
  self.opened[#self.opened + 1] = rt
  return rt
end

function Sandboxes:close()
  for _, rt in ipairs(self.opened) do pcall(rt.shutdown, rt) end
  sh("rm -rf " .. self.state)
end

return M
