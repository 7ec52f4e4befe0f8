--- What a look at the configured engine says: which one it is, and what it lacks.
local engines = require "paddock.docker.engine"
local images = require "paddock.docker.images"
local option_rules = require "paddock.docker.options"

local M = {}

---@class paddock.EngineReport
---@field address string
---@field over string?        "TLS" or "plain TCP", when it is no socket of this machine
---@field rootless boolean    it runs without root
---@field product string      "Docker 20.10.24", "Podman 4.3.1"
---@field api string          the version that is spoken
---@field lacks string[]      what a sandbox would want and the engine has not
---@field image string?       what is known of the configured image

--- Whether root in a container is nobody's root outside.
---@param facts table         of GET /info
---@return boolean
function M.is_rootless(facts)
  if facts.Rootless == true then return true end                       -- Podman's word; Docker has an option of that name
  for _, one in ipairs(type(facts.SecurityOptions) == "table" and facts.SecurityOptions or {}) do
    if type(one) == "string" and one:find("rootless", 1, true) then return true end
  end
  return false
end

--- What the facts of an engine lack for these options.
---@param facts table         of GET /info
---@param own paddock.DockerOptions
---@return string[]
function M.lacks(facts, own)
  local out = {}
  local function want(key, text)
    if facts[key] == false then out[#out + 1] = text end
  end
  if M.is_rootless(facts) and tostring(facts.CgroupVersion) == "1" then -- Podman says yes to each all the same, and ignores them
    out[#out + 1] = "limits are not kept (a rootless engine has no control groups of version 1: start this machine with version 2)"
  else
    want("MemoryLimit", "limits.memory is not kept (no memory control group)")
    want("PidsLimit", "limits.pids is not kept (no pids control group)")
    want("CpuCfsQuota", "limits.cpus is not kept (no cpu control group)")
  end
  if type(facts.OSType) == "string" and facts.OSType ~= "linux" then out[#out + 1] = "its containers are not Linux" end
  local seccomp = false
  for _, one in ipairs(type(facts.SecurityOptions) == "table" and facts.SecurityOptions or {}) do
    seccomp = seccomp or (type(one) == "string" and one:find("seccomp", 1, true) ~= nil)
  end
  if type(facts.SecurityOptions) == "table" and not seccomp then out[#out + 1] = "system calls are not filtered (no seccomp)" end
  local runtimes = type(facts.Runtimes) == "table" and facts.Runtimes or nil
  if own.runtime and runtimes and not runtimes[own.runtime] then
    out[#out + 1] = ("it has no runtime %q (backend_options.runtime)"):format(own.runtime)
  end
  return out
end

--- Asks the engine. Raises what paddock.open would.
---@param options table    backend_options
---@param image string?
---@return paddock.EngineReport
function M.examine(options, image)
  local own = option_rules.read(options)
  local engine = engines.find(engines.options(own))
  local version = engine:call({ method = "GET", path = "/version" }, "ask the engine for its version")
  local data = version and type(version.data) == "table" and version.data or {}
  local report = {
    address = engine.address, api = engine.version, lacks = M.lacks(engine.facts, own),
    over = engine.host and (engine.tls and "TLS" or "plain TCP") or nil, rootless = M.is_rootless(engine.facts),
    product = (engine.podman and "Podman " or "Docker ") .. tostring(data.Version or "?"),
  }
  if report.over == "plain TCP" then
    report.lacks[#report.lacks + 1] = "whoever reaches its plain TCP port commands it, every user of its machine too: use a socket or TLS"
  end
  if own.plane == "guest" and not engine.unix then -- named so: where it is chosen, such an engine gets another
    report.lacks[#report.lacks + 1] = "it is on another machine, where the guest cannot be mounted: set backend_options.plane"
  end
  if not image then
    report.lacks[#report.lacks + 1] = "no image is configured: set the option `image`, unless a policy answers one"
  else
    local fine, found = pcall(function() return images.new(engine, own):look(image) end)
    report.image = fine and found and "there" or (own.pull == "never" and "missing" or "pulled at its first use")
    if report.image == "missing" then report.lacks[#report.lacks + 1] = "it has no image " .. image .. ", and pull is \"never\"" end
  end
  return report
end

return M
