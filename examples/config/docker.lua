--- Containers of Docker on this machine.
---
---     paddock doctor --config examples/config/docker.lua          which engine answers, and what it lacks
---     paddock exec --config examples/config/docker.lua -- python3 -c 'print(6 * 7)'
return {
  backend = "docker",
  image = "python:3.12-slim",      -- pulled at its first use; any image will do: paddock brings its own entry point
  backend_options = {
    -- host = "unix:///var/run/docker.sock", -- default: DOCKER_HOST, then the usual sockets
    -- host = "tcp://engine.example:2376", tls_ca = "/etc/paddock/ca.pem",      -- another machine's, by TLS; or DOCKER_CERT_PATH
    -- tls_cert = "/etc/paddock/cert.pem", tls_key = "/etc/paddock/key.pem",
    -- user = "1000:1000",         -- in place of the image's own; its workspace is a tmpfs then
    -- read_only_root = true,      -- with a /tmp and a workspace of their own
  },
  limits = { memory = 1 << 30, cpus = 2, pids = 256 },
  network = "none",                -- "open": the engine's default bridge; or the name of one of its networks
  idle_timeout = 600,
  replicas = 8,
  max_sandboxes = 32,
}
