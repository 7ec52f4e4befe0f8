--- Which sandbox belongs to an identity? The same pair of user and thread gives the same id in every process.
return {
  -- Lengths come first: ("a:b", "c") and ("a", "b:c") must not meet. 32 hexadecimal characters are 128 bits.
  derive = function(ctx)
    local key = #ctx.user .. ":" .. ctx.user .. #ctx.thread .. ":" .. ctx.thread
    return policy.sha256hex(key):sub(1, 32)
  end,
}
