--- For network.lua, by `local hosts = policy.require "hosts"`: lists of hosts that are allowed and denied. It is built in; a folder
--- of policies finds it without having a copy.
---
---     return { decide = hosts.rules { allow = { "pypi.org", "*.pypi.org:443" }, deny = { "*" } } }
---
--- Of the entries that fit, the most exact one counts: a host before a wildcard, a longer wildcard before a shorter one, and of two
--- like these the one with a port. Of two that are alike, deny counts. So { allow = { "a" }, deny = { "*" } } allows a alone, and
--- { allow = { "*" }, deny = { "a" } } all but a. Where none fits, `otherwise` counts ("deny"; or "ask", "allow").
local M = {}

local DECISIONS = { allow = true, deny = true, ask = true }

--- A host as it is compared: lower case, without brackets and the dot at its end.
local function plain(host) return (host:lower():gsub("^%[(.*)%]$", "%1"):gsub("%.$", "")) end

--- "host", "host:443", "*.domain", "*", "[::1]:443" -> host or suffix, port, how exact. Raises what is none of these.
local function read(entry, list, i)
  local function wrong(why) error(("hosts.rules: %s[%d] %s"):format(list, i, why), 0) end
  if type(entry) ~= "string" or entry == "" or #entry > 300 or entry:find("[%c%s/@]") then wrong("is no host") end
  local host, port = entry:match("^(%[[^%]]*%])(:?%d*)$")
  if not host then host, port = entry:match("^([^:]*)(:%d+)$") end
  if not host then host, port = entry, "" end
  local number = port ~= "" and math.tointeger(tonumber(port:sub(2))) or nil
  if port ~= "" and not (number and number >= 1 and number <= 65535) then wrong("has no port from 1 to 65535 behind its colon") end
  host = plain(host)
  local suffix = host == "*" and "" or host:match("^%*(%..+)$")
  if host == "" or (suffix or host):find("*", 1, true) then wrong('has a "*" that is not all of it, or the first part of a name') end
  -- Wildcards by their length, a host above all of them; a port decides between what is equal else.
  local exact = (suffix and #suffix or 1000) * 2 + (number and 1 or 0)
  return { host = not suffix and host or nil, suffix = suffix, port = number, exact = exact, text = entry }
end

local function entries(list, name)
  local out = {}
  if list ~= nil and type(list) ~= "table" then error("hosts.rules: " .. name .. " must be a list of hosts", 0) end
  for i, entry in ipairs(list or {}) do out[i] = read(entry, name, i) end
  return out
end

local function fits(entry, host, port)
  if entry.port and entry.port ~= port then return false end
  if entry.host then return entry.host == host end
  return entry.suffix == "" or (#host > #entry.suffix and host:sub(-#entry.suffix) == entry.suffix)
end

local function exactness(list, host, port)
  local best = -1
  for _, entry in ipairs(list) do
    if entry.exact > best and fits(entry, host, port) then best = entry.exact end
  end
  return best
end

--- Whether `deny` takes all that `allow` would give.
local function covers(deny, allow)
  if deny.exact < allow.exact or (deny.port and deny.port ~= allow.port) then return false end
  return deny.host == allow.host and deny.suffix == allow.suffix
end

--- A function for network.lua's `decide`. An entry of `allow` without any effect is said in the log, at each load.
---@param rules { allow: string[]?, deny: string[]?, otherwise: string? }
---@return fun(ctx: table): string
function M.rules(rules)
  for key in pairs(rules) do
    if key ~= "allow" and key ~= "deny" and key ~= "otherwise" then error("hosts.rules: " .. tostring(key) .. " is unknown", 2) end
  end
  local allow, deny, otherwise = entries(rules.allow, "allow"), entries(rules.deny, "deny"), rules.otherwise or "deny"
  if not DECISIONS[otherwise] then error('hosts.rules: otherwise must be "allow", "deny" or "ask"', 2) end
  for _, one in ipairs(allow) do
    for _, other in ipairs(deny) do
      if covers(other, one) then
        policy.log(("hosts: %s in allow has no effect: %s in deny takes all of it"):format(one.text, other.text), "warn")
        break
      end
    end
  end
  return function(ctx)
    local host, port = plain(ctx.host), math.tointeger(ctx.port)
    local allowed, denied = exactness(allow, host, port), exactness(deny, host, port)
    if allowed < 0 and denied < 0 then return otherwise end
    return allowed > denied and "allow" or "deny"
  end
end

return M
