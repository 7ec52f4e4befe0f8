--- May a sandbox reach this host and port? Not unless an operator says so.
return {
  decide = function(_ctx)
    return "deny"
  end,
}
