--- The body of a create call: what a sandbox is, in the engine's words. Facts in, a table out; no I/O.
local errors = require "paddock.errors"
local guest_settings = require "paddock.guest_settings"
local io = require "paddock.io"

local M = {}

M.GUEST = "/.paddock-guest"          -- in the container: the guest's program,
M.FOLDER = "/.paddock"               -- and the folder that is its own
local KEEPALIVE = "trap 'exit 0' TERM INT; while :; do sleep 86400 & wait $!; done"

---@class paddock.ContainerPlan
---@field image string
---@field labels table<string, string>
---@field options paddock.DockerOptions
---@field mounts table[]                 { source, target, read_only }
---@field env table<string, string>
---@field limits table
---@field network string                 the mode: "none", "open", or a network's name
---@field sandbox_id string
---@field guest string?                  plane guest: the program on this machine, and the folder to mount
---@field folder string?
---@field helper string?                 a network that was made for it alone
---@field volume string?                 a volume for the workspace, to be made with these labels
---@field tmpfs_workspace boolean?
---@field cap_add string[]
---@field podman boolean?
---@field image_env string[]             what the image sets
---@field port { address: string, port: integer? }?   to publish the all-in-one port on

local function bind(source, target, read_only)
  return { Type = "bind", Source = source, Target = target, ReadOnly = read_only }
end

--- Options of a tmpfs that everybody may write to. In the map and not among the mounts: only here programs in it may run. Where the
--- folder is there already, a runtime keeps that one's mode, so a user that is known owns it.
local function tmpfs(plan, size)
  local uid, gid = (plan.options.user or ""):match("^(%d+):?(%d*)$")
  local owner = uid and not plan.podman and (",uid=%s,gid=%s"):format(uid, gid ~= "" and gid or uid) or ""
  return ("rw,exec,nosuid,nodev,size=%d,mode=1777%s"):format(size, owner)
end

---@param plan paddock.ContainerPlan
---@return table[] mounts
---@return table<string, string> tmpfs
local function mounts(plan)
  local out, options, memory = {}, plan.options, {}
  if plan.guest then
    out[#out + 1] = bind(plan.guest, M.GUEST, true)
    out[#out + 1] = bind(plan.folder, M.FOLDER, false)
  end
  local taken = {}
  for _, mount in ipairs(plan.mounts) do
    taken[mount.target] = true
    out[#out + 1] = bind(mount.source, mount.target, mount.read_only)
  end
  if options.read_only_root and not taken["/tmp"] then memory["/tmp"] = tmpfs(plan, options.tmp_size) end
  if taken[options.workdir] then return out, memory end
  if plan.volume then
    out[#out + 1] = { Type = "volume", Source = plan.volume, Target = options.workdir, ReadOnly = false }
  elseif plan.tmpfs_workspace then
    memory[options.workdir] = tmpfs(plan, options.workspace_size)
  end
  return out, memory
end

---@param plan paddock.ContainerPlan
local function host_config(plan)
  local options, limits = plan.options, plan.limits
  local bound, memory = mounts(plan)
  local out = {
    Mounts = io.json.array(bound), Tmpfs = memory, RestartPolicy = { Name = "no" },
    CapDrop = io.json.array { table.unpack(options.cap_drop) },
    CapAdd = io.json.array { table.unpack(plan.cap_add) }, SecurityOpt = io.json.array { table.unpack(options.security_opt) },
    ReadonlyRootfs = options.read_only_root, ShmSize = options.shm_size, Init = options.init, Runtime = options.runtime,
    NetworkMode = plan.helper or (plan.network == "open" and "bridge") or plan.network,
    LogConfig = { Type = "json-file", Config = { ["max-size"] = "10m" } },
  }
  if limits.memory then out.Memory, out.MemorySwap = limits.memory, limits.memory end
  if limits.cpus then out.NanoCpus = math.floor(limits.cpus * 1e9 + 0.5) end
  out.PidsLimit = limits.pids
  if plan.port then
    local number = plan.port.port and tostring(plan.port.port) or ""
    out.PortBindings = {
      [options.aio_port .. "/tcp"] = io.json.array { { HostIp = plan.port.address, HostPort = number } },
    }
  end
  return out
end

--- The whole body.
---@param plan paddock.ContainerPlan
---@return table
function M.body(plan)
  local options, env = plan.options, {}
  for name, value in pairs(plan.env) do
    if type(name) ~= "string" or not name:find("^[A-Za-z_][A-Za-z0-9_]*$") or type(value) ~= "string" or value:find("\0", 1, true) then
      errors.raise("invalid_argument", ("env: %q is no variable name, or its value no text without NUL"):format(tostring(name)))
    end
    env[#env + 1] = name .. "=" .. value
  end
  table.sort(env)
  local out = {
    Image = plan.image, Labels = plan.labels, Hostname = plan.sandbox_id:sub(1, 63), Tty = false,
    OpenStdin = false, Env = io.json.array(env), User = options.user, HostConfig = host_config(plan),
  }
  -- An engine makes the working directory, and a tmpfs over it would keep its mode; the guest goes to its workspace by itself.
  if not (plan.guest and plan.tmpfs_workspace) then out.WorkingDir = options.workdir else out.WorkingDir = "/" end
  if plan.guest then
    out.Entrypoint = { M.GUEST, "--settings", M.FOLDER .. "/settings" }
    out.Cmd = io.json.array {}
  elseif options.plane == "exec" then
    out.Entrypoint = options.command or { "/bin/sh", "-c", KEEPALIVE }
    out.Cmd = io.json.array {}
  elseif options.command then
    out.Cmd = options.command
  end
  if plan.port then out.ExposedPorts = { [options.aio_port .. "/tcp"] = {} } end
  return out
end

--- The guest's settings (core/guest/guest.h).
---@param s { generation: string, secret: string, orphan_ttl: number, workspace: string, env: table<string, string>, mounts: table[] }
---@return string
function M.settings(s)
  local lines = {
    "generation=" .. s.generation, "secret=" .. s.secret, "listen=" .. M.FOLDER .. "/socket",
    ("orphan_ttl=%.3f"):format(s.orphan_ttl), "workspace=" .. s.workspace, "home=" .. s.workspace,
  }
  return guest_settings.text(lines, s.env, s.mounts)
end

return M
