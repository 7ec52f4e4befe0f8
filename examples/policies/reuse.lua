--- When may a running sandbox serve the next turn, and how long is an idle one kept?

local quiet_from, quiet_until = 20, 7      -- hours, local time: few come back in the night
local quiet_idle_timeout = 120             -- seconds, within the quiet hours
local weekend_idle_timeout = 300           -- seconds, on Saturdays and Sundays
-- At other times: the option `idle_timeout`.

local function quiet(hour)
  if quiet_from <= quiet_until then return hour >= quiet_from and hour < quiet_until end
  return hour >= quiet_from or hour < quiet_until
end

return {
  decide = function(ctx)
    local want = ctx.requirements.require and ctx.requirements.require.image
    local have = ctx.attestation.image
    -- A backend that does not report images leaves nothing to compare.
    if want ~= nil and have ~= nil and want ~= have then
      if ctx.holders > 0 then return "defer", "image_changed", "the user's image is " .. want .. " now" end
      return "replace", "image_changed", "the user's image is " .. want .. " now"
    end
    return "reuse"
  end,

  idle_timeout = function(ctx)
    local normal = ctx.config.idle_timeout
    if normal == 0 then return 0 end       -- never, and that includes the nights
    if quiet(ctx.now.hour) then return math.min(normal, quiet_idle_timeout) end
    if ctx.now.weekday == 6 or ctx.now.weekday == 7 then return math.min(normal, weekend_idle_timeout) end
    return normal
  end,

  -- Room is made at the expense of whoever has been away longest.
  evict = function(candidates) return candidates[1].sandbox_id end,
}
