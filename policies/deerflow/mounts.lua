--- Which folders of the host does a sandbox see? deer-flow's own, in its order.
local paths = policy.require "paths"

local lark_root = "/mnt/integrations/lark-cli"
local kinds = { "public", "custom", "legacy", "integrations" }   -- of skills

--- Where a folder is: `here` for this process, `source` for the engine, which may see the base directory under another path.
local function placed(config, mount, ...)
  local base, seen = config.base_dir, config.host_base_dir
  if base == nil then error("policy_options.base_dir is missing: deer-flow's state directory", 0) end
  mount.source = paths.join(seen or base, ...)
  if seen and seen ~= base then mount.here = paths.join(base, ...) end
  return mount
end

--- The names of the thread's folder below the base directory.
local function thread_folder(user, thread)
  if user == "" then return paths.join("/", "threads", thread):sub(2) end
  return paths.join("/", "users", user, "threads", thread):sub(2)
end

--- Made open to everybody: the process inside may run under another uid.
local function thread_data(list, ctx, folder)
  for _, name in ipairs { "workspace", "uploads", "outputs" } do
    -- A provisioner makes these itself, and takes no others for them.
    if not ctx.config.remote then
      list[#list + 1] = placed(ctx.config, { target = "/mnt/user-data/" .. name, read_only = false, create = "0777" },
        folder, "user-data", name)
    end
  end
  list[#list + 1] = placed(ctx.config, { target = "/mnt/acp-workspace", read_only = true, create = "0777" },
    folder, "acp-workspace")
end

local function skills(list, ctx, user, folder)
  local options = ctx.requirements.options
  local root, view = options.skills_container_path, options.skills_projection
  if view == true then view = folder .. "/skills_view" end
  for _, kind in ipairs(kinds) do
    local mount = { target = paths.join(root, kind), read_only = true, create = "0755", optional = "skills" }
    if view then
      list[#list + 1] = placed(ctx.config, mount, view, kind)
    elseif kind == "public" then
      list[#list + 1] = placed(ctx.config, mount, "skills_view", kind)
    elseif user ~= "" then
      list[#list + 1] = placed(ctx.config, mount, "users", user, "skills_view", kind)
    end
  end
  -- So that a configured mount cannot put back a skill that this thread must not see.
  if view and not ctx.config.remote then list[#list + 1] = { exclude = root } end
end

--- Its locks are the one part of the configuration that the tool inside may write; that mount must come after its parent's.
local function credentials(list, ctx, user)
  if not ctx.requirements.options.provision_lark_cli_runtime or user == "" then return end
  local function own(name, writable)
    list[#list + 1] = placed(ctx.config, {
      target = paths.join(lark_root, name), read_only = not writable, create = "0700", owner_only = true, optional = "credentials",
    }, "users", user, "integrations", "lark-cli", name)
  end
  own("config", false)
  own("config/locks", true)
  own("data", true)
  list[#list + 1] = placed(ctx.config, { target = lark_root .. "/runtime", read_only = true, if_exists = true },
    "integrations", "lark-cli", "sandbox-cli")
end

--- What goes wrong here leaves these mounts out, and the turn goes on.
local function try(what, list, compose, ...)
  local added = {}
  local ok, why = pcall(compose, added, ...)
  if not ok then return policy.log(what .. " mounts are left out: " .. tostring(why), "warn") end
  for _, mount in ipairs(added) do list[#list + 1] = mount end
end

return {
  compose = function(ctx)
    local list, user, thread = {}, ctx.identity.user, ctx.identity.thread
    if user ~= "" then paths.safe_component(user, "the user", 255) end
    local folder
    if thread ~= "" then
      folder = thread_folder(user, paths.safe_component(thread, "the thread id"))
      thread_data(list, ctx, folder)
    end
    if folder or ctx.requirements.options.skills_projection ~= true then try("skills", list, skills, ctx, user, folder) end
    try("credential", list, credentials, ctx, user)
    return list
  end,
}
