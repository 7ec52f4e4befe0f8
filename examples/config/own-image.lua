--- An image of your own, and policies that pick one by what a turn requires (examples/images/policies).
---
---     docker build -t localhost/agent-tools:1 .                   on any base: a shell is all that a command needs
---     paddock exec --config examples/config/own-image.lua -- my-tool
---     paddock policy explain --config examples/config/own-image.lua --user alice --thread t1 --need tools=python
---
--- An image that brings an all-in-one server (agent-infra/sandbox and its like) is spoken to over its own API instead:
--- backend_options = { plane = "aio", aio_key = "..." }, network = "open".
return {
  backend = "docker",
  image = "localhost/agent-tools:1",
  policies = "../images/policies", -- beside this file's folder
  policy_options = {
    images = { -- what a turn may require, and the image that has it
      python = "python:3.12-slim",
      node = "node:22-slim",
    },
  },
  backend_options = {
    pull = "missing",
    -- registry_auth = { ["registry.example.org"] = { username = "reader", password = "..." } },
  },
  limits = { memory = 1 << 30, pids = 256 },
}
