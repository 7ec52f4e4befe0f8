--- The options of the docker backend: which there are, what each may be, and what they mean for the others.
---
--- Everything that can be refused without an engine is refused when a runtime is opened, with the option's name.
local errors = require "paddock.errors"

local M = {}

local MIB = 1 << 20

local function refuse(name, message)
  errors.raise("invalid_argument", ("option `%s` %s"):format(name, message))
end

local function text(name, value)
  if type(value) ~= "string" or value == "" or #value > 4096 or value:find("%c") then
    refuse(name, "must be a string of one line, not empty")
  end
  return value
end

local function path(name, value)
  if text(name, value):sub(1, 1) ~= "/" then refuse(name, "must be an absolute path") end
  return value
end

local function boolean(name, value)
  if type(value) ~= "boolean" then refuse(name, "must be true or false") end
  return value
end

local function whole(least, most)
  return function(name, value)
    local n = type(value) == "number" and math.tointeger(value) or nil
    if not n or n < least or n > most then refuse(name, ("must be a whole number from %d to %d"):format(least, most)) end
    return n
  end
end

local function seconds(least)
  return function(name, value)
    if type(value) ~= "number" or value ~= value or value < least or value > 86400 then
      refuse(name, ("must be a number of seconds from %g to 86400"):format(least))
    end
    return value
  end
end

local function one_of(...)
  local known, names = {}, table.concat({ ... }, ", ")
  for _, one in ipairs { ... } do known[one] = true end
  return function(name, value)
    if not known[value] then refuse(name, ("must be one of %s"):format(names)) end
    return value
  end
end

local function list(name, value)
  local out = {}
  if type(value) ~= "table" then refuse(name, "must be a list of strings") end
  for key in pairs(value) do
    if math.type(key) ~= "integer" or key < 1 or key > #value then refuse(name, "must be a list of strings") end
  end
  for i, entry in ipairs(value) do out[i] = text(("%s[%d]"):format(name, i), entry) end
  return out
end

local function command(name, value)
  local out = list(name, value)
  if #out == 0 then refuse(name, "must not be an empty list: leave it out for the default") end
  return out
end

local function oci_runtime(name, value)
  if #text(name, value) > 255 or not value:find("^[%w/][%w_./-]*$") then
    refuse(name, 'must be the name that the engine has for an OCI runtime, such as "runc"')
  end
  return value
end

local function user(name, value)
  local who, group = text(name, value):match("^([^:]*):?(.*)$")
  local function fine(part) return #part <= 64 and part:find("^[%w_][%w_.-]*%$?$") ~= nil end
  if not fine(who) or (value:find(":", 1, true) and not fine(group)) then
    refuse(name, 'must be a user of the image, or its number, and perhaps a group after a colon, such as "1000:1000"')
  end
  return value
end

local function prefix(name, value)
  if type(value) ~= "string" or not value:find("^[a-zA-Z0-9][a-zA-Z0-9_.-]*$") or #value > 64 then
    refuse(name, "must be up to 64 letters, digits, `_`, `.` and `-`, and begin with a letter or a digit")
  end
  return value
end

local function label_prefix(name, value)
  if type(value) ~= "string" or not value:find("^[a-z0-9][a-z0-9._-]*%.$") or #value > 64 then
    refuse(name, "must be up to 64 small letters, digits, `_`, `.` and `-`, and end with a dot")
  end
  return value
end

local function capabilities(name, value)
  for i, one in ipairs(list(name, value)) do
    if not one:find("^[A-Z_]+$") then
      refuse(("%s[%d]"):format(name, i), 'must be the name of a capability without CAP_, such as "CHOWN"')
    end
  end
  return value
end

local function is_ipv4(value)
  local parts = { value:match("^(%d+)%.(%d+)%.(%d+)%.(%d+)$") }
  for _, part in ipairs(parts) do
    if #part > 3 or tonumber(part) > 255 then return false end
  end
  return #parts == 4
end

