--- What an engine's answers say of a sandbox: a container's inspection or list item in, a backend's `info` out.
local labels = require "paddock.docker.labels"

local M = {}

--- Seconds since 1970 of an engine's time: RFC 3339, with 0 to 9 digits of a fraction, in UTC or with an offset; nil for "never"
--- and for what is no time.
---@param text any
---@return number?
function M.time(text)
  if type(text) == "number" then return text end
  if type(text) ~= "string" then return nil end
  local year, month, day, hour, minute, second, rest = text:match("^(%d%d%d%d)-(%d%d)-(%d%d)[Tt ](%d%d):(%d%d):(%d%d)(.*)$")
  if not year then return nil end
  local fraction, zone = rest:match("^(%.%d+)(.*)$")
  zone = zone or rest
  local offset = 0
  if zone ~= "" and zone:upper() ~= "Z" then
    local sign, hours, minutes = zone:match("^([+-])(%d%d):?(%d%d)$")
    if not sign then return nil end
    offset = (hours * 3600 + minutes * 60) * (sign == "-" and -1 or 1)
  end
  year, month, day = math.tointeger(tonumber(year)), math.tointeger(tonumber(month)), math.tointeger(tonumber(day))
  if year < 1970 or month < 1 or month > 12 or day < 1 or day > 31 then return nil end
  local y, m = month <= 2 and year - 1 or year, (month + 9) % 12 -- days of the civil calendar, March first
  local era, of_era = y // 400, y % 400
  local days = era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + (153 * m + 2) // 5 + day - 1 - 719468
  return days * 86400 + hour * 3600 + minute * 60 + second + (tonumber("0" .. (fraction or ".0")) or 0) - offset
end

--- Whether that is a whole id. A shorter one would be some container's all the same: an engine completes it.
---@param id any
---@return boolean
function M.is_id(id)
  return type(id) == "string" and #id == 64 and id:find("^%x+$") ~= nil
end

local function text(value)
  return type(value) == "string" and value ~= "" and value or nil
end

---@class paddock.ContainerState
---@field id string          all 64 digits
---@field name string
---@field status string      created, running, paused, restarting, removing, exited, dead
---@field running boolean    running or paused: its processes are there
---@field paused boolean
---@field pid integer?
---@field exit_code integer?
---@field oom boolean
---@field error string?
---@field created_at number
---@field labels table<string, string>
---@field port integer?      where the all-in-one port is published
---@field address string?    the container's own
---@field env string[]
---@field image string?

local function published(ports, inner)
  local bound = type(ports) == "table" and ports[inner .. "/tcp"]
  for _, one in ipairs(type(bound) == "table" and bound or {}) do
    local port = type(one) == "table" and math.tointeger(tonumber(one.HostPort))
    if port and port > 0 then return port end
  end
  return nil
end

local function address_of(settings, prefer)
  local networks = type(settings) == "table" and settings.Networks
  local found
  for name, one in pairs(type(networks) == "table" and networks or {}) do
    local address = type(one) == "table" and (text(one.IPAddress) or text(one.GlobalIPv6Address))
    if address and (name == prefer or not found) then found = address end
  end
  return found or (type(settings) == "table" and text(settings.IPAddress)) or nil
end

--- A container as `GET /containers/ID/json` shows it; nil when the answer is no such thing.
---@param data any
---@param inner integer   the all-in-one port
---@return paddock.ContainerState?
function M.inspected(data, inner)
  if type(data) ~= "table" or type(data.State) ~= "table" or not M.is_id(data.Id) then return nil end
  local state, config = data.State, type(data.Config) == "table" and data.Config or {}
  local settings = type(data.NetworkSettings) == "table" and data.NetworkSettings or {}
  local status = text(state.Status) or (state.Running == true and "running" or "exited")
  local pid = type(state.Pid) == "number" and math.tointeger(state.Pid) or nil
  local env = {}
  for _, one in ipairs(type(config.Env) == "table" and config.Env or {}) do env[#env + 1] = one end
  return {
    id = data.Id, name = (text(data.Name) or ""):gsub("^/", ""), status = status, paused = state.Paused == true or status == "paused",
    running = state.Running == true or status == "running" or status == "paused",
    pid = pid and pid > 0 and pid or nil, exit_code = type(state.ExitCode) == "number" and math.tointeger(state.ExitCode) or nil,
    oom = state.OOMKilled == true, error = text(state.Error), created_at = M.time(data.Created) or 0,
    finished_at = M.time(state.FinishedAt), labels = type(config.Labels) == "table" and config.Labels or {},
    port = published(settings.Ports, inner), address = address_of(settings), env = env, image = text(config.Image),
  }
end

--- A container as an item of `GET /containers/json`; nil when it is no such thing.
---@param item any
---@param inner integer
---@return paddock.ContainerState?
function M.listed(item, inner)
  if type(item) ~= "table" or not M.is_id(item.Id) then return nil end
  local port
  for _, one in ipairs(type(item.Ports) == "table" and item.Ports or {}) do
    if type(one) == "table" and one.PrivatePort == inner and type(one.PublicPort) == "number" and one.PublicPort > 0 then
      port = port or math.tointeger(one.PublicPort)
    end
  end
  local names = type(item.Names) == "table" and item.Names or {}
  local status = (text(item.State) or "unknown"):lower()
  return {
    id = item.Id, name = (text(names[1]) or ""):gsub("^/", ""), status = status, paused = status == "paused",
    running = status == "running" or status == "paused", oom = false, created_at = M.time(item.Created) or 0,
    labels = type(item.Labels) == "table" and item.Labels or {}, port = port, image = text(item.Image),
    address = address_of(item.NetworkSettings), env = {},
  }
end

--- The capacity that an environment records.
---@param env string[]   NAME=value
---@return integer?
function M.capacity(env)
  for _, one in ipairs(env) do
    local value = one:match("^MAX_SHELL_SESSIONS=(%d+)$")
    if value then return math.tointeger(tonumber(value)) end
  end
  return nil
end

--- The `info` of a sandbox whose labels are ours. `url` is filled in by who knows how it is reached.
---@param state paddock.ContainerState
---@param prefix string    of labels
---@return table
function M.info(state, prefix)
  local facts = labels.read(prefix, state.labels)
  local attestation = labels.attest(prefix, state.labels, state.port)
  attestation.max_shell_sessions = attestation.max_shell_sessions or M.capacity(state.env)
  attestation.capacity = attestation.max_shell_sessions
  return {
    sandbox_id = facts.sandbox_id, url = "", generation = state.id, name = state.name, created_at = state.created_at,
    identity = facts.identity, labels = facts.labels, attestation = attestation, instance = facts.instance, plane = facts.plane,
    networks = facts.networks, volume = facts.volume, port = state.port, status = state.status,
    -- What does not run serves nobody: it is only to be taken away.
    doomed = not state.running or nil,
  }
end

return M
