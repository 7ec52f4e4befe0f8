--- What does this turn need? Here: which image, and one that a user keeps.
---
--- A new image is tried on a share of the users first. Who is in that share follows from the user's name alone, so a user
--- gets the same image at every turn, in every process, and after a restart.

local stable = "default"          -- nil would leave the choice to the option `image`
local canary = nil                -- e.g. "tools-2": the image that is on trial
local canary_percent = 10         -- of the users; 0 = nobody, 100 = everybody
local pinned = {                  -- users with an image of their own, whatever the shares are
  -- ["ops@example.org"] = "tools-2",
}

--- 0 to 99, spread evenly over users and the same for ever.
local function bucket(user)
  return tonumber(policy.sha256hex("image:" .. user):sub(1, 6), 16) % 100
end

return {
  resolve = function(ctx)
    local config = ctx.config
    local trial = config.canary or canary
    local percent = config.canary_percent or canary_percent
    local image = pinned[ctx.user] or config.stable or stable
    if pinned[ctx.user] == nil and trial and bucket(ctx.user) < percent then image = trial end
    if image == "default" then image = nil end
    -- What stands in `labels` is kept with the sandbox; reuse.lua compares it.
    return { image = image, labels = { image = image or "default" }, require = { image = image or "default" } }
  end,
}
