--- An engine of one's own: the file examples/engine/workdir.lua, and its options. Start it in this tree's top folder.
return {
  backend = "examples/engine/workdir.lua",
  backend_options = { root = "/var/tmp/paddock-workdirs" }, -- must exist
  idle_timeout = 3600,  -- seconds; a sandbox is only a folder here
  replicas = 100,
}
