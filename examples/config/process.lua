--- Bubblewrap sandboxes on this machine, for a small team: no daemon, nothing to set up.
---
---     paddock exec --config examples/config/process.lua --user alice --thread t1 -- echo hello
return {
  backend = "process",

  -- Where a sandbox's /workspace is kept, so that it survives the sandbox; without it, it lives and dies with it.
  -- mkdir -p /srv/paddock first: the folder itself is made, the one above it is not.
  -- data_dir = "/srv/paddock/workspaces",

  limits = { memory = 1 << 30, cpus = 2, pids = 256 }, -- per sandbox: bytes, processors, processes
  network = "none",
  environment = { LANG = "C.UTF-8" },

  idle_timeout = 600,     -- seconds after which a warm sandbox is torn down; policies/reuse.lua has the last word
  replicas = 8,           -- sandboxes that are kept; above it, warm ones make room for new ones
  max_sandboxes = 32,     -- and never more than these
  command_timeout = 300,  -- seconds for a command that names no limit
}
