--- May a running sandbox serve the next turn, how long may it idle, and which one goes first?
local must_agree = { "image", "network" }   -- what the request needs and the sandbox attests has to be the same

--- What the sandbox itself says, or else what a probe of the deployment has found.
local function known(ctx, key)
  local value = ctx.attestation and ctx.attestation[key]
  if value == nil and ctx.capability then value = ctx.capability[key] end
  return value
end

return {
  -- "reuse", "replace", "refuse", "defer" or "probe"; then a code and a message for people.
  decide = function(ctx)
    local want, have = ctx.requirements, ctx.attestation
    if not want then return "reuse" end
    if have then
      for i = 1, #must_agree do
        local key = must_agree[i]
        local needed = want[key]
        if needed ~= nil and have[key] ~= nil and needed ~= have[key] then
          return "replace", key .. "_differs", "the sandbox has another " .. key
        end
      end
    end
    local require = want.require
    if not require or next(require) == nil then return "reuse" end
    for key, value in pairs(require) do
      local found = known(ctx, key)
      if found == nil and not ctx.capability then return "probe" end
      if found == nil then return "refuse", "unattested", "nothing says whether " .. key .. " holds" end
      if found ~= value then return "replace", "requirement_differs", key .. " differs" end
    end
    return "reuse"
  end,

  -- Seconds; 0 = never.
  idle_timeout = function(ctx)
    return ctx.config.idle_timeout
  end,

  -- Oldest first; nil = evict none.
  evict = function(candidates)
    return candidates[1].sandbox_id
  end,
}
