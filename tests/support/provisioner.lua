--- Starts the double of the provisioner (tests/support/provisioner.py) and speaks to it.
---
---     local double = provisioner.start()            -- { guest = path, cert = path, key = path }
---     double:tell { faults = { { route = "create", drop = true } } }
---     local seen = double:seen()                     -- { log, pods, connections, most_connections }
---     double:stop()
local json = require "cjson"
local support = require "tests.support"
-- The module that backends have, in a plain Lua state.
local io_module = assert(package.loadlib(assert(package.searchpath("paddock.core", package.cpath)), "luaopen_paddock_io"))()
local http = io_module.http

local M = {}
local Double = {}
Double.__index = Double

M.io = io_module

--- The driver itself, in this Lua state: to be asked directly, or to be wrapped and given to paddock.open as a table.
function M.driver()
  package.loaded["paddock.io"] = package.loaded["paddock.io"] or io_module
  return require "paddock.backend.provisioner"
end

---@param opts { guest: string?, cert: string?, key: string? }?
function M.start(opts)
  opts = opts or {}
  local folder = support.sh("mktemp -d \"${TMPDIR:-/tmp}/pdk-double.XXXXXX\""):gsub("\n", "")
  local port_file = folder .. "/port"
  local cmd = "exec python3 tests/support/provisioner.py --port-file " .. port_file
  for _, name in ipairs { "guest", "cert", "key" } do
    if opts[name] then cmd = ("%s --%s '%s'"):format(cmd, name, opts[name]) end
  end
  local pipe = assert(io.popen(cmd, "w"))
  local function port()
    local file <close> = io.open(port_file, "r")
    return file and math.tointeger(tonumber(file:read("a")))
  end
  assert(support.eventually(function() return port() ~= nil end, 20), "the provisioner's double did not start")
  local self = setmetatable({ pipe = pipe, folder = folder, port = port(), cert = opts.cert }, Double)
  self.url = ("%s://127.0.0.1:%d"):format(opts.cert and "https" or "http", self.port)
  return self
end

function Double:_ask(method, body)
  local response, err = http { method = method, url = self.url .. "/_double", body = body, timeout = 20, ca_file = self.cert }
  assert(response and response.status == 200, err and err.message or response and response.body)
  return json.decode(response.body)
end

--- Changes settings, faults, Pods.
function Double:tell(what) return self:_ask("POST", json.encode(what)) end
function Double:seen() return self:_ask("GET") end

--- The requests of a route, or of all, in order.
function Double:requests(route)
  local found = {}
  for _, one in ipairs(self:seen().log) do
    if route == nil or one.route == route then found[#found + 1] = one end
  end
  return found
end

function Double:count(route) return #self:requests(route) end

--- The routes asked for, as one text.
function Double:trace(from)
  local names = {}
  for i, one in ipairs(self:seen().log) do
    if i >= (from or 1) then names[#names + 1] = one.route end
  end
  return table.concat(names, " ")
end

function Double:pod(id) return self:seen().pods[id] end

function Double:stop()
  self.pipe:close()
  os.execute("rm -rf '" .. self.folder .. "'")
end

return M
