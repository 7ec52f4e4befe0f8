--- An engine as an operator could write one: a sandbox is a folder, and each command is one bubblewrap around it.
---
---     return { backend = "examples/engine/workdir.lua", backend_options = { root = "/srv/workdirs" } }
---
--- There is no daemon and no guest: nothing runs between two commands, so a sandbox costs a folder and nothing else, and
--- "stopping" it means removing the folder. The price: no shell that remembers, no background processes, no tokens enforced
--- inside (`fenced` is false), and a start of bubblewrap for each command. The folder's name carries the generation, so
--- that a new sandbox of the same id is never taken for the old one.
local errors = require "paddock.errors"
local io = require "paddock.io"

local Engine = {
  name = "workdir",
  capabilities = { mounts = true, limits = false, fenced = false, pause = false, snapshot = false },
}
Engine.__index = Engine

local MAX_OUTPUT = 1 << 20 -- bytes kept of each stream

local function exists(path)
  local fd <close> = io.proc.open(path, "rdn")
  return fd ~= nil
end

local function folder(self, info)
  return self.root .. "/" .. info.name
end

local function info_of(name)
  local id, generation = name:match("^([a-z0-9-]+)%.(%x+)$")
  if id == nil then return nil end
  return { sandbox_id = id, generation = generation, name = name, attestation = {} }
end

-- ---- running something in a folder ---------------------------------------------------------------------------

local SYSTEM = { -- what programs need of the host, read-only
  "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin", "--symlink", "usr/lib", "/lib",
  "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
}