--- Groups of hexadecimal digits: eight of them, or less around one "::".
local function is_ipv6(value)
  local _, gaps = value:gsub("::", "")
  if not value:find("^[%x:]+$") or gaps > 1 or value:find(":::", 1, true) then return false end
  if value:find("^:[^:]") or value:find("[^:]:$") then return false end
  local groups = 0
  for group in value:gmatch("%x+") do
    if #group > 4 then return false end
    groups = groups + 1
  end
  if gaps == 1 then return groups < 8 end
  return groups == 8
end

local function address(name, value)
  if is_ipv4(text(name, value)) or is_ipv6(value) then return value end
  refuse(name, 'must be an IP address of the engine\'s machine, such as "127.0.0.1" or "::1"')
end

--- What stands in a URL as its host.
local function host_name(name, value)
  if is_ipv6(text(name, value):match("^%[(.*)%]$") or value) then return value end
  if #value > 253 or not value:find("^[%w][%w._-]*$") then
    refuse(name, 'must be a host name or an IP address, such as "127.0.0.1", without a scheme and a port')
  end
  return value
end

--- A secret that travels in a header: its text is in no message.
local function header_key(name, value)
  if type(value) ~= "string" or #value < 1 or #value > 4096 or value:find("[^\x21-\x7e]") then
    refuse(name, "must be a text of 1 to 4096 visible ASCII characters: it travels in a header (is there a line break at its end?)")
  end
  return value
end

local LOGIN = { username = text, password = text, identitytoken = text }

local function logins(name, value)
  local out = {}
  if type(value) ~= "table" then refuse(name, "must be a table of registries and their logins") end
  for registry, login in pairs(value) do
    local at = ("%s[%q]"):format(name, tostring(registry))
    if type(registry) ~= "string" or type(login) ~= "table" then refuse(at, "must be { username =, password = }") end
    out[registry] = {}
    for key, entry in pairs(login) do
      if not LOGIN[key] then refuse(at .. "." .. tostring(key), "is unknown (username, password, identitytoken)") end
      out[registry][key] = LOGIN[key](at .. "." .. key, entry)
    end
  end
  return out
end

---@class paddock.DockerOptions
---@field host? string               unix:///path or tcp://host:port (DOCKER_HOST, then the usual sockets)
---@field tls_ca? string             certificates that the engine's own must be signed by
---@field tls_cert? string           the client's certificate
---@field tls_key? string            and its key
---@field plain_tcp? boolean          another machine's engine may be spoken to over plain TCP
---@field plane? "guest"|"aio"|"exec" how commands and files get inside (by what the configured image has: planes.choose)
---@field guest? string              path of paddock-guest
---@field prefix? string             a container's name is prefix-ID ("paddock")
---@field label_prefix? string       of the labels ("paddock.")
---@field command? string[]          plane exec: what keeps a container running; plane aio: in place of the image's own
---@field user? string               "uid:gid" or a name, in place of the image's own
---@field workdir? string            the workspace inside ("/workspace")
---@field workspace? "layer"|"tmpfs"|"volume"  where it lives when no data_dir is set
---@field workspace_size? integer    bytes of a tmpfs workspace (1 GiB)
---@field read_only_root? boolean    the container's root file system
---@field tmp_size? integer          bytes of /tmp where the root is read-only (256 MiB)
---@field shm_size? integer          bytes of /dev/shm (64 MiB)
---@field cap_drop? string[]         ({ "ALL" })
---@field cap_add? string[]          (what a root needs inside; nothing for another user)
---@field security_opt? string[]     ({ "no-new-privileges" })
---@field runtime? string            the OCI runtime, by the engine's name for it
---@field init? boolean              the engine's own init as pid 1 (plane exec: when the engine has one)
---@field pull? "missing"|"always"|"never"
---@field pull_timeout? number       seconds (600)
---@field registry_auth? table<string, table>
---@field base_port? integer         the first of the ports to publish on; else the engine chooses
---@field publish_address? string    the address to publish on
---@field reach_host? string         how this machine reaches published ports
---@field aio_port? integer          of the all-in-one image (8080)
---@field aio_key? string            its API key
---@field engine_timeout? number     seconds for one call of the engine, and for one stream of its events (30)
---@field stop_grace? number         seconds between the polite signal and the kill (0 with the guest, else 5)
local OPTIONS = {
  host = text, tls_ca = path, tls_cert = path, tls_key = path, plain_tcp = boolean, plane = one_of("guest", "aio", "exec"), guest = path,
  prefix = prefix, label_prefix = label_prefix, command = command, user = user, workdir = path,
  workspace = one_of("layer", "tmpfs", "volume"), workspace_size = whole(65536, 1 << 50), read_only_root = boolean,
  tmp_size = whole(65536, 1 << 50), shm_size = whole(65536, 1 << 50), cap_drop = capabilities, cap_add = capabilities,
  security_opt = list, runtime = oci_runtime, init = boolean, pull = one_of("missing", "always", "never"), pull_timeout = seconds(1),
  registry_auth = logins, base_port = whole(1, 65535), publish_address = address, reach_host = host_name, aio_port = whole(1, 65535),
  aio_key = header_key, engine_timeout = seconds(1), stop_grace = seconds(0),
}

