--- What a container says of itself: labels, written once when it is made, and what is attested from them.
---
--- Why labels and not what the engine shows: engines rewrite environment, mounts and capabilities in their own words, so that
--- what was sent cannot be compared with what comes back; labels come back exactly.
local M = {}

local SCHEMA = "1"

local function encode(bytes)
  return (bytes:gsub("[^%w%-._~ @+:/]", function(c) return ("%%%02X"):format(c:byte()) end))
end

local function decode(text)
  return (text:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end))
end

---@class paddock.ContainerFacts
---@field sandbox_id string
---@field instance string      a random name of this one container, for what it leaves on this machine
---@field deployment string    whose it is: runtimes with the same one share their sandboxes
---@field plane string
---@field network string       the mode that was asked for
---@field image string
---@field networks string[]    that were made for it
---@field volume string?       that was made for it
---@field identity { user: string, thread: string }?
---@field limits table?
---@field env table<string, string>?
---@field labels table<string, string>?   the operator's own

--- All labels of a container.
---@param prefix string
---@param facts paddock.ContainerFacts
---@return table<string, string>
function M.of(prefix, facts)
  local out = {}
  for name, value in pairs(facts.labels or {}) do out[name] = value end
  local own = {
    schema = SCHEMA, role = "sandbox", sandbox_id = facts.sandbox_id, instance = facts.instance, deployment = facts.deployment,
    plane = facts.plane, network_mode = facts.network, image = facts.image, networks = table.concat(facts.networks or {}, ","),
    volume = facts.volume, max_shell_sessions = facts.env and facts.env.MAX_SHELL_SESSIONS,
    user = facts.identity and encode(facts.identity.user), thread = facts.identity and encode(facts.identity.thread),
  }
  for name, value in pairs(facts.limits or {}) do own["limit." .. name] = ("%.14g"):format(value) end
  for name, value in pairs(own) do out[prefix .. name] = value end
  return out
end

local NEEDED = { "sandbox_id", "instance", "deployment", "plane" }

--- Whose a container is: "ours", "foreign" (another deployment's, or labels of ours without all that belongs to them), or "none"
--- (no label of ours at all).
---@param prefix string
---@param labels table?
---@param deployment string
---@return "ours"|"foreign"|"none"
function M.whose(prefix, labels, deployment)
  local any = false
  for name in pairs(type(labels) == "table" and labels or {}) do
    any = any or (type(name) == "string" and name:sub(1, #prefix) == prefix)
  end
  if not any then return "none" end
  if labels[prefix .. "role"] ~= "sandbox" then return "foreign" end
  for _, name in ipairs(NEEDED) do
    if type(labels[prefix .. name]) ~= "string" then return "foreign" end
  end
  if not labels[prefix .. "instance"]:find("^%x+$") then return "foreign" end
  return labels[prefix .. "deployment"] == deployment and "ours" or "foreign"
end

--- The facts in labels that are ours.
---@param prefix string
---@param labels table<string, string>
---@return table
function M.read(prefix, labels)
  local function get(name) return labels[prefix .. name] end
  local out = {
    sandbox_id = get "sandbox_id", instance = get "instance", plane = get "plane", volume = get "volume", networks = {},
    network = get "network_mode" or "open", image = get "image", limits = {}, labels = {},
  }
  for one in (get "networks" or ""):gmatch("[^,]+") do out.networks[#out.networks + 1] = one end
  if get "user" and get "thread" then out.identity = { user = decode(get "user"), thread = decode(get "thread") } end
  out.max_shell_sessions = math.tointeger(tonumber(get "max_shell_sessions"))
  for name, value in pairs(labels) do
    local limit = name:match("^" .. prefix:gsub("%p", "%%%0") .. "limit%.(%a+)$")
    if limit then
      out.limits[limit] = math.tointeger(tonumber(value)) or tonumber(value)
    elseif name:sub(1, #prefix) ~= prefix then
      out.labels[name] = value
    end
  end
  return out
end

--- What a sandbox attests: policies compare it with what a turn requires.
---@param prefix string
---@param labels table<string, string>?
---@param port integer?   that is published
---@return table
function M.attest(prefix, labels, port)
  local facts = M.read(prefix, labels or {})
  return {
    role = labels and labels[prefix .. "role"], sandbox_id = facts.sandbox_id, network = facts.network, network_mode = facts.network,
    image = facts.image, networks = facts.networks, published_port = port, max_shell_sessions = facts.max_shell_sessions,
    limits = facts.limits, plane = facts.plane, broker_mode = false,
    capacity = facts.max_shell_sessions, broker = false, -- under the names that all backends have
  }
end

return M
