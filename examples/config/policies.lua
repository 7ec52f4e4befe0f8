--- The policies of examples/policies over process sandboxes.
---
---     paddock exec --config examples/config/policies.lua --user alice --thread t1 -- ls -R /mnt
---
--- Skills are read-only folders of the host. Make some, as root, to see them in the sandbox:
---
---     mkdir -p /srv/skills/public /srv/skills/users/alice && echo hello > /srv/skills/public/greeting.md
return {
  backend = "process",
  policies = "../policies", -- beside this file's folder: what a configuration names is looked for from where it stands
  policy_options = {
    skills_root = "/srv/skills", -- with public/ and users/NAME/; folders that are missing are left out
    canary_percent = 25,         -- of the users, once `canary` names an image
  },
  mount_roots = { "/srv/skills" },
  signals = true, -- so that `paddock policy reload` and SIGHUP reload the policies of a host that has this configuration
}
