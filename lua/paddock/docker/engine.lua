--- One container engine that speaks the Docker Engine API: where it is, which version is spoken, and what its answers mean.
---
--- Two engines are in daily use, Docker and Podman's compatible service, and they differ in statuses and words. What an
--- answer means is decided here, once, by facts in it (a status, a cause, the name of the thing), never by the engine's name
--- alone: the rest of the backend sees `absent`, `name_taken`, `state`, `port_taken`, `no_image`, `busy`.
local certificates = require "paddock.docker.certificates"
local errors = require "paddock.errors"
local io = require "paddock.io"
local streams = require "paddock.docker.stream"

local M = {}

local OWN_VERSION = { 1, 47 }        -- the newest API that this file was written against
local LEAST_VERSION = { 1, 40 }
local PING_LIMIT = 5                 -- seconds
local CALL_LIMIT = 30                -- seconds for a call that names none
local MAX_TEXT = 300                 -- bytes of an engine's message in ours
local LEAST_SECRET = 4               -- bytes of a value that is hidden; less is in every other word
local MUST_BE = "must be unix:///path or tcp://host:port, where an IPv6 address stands in [ ]"
local MOST_SOCKET = 107              -- bytes of a unix socket's path

---@class paddock.Engine
---@field address string       for people: unix:///path or tcp://host:port
---@field unix string?
---@field url string           http://host[:port], without a version
---@field host string?         the engine's machine, when it is reached over TCP
---@field tls paddock.EngineTrust?   it is spoken to over TLS, and believed and told by these
---@field version string       of the API that is spoken, "1.41"
---@field limit number         seconds for a call that names none
local Engine = {}
Engine.__index = Engine

-- ---- addresses ------------------------------------------------------------------------------------------------

--- The parts of an address, or nil and why not.
---@param address string
---@return { address: string, unix: string?, url: string, host: string?, tls: boolean? }?
---@return string? why
function M.parse(address)
  local path = address:match("^unix://(/.+)$")
  if path then
    if #path > MOST_SOCKET then return nil, ("names a socket whose path is longer than %d bytes"):format(MOST_SOCKET) end
    return { address = address, unix = path, url = "http://engine" }
  end
  local scheme, rest = address:match("^(%a+)://([^/]*)/?$")
  if scheme == "tcp" or scheme == "http" or scheme == "https" then
    if rest:find("@", 1, true) then return nil, "has a user in it: an engine knows its clients by certificates" end
    local host, port = rest:match("^([%w%.%-]+):?(%d*)$")
    if not host then host, port = rest:match("^(%[%x*:[%x:.]*%]):?(%d*)$") end
    if not host then return nil, MUST_BE end
    port = port ~= "" and port or nil
    local tls = scheme == "https" or (scheme == "tcp" and port == "2376")
    port = port or (tls and "2376" or "2375")
    if #port > 5 or tonumber(port) < 1 or tonumber(port) > 65535 then return nil, "has no usable port (1 to 65535)" end
    return { address = address, url = ("http://%s:%s"):format(host, port), host = host, tls = tls or nil }
  end
  if address:find("^ssh://") then return nil, "is for ssh, which is not spoken: forward the engine's socket (ssh -L), and name that" end
  if address:find("^npipe:") then return nil, "is a named pipe, which is not spoken" end
  return nil, MUST_BE
end

