--- The real container engines of this test run (engines.py), for specs. A spec that requires this module is run by
--- tests/run inside the engines' network, where the ports that they publish on loopback are reached; by hand:
---     python3 tests/support/engines.py run busted --lua=lua5.4 tests/live/engines_spec.lua
---
---     local engines = require "tests.support.engines"
---     for _, engine in ipairs(engines.all()) do
---       describe("on " .. engine.name, function()
---         it("...", function()
---           if engine.why then return pending(engine.why) end
---           local status, body = engine:call("GET", "/version")
local cjson = require "cjson.safe"

local M = {}

---@class tests.Engine
---@field name string       "docker" or "podman"
---@field why string?       why it does not run here
---@field socket string?    path of its unix socket
---@field version string?
local Engine = {}
Engine.__index = Engine

local folder = os.getenv "PDK_ENGINES"

local state
--- What engines.py says: see its head.
function M.state()
  if state == nil then
    local file = folder and io.open(folder .. "/state.json")
    state = file and cjson.decode(file:read("a")) or
      { why = os.getenv "PDK_ENGINES_WHY" or "run this through tests/support/engines.py run ..." }
    if file then file:close() end
    if state.why == cjson.null then state.why = nil end
  end
  return state
end

local function text(value)
  return type(value) == "string" and value or nil
end

--- Both engines, or the one of that name; one that does not run here has a `why`, for pending().
---@param only string?
---@return tests.Engine[]
function M.all(only)
  local list = {}
  for _, name in ipairs(only and { only } or { "docker", "podman" }) do
    local known = M.state()[name] or {}
    list[#list + 1] = setmetatable({ name = name, why = M.state().why or text(known.why), socket = text(known.socket),
      version = text(known.version) }, Engine)
  end
  return list
end

--- Names of the images that both have: busybox, and aio, whose entry point is an all-in-one server on port 8080.
function M.image(which)
  return (M.state().images or {})[which]
end

--- The address of a registry on loopback that has both images, as pdk/busybox:1 and pdk/aio:1; or nil, why.
function M.registry()
  local known = M.state().registry or {}
  return text(known.address), M.state().why or text(known.why)
end

--- The docker engine's port with TLS, "127.0.0.1:2376", and the folder of its certificates (engines.py); or nil, nil, why.
function M.tls()
  local known = M.state().tls or {}
  return text(known.address), text(known.folder), M.state().why or text(known.why)
end

--- A port of podman's on plain TCP; or nil, why.
function M.plain()
  local known = M.state().plain or {}
  return text(known.address), M.state().why or text(known.why)
end

local function quoted(word)
  return "'" .. tostring(word):gsub("'", "'\\''") .. "'"
end

--- One request by curl, to an engine or to another socket in its place. A table as body goes as JSON.
---@return integer status   0: no answer
---@return any body         decoded when it is JSON
---@return string raw
function Engine:call(method, path, body, opts)
  opts = opts or {}
  local words = { "curl -sS -w '\\n%{http_code}' --max-time", opts.timeout or 60, "--unix-socket",
    quoted(opts.socket or self.socket), "-X", method, quoted("http://engine" .. path) }
  if method == "HEAD" then words[#words + 1] = "-I" end
  if body ~= nil then
    words[#words + 1] = "-H 'Content-Type: application/json' --data-binary " ..
      quoted(type(body) == "table" and cjson.encode(body) or body)
  end
  local pipe <close> = assert(io.popen(table.concat(words, " ")))
  local raw, status = pipe:read("a"):match("^(.*)\n(%d+)$")
  return math.tointeger(tonumber(status)) or 0, cjson.decode(raw or "") or raw, raw
end

--- A fault proxy before this engine: see tests/support/faultproxy.lua.
---@return tests.FaultProxy
function Engine:proxy()
  return require("tests.support.faultproxy").open(self.socket)
end

--- Gives an order to the engines: "stop", "start", "restart" (with a signal's name), "freeze", "thaw", "pid". An engine that other
--- suites use at the same time takes none that they would feel: that is for suites with engines of their own (tests/run).
---@param verb string
---@param name string       docker, containerd, podman or registry
function M.tell(verb, name, signal)
  assert(verb == "pid" or name == "rootless" or not os.getenv "PDK_ENGINES_SHARED",
    "other suites use these engines: this suite needs engines of its own (see tests/run)")
  local pipe <close> = assert(io.popen(("python3 tests/support/engines.py tell %s %s %s 2>&1"):format(verb, name, signal or "")))
  local answer = pipe:read("a")
  assert(answer:find("^ok"), "engines: " .. answer)
  return math.tointeger(tonumber(answer:match("%d+")))
end

return M