--- Runs argv in the sandbox's folder; all it starts ends with it, since the pid namespace does. (--die-with-parent looks
--- at the thread that started bubblewrap: here it waits for the end, so it cannot go first unless the process does.)
local function run(self, info, argv, opts)
  local cmd = { "/usr/bin/bwrap", "--unshare-all", "--clearenv", "--new-session", "--die-with-parent" }
  table.move(SYSTEM, 1, #SYSTEM, #cmd + 1, cmd)
  for _, mount in ipairs(self.mounts[info.generation] or {}) do
    table.move({ mount.read_only and "--ro-bind" or "--bind", mount.source, mount.target }, 1, 3, #cmd + 1, cmd)
  end
  local env = { PATH = "/usr/bin:/bin", HOME = "/workspace" }
  for name, value in pairs(opts.env or {}) do env[name] = value end
  for name, value in pairs(env) do table.move({ "--setenv", name, value }, 1, 3, #cmd + 1, cmd) end
  table.move({ "--bind", folder(self, info), "/workspace", "--chdir", opts.cwd or "/workspace", "--" }, 1, 6, #cmd + 1, cmd)
  table.move(argv, 1, #argv, #cmd + 1, cmd)
  return io.proc.run { argv = cmd, stdin = opts.stdin, max = MAX_OUTPUT, timeout = opts.timeout }
end

-- ---- the engine ----------------------------------------------------------------------------------------------

function Engine:create(spec)
  local generation = ("%x%08x"):format(os.time(), math.random(0, 0xffffffff))
  local name = spec.sandbox_id .. "." .. generation
  local ok, why = io.proc.mkdir(self.dir, name, tonumber("700", 8))
  if not ok then errors.raise("backend_error", "cannot make the sandbox's folder: " .. tostring(why)) end
  self.mounts[generation] = spec.mounts
  local info = info_of(name)
  info.created_at = os.time()
  return info
end

function Engine:destroy(info)
  -- Out of the names that `list` knows first, so that a removal which stops halfway leaves no half sandbox.
  io.proc.rename(self.dir, info.name, "gone-" .. info.name)
end

function Engine:inspect(sandbox_id, info)
  if info then return exists(folder(self, info)) and info_of(info.name) or nil end
  return self:discover(sandbox_id)
end

function Engine:discover(sandbox_id)
  for _, info in ipairs(self:list()) do
    if info.sandbox_id == sandbox_id then return info end
  end
  return nil
end

function Engine:alive(info)
  return exists(folder(self, info))
end

function Engine:ready(info)
  return exists(folder(self, info))
end

function Engine:list()
  local infos = {}
  for _, name in ipairs(io.proc.names(self.dir) or {}) do infos[#infos + 1] = info_of(name) end
  return infos
end

function Engine:finish(_, info)
  self.mounts[info.generation] = nil
  io.proc.run { argv = { "/bin/rm", "-rf", self.root .. "/gone-" .. info.name }, max = 4096, timeout = 60 }
end

-- ---- its client ----------------------------------------------------------------------------------------------

local Client = {}
Client.__index = Client

function Engine:connect(info, opts)
  return setmetatable({ engine = self, info = info, command_timeout = opts and opts.command_timeout or 600 }, Client)
end

function Client:exec(req)
  local limit = req.timeout or self.command_timeout
  local started = io.now()
  local ok, r = pcall(run, self.engine, self.info, { "/bin/sh", "-c", req.command },
    { env = req.env, cwd = req.cwd, stdin = req.stdin, timeout = limit })
  local result = { stdout = "", stderr = "", truncated = false, session_reset = false, duration = io.now() - started }
  if not ok then
    if errors.is(r, "timeout") then
      result.outcome, result.exit_code = "hard_timeout", 124
      return result
    end
    error(r, 0)
  end
  result.stdout, result.stderr, result.truncated = r.out, r.err, r.truncated
  result.outcome, result.exit_code = "completed", r.status or 128 + r.signal
  if result.exit_code > 128 and result.exit_code <= 192 then -- how bubblewrap reports a signal
    result.outcome, result.signal = "signalled", result.exit_code - 128
  end
  return result
end

--- Files are read and written inside, where a link that the agent made can lead nowhere else.
function Client:_file(script, path, stdin)
  local r = run(self.engine, self.info, { "/bin/sh", "-c", script, "sh", path }, { stdin = stdin, timeout = 60 })
  if r.status ~= 0 then errors.raise("io_error", path .. ": " .. r.err:gsub("^sh: %d+: ", ""):gsub("\n.*", "")) end
  if r.truncated then errors.raise("io_error", path .. " is larger than this engine reads") end
  return r.out
end

function Client:read(path)
  return self:_file('exec cat -- "$1"', path)
end

function Client:write(path, bytes)
  self:_file('cat > "$1.part" && mv -- "$1.part" "$1"', path, bytes)
  return true
end

function Client:list(path)
  local entries = {}
  local out = self:_file([[cd -- "$1" && find . -mindepth 1 -maxdepth 1 -printf '%f\0%y\0%s\0%T@\0']], path)
  for name, kind, size, time in out:gmatch("(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)%z") do
    entries[#entries + 1] = {
      name = name, path = (path == "/" and "" or path) .. "/" .. name, is_directory = kind == "d",
      size = math.tointeger(tonumber(size)), modified_time = tonumber(time),
    }
  end
  table.sort(entries, function(a, b) return a.name < b.name end)
  return entries
end

--- The core asks for a session where commands must not meet in one shell. Here no two ever do: each is a process of its
--- own, so a session is only a name, and what a shell would remember (cd, variables) is forgotten after each command.
function Client:open_session(_, id)
  return id
end

function Client:close_session()
  return true
end

function Client:close() end

return {
  --- Called once, when the runtime opens; what it raises is what `open` raises.
  ---@param options table   the option `backend_options`
  new = function(options)
    local root = options.root
    local dir = type(root) == "string" and root:sub(1, 1) == "/" and io.proc.open(root, "rd")
    if not dir then
      errors.raise("invalid_argument", "option `backend_options.root` must be an absolute folder that exists, the sandboxes' "
        .. "home, not " .. tostring(root))
    end
    -- `mounts` by generation: a sandbox that another process made has none here.
    return setmetatable({ name = Engine.name, capabilities = Engine.capabilities, root = root, dir = dir, mounts = {} }, Engine)
  end,
}
