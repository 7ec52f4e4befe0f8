--- An engine of one's own: the file examples/engine/workdir.lua, and its options.
---
---     mkdir -p /var/tmp/paddock-workdirs
---     paddock exec --config examples/config/workdir.lua --user alice --thread t1 -- echo hello
return {
  backend = "../engine/workdir.lua", -- counts from this file's folder
  backend_options = { root = "/var/tmp/paddock-workdirs" },
  idle_timeout = 3600,  -- seconds; a sandbox is only a folder here
  replicas = 100,
}
