--- Which folders of the host does a sandbox see?
---
--- Skills are folders that operators maintain: everybody's, and a user's own. Agents read them and never change them. The
--- option `mount_roots` must allow `skills_root`, or the core refuses the mounts, whatever is written here.

local default_skills_root = nil  -- "/srv/skills", with public/ and users/NAME/; the option policy_options.skills_root wins

--- A user's name as a folder's: names that could lead elsewhere have no folder.
local function folder_of(user)
  if user:find("^[%w][%w._@-]*$") and #user <= 64 then return user end
  return nil
end

return {
  compose = function(ctx)
    local root = ctx.config.skills_root or default_skills_root
    local mounts = {}
    if root then
      mounts[1] = { source = root .. "/public", target = "/mnt/skills/public", read_only = true, if_exists = true }
    end
    local own = root and folder_of(ctx.identity.user)
    if own then
      mounts[#mounts + 1] = {
        source = root .. "/users/" .. own, target = "/mnt/skills/own", read_only = true, if_exists = true,
      }
    end
    -- What the option `mounts` has is added by the core.
    return mounts
  end,
}
