--- Which folders of the host does a sandbox see? None, until an operator lists them here.
return {
  -- For example: { source = "/srv/skills", target = "/skills", read_only = true }. Sources must lie below one of the
  -- runtime's mount_roots.
  compose = function(_ctx)
    return {}
  end,
}
