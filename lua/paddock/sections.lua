--- The sections of a deer-flow configuration (`sandbox`, `subagent_runtime`, `skills`), as options of `paddock.open`.
---
--- Why: an operator who runs that project has these values already, under these names, and policies/deerflow is made for them.
--- They are taken apart before anything else looks at the options; whatever is wrong is refused under the name that was given.
local errors = require "paddock.errors"

local M = {}

M.NAMES = { sandbox = true, subagent_runtime = true, skills = true }

local DEFAULT_ROOT = "/mnt/skills"
local KEYS = {
  sandbox = { "use", "image", "port", "container_prefix", "idle_timeout", "replicas", "mounts", "environment",
    "thread_data_mounts", "provisioner_url", "provisioner_api_key", "bash_command_timeout" },
  subagent_runtime = { "max_running" },
  skills = { "container_path" },
}

local function refuse(name, message)
  errors.raise("invalid_argument", ("option `%s` %s"):format(name, message))
end

--- Whether these options have any of the sections.
---@param options table
---@return boolean
function M.present(options)
  for name in pairs(M.NAMES) do
    if rawget(options, name) ~= nil then return true end
  end
  return false
end

--- A section, its keys known; {} when it is not given.
local function section(options, name)
  local value, known = options[name], {}
  if value == nil then return {} end
  if type(value) ~= "table" then refuse(name, "must be a table, not a " .. type(value)) end
  for _, key in ipairs(KEYS[name]) do known[key] = true end
  for key in pairs(value) do
    if not known[key] then
      refuse(name, ("does not take %s; it takes %s"):format(tostring(key):sub(1, 60):gsub("%c", "?"), table.concat(KEYS[name], ", ")))
    end
  end
  return value
end

--- Gives an option its value, unless it was given under its own name as well.
local function put(out, option, value, from)
  if value == nil then return end
  if out[option] ~= nil then refuse(from, ("is given twice: also as `%s`"):format(option)) end
  out[option] = value
end

--- Environment values as text; what begins with `$` is looked up later, as in the option `environment`.
local function environment(given)
  local out = {}
  if given == nil then return out end
  if type(given) ~= "table" then refuse("sandbox.environment", "must be a table, not a " .. type(given)) end
  for key, value in pairs(given) do
    if type(value) == "table" or type(value) == "function" then
      refuse("sandbox.environment." .. tostring(key), "must be text, a number or a boolean, not a " .. type(value))
    end
    out[key] = tostring(value)
  end
  return out
end

--- The operator's own MAX_SHELL_SESSIONS, or nil.
local function sessions(env, kinds, max_running)
  local text = env.MAX_SHELL_SESSIONS
  if text == nil then return nil end
  local name = "sandbox.environment.MAX_SHELL_SESSIONS"
  if text:sub(1, 1) == "$" then text = os.getenv(text:sub(2)) or "" end
  local number = kinds.count(1, 1000000)(name, math.tointeger(tonumber(text)) or 0)
  if max_running and number < max_running + 1 then
    refuse(name, ("(%d) must be at least subagent_runtime.max_running + 1 (%d): one shell for each subagent, and the lead's own")
      :format(number, max_running + 1))
  end
  return number
end

local function mounts(given)
  if given == nil then return nil end
  if type(given) ~= "table" then refuse("sandbox.mounts", "must be a list, not a " .. type(given)) end
  local out = {}
  for i, one in ipairs(given) do
    local at = ("sandbox.mounts[%d]"):format(i)
    if type(one) ~= "table" then refuse(at, "must be a table with host_path and container_path") end
    for key in pairs(one) do
      if key ~= "host_path" and key ~= "container_path" and key ~= "read_only" then
        refuse(at, ("does not take %s; it takes host_path, container_path, read_only"):format(tostring(key)))
      end
    end
    if one.host_path == nil then refuse(at .. ".host_path", "is missing") end
    if one.container_path == nil then refuse(at .. ".container_path", "is missing") end
    out[i] = { source = one.host_path, target = one.container_path, read_only = one.read_only == true }
  end
  return out
end

--- The root of skills inside the sandbox, without a slash at its end.
local function skills_root(given, kinds)
  local root = given == nil and DEFAULT_ROOT or kinds.mount_target("skills.container_path", (tostring(given):gsub("(.)/+$", "%1")))
  return root
end

--- The engine's own options that the sections say, beside those that were given as such.
local function engine_options(out, said, names)
  local options = {}
  for key, value in pairs(type(out.backend_options) == "table" and out.backend_options or {}) do options[key] = value end
  for key, value in pairs(said) do
    if names[key] == nil then
      if options[key] == nil then options[key] = value end -- that project's default
    else
      put(options, key, value, names[key])
    end
  end
  out.backend_options = options
end

