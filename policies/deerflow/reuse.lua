--- May a running sandbox serve the next turn? As deer-flow decides it: capacity and broker mode by what the sandbox itself attests.
local image_capacity = 10        -- shell sessions that the all-in-one image has room for, where nothing is attested

--- Of an active integration on a provisioner: does the sandbox hold its credentials in the way that the deployment wants?
--- nil = yes; else a decision, a code, a message.
local function broker(ctx)
  local attested, capability = ctx.attestation.broker, ctx.capability
  if attested == nil then   -- no evidence at all is no permission; what the deployment could do says nothing about this sandbox
    return "refuse", "broker_mode", "the sandbox does not attest whether it has a broker"
  end
  if not capability then return "probe" end
  if capability.unknown then
    if ctx.source ~= "created" then return nil end   -- an outage: its own attestation decides
    return "refuse", "capability", "the deployment does not say whether it wants a broker"
  end
  local wanted = capability.lark_cli_broker_image == true
  if attested == wanted then return nil end
  if not ctx.capability_fresh then return "probe" end   -- the remembered answer may be older than the sandbox
  return "replace", "broker_mode", wanted and "the deployment wants a broker, and the sandbox has none"
    or "the sandbox has a broker, and the deployment wants none"
end

return {
  pure = true,   -- what these answer depends on ctx alone: an answer is kept for as long as ctx is the same
  decide = function(ctx)
    local needs, options = ctx.requirements, ctx.requirements.options or {}
    local wanted = needs.require and needs.require.capacity
    local least = type(wanted) == "table" and wanted.at_least or nil
    local has = ctx.attestation.capacity or image_capacity
    if least and has < least then
      return "replace", "insufficient_capacity", ("room for %d shell sessions, and %d are needed"):format(has, least)
    end
    if options.provision_lark_cli_runtime and ctx.config.remote then
      local decision, code, message = broker(ctx)
      if decision then return decision, code, message end
    end
    -- What an operator or a request requires besides: image, network, and the names in `require`.
    for key, how in pairs(ctx.differs or {}) do
      local judged = key == "capacity" and least
      if how == "differs" and not judged then return "replace", key:sub(1, 30) .. "_differs", "the sandbox has another " .. key end
    end
    for key in pairs(ctx.differs or {}) do
      if key ~= "capacity" or not least then
        if not ctx.capability then return "probe" end
        return "refuse", "unattested", "nothing says whether the sandbox has " .. key
      end
    end
    return "reuse"
  end,
}
