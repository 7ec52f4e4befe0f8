--- For examples/frames.c and examples/frames.lua: an engine that takes its time, and hangs now and then.
return {
  backend = "../engine/slow.lua",
  backend_options = { create = 0.3, exec = 0.05, hang_every = 40, hang = 3 },
  ownership = { type = "memory" }, -- nothing outlives this process
  replicas = 2000,
  idle_timeout = 0,
  user = "player",
  log = "off",
}
