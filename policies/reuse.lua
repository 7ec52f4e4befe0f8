--- May a running sandbox serve the next turn, how long may it idle, and which one goes first?
local must_agree = { "image", "network" }   -- what the request needs and the sandbox attests has to be the same

--- What the sandbox itself says, or else what a probe of the deployment has found.
local function known(ctx, key)
  local value = ctx.attestation and ctx.attestation[key]
  if value == nil and ctx.capability then value = ctx.capability[key] end
  return value
end

return {
  decide = function(ctx)
    local want, have = ctx.requirements, ctx.attestation
    if not want then return "reuse" end
    if have then
      for _, key in ipairs(must_agree) do
        if want[key] ~= nil and have[key] ~= nil and want[key] ~= have[key] then
          return "replace", key .. "_differs", "the sandbox has another " .. key
        end
      end
    end
    if want.require then
      for key, value in pairs(want.require) do
        local found = known(ctx, key)
        if found == nil and not ctx.capability then return "probe" end
        if found == nil then return "refuse", "unattested", "nothing says whether " .. key .. " holds" end
        if found ~= value then return "replace", "requirement_differs", key .. " differs" end
      end
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
