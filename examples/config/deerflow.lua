--- Beside a deer-flow deployment: its ids, its folders, its keys. policies/README.md says what they mean here.
---
---     paddock policy check   --config examples/config/deerflow.lua
---     paddock policy explain --config examples/config/deerflow.lua --user alice --thread t1 --need lark_cli=true
---
--- Where a sandbox would not be used again, and why:
---
---     paddock policy explain --config examples/config/deerflow.lua --user alice --thread t1 --source warm --attest capacity=4
return {
  sandbox = {
    provisioner_url = "http://provisioner:8002", -- without it: containers of this machine
    -- provisioner_api_key = "$PROVISIONER_API_KEY",
    bash_command_timeout = 600, -- seconds for a command that names no limit
    idle_timeout = 600,
    replicas = 3,
  },
  subagent_runtime = { max_running = 12 }, -- then a sandbox needs room for 13 shell sessions
  skills = { container_path = "/mnt/skills" },

  policy_options = {
    base_dir = "/srv/deer-flow",             -- default: $DEER_FLOW_HOME
    -- host_base_dir = "/mnt/nodes/deer-flow", -- where the engine sees it; default: $DEER_FLOW_HOST_BASE_DIR
    lark_cli = { "alice" },                  -- users with the integration, or true; a request's lark_cli says it for one turn
    legacy_skills = false,
  },
}
