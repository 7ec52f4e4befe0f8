--- Containers of a Podman that runs without root, for whoever runs this.
---
---     systemctl --user enable --now podman.socket                 or: podman system service --time=0 &
---     paddock doctor --config examples/config/podman.lua
---     paddock exec --config examples/config/podman.lua -- id
---
--- The socket is found: $XDG_RUNTIME_DIR/podman/podman.sock. Root inside is this user outside, so files in data_dir stay this user's.
return {
  backend = "docker",              -- Podman's service speaks Docker's API
  image = "docker.io/library/debian:12-slim", -- with its registry: Podman does not guess it everywhere
  backend_options = {
    -- host = "unix:///run/user/1000/podman/podman.sock", -- for another one than the usual
    shm_size = 256 << 20,
  },
  -- Kept where the user's control groups are delegated (cgroup v2): `paddock doctor` says so if they are not.
  limits = { memory = 512 << 20, pids = 128 },
  network = "none",
  idle_timeout = 300,
}
