--- Pods that a provisioner service makes, for agents of several machines.
---
---     export PROVISIONER_API_KEY=...
---     paddock doctor --config examples/config/provisioner.lua
---     paddock exec --config examples/config/provisioner.lua --user alice --thread t1 -- echo hello
return {
  backend = "provisioner",
  backend_options = {
    url = "http://provisioner:8002",      -- may have a path; https with ca_file = "/etc/ssl/private-ca.pem" where that is your own
    api_key = "$PROVISIONER_API_KEY",     -- from the environment; leave it out where the provisioner wants none
  },

  -- Whose turn it is to stop a Pod is settled in a store that all machines reach; nothing inside a Pod refuses a late stop.
  -- ownership = { type = "redis", url = "redis://redis:6379", ttl = 180, renew_interval = 60 },

  idle_timeout = 600,     -- seconds after which a warm sandbox is deleted
  replicas = 20,          -- sandboxes that are kept; above it, warm ones make room for new ones
  ready_timeout = 120,    -- seconds until a Pod must answer: an image may have to be pulled
}
