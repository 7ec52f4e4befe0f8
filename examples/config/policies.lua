--- The policies of examples/policies over process sandboxes. Start it in this tree's top folder.
return {
  backend = "process",
  policies = "examples/policies",
  policy_options = {
    skills_root = "/srv/skills", -- with public/ and users/NAME/; folders that are missing are left out
    canary_percent = 25,         -- of the users, once `canary` names an image
  },
  mount_roots = { "/srv/skills" },
}
