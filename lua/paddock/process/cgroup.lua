--- Limits of a sandbox: control groups where this process may make them, resource limits elsewhere.
---
--- Version 2 counts when its group can be made and has the controller: /sys/fs/cgroup/paddock for root, or the delegated
--- group that the option `cgroup` names. Version 1 needs root. What neither holds becomes a resource limit of the guest,
--- which its commands inherit: bytes of private memory for each process, and processes of the sandbox in all.
local io = require "paddock.io"
local proc = io.proc

local M = {}

local ROOT = "/sys/fs/cgroup"
local CPU_PERIOD = 100000        -- microseconds
local SWEEP_AGE = 120            -- seconds; a group is made, filled within 30, or abandoned
-- Processes where nobody set a limit, so that a fork bomb stays in its sandbox, and small enough to be ended soon. Before
-- Linux 5.14 the kernel counts all that an unprivileged user runs on the host, which may be many more.
local DEFAULT_PIDS, DEFAULT_PIDS_OLD = 512, 4096

--- What of each version is written, in order; `value` makes the text.
local FILES = {
  cgroup2 = {
    memory = { controller = "memory", { "memory.max", "%d" }, { "memory.swap.max", "0", optional = true } },
    cpus = { controller = "cpu", { "cpu.max", "%d " .. CPU_PERIOD } },
    pids = { controller = "pids", { "pids.max", "%d" } },
    events = "memory.events",
  },
  cgroup1 = {
    memory = {
      controller = "memory", { "memory.limit_in_bytes", "%d" }, { "memory.memsw.limit_in_bytes", "%d", optional = true },
    },
    cpus = { controller = "cpu", { "cpu.cfs_period_us", tostring(CPU_PERIOD) }, { "cpu.cfs_quota_us", "%d" } },
    pids = { controller = "pids", { "pids.max", "%d" } },
    events = "memory.oom_control",
  },
}

--- Finds out what there is; once per backend.
---@param option string?   a delegated version 2 group
---@return table
function M.detect(option)
  local root = proc.self().uid == 0
  if option then
    return { version = "cgroup2", base = option, enable = true }
  elseif proc.access(ROOT .. "/cgroup.controllers") then
    return { version = root and "cgroup2" or nil, base = ROOT .. "/paddock", enable = true }
  end
  return { version = root and "cgroup1" or nil, base = ROOT }
end

local function default_pids()
  local release <close> = proc.open("/proc/sys/kernel/osrelease", "r")
  local major, minor = ((release and release:pread(64, 0)) or ""):match("^(%d+)%.(%d+)")
  local counts_apart = major and tonumber(major) * 1000 + tonumber(minor) >= 5014
  return (counts_apart or proc.self().uid == 0) and DEFAULT_PIDS or DEFAULT_PIDS_OLD
end

local function exists_or_made(path)
  local made, _, code = proc.mkdir(nil, path, 493) -- 0755
  return made or code == "EEXIST"
end

--- The folder of one controller's groups, made ready; nil where it cannot be.
local function base_of(found, controller)
  if found.version == "cgroup1" then
    local base = ("%s/%s/paddock"):format(found.base, controller)
    return proc.access(("%s/%s/cgroup.procs"):format(found.base, controller), "write") and exists_or_made(base) and base or nil
  end
  local parent = found.base:match("^(.+)/[^/]+$")
  if not exists_or_made(found.base) then return nil end
  -- Groups below get a controller only if every group above hands it down; ours may be refused, then it is not there.
  proc.put(parent .. "/cgroup.subtree_control", "+" .. controller)
  proc.put(found.base .. "/cgroup.subtree_control", "+" .. controller)
  return found.base
end

local function value_of(limit, value)
  return limit == "cpus" and math.max(1000, math.floor(value * CPU_PERIOD)) or math.floor(value)
end

---@class paddock.ProcessLimits
---@field hold table<string, string>  which mechanism holds memory, cpus and pids
---@field groups string[]             the groups' paths
---@field events userdata?            a descriptor of the memory group's events
---@field rlimits table<string, integer>
---@field again table<string, function[]>  what makes a group anew
local Limits = {}
Limits.__index = Limits

--- Writes one limit's files in its group, which is made when it is not there; the group's path, or nil where they are not.
local function place(found, generation, limit, value)
  local files = found.version and FILES[found.version][limit]
  local base = files and base_of(found, files.controller)
  local group = base and ("%s/%s"):format(base, generation)
  if not group or not exists_or_made(group) then return nil, group end
  for _, file in ipairs(files) do
    if not proc.put(group .. "/" .. file[1], file[2]:format(value_of(limit, value))) and not file.optional then
      return nil, group
    end
  end
  return group, group
end