local DEFAULTS = {
  prefix = "paddock", label_prefix = "paddock.", workdir = "/workspace", workspace_size = 1024 * MIB,
  read_only_root = false, tmp_size = 256 * MIB, shm_size = 64 * MIB, cap_drop = { "ALL" },
  security_opt = { "no-new-privileges" }, pull = "missing", pull_timeout = 600, aio_port = 8080, engine_timeout = 30,
}

--- What a root inside needs to install packages and to use files of other users; nothing that reaches the machine. Another user gets
--- none of it: some engines would give it what is added.
M.ROOT_CAPABILITIES = { "CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID", "KILL" }

--- Checks them and fills in the defaults.
---@param given table?
---@return paddock.DockerOptions
function M.read(given)
  local out = {}
  for key, value in pairs(given or {}) do
    local name = "backend_options." .. tostring(key)
    if not OPTIONS[key] then errors.raise("invalid_argument", ("option `%s` is not known to the docker backend"):format(name)) end
    out[key] = OPTIONS[key](name, value)
  end
  for key, value in pairs(DEFAULTS) do
    if out[key] == nil then out[key] = value end
  end
  if out.workdir:find("/%.%.?/") or (out.workdir .. "/"):find("/%.%.?/") or not out.workdir:find("^/[^/]") then
    refuse("backend_options.workdir", "must be an absolute path below /, without . and ..")
  end
  if (out.tls_cert == nil) ~= (out.tls_key == nil) then
    refuse(out.tls_cert and "backend_options.tls_key" or "backend_options.tls_cert", "is missing: a certificate goes with its key")
  end
  if out.plane then M.settle(out) end
  return out
end

--- What depends on the plane, once it is known.
---@param own paddock.DockerOptions   with `plane`
function M.settle(own)
  if own.stop_grace == nil then own.stop_grace = own.plane == "aio" and 5 or 0 end
  if own.base_port and own.plane ~= "aio" then
    refuse("backend_options.base_port", ('has a meaning for plane "aio" only: the others publish no port, and this one is %q')
      :format(own.plane))
  end
end

--- No guest inside refuses a former owner: only the clock does.
---@param own paddock.DockerOptions
---@param stop_timeout number
---@param ttl number
function M.check_clock(own, stop_timeout, ttl)
  if own.plane == "guest" then return end
  local margin = ttl / 10
  if stop_timeout + margin >= ttl then
    refuse("stop_timeout", ("(%g s) and a margin of %g s must stay below ownership.ttl (%g s) with backend_options.plane = %q%s: "
      .. "without a guest inside, a stop that outlives its lease could hit the next owner"):format(stop_timeout, margin,
      ttl, own.plane, own.chosen and " (chosen: " .. own.chosen .. ")" or ""))
  end
end

--- What needs no look at the machine: for paddock.config.
---@param options table   normalized
function M.options(options)
  local own = M.read(options.backend_options)
  if own.plane then M.check_clock(own, options.stop_timeout, options.ownership.ttl) end
end

--- What a look at the machine says.
---@param _ table   normalized
function M.places(_) end

return M
