--- May a running sandbox serve the next turn, how long may it idle, and which one goes first?
return {
  pure = true,   -- what these answer depends on ctx alone: an answer is kept for as long as ctx is the same
  -- "reuse", "replace", "refuse", "defer" or "probe"; then a code and a message for people.
  decide = function(ctx)
    -- nil, or what the request needs and the sandbox is not known to have: { image = "differs", gpu = "unattested" }
    local differs = ctx.differs
    if not differs then return "reuse" end
    for key, how in pairs(differs) do
      if how == "differs" then return "replace", key:sub(1, 30) .. "_differs", "the sandbox has another " .. key end
    end
    if not ctx.capability then return "probe" end   -- ask the engine; the answer comes as ctx.capability
    return "refuse", "unattested", "nothing says whether the sandbox has " .. next(differs)
  end,

  -- Seconds; 0 = never.
  idle_timeout = function(ctx)
    return ctx.config.idle_timeout
  end,

  -- Candidates, oldest first; nil = evict none.
  evict = function(candidates)
    return candidates[1].sandbox_id
  end,
}
