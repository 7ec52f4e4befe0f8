--- What does this turn need of its sandbox? From the keys of a deer-flow configuration, which come as ctx.config.
local image_capacity = 10        -- shell sessions that the all-in-one image has room for by itself
local default_root = "/mnt/skills"

local may_ask = {}               -- fields of a request
for _, key in ipairs { "image", "env", "limits", "network", "labels", "require", "options",
  "skills_projection", "lark_cli", "include_legacy_skills" } do may_ask[key] = true end

--- true, or a list of users: is this one among them?
local function holds_for(setting, user)
  if type(setting) ~= "table" then return setting == true end
  for _, name in ipairs(setting) do
    if name == user then return true end
  end
  return false
end

local function copy(from)
  local to = {}
  for key, value in pairs(from or {}) do to[key] = value end
  return to
end

local function flag(request, key, setting, user)
  local asked = request[key]
  if asked == nil then return holds_for(setting, user) end
  if type(asked) ~= "boolean" then policy.fail("invalid_argument", "requirements." .. key .. " must be true or false") end
  return asked
end

--- How many shell sessions a sandbox must have room for to be used again, and how many a new one is asked for (nil = as it is).
local function capacity(config)
  local least = config.max_running and config.max_running + 1   -- one for the lead agent's own shell
  local given = config.max_shell_sessions                       -- the operator's word
  if least and given and given < least then
    error(("MAX_SHELL_SESSIONS (%d) must be at least max_running + 1 (%d)"):format(given, least))
  end
  if given or (least and least > image_capacity) then return least, given or least end
  return least, nil
end

local function projection(request)
  local asked = request.skills_projection
  if asked == nil or asked == false then return nil end
  if asked ~= true and (type(asked) ~= "string" or asked == "") then
    policy.fail("invalid_argument", "requirements.skills_projection must be true, or a folder's path below the base directory")
  end
  return asked
end

return {
  pure = true,   -- what these answer depends on ctx alone: an answer is kept for as long as ctx is the same
  resolve = function(ctx)
    local request, config = ctx.request, ctx.config
    for key in pairs(request) do
      if not may_ask[key] then policy.fail("invalid_argument", "requirements." .. tostring(key) .. " is unknown") end
    end
    local least, wanted = capacity(config)
    local lark = flag(request, "lark_cli", config.lark_cli, ctx.user)
    local env, require, options = copy(request.env), copy(request.require), copy(request.options)
    if wanted then env.MAX_SHELL_SESSIONS = tostring(wanted) end
    if least then require.capacity = { at_least = least } end
    -- The fields of a provisioner's create request, by their names there; the other policies see them too.
    options.skills_container_path = config.skills_root or default_root
    options.skills_projection = projection(request)
    options.include_legacy_skills = flag(request, "include_legacy_skills", config.legacy_skills, ctx.user)
    options.max_shell_sessions = wanted
    options.provision_lark_cli_runtime = lark
    -- Whether the deployment wants its broker is known before a create only, when it has been asked (`probe`).
    options.provision_lark_cli_broker = lark and ctx.capability ~= nil and ctx.capability.lark_cli_broker_image == true
    return {
      image = request.image, limits = request.limits, network = request.network, labels = request.labels,
      env = env, require = require, options = options, probe = lark and config.remote == true,
    }
  end,
}
