--- The options of `paddock.open`: which there are, what each may be, and what holds between them.
---
--- One table says all of it (OPTIONS below); `normalize` walks it. Everything that can be refused is refused here, at
--- open, with the option's dotted name, so that the core reads values that it need not doubt.
local errors = require "paddock.errors"
local sections = require "paddock.sections"

local M = {}

local MAX_SECONDS = 10 * 366 * 86400 -- ten years; larger numbers are a slip of units, and would overflow a store's
local MAX_COUNT = 1000000
local MAX_BYTES = 2 ^ 50
local MAX_TEXT = 4096

-- ---- refusing -----------------------------------------------------------------------------------------------------

local function refuse(name, message)
  errors.raise("invalid_argument", ("option `%s` %s"):format(name, message))
end

--- A value as it may stand in a message: short, on one line, and never the text of a string that could be a secret.
local function show(value)
  if type(value) == "number" then return ("%.14g"):format(value) end
  if type(value) == "boolean" then return tostring(value) end
  return "a " .. type(value)
end

local function quote(text)
  local short = #text > 40 and text:sub(1, 40) .. "..." or text
  return '"' .. short:gsub("[%c\"\\\x80-\xff]", function(c) return ("\\x%02x"):format(c:byte()) end) .. '"'
end

--- How many single edits lie between two short names.
local function distance(a, b)
  local row = {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local diagonal = row[0]
    row[0] = i
    for j = 1, #b do
      local above = row[j]
      local change = a:byte(i) == b:byte(j) and 0 or 1
      row[j] = math.min(above + 1, row[j - 1] + 1, diagonal + change)
      diagonal = above
    end
  end
  return row[#b]
end

local function nearest(name, known)
  if #name > 40 then return nil end
  local best, best_distance
  for candidate in pairs(known) do
    local d = distance(name, candidate)
    if best == nil or d < best_distance or (d == best_distance and candidate < best) then
      best, best_distance = candidate, d
    end
  end
  if best and best_distance <= math.max(2, #best // 3) then return best end
  return nil
end

--- Refuses keys of `map` that `known` has not; `prefix` is the option that the map is the value of.
local function only_known(map, known, prefix, what)
  for key in pairs(map) do
    if type(key) ~= "string" then
      refuse(prefix or "options", ("has a key that is no name (%s)"):format(show(key)))
    end
    if known[key] == nil then
      local name = prefix and prefix .. "." .. key or key
      local hint = nearest(key, known)
      local advice = hint and ("; did you mean `%s`?"):format(prefix and prefix .. "." .. hint or hint) or ""
      if prefix then
        local takes = {}
        for one in pairs(known) do takes[#takes + 1] = one end
        table.sort(takes)
        advice = ("%s; `%s` takes %s"):format(advice:sub(1, -2), prefix, table.concat(takes, ", "))
      end
      errors.raise("invalid_argument", ("unknown %s `%s`%s"):format(what or "option", quote(name):sub(2, -2), advice))
    end
  end
end

-- ---- kinds of values: each is a function(name, value) -> normalized value, and raises ---------------------------------

local function number(name, value, unit)
  if type(value) ~= "number" then refuse(name, "must be a number of " .. unit .. ", not " .. show(value)) end
  if value ~= value then refuse(name, "must be a number of " .. unit .. ", not NaN") end
  if value == math.huge or value == -math.huge then refuse(name, "must be finite") end
  return value
end

local function positive_seconds(name, value)
  if type(value) == "number" and not (value > 0 and value < math.huge) then -- NaN, too
    refuse(name, ("must be positive and finite, not %s"):format(show(value)))
  end
  number(name, value, "seconds")
  if value > MAX_SECONDS then refuse(name, ("must be at most %d seconds, not %s"):format(MAX_SECONDS, show(value))) end
  return value
end

local function seconds_or_zero(name, value)
  number(name, value, "seconds")
  if value < 0 then refuse(name, ("must not be negative (0 = never), not %s"):format(show(value))) end
  if value > MAX_SECONDS then refuse(name, ("must be at most %d seconds, not %s"):format(MAX_SECONDS, show(value))) end
  return value
end

local function count(least, most)
  return function(name, value)
    number(name, value, "things")
    local whole = math.tointeger(value)
    if whole == nil then refuse(name, ("must be a whole number, not %s"):format(show(value))) end
    if whole < least or whole > most then
      refuse(name, ("must be from %d to %d, not %s"):format(least, most, show(value)))
    end
    return whole
  end
end

local function boolean(name, value)
  if type(value) ~= "boolean" then refuse(name, "must be true or false, not " .. show(value)) end
  return value
end

local function text(least, most, what)
  return function(name, value)
    if type(value) ~= "string" then refuse(name, ("must be %s, not %s"):format(what, show(value))) end
    if #value < least then refuse(name, ("must be %s, not empty"):format(what)) end
    if #value > most then refuse(name, ("must be %s of at most %d bytes, not %d"):format(what, most, #value)) end
    return value
  end
end

local function no_nul(name, value)
  if value:find("\0", 1, true) then refuse(name, "must not contain a NUL byte") end
  return value
end

local any_path = text(1, MAX_TEXT, "a path")
local function path(name, value)
  return no_nul(name, any_path(name, value))
end

local function absolute(name, value)
  path(name, value)
  if value:sub(1, 1) ~= "/" and not value:find("^%a:[/\\]") then
    refuse(name, "must be an absolute path, not " .. quote(value))
  end
  return value
end

local line_text = text(1, MAX_TEXT, "a string")
local function line(name, value)
  line_text(name, value)
  if value:find("%c") then refuse(name, "must not contain control characters") end
  return value
end

local short_text = text(1, 159, "a string") -- what the stores keep of it
local function short_line(name, value)
  short_text(name, value)
  return line(name, value)
end

local function one_of(...)
  local choices, known = { ... }, {}
  for _, choice in ipairs(choices) do known[choice] = true end
  return function(name, value)
    if type(value) ~= "string" then
      refuse(name, ("must be one of %s, not %s"):format(table.concat(choices, ", "), show(value)))
    end
    if not known[value] then
      refuse(name, ("must be one of %s, not %s"):format(table.concat(choices, ", "), quote(value)))
    end
    return value
  end
end

local function map(name, value)
  if type(value) ~= "table" then refuse(name, "must be a table, not " .. show(value)) end
  for key in pairs(value) do
    if type(key) ~= "string" then refuse(name, ("must have names as keys, not %s"):format(show(key))) end
  end
  return value
end

local function list(name, value)
  if type(value) ~= "table" then refuse(name, "must be a list, not " .. show(value)) end
  local n = 0
  for key in pairs(value) do
    if math.type(key) ~= "integer" or key < 1 then
      refuse(name, "must be a list, not a table with the key " .. (type(key) == "string" and quote(key) or show(key)))
    end
    n = n + 1
  end
  if n ~= #value then refuse(name, "must be a list without holes") end
  return value
end

--- Plain data all through: what lies below may cross between Lua states and be kept packed.
local function plain(name, value, depth)
  depth = depth or 0
  if depth > 16 then refuse(name, "is nested too deeply, or contains itself") end
  local kind = type(value)
  if kind == "number" and (value ~= value or value == math.huge or value == -math.huge) then
    refuse(name, "must be finite, not " .. show(value))
  elseif kind == "table" then
    for key, inner in pairs(value) do
      if type(key) == "string" then
        plain(#name < 200 and name .. "." .. key or name, inner, depth + 1)
      elseif math.type(key) == "integer" then
        plain(("%s[%d]"):format(name, key), inner, depth + 1)
      else
        refuse(name, "has a key that is neither a name nor a position")
      end
    end
  elseif kind ~= "number" and kind ~= "string" and kind ~= "boolean" and kind ~= "nil" then
    refuse(name, ("must be plain data, not a %s; functions are taken in backend, ownership, journal and log only")
      :format(kind))
  end
  return value
end

-- ---- options that are tables ------------------------------------------------------------------------------------------

local function env_name(name, key)
  if not key:find("^[%a_][%w_]*$") or #key > 255 then
    refuse(name, quote(key) .. " is no name of an environment variable")
  end
end

--- `$NAME` as a value is taken from the runtime's own environment, empty when unset (row B14). The value itself is
--- never shown, neither in an error nor in a log.
local function environment(name, value)
  local out = {}
  for key, entry in pairs(map(name, value)) do
    env_name(name, key)
    if type(entry) ~= "string" then
      refuse(name .. "." .. key, "must be a string, not " .. show(entry))
    end
    if #entry > 131072 then refuse(name .. "." .. key, "must be at most 131072 bytes") end -- the kernel's own limit
    no_nul(name .. "." .. key, entry)
    if entry:sub(1, 1) == "$" then
      entry = os.getenv(entry:sub(2)) or ""
    end
    out[key] = entry
  end
  return out
end

local function mode(name, value)
  if type(value) ~= "string" or not value:find("^0?[0-7][0-7][0-7]$") then
    refuse(name, 'must be a mode in octal, such as "0777"')
  end
  return value
end

--- Where a mount may be made in a sandbox; the core refuses the same of policies.
local function mount_target(name, value)
  path(name, value)
  if not value:find("^/[^/]") or (value .. "/"):find("/%.?%.?/") then
    refuse(name, 'must be an absolute path without ".", ".." and "//", and not /')
  end
  for _, own in ipairs { "/proc", "/sys", "/dev" } do
    if value == own or value:sub(1, #own + 1) == own .. "/" then refuse(name, "must not be at or below " .. own) end
  end
  return value
end

local MOUNT = {
  source = absolute, target = mount_target, read_only = boolean, create = mode, if_exists = boolean, owner_only = boolean,
}

local function mounts(name, value)
  local out = {}
  for i, entry in ipairs(list(name, value)) do
    local at = ("%s[%d]"):format(name, i)
    if type(entry) ~= "table" then refuse(at, "must be a table with source and target, not " .. show(entry)) end
    only_known(entry, MOUNT, at)
    local mount = {}
    for key, check in pairs(MOUNT) do
      if entry[key] ~= nil then mount[key] = check(at .. "." .. key, entry[key]) end
    end
    if mount.source == nil then refuse(at .. ".source", "is missing") end
    if mount.target == nil then refuse(at .. ".target", "is missing") end
    if mount.read_only == nil then mount.read_only = true end
    out[i] = mount
  end
  return out
end

local function mount_roots(name, value)
  local out = {}
  for i, root in ipairs(list(name, value)) do out[i] = absolute(("%s[%d]"):format(name, i), root) end
  return out
end

local LIMITS = {
  memory = count(1, MAX_BYTES),
  pids = count(1, 4194304),
  cpus = function(name, value)
    number(name, value, "processors")
    if value <= 0 or value > 4096 then refuse(name, "must be more than 0 and at most 4096, not " .. show(value)) end
    return value
  end,
}

local function limits(name, value)
  local out = {}
  only_known(map(name, value), LIMITS, name)
  for key, check in pairs(LIMITS) do
    if value[key] ~= nil then out[key] = check(name .. "." .. key, value[key]) end
  end
  return out
end

local OWNERSHIP = {
  type = one_of("memory", "file", "redis"), ttl = positive_seconds, renew_interval = positive_seconds, url = line,
}

local function ownership(name, value)
  map(name, value)
  only_known(value, OWNERSHIP, name)
  local out = { type = "file", ttl = 180, renew_interval = 60 }
  for key, check in pairs(OWNERSHIP) do
    if value[key] ~= nil and not (key == "type" and value[key] == "table") then
      out[key] = check(name .. "." .. key, value[key])
    end
  end
  if value.type == "table" then out.type = "table" end -- set by `split`, for a store made of functions
  if out.type == "redis" and out.url == nil then
    refuse(name .. ".url", 'is missing: type "redis" needs redis://[:password@]host[:port][/db] or unix:///path')
  end
  if out.type ~= "redis" and out.url ~= nil then
    refuse(name .. ".url", "has a meaning for the type \"redis\" only; leave it out")
  end
  if out.renew_interval * 2 > out.ttl then
    refuse(name .. ".renew_interval", ("(%s s) must be at most half of %s.ttl (%s s), so that one renewal may fail")
      :format(show(out.renew_interval), name, show(out.ttl)))
  end
  return out
end

local WORKERS = { max = count(1, 16384) }

local function workers(name, value)
  only_known(map(name, value), WORKERS, name)
  return { max = value.max == nil and 1024 or WORKERS.max(name .. ".max", value.max) }
end

local POLICIES = { identity = true, requirements = true, mounts = true, reuse = true, network = true }
local POLICY_SOURCE = { source = text(0, 1048576, "a Lua text"), name = line }

local function policies(name, value)
  if type(value) == "string" then return path(name, value) end
  if type(value) ~= "table" then
    refuse(name, "must be a folder, or a table of policies by name, not " .. show(value))
  end
  local out = {}
  only_known(map(name, value), POLICIES, name, "policy")
  for key, entry in pairs(value) do
    local at = name .. "." .. key
    if type(entry) == "string" then
      out[key] = path(at, entry)
    elseif type(entry) == "table" then
      only_known(entry, POLICY_SOURCE, at)
      if entry.source == nil then refuse(at .. ".source", "is missing") end
      out[key] = {
        source = POLICY_SOURCE.source(at .. ".source", entry.source),
        name = entry.name == nil and key .. ".lua" or POLICY_SOURCE.name(at .. ".name", entry.name),
      }
    else
      refuse(at, "must be a path or { source =, name = }, not " .. show(entry))
    end
  end
  return out
end

local BACKENDS = { process = true, docker = true, provisioner = true, e2b = false } -- false: not in this version
-- Modules that know what a backend cannot do.
local CHECKS = {
  process = "paddock.process.check", docker = "paddock.docker.options", provisioner = "paddock.provisioner.check",
}

local function backend(name, value)
  if type(value) ~= "string" then
    refuse(name, "must be a backend's name, a path to a Lua file, or a table of functions, not " .. show(value))
  end
  if BACKENDS[value] then return value end
  if BACKENDS[value] == false then
    errors.raise("unsupported", ("option `%s`: this version has no backend %s; it has process, docker and provisioner, and takes a "
      .. "path to a Lua file")
      :format(name, quote(value)))
  end
  path(name, value)
  if not value:find("%.lua$") then
    local hint = nearest(value, BACKENDS)
    refuse(name, ("has no backend %s; it is one of process, docker, provisioner, or a path that ends in .lua%s")
      :format(quote(value), hint and ("; did you mean %s?"):format(quote(hint)) or ""))
  end
  return value
end

--- Which implementation the default instance is of; a runtime that is opened is paddock's own.
local function use(name, value)
  line(name, value)
  if #value > 100 then refuse(name, "must be at most 100 bytes") end
  return value
end

local function journal(name, value)
  if value == "memory" then return value end
  refuse(name, 'must be "memory" or a table of functions, not ' .. show(value))
end

local LOG_LEVELS = { "off", "error", "warn", "info", "debug" }
local log_level = one_of(table.unpack(LOG_LEVELS))

local function log(name, value)
  if type(value) ~= "string" then
    refuse(name, ("must be one of %s, or a function that takes each record, not %s")
      :format(table.concat(LOG_LEVELS, ", "), show(value)))
  end
  return log_level(name, value)
end

--- What reaches stderr when nobody says what should: the environment's word, or what an operator must know.
local function default_log()
  local level = os.getenv("PADDOCK_LOG")
  if level == nil or level == "" then return "warn" end
  for _, known in ipairs(LOG_LEVELS) do
    if level == known then return level end
  end
  errors.raise("invalid_argument", ("the environment variable PADDOCK_LOG must be one of %s, not %s")
    :format(table.concat(LOG_LEVELS, ", "), quote(level)))
end

-- ---- the options ------------------------------------------------------------------------------------------------------

local OPTIONS = {
  backend = { backend, "process" },
  backend_options = { function(name, value) return plain(name, map(name, value)) end, {} },
  state_dir = { absolute },
  data_dir = { absolute },
  policies = { policies },
  policy_options = { function(name, value) return plain(name, map(name, value)) end, {} },
  environment = { environment, {} },
  mounts = { mounts, {} },
  mount_roots = { mount_roots, {} },
  image = { line },
  limits = { limits, {} },
  network = { line, "none" },
  user = { text(1, MAX_TEXT, "a user's name") },
  ownership = { ownership, {} },
  journal = { journal },
  scope = { short_line },
  idle_timeout = { seconds_or_zero, 600 },
  replicas = { count(0, MAX_COUNT), 3 },
  max_sandboxes = { count(0, MAX_COUNT) },
  reap_interval = { positive_seconds, 60 },
  orphan_ttl = { positive_seconds, 3600 },
  ready_timeout = { positive_seconds, 60 },
  ready_interval = { positive_seconds, 1 },
  discover_timeout = { positive_seconds, 5 },
  stop_timeout = { positive_seconds, 120 },
  command_timeout = { positive_seconds, 600 },
  health_ttl = { seconds_or_zero, 5 },
  workers = { workers, {} },
  clock = { one_of("monotonic", "boottime", "manual"), "monotonic" },
  thread_data_mounts = { boolean }, -- nil: as the backend says
  threads = { boolean, true },
  signals = { boolean, false },
  log = { log },
  use = { use, "paddock" },
}

--- The numbers and places that policies see as ctx.config, beside `policy_options`. Not the environment: its values may
--- be secrets.
local FOR_POLICIES = {
  "image", "limits", "network", "mounts", "mount_roots", "data_dir", "idle_timeout", "replicas", "max_sandboxes",
  "reap_interval", "orphan_ttl", "ready_timeout", "ready_interval", "discover_timeout", "stop_timeout", "command_timeout",
  "health_ttl",
}

local function default_state_dir()
  local base = os.getenv("XDG_STATE_HOME")
  if base and base:sub(1, 1) == "/" then return base .. "/paddock" end -- a relative one is invalid by its own standard
  local home = os.getenv("HOME")
  if home and home ~= "" then return home .. "/.local/state/paddock" end
  refuse("state_dir", "has no default here, since neither XDG_STATE_HOME nor HOME is set: give one")
end

local KINDS = {
  positive_seconds = positive_seconds, seconds_or_zero = seconds_or_zero, count = count, boolean = boolean, line = line,
  mount_target = mount_target,
}

--- What must hold between options.
local function check_together(out, given)
  if out.ready_interval > out.ready_timeout then
    if given.ready_interval ~= nil then
      refuse("ready_interval", ("(%s s) must not be above ready_timeout (%s s)")
        :format(show(out.ready_interval), show(out.ready_timeout)))
    end
    out.ready_interval = out.ready_timeout
  end
  if out.max_sandboxes and out.replicas > out.max_sandboxes then
    if given.replicas ~= nil then
      refuse("replicas", ("(%d) must not be above max_sandboxes (%d)"):format(out.replicas, out.max_sandboxes))
    end
    out.replicas = out.max_sandboxes
  end
  if out.orphan_ttl < 2 * out.ownership.renew_interval then
    refuse("orphan_ttl", ("(%s s) must be at least twice ownership.renew_interval (%s s), since a renewal is what tells "
      .. "a warm sandbox that its runtime lives: raise it, or lower ownership.renew_interval")
      :format(show(out.orphan_ttl), show(out.ownership.renew_interval)))
  end
end

--- ctx.config of the policies: `policy_options`, and what FOR_POLICIES names.
local function policy_config(out)
  local config = {}
  for key, value in pairs(out.policy_options) do config[key] = value end
  for _, key in ipairs(FOR_POLICIES) do
    if config[key] ~= nil then
      refuse("policy_options." .. key, ("is taken: policies see the option `%s` under this name"):format(key))
    end
    config[key] = out[key]
  end
  return config
end

--- Checks the plain part of the options and fills in the defaults.
---
--- Beside every option it has `policy_config`, which is what policies see as ctx.config. Where the backend, the ownership
--- store or the journal is a table of functions, `backend` and `journal` are nil and `ownership.type` is "table".
---@param given table   as `split` returns it
---@return table options
function M.normalize(given)
  only_known(given, OPTIONS)
  local out = {}
  for name, option in pairs(OPTIONS) do
    local check, default = option[1], option[2]
    local value = given[name]
    if name == "backend" and type(value) == "table" then -- left by `split`: a table of functions
      out.backend = nil
    elseif value ~= nil then
      out[name] = check(name, value)
    elseif type(default) == "table" then
      out[name] = check(name, {})
    else
      out[name] = default
    end
  end
  out.state_dir = out.state_dir or default_state_dir()
  out.log = out.log or default_log()
  check_together(out, given)
  local backend_check = CHECKS[out.backend]
  if backend_check then require(backend_check).options(out, given) end
  out.policy_config = policy_config(out)
  return out
end

--- As `normalize`, for a runtime that is about to open: also looks whether the folders are there that it will need.
---@param given table   as `split` returns it
---@return table options
function M.for_open(given)
  local out = M.normalize(given)
  if out.use ~= "paddock" then
    refuse("use", ("names another implementation (%s): ask for the default instance, which is what resolves it"):format(quote(out.use)))
  end
  local backend_check = CHECKS[out.backend]
  if backend_check then require(backend_check).places(out) end
  return out
end

local function has_functions(value)
  local seen = 0
  while type(value) == "table" and seen < 8 do -- methods may stand in a class, behind __index
    for _, entry in pairs(value) do
      if type(entry) == "function" then return true end
    end
    local metatable = getmetatable(value)
    value = type(metatable) == "table" and metatable.__index or nil
    seen = seen + 1
  end
  return type(value) == "function"
end

--- Takes the options apart: the plain part, which crosses into the universe, and the tables of functions, which stay
--- where they are. Changes nothing in `options`.
---@param options table?
---@return table plain
---@return { backend: table?, ownership: table?, journal: table?, log: function? } tables
function M.split(options)
  if options == nil then options = {} end
  if type(options) ~= "table" then
    errors.raise("invalid_argument", "the options must be a table, not " .. show(options))
  end
  local rest, tables = {}, {}
  for key, value in next, options do rest[key] = value end
  if sections.present(rest) then rest = sections.translate(rest, KINDS) end
  if type(rest.backend) == "table" then
    if not has_functions(rest.backend) then refuse("backend", "is a table without functions") end
    tables.backend, rest.backend = rest.backend, {}
  end
  if has_functions(rest.ownership) then
    tables.ownership = rest.ownership
    rest.ownership = { -- its numbers count as they do for a built-in store
      type = "table", ttl = rest.ownership.ttl, renew_interval = rest.ownership.renew_interval,
    }
  elseif type(rest.ownership) == "table" and rest.ownership.type == "table" then
    refuse("ownership.type", 'must be one of memory, file, redis, not "table"')
  end
  if has_functions(rest.journal) then tables.journal, rest.journal = rest.journal, nil end
  if type(rest.log) == "function" then tables.log, rest.log = rest.log, nil end
  for key, value in pairs(rest) do
    if type(key) == "string" and OPTIONS[key] then plain(key, value) end
  end
  only_known(rest, OPTIONS)
  return rest, tables
end

--- The names of all options, sorted.
---@return string[]
function M.names()
  local names = {}
  for name in pairs(OPTIONS) do names[#names + 1] = name end
  table.sort(names)
  return names
end

-- ---- configuration files ------------------------------------------------------------------------------------------------

--- What a configuration file may use: enough to compute a table, nothing that reaches the machine.
local function environment_of_files()
  local env = {
    assert = assert, error = error, ipairs = ipairs, next = next, pairs = pairs, pcall = pcall, select = select,
    tonumber = tonumber, tostring = tostring, type = type,
  }
  for _, library in ipairs { "string", "table", "math", "utf8" } do -- copies: a file must not change what others see
    env[library] = {}
    for key, value in pairs(_G[library]) do env[library][key] = value end
  end
  env.string.dump = nil
  return env
end

--- Runs the text of a configuration file and returns its options, unchecked. Text only, never bytecode.
---@param source string
---@param name string   what errors call it
---@return table options
function M.load_text(source, name)
  local shown = name:gsub("%c", "?")
  local chunk, why = load(source, "@" .. shown, "t", environment_of_files())
  if chunk == nil then errors.raise("invalid_argument", ("the configuration %s cannot be read: %s"):format(shown, why)) end
  local ok, options = pcall(chunk)
  if not ok then
    if errors.is(options) then error(options, 0) end
    errors.raise("invalid_argument", ("the configuration %s failed: %s"):format(shown, tostring(options)))
  end
  if type(options) ~= "table" then
    errors.raise("invalid_argument", ("the configuration %s must return a table, not %s"):format(shown, show(options)))
  end
  return options
end

--- Opens a file for reading, once it is known to be one: a pipe would have us wait for whoever might write to it.
local function open_regular(file_name)
  local found, lib = pcall(require, "paddock.io")
  local pinned <close> = found and lib.proc.open(file_name, "p") or nil
  if not pinned then return io.open(file_name, "rb") end -- which says what is wrong
  local kind = pinned:stat().type
  if kind ~= "file" then return nil, ("%s: is a %s, not a file"):format(file_name, kind == "other" and "pipe or a device" or kind) end
  return io.open("/proc/self/fd/" .. pinned:no(), "rb") or io.open(file_name, "rb")
end

--- Relative paths of a configuration file count from its folder, wherever the process was started.
local function from_folder(options, file_name)
  local folder = file_name:match("^(.*/)[^/]*$")
  if folder == nil then return options end
  local function there(value)
    local from_here = type(value) == "string" and value ~= "" and value:sub(1, 1) ~= "/" and not value:find("^builtin:")
    return from_here and folder .. value or value
  end
  if type(options.backend) == "string" and options.backend:find("%.lua$") then options.backend = there(options.backend) end
  if type(options.policies) == "table" then
    for name, entry in pairs(options.policies) do options.policies[name] = there(entry) end
  else
    options.policies = there(options.policies)
  end
  return options
end

--- As `load_text`, from a file. What its `policies` and `backend` name by a relative path is looked for beside it.
---@param file_name string
---@return table options
function M.load_file(file_name)
  if file_name:find("\0", 1, true) then
    errors.raise("invalid_argument", "the name of a configuration file must not contain a NUL byte")
  end
  local file <close>, why = open_regular(file_name)
  if file == nil then errors.raise("io_error", "the configuration cannot be read: " .. tostring(why)) end
  local source
  source, why = file:read(1048577)
  if source == nil and why ~= nil then
    errors.raise("io_error", ("the configuration %s cannot be read: %s"):format(file_name, why))
  end
  if source and #source > 1048576 then
    errors.raise("invalid_argument", ("the configuration %s is larger than 1 MiB"):format(file_name))
  end
  return from_folder(M.load_text(source or "", file_name), file_name)
end

--- The implementation that a table of options asks for, nil = paddock's own: option `use`, or `sandbox.use` of a deer-flow
--- configuration, whose own containers paddock stands in for. Nothing else of the table is looked at.
---@param options table
---@return string?
function M.use(options)
  local name, sandbox, at = rawget(options, "use"), rawget(options, "sandbox"), "use"
  if name == nil and type(sandbox) == "table" then
    name, at = sandbox.use, "sandbox.use"
    if type(name) == "string" and name:find("AioSandboxProvider$") then return nil end
  end
  if name == nil then return nil end
  use(at, name)
  return name ~= "paddock" and name or nil
end

--- The same of a configuration file.
---@param file_name string
---@return string?
function M.use_of_file(file_name)
  return M.use(M.load_file(file_name))
end

--- Requirements given as JSON (the C API): an object, with null as "not given".
---@param json string
---@return table
function M.requirements_from_json(json)
  local cjson = require "cjson"
  local ok, value = pcall(cjson.decode, json)
  if not ok then errors.raise("invalid_argument", "requirements_json is no JSON: " .. tostring(value)) end
  if type(value) ~= "table" or not json:find("^%s*{") then
    errors.raise("invalid_argument", "requirements_json must be a JSON object")
  end
  local function without_null(node)
    for key, inner in pairs(node) do
      if inner == cjson.null then
        node[key] = nil
      elseif type(inner) == "table" then
        without_null(inner)
      end
    end
    return node
  end
  return plain("requirements_json", without_null(value))
end

return M
