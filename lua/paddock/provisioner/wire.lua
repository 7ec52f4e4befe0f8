--- The provisioner's HTTP interface as a description: routes, what a request carries, how each answer is read.
---
--- Nothing here sends anything, so that a server can be built on the same description as the client is. Every reader says
--- "cannot be read" rather than guess: of an answer that is wrong in one field, nothing is believed. A field that is left
--- out or null is unknown, which is never read as "no".
local M = {}

local MOST_URL = 2048
local MOST_ID = 253              -- a Kubernetes name; a UID is 36
local MOST_SESSIONS = 100000

-- ---- routes ---------------------------------------------------------------------------------------------------

---@class paddock.ProvisionerRoute
---@field method string
---@field path string            "{id}" stands for the sandbox id
---@field limit "create"|"delete"|"read"|"probe"   which time limit is a client's
---@field changes boolean        whether a lost answer leaves something unknown

---@type table<string, paddock.ProvisionerRoute>
M.routes = {
  create = { method = "POST", path = "/api/sandboxes", limit = "create", changes = true },
  list = { method = "GET", path = "/api/sandboxes", limit = "read", changes = false },
  get = { method = "GET", path = "/api/sandboxes/{id}", limit = "read", changes = false },
  presence = { method = "GET", path = "/api/sandboxes/{id}/presence", limit = "read", changes = false },
  delete = { method = "DELETE", path = "/api/sandboxes/{id}", limit = "delete", changes = true },
  capabilities = { method = "GET", path = "/api/capabilities", limit = "probe", changes = false },
}

--- The header that carries the API key.
M.KEY_HEADER = "X-API-Key"
--- The header of a delete that names the generation that is meant: an entity tag. A server that knows it answers 412 when
--- another one is there; one that does not know it ignores it.
M.GENERATION_HEADER = "If-Match"

--- Whether a text can be a sandbox id: nothing in it can change the path of a URL.
---@param id any
---@return boolean
function M.is_id(id)
  return type(id) == "string" and #id >= 1 and #id <= 63 and id:find("^[a-z0-9-]+$") ~= nil
end

--- The path of a route.
---@param name string
---@param id string?
---@return string
function M.path(name, id)
  local path = M.routes[name].path
  if not path:find("{id}", 1, true) then return path end
  assert(M.is_id(id), "wire.path: not a sandbox id")
  return (path:gsub("{id}", id))
end

--- The route of a request, for a server: its name and the sandbox id, or nil.
---@param method string
---@param path string    without a query
---@return string? name
---@return string? id
function M.route(method, path)
  for name, route in pairs(M.routes) do
    if route.method == method then
      local pattern = "^" .. route.path:gsub("[-.]", "%%%0"):gsub("{id}", "([a-z0-9-]+)") .. "$"
      local at, _, id = path:find(pattern)
      if at and (id == nil or M.is_id(id)) then return name, id end
    end
  end
  return nil
end