--- Where an engine usually listens, for whoever runs this; the first that answers is taken.
---@param env fun(name: string): string?
---@param uid integer
---@return string[]
function M.usual(env, uid)
  local out, seen = {}, {}
  local function add(path)
    if path and not seen[path] then
      seen[path] = true
      out[#out + 1] = "unix://" .. path
    end
  end
  local run = env "XDG_RUNTIME_DIR"
  if not run or run:sub(1, 1) ~= "/" then run = "/run/user/" .. uid end
  local home = env "HOME"
  if uid ~= 0 then
    add(run .. "/docker.sock")
    add(run .. "/podman/podman.sock")
    if home and home:sub(1, 1) == "/" then
      add(home .. "/.docker/run/docker.sock")
      add(home .. "/.docker/desktop/docker.sock")
    end
  end
  add("/var/run/docker.sock")
  add("/run/docker.sock")
  add("/run/podman/podman.sock")
  return out
end

-- ---- calling --------------------------------------------------------------------------------------------------

---@class paddock.EngineCall
---@field method string
---@field path string             below the version
---@field query table<string, any>?
---@field json table?             the body, or
---@field body string?            raw bytes, with
---@field type string?            their type
---@field headers table<string, string>?
---@field limit number?           seconds
---@field max_body integer?
---@field on_body fun(piece: string)?
---@field plain boolean?          without a version in the path
---@field fresh boolean?          over a connection of its own
---@field announce boolean?       on_body is called with "" when the answer begins

local function percent(text)
  return (tostring(text):gsub("[^%w%-%._~]", function(c) return ("%%%02X"):format(c:byte()) end))
end
M.percent = percent

--- A name in a path: slashes and colons of an image's name stay.
function M.path(text)
  return (text:gsub("[^%w%-%._~/:@]", function(c) return ("%%%02X"):format(c:byte()) end))
end

local function with_query(path, query)
  local parts = {}
  for name, value in pairs(query or {}) do
    if type(value) == "table" then value = io.json.encode(value) end
    parts[#parts + 1] = percent(name) .. "=" .. percent(value)
  end
  if #parts == 0 then return path end
  table.sort(parts)
  return path .. "?" .. table.concat(parts, "&")
end

--- Sends one call, once: the response with `data` (its JSON, if it is some), or nil and the transport's error.
---@param call paddock.EngineCall
---@return table? response   { status, body, headers, data }
---@return table? err        with `failure`: "not_sent" or "ambiguous"
function Engine:send(call)
  local headers = {}
  for name, value in pairs(call.headers or {}) do headers[name] = value end
  local body = call.body
  if call.json then
    body = io.json.encode(call.json)
    headers["Content-Type"] = "application/json"
  elseif call.type then
    headers["Content-Type"] = call.type
  end
  local path = with_query((call.plain and "" or "/v" .. self.version) .. call.path, call.query)
  local limit = call.limit or self.limit or CALL_LIMIT
  local request = {
    method = call.method, url = self.url .. path, unix = self.unix, headers = headers, body = body, timeout = limit,
    connect_timeout = math.min(limit, PING_LIMIT), max_body = call.max_body, on_body = call.on_body, fresh = call.fresh,
    announce = call.announce,
  }
  for name, value in pairs(self.tls or {}) do request[name] = value end
  local response, err = io.http(request)
  if response and response.body ~= "" and (response.headers["content-type"] or ""):find("json", 1, true) then
    local fine, data = pcall(io.json.decode, response.body)
    response.data = fine and data or nil
  end
  return response, err
end

--- A text without the values of an environment that was sent: what an engine repeats of them must be in no log.
local function without(text, env)
  for _, one in ipairs(env or {}) do
    local name, value = one:match("^([^=]*)=(.*)$")
    local at = 1
    while value and #value >= LEAST_SECRET do
      local from, to = text:find(value, at, true)
      if not from then break end
      local shown = "$" .. name
      text = text:sub(1, from - 1) .. shown .. text:sub(to + 1)
      at = from + #shown
    end
  end
  return text
end

--- The engine's own words in an answer, on one line.
---@param response table
---@param env string[]?   NAME=value, of the call: no value is shown
---@return string
function M.words(response, env)
  local text = response.body or ""
  local data = response.data
  if data == nil and text:sub(1, 1) == "{" then
    local fine, value = pcall(io.json.decode, text)
    data = fine and value or nil
  end
  if type(data) == "table" and type(data.message) == "string" then text = data.message end
  text = streams.one_line(without(text, env))
  return #text > MAX_TEXT and text:sub(1, MAX_TEXT) .. "..." or text
end

--- What an answer of status 400 or more means: { meaning, message, status }. `name` is the id or name of what was spoken
--- about: only a 404 that names it says that it is absent; any other may come from something in between.
---@param response table
---@param name string?
---@param env string[]?   NAME=value, of the call
---@return { meaning: string, message: string, status: integer }
function M.fault(response, name, env)
  local message = M.words(response, env)
  local cause = type(response.data) == "table" and type(response.data.cause) == "string" and response.data.cause or ""
  local text, status = (message .. " " .. cause):lower(), response.status
  local meaning = "other"
  if text:find("no such image", 1, true) or text:find("image not known", 1, true) then
    meaning = "no_image"
  elseif text:find("name that is already in use", 1, true) or text:find("that name is already in use", 1, true)
    or text:find("name %S+ is already in use") or (status == 409 and text:find("is already in use by container", 1, true)) then
    meaning = "name_taken"
  elseif text:find("port is already allocated", 1, true) or text:find("address already in use", 1, true)
    or text:find("port is already in use", 1, true) then
    meaning = "port_taken"
  elseif text:find("removal of container %S+ is already in progress") then
    meaning = "busy"
  elseif text:find("no such container", 1, true) and (status == 404 or cause == "no such container")
    and name and text:find(name:lower(), 1, true) then
    meaning = "absent"
  elseif text:find("no such exec", 1, true) then
    meaning = "no_exec"
  elseif status == 409 or cause:find("container state improper", 1, true) then
    meaning = "state"
  elseif status == 404 then
    meaning = "not_found"
  end
  return { meaning = meaning, message = message ~= "" and message or "HTTP " .. status, status = status }
end

local REASONS = { no_image = "no_image", name_taken = "name_taken", port_taken = "port_taken", state = "state" }

--- Raises what a refusal means.
---@param what string
---@param fault table   of M.fault
---@param advice string?
function M.refuse(what, fault, advice)
  errors.raise("backend_error", ("%s: the engine says: %s%s"):format(what, fault.message, advice and "; " .. advice or ""),
    { reason = REASONS[fault.meaning] or "engine" })
end

--- What to do about a failed transport, after a semicolon; or nothing.
local function advice(engine, err)
  local text = err.reason == "tls" and certificates.advice(tostring(err.message), engine.tls)
  return text and "; " .. text or ""
end

--- Raises a failed transport: nobody knows more than that.
---@param what string
---@param err table
function M.unreachable(engine, what, err)
  if err.kind ~= "backend_error" then error(err, 0) end -- a limit, a cancellation
  errors.raise("backend_error", ("%s: the engine at %s does not answer: %s%s"):format(what, engine.address, tostring(err.message),
    advice(engine, err)), { reason = err.reason or "engine" })
end

--- A call that must be answered: the response when its status is below 400, or nil and the fault.
---@param call paddock.EngineCall
---@param what string
---@param name string?
---@return table? response
---@return table? fault
function Engine:call(call, what, name)
  local response, err = self:send(call)
  if not response then M.unreachable(self, what, err) end
  if response.status < 400 then return response end
  return nil, M.fault(response, name)
end

--- The limit of a call that is answered at once: so many seconds, or engine_timeout where that is less.
---@param seconds number
function Engine:within(seconds)
  return math.min(seconds, self.limit or CALL_LIMIT)
end

-- ---- which engine ---------------------------------------------------------------------------------------------

local function numbers(version)
  local major, minor = tostring(version):match("^(%d+)%.(%d+)")
  return math.tointeger(tonumber(major)) or 0, math.tointeger(tonumber(minor)) or 0
end

local function at_least(version, least)
  local major, minor = numbers(version)
  return major > least[1] or (major == least[1] and minor >= least[2])
end
M.at_least = at_least

--- Speaks to it for the first time, and settles the version. Nil and why not.
---@return boolean? fine
---@return string? why
---@return string? reason   "tls": one of the two does not take the other for what it must be
function Engine:greet()
  local response, err = self:send { method = "GET", path = "/_ping", plain = true, limit = PING_LIMIT }
  if not response then
    if err.kind ~= "backend_error" then error(err, 0) end
    -- Who is refused for a certificate may lose the word that says so to the reset that follows it.
    if self.tls and certificates.was_cut(tostring(err.message)) then err.reason = "tls" end
    return nil, tostring(err.message) .. advice(self, err), err.reason
  end
  if response.status == 400 and M.words(response):find("HTTPS server", 1, true) then
    return nil, "it speaks TLS alone: name certificates in backend_options.tls_ca, tls_cert and tls_key, or in DOCKER_CERT_PATH", "tls"
  end
  if response.status ~= 200 then return nil, ("HTTP %d: %s"):format(response.status, M.words(response)) end
  local offered = response.headers["api-version"]
  if not offered then return nil, "what answers there is no container engine (no Api-Version)" end
  if not at_least(offered, LEAST_VERSION) then
    return nil, ("it speaks version %s of the API, and paddock needs %d.%d: install a newer engine")
      :format(offered, LEAST_VERSION[1], LEAST_VERSION[2])
  end
  self.offered = offered
  self.version = at_least(offered, OWN_VERSION) and ("%d.%d"):format(OWN_VERSION[1], OWN_VERSION[2])
    or ("%d.%d"):format(numbers(offered))
  self.podman = response.headers["libpod-api-version"] ~= nil
  return true
end

--- Its own facts, asked once: `id` tells it from every other engine.
function Engine:identify()
  local info, fault = self:call({ method = "GET", path = "/info" }, "look at the engine")
  if not info then M.refuse("look at the engine", fault) end
  local facts = type(info.data) == "table" and info.data or {}
  self.facts = facts
  local root = type(facts.DockerRootDir) == "string" and facts.DockerRootDir or "?"
  local machine = type(facts.Name) == "string" and facts.Name or "?"
  if self.podman then -- its ID is a new one at each call: the place of its storage is what stays
    self.id = "podman/" .. io.sha256hex(machine .. "\0" .. io.proc.self().machine .. "\0" .. root):sub(1, 32)
  else
    local id = type(facts.ID) == "string" and facts.ID or machine .. "\0" .. root
    self.id = "docker/" .. io.sha256hex(id):sub(1, 32)
  end
end

--- An engine at that address, not spoken to yet.
---@param parts table      of M.parse
---@param options { tls: paddock.EngineTrust?, limit: number? }   over TCP, `tls` means TLS
---@return paddock.Engine
function M.new(parts, options)
  local self = setmetatable({
    address = parts.address, unix = parts.unix, url = parts.url, host = parts.host, limit = options.limit,
    version = ("%d.%d"):format(OWN_VERSION[1], OWN_VERSION[2]),
  }, Engine)
  if parts.tls or (parts.host and options.tls) then
    self.url = self.url:gsub("^http:", "https:")
    self.tls = options.tls or {}
  end
  return self
end

--- The addresses to try, and where they come from.
---@param host string?   the option
---@param env fun(name: string): string?
---@return string[] addresses
---@return string? source   the one thing that named them
function M.addresses(host, env)
  if host then return { host }, "backend_options.host" end
  local named = env "DOCKER_HOST"
  if named and named ~= "" then return { named }, "the environment variable DOCKER_HOST" end
  return M.usual(env, io.proc.self().uid), nil
end

--- An engine at that address, not spoken to yet; raises what is wrong with how it is to be spoken to.
local function prepared(parts, source, options, env)
  local trust, folder
  if parts.host then trust, folder = certificates.find(options.tls, env) end
  local engine = M.new(parts, { limit = options.limit, tls = trust })
  if trust then certificates.check(trust, folder) end
  if parts.host and not engine.tls and not options.plain_tcp and not certificates.is_loopback(parts.host) then
    certificates.refuse_plain(parts, source)
  end
  return engine
end

--- The options of find.
---@param own paddock.DockerOptions
function M.options(own)
  return {
    host = own.host, limit = own.engine_timeout, plain_tcp = own.plain_tcp,
    tls = { ca_file = own.tls_ca, cert_file = own.tls_cert, key_file = own.tls_key },
  }
end

--- Finds the engine, or raises what was tried.
---@param options { host: string?, tls: paddock.EngineTrust?, limit: number?, plain_tcp: boolean? }
---@param env? fun(name: string): string?
---@return paddock.Engine
function M.find(options, env)
  env = env or os.getenv
  local addresses, source = M.addresses(options.host, env)
  local tried, missing, reason = {}, {}, "engine"
  for _, address in ipairs(addresses) do
    local parts, why = M.parse(address)
    if not parts then
      local shown = address:gsub("//.*@", "//...@") -- a password might stand there
      errors.raise("invalid_argument", ("%s names no engine (%s): it %s"):format(source or "the default", shown, why))
    end
    local engine = prepared(parts, source, options, env)
    local there, fault = true, nil
    if not source then there, fault = io.fs.realpath(parts.unix) end
    if not there and fault.reason == "ENOENT" then
      missing[#missing + 1] = parts.unix
    else
      local fine, kind
      fine, why, kind = engine:greet()
      if fine then
        engine:identify()
        return engine
      elseif kind == "tls" then
        reason = "tls"
      end
      tried[#tried + 1] = ("%s (%s)"):format(address, why)
    end
  end
  if reason == "tls" then -- only what one address was named for is reached over TLS
    errors.raise("backend_error", "the container engine cannot be trusted, or does not trust us: " .. tried[1], { reason = "tls" })
  end
  if #missing > 0 then tried[#tried + 1] = "there is no socket " .. table.concat(missing, ", ") end -- last: the list is long
  errors.raise("backend_error", ("no container engine answers: start Docker, or Podman's service (podman system service), or "
    .. "name the engine in backend_options.host or DOCKER_HOST; %s"):format(table.concat(tried, "; ")), { reason = "engine" })
end

return M