--- Sets one limit; false where the group or its files are not there.
function Limits:_place(found, generation, limit, value)
  local placed, group = place(found, generation, limit, value)
  if group and self.groups[#self.groups] ~= group then self.groups[#self.groups + 1] = group end
  if not placed then return false end
  self.again[group] = self.again[group] or {}
  table.insert(self.again[group], function() return place(found, generation, limit, value) end)
  if limit == "memory" then
    self.events = proc.open(group .. "/" .. FILES[found.version].events, "r")
  end
  return true
end

--- Prepares groups for one generation. Undo with M.remove(limits.groups).
---@param found table        from detect
---@param generation string
---@param wanted table?      { memory =, cpus =, pids = }
---@return paddock.ProcessLimits
function M.prepare(found, generation, wanted)
  local self = setmetatable({ hold = {}, groups = {}, rlimits = {}, again = {} }, Limits)
  wanted = wanted or {}
  for _, limit in ipairs { "memory", "cpus", "pids" } do
    self.hold[limit] = wanted[limit] ~= nil and self:_place(found, generation, limit, wanted[limit]) and found.version or "none"
  end
  if wanted.memory and self.hold.memory == "none" then
    self.rlimits.data, self.hold.memory = math.floor(wanted.memory), "rlimit"
  end
  if self.hold.pids == "none" then
    self.rlimits.nproc, self.hold.pids = math.floor(wanted.pids or default_pids()), "rlimit"
  end
  return self
end

--- Puts the guest into one group. An empty group may be swept away by anybody who tidies up, whatever its age says (the wall
--- clock may have been set): it is made anew then.
function Limits:_enter(group, pid)
  local done, message, code
  for try = 1, 5 do
    done, message, code = proc.put(group .. "/cgroup.procs", tostring(pid))
    if done or (code ~= "ENOENT" and code ~= "ENODEV") or try == 5 then break end
    for _, make in ipairs(self.again[group] or {}) do make() end
  end
  return not done and ("cannot put it into %s: %s"):format(group, message) or nil
end

--- Puts the guest under its limits, before it has started anything. Returns a message when that failed.
---@param pid integer
---@param has_rlimits boolean   it was started with its resource limits
---@return string?
function Limits:apply(pid, has_rlimits)
  for _, group in ipairs(self.groups) do
    local failed = self:_enter(group, pid)
    if failed then return failed end
  end
  if has_rlimits then return nil end
  local done, message = proc.prlimit(pid, self.rlimits)
  return not done and "cannot set its resource limits: " .. tostring(message) or nil
end

--- How many processes the kernel has killed for memory in these groups; nil where none of them limits memory.
---@param groups string[]
---@return integer?
function M.oom_kills(groups)
  for _, group in ipairs(groups) do
    for _, version in pairs(FILES) do
      local file <close> = proc.open(("%s/%s"):format(group, version.events), "r")
      local kills = file and (file:pread(4096, 0) or ""):match("oom_kill (%d+)")
      if kills then return math.tointeger(tonumber(kills)) end
    end
  end
  return nil
end

--- The groups that a generation may have been given by a process that could not say which any more.
---@param found table
---@param generation string
---@return string[]
function M.guess(found, generation)
  if found.version ~= "cgroup1" then
    return found.version and { ("%s/%s"):format(found.base, generation) } or {}
  end
  local groups = {}
  for _, controller in ipairs { "memory", "cpu", "pids" } do
    groups[#groups + 1] = ("%s/%s/paddock/%s"):format(found.base, controller, generation)
  end
  return groups
end

--- Removes groups that nobody is in and nobody is just making: what is left of sandboxes that ended by themselves after
--- their runtime and its records were gone. The kernel refuses to remove one that is in use.
---@param found table
function M.sweep(found)
  local seen = {}
  for _, group in ipairs(M.guess(found, "x")) do
    local base = group:match("^(.+)/x$")
    local dir <close> = not seen[base] and proc.open(base, "rd") or nil
    seen[base] = true
    for _, name in ipairs(dir and proc.names(dir) or {}) do
      local one <close> = #name == 32 and name:find("^%x+$") and proc.open(name, "pdn", 0, dir) or nil
      local stat = one and one:stat()
      if stat and os.time() - stat.changed > SWEEP_AGE then proc.rmdir(base .. "/" .. name) end
    end
  end
end

--- Removes groups. The kernel lets go of an ended process's group a moment after it is gone.
---@param groups string[]
---@return string?  what could not be removed
function M.remove(groups)
  local deadline = io.now() + 1
  for _, group in ipairs(groups) do
    repeat
      local done, message, code = proc.rmdir(group)
      if not done and code ~= "ENOENT" then
        if code ~= "EBUSY" or io.now() > deadline then return ("%s: %s"):format(group, message) end
        io.sleep(0.002)
      end
    until done or code == "ENOENT"
  end
  return nil
end

return M