--- A base URL in its normal form (no slash at its end), or nil and what is wrong with it.
---@param url any
---@return string? base
---@return string? problem
function M.base_url(url)
  if type(url) ~= "string" then return nil, "must be a URL such as http://provisioner:8002" end
  if #url > 140 then return nil, "must have at most 140 bytes" end
  if url:find("[^\x21-\x7e]") or url:find('[\\"<>^`{|}]') then return nil, "must have neither spaces nor control characters in it" end
  local scheme, authority, path = url:match("^(%a[%w+.-]*)://([^/?#]*)([^?#]*)")
  if not scheme then return nil, "must begin with http:// or https://" end
  scheme = scheme:lower()
  if scheme ~= "http" and scheme ~= "https" then return nil, "must begin with http:// or https://" end
  if url:find("[?#]") then return nil, "must have neither a query nor a fragment" end
  if authority:find("@", 1, true) then return nil, "must not hold a user or a password: the key goes into backend_options.api_key" end
  local host, rest = authority:match("^(%[[%x:.]+%])(.*)$")
  if not host then host, rest = authority:match("^([%w._-]+)(.*)$") end
  if not host then return nil, "names no host" end
  local port = rest:match("^:(%d+)$")
  if rest ~= "" and (not port or #port > 5 or tonumber(port) < 1 or tonumber(port) > 65535) then
    return nil, "has no usable port (1 to 65535)"
  end
  if (path .. "/"):find("/%.%.?/") or path:find("%%2[eEfF]") then return nil, 'must have no "." or ".." in its path' end
  return scheme .. "://" .. host:lower() .. (port and ":" .. port or "") .. path:gsub("/+$", "")
end

-- ---- JSON -----------------------------------------------------------------------------------------------------

--- nil for null: both mean that nothing is said.
local function given(json, value)
  if value == json.null then return nil end
  return value
end

--- The name of the first field that an object of this JSON text has twice, or nil. Parsers disagree about which of the two
--- counts, so neither may. The text has been parsed already: that it is JSON can be relied on.
---@param text string
---@param decode fun(text: string): any
---@return string?
function M.repeated(text, decode)
  local seen, depth, at = {}, 0, 1
  while true do
    local from = text:find('["{}%[%]]', at)
    if not from then return nil end
    local c = text:sub(from, from)
    at = from + 1
    if c == "{" or c == "[" then
      depth = depth + 1
      seen[depth] = {}
    elseif c == "}" or c == "]" then
      depth = depth - 1
    else
      local stop = from
      repeat
        stop = text:find('["\\]', stop + 1)
        if not stop then return nil end
        local escape = text:sub(stop, stop) == "\\"
        if escape then stop = stop + 1 end
      until not escape
      at = stop + 1
      if text:find("^%s*:", at) and depth > 0 then
        local key = text:sub(from + 1, stop - 1)
        if key:find("\\", 1, true) then key = decode('["' .. key .. '"]')[1] end
        if seen[depth][key] then return key end
        seen[depth][key] = true
      end
    end
  end
end

--- An answer's JSON object, or nil and what is wrong with the text.
---@param json table    decode, null
---@param text string
---@return table?
---@return string? problem
function M.object(json, text)
  if not text:find("^%s*{") then return nil, "no JSON object" end
  local value, why = json.decode(text)
  if type(value) ~= "table" then return nil, "no JSON (" .. tostring(why):sub(1, 80) .. ")" end
  local twice = M.repeated(text, json.decode)
  if twice then return nil, "the field " .. twice:sub(1, 40):gsub("%c", "?") .. " comes twice" end
  return value
end

-- ---- what a request carries -----------------------------------------------------------------------------------

--- The targets that a provisioner mounts something on, in its order.
---@param skills_root string
---@return string[]
function M.targets(skills_root)
  local lark = "/mnt/integrations/lark-cli/"
  return {
    "/mnt/acp-workspace", skills_root .. "/public", skills_root .. "/custom", skills_root .. "/legacy",
    skills_root .. "/integrations", lark .. "config", lark .. "config/locks", lark .. "data", lark .. "runtime",
  }
end

--- The target that the provisioner itself fills when it is asked to provide the helper's runtime.
M.RUNTIME_TARGET = "/mnt/integrations/lark-cli/runtime"
M.MOST_MOUNTS = 10
M.SKILLS_ROOT = "/mnt/skills"

---@class paddock.ProvisionerCreate
---@field sandbox_id string
---@field thread_id string
---@field user_id string
---@field include_legacy_skills boolean?
---@field skills_container_path string?
---@field provision_lark_cli_runtime boolean?
---@field provision_lark_cli_broker boolean?
---@field max_shell_sessions integer?
---@field mounts { source: string, target: string, read_only: boolean }[]?

--- Those of `mounts` that a provisioner takes, in their order, and the targets of the others.
---@param mounts table[]
---@param skills_root string
---@param supplies_runtime boolean
---@return table[] taken
---@return string[] left_out
function M.acceptable(mounts, skills_root, supplies_runtime)
  local known, taken, left_out = {}, {}, {}
  for _, target in ipairs(M.targets(skills_root)) do known[target] = true end
  if supplies_runtime then known[M.RUNTIME_TARGET] = nil end
  for _, mount in ipairs(mounts) do
    if known[mount.target] then
      known[mount.target] = nil           -- a target that comes again is refused by a provisioner; the earlier one stays
      taken[#taken + 1] = { host_path = mount.source, container_path = mount.target, read_only = mount.read_only ~= false }
    elseif not (supplies_runtime and mount.target == M.RUNTIME_TARGET) then
      left_out[#left_out + 1] = mount.target
    end
  end
  return taken, left_out
end

--- The body of a create request.
---@param json table     array
---@param req paddock.ProvisionerCreate
---@return table body
---@return string[] left_out   targets that no provisioner takes
function M.create_body(json, req)
  local root = req.skills_container_path or M.SKILLS_ROOT
  local body = {
    sandbox_id = req.sandbox_id, thread_id = req.thread_id, user_id = req.user_id,
    include_legacy_skills = req.include_legacy_skills == true, skills_container_path = root,
    provision_lark_cli_runtime = req.provision_lark_cli_runtime == true,
    provision_lark_cli_broker = req.provision_lark_cli_broker == true,
    max_shell_sessions = req.max_shell_sessions,
  }
  local taken, left_out = M.acceptable(req.mounts or {}, root, body.provision_lark_cli_runtime)
  if #taken > 0 then body.extra_mounts = json.array(taken) end
  return body, left_out
end

local function plain_path(path)
  return type(path) == "string" and path:sub(1, 1) == "/" and not path:find("%c") and not (path .. "/"):find("/%.?%.?/", 2)
end

local function check_mounts(json, body)
  local list, known = given(json, body.extra_mounts), {}
  if list == nil then return nil end
  if type(list) ~= "table" then return "extra_mounts must be a list" end
  if #list > M.MOST_MOUNTS then return ("extra_mounts has more than %d entries"):format(M.MOST_MOUNTS) end
  for _, target in ipairs(M.targets(given(json, body.skills_container_path) or M.SKILLS_ROOT)) do known[target] = true end
  for i, mount in ipairs(list) do
    local at = ("extra_mounts[%d]"):format(i)
    if type(mount) ~= "table" then return at .. " must be an object" end
    if not plain_path(mount.host_path) then return at .. ".host_path must be an absolute path" end
    if known[mount.container_path] ~= true then return at .. ".container_path is repeated, or not one that is mounted on" end
    known[mount.container_path] = "taken"
    if type(given(json, mount.read_only) or false) ~= "boolean" then return at .. ".read_only must be true or false" end
  end
  return nil
end

--- What a server has to say against a create request, or nil.
---@param json table
---@param body table
---@return string? problem
function M.check_create(json, body)
  if not M.is_id(body.sandbox_id) then return "sandbox_id must be 1 to 63 characters of a-z, 0-9 and -" end
  for _, key in ipairs { "thread_id", "user_id" } do
    local value = body[key]
    if type(value) ~= "string" or #value > 128 or not value:find("^[A-Za-z0-9_-]+$") then
      return key .. " must be 1 to 128 characters of A-Z, a-z, 0-9, _ and -"
    end
  end
  for _, key in ipairs { "include_legacy_skills", "provision_lark_cli_runtime", "provision_lark_cli_broker" } do
    if type(given(json, body[key]) or false) ~= "boolean" then return key .. " must be true or false" end
  end
  local root = given(json, body.skills_container_path)
  if root ~= nil and not plain_path(root) then return "skills_container_path must be an absolute path" end
  local sessions = given(json, body.max_shell_sessions)
  if sessions ~= nil and (math.type(sessions) ~= "integer" or sessions < 1 or sessions > MOST_SESSIONS) then
    return "max_shell_sessions must be a whole number, 1 or more"
  end
  return check_mounts(json, body)
end

-- ---- how answers are read -------------------------------------------------------------------------------------

local function printable(text, most)
  return type(text) == "string" and #text >= 1 and #text <= most and not text:find("[^\x21-\x7e]")
end

---@class paddock.ProvisionedSandbox
---@field sandbox_id string
---@field url string?             nil = no endpoint yet
---@field generation string?      the Pod's UID; nil = unknown
---@field broker boolean?         nil = not attested
---@field sessions integer?       nil = not attested
---@field status string?          "Pending", "Running", "Terminating", ...

--- Where a sandbox is reached: "" and null mean that it has no endpoint.
local function read_url(url)
  if url == nil or url == "" then return true, nil end
  local authority = printable(url, MOST_URL) and url:match("^https?://([^/?#]+)[^?#]*$")
  if not authority or not authority:find("^[%w%[][^@\\]*$") then return false end
  return true, (url:gsub("/+$", ""))
end

--- Reads what create, get and each entry of list say of a sandbox.
---@param json table
---@param object any
---@param id string?   the sandbox that was asked about; nil = whichever it is
---@return paddock.ProvisionedSandbox?
---@return string? problem
---@return "other"|nil which   "other": it is about another sandbox
function M.read_sandbox(json, object, id)
  if type(object) ~= "table" then return nil, "it is no JSON object" end
  local said = given(json, object.sandbox_id)
  if said == nil and id == nil then return nil, "it has no sandbox_id" end
  if said ~= nil and not M.is_id(said) then return nil, "its sandbox_id is no sandbox id" end
  if said ~= nil and id ~= nil and said ~= id then return nil, "it is about the sandbox " .. said, "other" end
  local fine, url = read_url(given(json, object.sandbox_url))
  if not fine then return nil, "its sandbox_url is no http or https URL" end
  local generation, status = given(json, object.container_id), given(json, object.status)
  local broker, sessions = given(json, object.lark_cli_broker), given(json, object.max_shell_sessions)
  if generation ~= nil and not printable(generation, MOST_ID) then return nil, "its container_id is no id" end
  if broker ~= nil and type(broker) ~= "boolean" then return nil, "its lark_cli_broker is neither true nor false" end
  if sessions ~= nil and (math.type(sessions) ~= "integer" or sessions < 0 or sessions > MOST_SESSIONS) then
    return nil, "its max_shell_sessions is no number of sessions"
  end
  if status ~= nil and not printable(status, 40) then return nil, "its status is no word" end
  return { sandbox_id = said or id, url = url, generation = generation, broker = broker, sessions = sessions, status = status }
end

--- Reads a list. Entries that cannot be read are left out and counted.
---@param json table
---@param object table
---@return paddock.ProvisionedSandbox[]? sandboxes
---@return integer|string skipped   or the problem
function M.read_list(json, object)
  local entries, found, skipped = object.sandboxes, {}, 0
  if type(entries) ~= "table" then return nil, "it has no list of sandboxes" end
  local seen = {}
  for key, entry in pairs(entries) do
    if math.type(key) ~= "integer" then return nil, "its sandboxes are no list" end
    local one = M.read_sandbox(json, entry)
    if one and not seen[one.sandbox_id] then
      seen[one.sandbox_id] = true
      found[#found + 1] = one
    else
      skipped = skipped + 1
    end
  end
  table.sort(found, function(a, b) return a.sandbox_id < b.sandbox_id end)
  return found, skipped
end

--- Reads a presence answer: whether the Pod object exists, in whatever phase, and its UID when that is said.
---@return boolean? present
---@return string? generation_or_problem
function M.read_presence(json, object, id)
  local said, present = given(json, object.sandbox_id), object.present
  if said ~= nil and said ~= id then return nil, "it is about another sandbox" end
  if type(present) ~= "boolean" then return nil, "it does not say whether the Pod is present" end
  local generation = given(json, object.container_id)
  if generation ~= nil and not printable(generation, MOST_ID) then return nil, "its container_id is no id" end
  return present, generation
end

--- Reads what the deployment can do.
---@return { lark_cli_init_image: boolean, lark_cli_broker_image: boolean }?
---@return string? problem
function M.read_capabilities(_json, object)
  local init, broker = object.lark_cli_init_image, object.lark_cli_broker_image
  if type(init) ~= "boolean" then return nil, "lark_cli_init_image is neither true nor false" end
  if type(broker) ~= "boolean" then return nil, "lark_cli_broker_image is neither true nor false" end
  return { lark_cli_init_image = init, lark_cli_broker_image = broker }
end

--- Whether a 404 says that this sandbox is not there. A 404 that does not name it may come from a proxy, a wrong base path, or a
--- server without that route: of the sandbox it says nothing. Nor does one that repeats the path in which the id stands.
---@param json table
---@param text string
---@param id string
---@return boolean
function M.says_missing(json, text, id)
  local object = M.object(json, text)
  if not object then return false end
  if object.sandbox_id == id then return true end
  local detail = object.detail
  if type(detail) == "table" then return detail.sandbox_id == id end
  if type(detail) ~= "string" then return false end
  for word in detail:gmatch("[^%s'\"`]+") do
    if word:gsub("^[(%[]+", ""):gsub("[.,:;!)%]]+$", "") == id then return true end
  end
  return false
end

--- The line for a person that a refusal carries, without control characters.
---@param json table
---@param text string
---@return string
function M.said(json, text)
  local object = M.object(json, text)
  local detail = object and (object.detail or object.message or object.error)
  if type(detail) == "table" then -- validation: [{ loc, msg, type }]
    local first = detail[1]
    detail = type(first) == "table" and first.msg or nil
  end
  if type(detail) ~= "string" or detail == "" then return "no reason given" end
  return (detail:sub(1, 160):gsub("[%c\x7f-\xff]", "?"))
end

return M