--- Which driver: a provisioner's address selects the remote one, else it is local containers. An option `backend` has the last word.
local function driver(out, sandbox, kinds, root)
  local url = sandbox.provisioner_url
  if url ~= nil then kinds.line("sandbox.provisioner_url", url) end
  local remote = url ~= nil
  if out.backend == nil then out.backend = remote and "provisioner" or "docker" end
  if remote and out.backend == "provisioner" then
    engine_options(out, { url = url, api_key = sandbox.provisioner_api_key, skills_root = root },
      { url = "sandbox.provisioner_url", api_key = "sandbox.provisioner_api_key", skills_root = "skills.container_path" })
  elseif not remote and out.backend == "docker" then
    engine_options(out, { plane = "aio", base_port = sandbox.port or 8080, prefix = sandbox.container_prefix or "deer-flow-sandbox",
      label_prefix = "deerflow." },
      { base_port = sandbox.port and "sandbox.port", prefix = sandbox.container_prefix and "sandbox.container_prefix" })
  end
  return remote
end

--- A key that would have no effect is refused, as everywhere: what it was meant to do would be missing without a word.
local function check_effect(sandbox, env, remote)
  local use = sandbox.use
  if use ~= nil and not (type(use) == "string" and use:find("AioSandboxProvider$")) then
    refuse("sandbox.use", "is no provider that paddock stands in for; that is deerflow.community.aio_sandbox:AioSandboxProvider")
  end
  if not remote then return end
  for _, key in ipairs { "image", "port", "container_prefix", "mounts" } do
    if sandbox[key] ~= nil then
      refuse("sandbox." .. key, "has no effect with sandbox.provisioner_url: it is about containers of this machine; leave it out")
    end
  end
  for name in pairs(env) do
    if name ~= "MAX_SHELL_SESSIONS" then
      refuse("sandbox.environment." .. tostring(name), "has no effect with sandbox.provisioner_url: a request to a provisioner carries no "
        .. "environment but MAX_SHELL_SESSIONS; leave it out")
    end
  end
end

--- The state directory of the project: what its own variables say, when `policy_options` do not.
local function places(out, policy_options)
  local base = policy_options.base_dir or os.getenv("DEER_FLOW_HOME")
  local seen = policy_options.host_base_dir or os.getenv("DEER_FLOW_HOST_BASE_DIR")
  policy_options.base_dir = base ~= "" and base or nil
  policy_options.host_base_dir = seen ~= "" and seen or nil
  if out.mount_roots == nil then out.mount_roots = { policy_options.base_dir, policy_options.host_base_dir } end
  if policy_options.base_dir == nil and policy_options.host_base_dir then out.mount_roots = { policy_options.host_base_dir } end
end

--- The options without the sections, and with what the sections say. Raises invalid_argument under the section's name.
---@param given table     a copy that may be changed
---@param kinds table     how config.lua checks values: positive_seconds, seconds_or_zero, count, boolean, line, mount_target
---@return table options
function M.translate(given, kinds)
  local out = given
  local sandbox, running, skills = section(given, "sandbox"), section(given, "subagent_runtime"), section(given, "skills")
  for name in pairs(M.NAMES) do out[name] = nil end
  local function checked(check, name, value)
    if value == nil then return nil end
    return check(name, value)
  end
  local most = checked(kinds.count(1, 100000), "subagent_runtime.max_running", running.max_running)
  local root = skills_root(skills.container_path, kinds)
  local env = environment(sandbox.environment)
  local own = sessions(env, kinds, most)
  local remote = driver(out, sandbox, kinds, root)
  check_effect(sandbox, env, remote)

  put(out, "command_timeout", checked(kinds.positive_seconds, "sandbox.bash_command_timeout", sandbox.bash_command_timeout),
    "sandbox.bash_command_timeout")
  put(out, "idle_timeout", checked(kinds.seconds_or_zero, "sandbox.idle_timeout", sandbox.idle_timeout), "sandbox.idle_timeout")
  put(out, "replicas", checked(kinds.count(0, 1000000), "sandbox.replicas", sandbox.replicas), "sandbox.replicas")
  put(out, "thread_data_mounts", checked(kinds.boolean, "sandbox.thread_data_mounts", sandbox.thread_data_mounts),
    "sandbox.thread_data_mounts")
  if not remote then
    put(out, "image", checked(kinds.line, "sandbox.image", sandbox.image), "sandbox.image")
    put(out, "mounts", mounts(sandbox.mounts), "sandbox.mounts")
    env.MAX_SHELL_SESSIONS = nil -- the requirements put it in again, with the number that is asked for
    if next(env) ~= nil then put(out, "environment", env, "sandbox.environment") end
  end
  if out.network == nil then out.network = "open" end

  local options = {}
  for key, value in pairs(type(out.policy_options) == "table" and out.policy_options or {}) do options[key] = value end
  put(options, "max_running", most, "subagent_runtime.max_running")
  put(options, "max_shell_sessions", own, "sandbox.environment.MAX_SHELL_SESSIONS")
  put(options, "skills_root", root, "skills.container_path")
  put(options, "remote", remote, "sandbox.provisioner_url")
  places(out, options)
  out.policy_options = options
  if out.policies == nil then out.policies = "builtin:deerflow" end
  return out
end

return M
