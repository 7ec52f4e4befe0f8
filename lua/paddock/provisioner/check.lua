--- What can be said against options for the provisioner backend before anything is sent.
---
--- Why also against options that are not its own: what a provisioner has no field for would be ignored without a word, and an
--- operator would believe in a limit that nobody holds.
local errors = require "paddock.errors"
local wire = require "paddock.provisioner.wire"

local M = {}

local function refuse(name, message, kind)
  errors.raise(kind or "invalid_argument", ("option `%s` %s"):format(name, message))
end

local function seconds(name, value)
  if type(value) ~= "number" or value ~= value or value <= 0 or value > 3600 then
    refuse(name, "must be a number of seconds, more than 0 and at most 3600")
  end
  return value
end

local function seconds_or_zero(name, value)
  return value == 0 and value or seconds(name, value)
end

local function url(name, value)
  local base, problem = wire.base_url(value)
  if not base then refuse(name, problem) end
  return base
end

--- A secret: its text is in no message. What is not visible ASCII could end the header that it travels in.
local function secret(name, value)
  if type(value) ~= "string" or #value < 1 or #value > 4096 then refuse(name, "must be a text of 1 to 4096 bytes") end
  if value:find("[^\x21-\x7e]") then
    refuse(name, "must be visible ASCII characters only: it travels in a header (is there a line break at its end?)")
  end
  return value
end

local function absolute(name, value)
  if type(value) ~= "string" or value:sub(1, 1) ~= "/" or value:find("%c") then refuse(name, "must be an absolute path") end
  return value
end

local function inner_path(name, value)
  absolute(name, value)
  if not value:find("^/[^/]") or (value .. "/"):find("/%.?%.?/") then
    refuse(name, 'must be an absolute path without ".", "..", "//" and a slash at its end')
  end
  return value
end

--- Names, checks and defaults of `backend_options`.
M.OPTIONS = {
  url = { url }, api_key = { secret }, sandbox_api_key = { secret }, ca_file = { absolute },
  skills_root = { inner_path, wire.SKILLS_ROOT },
  create_timeout = { seconds, 30 }, delete_timeout = { seconds, 15 }, read_timeout = { seconds, 10 },
  gone_timeout = { seconds_or_zero, 45 },
}

--- The backend's own options, checked, with defaults. `$NAME` as a key is taken from the environment, and must be there.
---@param given table?
---@param getenv fun(name: string): string?
---@return table
function M.own(given, getenv)
  local out, names = {}, {}
  for key in pairs(M.OPTIONS) do names[#names + 1] = key end
  table.sort(names)
  for key in pairs(given or {}) do
    if not M.OPTIONS[key] then
      errors.raise("invalid_argument", ("option `backend_options.%s` is not known to the provisioner backend; it takes %s")
        :format(tostring(key):sub(1, 60):gsub("%c", "?"), table.concat(names, ", ")))
    end
  end
  for key, option in pairs(M.OPTIONS) do
    local name, value = "backend_options." .. key, given and given[key]
    if option[1] == secret and type(value) == "string" and value:find("^%$[%a_][%w_]*$") then
      local variable = value:sub(2)
      value = getenv(variable)
      if value == nil or value == "" then refuse(name, "names the environment variable " .. variable .. ", which is not set") end
    end
    if value ~= nil then out[key] = option[1](name, value) else out[key] = option[2] end
  end
  if out.url == nil then refuse("backend_options.url", "is missing: the provisioner's address, such as http://provisioner:8002") end
  return out
end

--- Those of the runtime's options that a provisioner has no field for.
local function unsupported(options)
  if options.image ~= nil then
    refuse("image", "cannot be used with the provisioner backend: the provisioner itself says which image its Pods run", "unsupported")
  end
  if next(options.limits) ~= nil then
    refuse("limits", "cannot be used with the provisioner backend: the provisioner itself limits its Pods", "unsupported")
  end
  if options.data_dir ~= nil then
    refuse("data_dir", "cannot be used with the provisioner backend: the provisioner keeps its own user data", "unsupported")
  end
  for name in pairs(options.environment) do
    if name ~= "MAX_SHELL_SESSIONS" then
      refuse("environment." .. name, "cannot be used with the provisioner backend: a request to it carries no environment but "
        .. "MAX_SHELL_SESSIONS; give it to each command instead", "unsupported")
    end
  end
  local known = {}
  for _, target in ipairs(wire.targets(options.backend_options.skills_root or wire.SKILLS_ROOT)) do known[target] = true end
  for i, mount in ipairs(options.mounts) do
    if not known[mount.target] then
      refuse(("mounts[%d].target"):format(i), "is none that a provisioner mounts on (" ..
        table.concat(wire.targets(options.backend_options.skills_root or wire.SKILLS_ROOT), ", ") .. ")", "unsupported")
    end
  end
end

--- What needs no look at the machine. `given` are the options as they were given: what is not among them may get another default.
---@param options table   normalized; `network` and `scope` may be filled in
---@param given table
function M.options(options, given)
  local own = M.own(options.backend_options, os.getenv)
  if given.network == nil then options.network = "open" end
  if options.network ~= "open" then
    refuse("network", 'must be "open" with the provisioner backend, or left out: what a Pod may reach is the cluster\'s to say '
      .. "(a NetworkPolicy), and nothing here could hold it to less", "unsupported")
  end
  unsupported(options)
  -- Nothing inside a Pod refuses a stop that comes too late: it has to be over before somebody else may own the sandbox.
  local ttl = options.ownership.ttl
  local longest = math.max(options.stop_timeout, own.delete_timeout + 2 * own.read_timeout + own.gone_timeout)
  if longest + ttl / 10 >= ttl then
    refuse("stop_timeout", ("(%g s, with the provisioner's own limits) and a tenth of ownership.ttl (%g s) must be below that ttl: "
      .. "raise ownership.ttl, or lower stop_timeout"):format(longest, ttl))
  end
  if given.scope == nil then options.scope = "provisioner " .. own.url end -- whose sandboxes the leases are about
end

--- What a look at the machine says.
---@param options table
function M.places(options)
  local file = options.backend_options.ca_file
  if type(file) ~= "string" then return end
  local found, io = pcall(require, "paddock.io")
  if not found then return end
  local fd <close>, message = io.proc.open(file, "p")
  if fd == nil then refuse("backend_options.ca_file", ("names %s, which cannot be used: %s"):format(file, message)) end
end

return M
