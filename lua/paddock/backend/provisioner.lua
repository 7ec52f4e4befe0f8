--- The provisioner backend: a sandbox is a Pod that a provisioner service makes, and serves the AIO HTTP API.
---
--- What is true of every request: a create is sent once, whatever becomes of its answer; what is there is then found out by
--- asking for the id, which is the same in every process. A read that fails says nothing about the sandbox (it raises), and
--- absence is only what the Pod itself shows: the ordinary read answers 404 also when merely the Service is missing.
---
--- The generation is the Pod's UID. Nothing inside a Pod knows tokens (`fenced` is false), so a stop names the UID that it
--- means, and looks first which one is there.
local aio = require "paddock.client.aio"
local check = require "paddock.provisioner.check"
local errors = require "paddock.errors"
local io = require "paddock.io"
local wire = require "paddock.provisioner.wire"

local M = {}

local ONE_ANSWER, LIST_ANSWER = 1 << 20, 16 << 20   -- bytes of an answer that are read
local CONNECT = 5                -- seconds
local REDIRECTS = 3              -- followed by reads, on the provisioner's own host only
local PROBE = 1.5                -- seconds for what the deployment can do; the core asks rarely, and remembers
local PER_TRY = 5                -- seconds for one question whether a sandbox is ready
local SEARCH_PAUSE, SEARCH_PAUSE_MAX = 0.1, 1       -- seconds between two looks for what a lost answer made
local SETTLE = 3                 -- seconds after which what a lost create has not made by then counts as not made
local SEEN_FRESH = 1             -- seconds for which what was seen need not be looked at again before a stop
local ANSWERED_FRESH, ANSWERED_MOST = 5, 1000       -- seconds for which an answer of a sandbox opens its gate; how many are kept
-- What the provisioner calls a sandbox that does not run and will not. Any other word (one that is suspended, say) is unknown.
local DEAD = {
  Pending = true, Failed = true, Succeeded = true, Terminating = true, Stopped = true, NotFound = true, Error = true,
  OOMKilled = true, Evicted = true, CrashLoopBackOff = true,
}

---@class paddock.ProvisionerOptions
---@field url string               the provisioner's address; may have a path
---@field api_key? string          sent to it as X-API-Key; "$NAME" = from the environment
---@field sandbox_api_key? string  sent to the sandboxes as X-AIO-API-Key; "$NAME" = from the environment
---@field ca_file? string          PEM file of the authorities that vouch for https servers
---@field skills_root? string      where skills are inside a sandbox (/mnt/skills)
---@field create_timeout? number   seconds (30)
---@field delete_timeout? number   seconds (15)
---@field read_timeout? number     seconds (10)
---@field gone_timeout? number     seconds that an accepted delete may take until the Pod is gone (45); 0 = nobody waits for it

---@class paddock.ProvisionerBackend
local Backend = {}
Backend.__index = Backend

---@param options paddock.ProvisionerOptions?
---@param runtime { ready_interval: number?, discover_timeout: number?, command_timeout: number? }?
---@return paddock.ProvisionerBackend
function M.new(options, runtime)
  local own = check.own(options, io.env)
  return setmetatable({
    name = "provisioner",
    capabilities = { mounts = true, pause = false, snapshot = false, limits = false, fenced = false },
    options = own, runtime = runtime or {}, answered = {}, answered_count = 0,
  }, Backend)
end

-- ---- asking ---------------------------------------------------------------------------------------------------

local function fail(message, reason, id, cause)
  errors.raise("backend_error", message, { reason = reason, sandbox_id = id, cause = cause })
end

--- Sends a request of a route, once. Returns the response, or nil and the transport's error.
function Backend:_send(name, id, body)
  local route, own = wire.routes[name], self.options
  local limit = route.limit == "probe" and PROBE or own[route.limit .. "_timeout"]
  local headers = { Accept = "application/json" }
  if own.api_key then headers[wire.KEY_HEADER] = own.api_key end
  if name == "delete" and body then
    headers[wire.GENERATION_HEADER] = '"' .. body:gsub('["\\]', "") .. '"'
    body = nil
  elseif body then
    headers["Content-Type"] = "application/json"
  end
  return io.http {
    method = route.method, url = own.url .. wire.path(name, id), headers = headers, body = body, timeout = limit,
    connect_timeout = math.min(limit, CONNECT), max_body = name == "list" and LIST_ANSWER or ONE_ANSWER,
    redirects = REDIRECTS, ca_file = own.ca_file,
  }
end

--- Raises what a status means that is not what was hoped for.
function Backend:_refused(what, response, id)
  local status = response.status
  local text = ("%s: the provisioner answers HTTP %d: %s"):format(what, status, wire.said(io.json, response.body))
  if status == 401 or status == 403 then
    fail(text .. " (is backend_options.api_key the right one?)", "unauthorized", id)
  elseif status == 429 or status == 507 then
    errors.raise("capacity_exhausted", text, { reason = "http_" .. status, sandbox_id = id })
  elseif status >= 300 and status < 400 then
    fail(text .. " (a redirect is followed only for reads, and only on its own host: correct backend_options.url)", "redirect", id)
  end
  fail(text, "http_" .. status, id)
end

--- A read: its JSON object; or nil where it is answered 404, with that response.
function Backend:_read(name, id, what)
  local response, err = self:_send(name, id)
  if not response then
    errors.raise(err.kind, what .. ": " .. tostring(err.message), { reason = err.reason, sandbox_id = id })
  end
  if response.status == 404 then return nil, response end
  if response.status ~= 200 then self:_refused(what, response, id) end
  local object, problem = wire.object(io.json, response.body)
  if not object then fail(what .. ": the provisioner's answer cannot be read: " .. problem, "protocol", id) end
  return object
end

local function unreadable(what, problem, id)
  fail(("%s: the provisioner's answer cannot be used: %s"):format(what, problem), "protocol", id)
end

--- What the ordinary read says of a sandbox; nil = nothing found, which proves no absence.
---@return paddock.ProvisionedSandbox?
function Backend:_get(id)
  local what = "reading sandbox " .. id
  local object = self:_read("get", id, what)
  if not object then return nil end
  local sandbox, problem = wire.read_sandbox(io.json, object, id)
  return sandbox or unreadable(what, problem, id)
end

--- Whether the Pod exists, and its UID where that is said.
---@return boolean present
---@return string? generation
function Backend:_presence(id)
  local what = "looking for the Pod of sandbox " .. id
  local object, missing = self:_read("presence", id, what)
  if not object then
    if wire.says_missing(io.json, missing.body, id) then return false end
    fail(what .. ": HTTP 404 that does not name it: this provisioner has no presence route, or the address is wrong "
      .. "(backend_options.url)", "no_route", id)
  end
  local present, generation = wire.read_presence(io.json, object, id)
  if present == nil then unreadable(what, generation, id) end
  return present, generation
end

---@param s paddock.ProvisionedSandbox
function Backend:_info(s)
  return {
    sandbox_id = s.sandbox_id, url = s.url, headers = {}, generation = s.generation, name = "sandbox-" .. s.sandbox_id,
    status = s.status, seen_at = io.now(), attestation = { broker = s.broker, capacity = s.sessions },
  }
end

local function check_id(id)
  if not wire.is_id(id) then errors.raise("invalid_argument", "sandbox_id must be 1 to 63 characters of a-z, 0-9 and -") end
  return id
end

local function id_of(info, what)
  if type(info) ~= "table" then errors.raise("invalid_argument", what .. ": info must be a table") end
  return check_id(info.sandbox_id)
end

-- ---- creating -------------------------------------------------------------------------------------------------

-- What a requirements policy may say in `options`: fields of the request, as the provisioner calls them.
local FIELDS = {
  include_legacy_skills = "boolean", provision_lark_cli_runtime = "boolean", provision_lark_cli_broker = "boolean",
  skills_container_path = "string", max_shell_sessions = "integer",
}
local POLICIES_OWN = { skills_projection = true } -- what policies of the deer-flow set tell each other

local function wanted(requirements)
  local options = requirements.options or {}
  for key, value in pairs(options) do
    local kind = FIELDS[key]
    if POLICIES_OWN[key] then kind = type(value) end
    if not kind or (kind == "integer" and math.type(value) or type(value)) ~= kind then
      errors.raise("invalid_argument", ("requirements.options.%s: %s"):format(tostring(key),
        kind and "must be " .. kind or "a provisioner has no such field"))
    end
  end
  return options
end

local function sessions_of(options, env)
  local sessions = options.max_shell_sessions
  for name, value in pairs(env or {}) do
    if name ~= "MAX_SHELL_SESSIONS" then
      errors.raise("unsupported", ("the variable %s cannot reach a provisioner's sandbox: a request carries no environment")
        :format(name))
    end
    sessions = sessions or math.tointeger(tonumber(value))
    if not sessions then errors.raise("invalid_argument", "MAX_SHELL_SESSIONS must be a whole number, 1 or more") end
  end
  if sessions and (sessions < 1 or sessions > 100000) then
    errors.raise("invalid_argument", ("MAX_SHELL_SESSIONS must be from 1 to 100000, not %d"):format(sessions))
  end
  return sessions
end

--- The body of the request for a spec.
function Backend:_request(spec)
  local requirements = type(spec.requirements) == "table" and spec.requirements or {}
  local options = wanted(requirements)
  if spec.image ~= nil then
    errors.raise("unsupported", "image: the provisioner itself says which image its Pods run")
  elseif next(spec.limits or {}) ~= nil then
    errors.raise("unsupported", "limits: the provisioner itself limits its Pods")
  elseif spec.network ~= nil and spec.network ~= "open" then
    errors.raise("unsupported", ("network %q: what a Pod may reach is the cluster's to say"):format(tostring(spec.network)))
  end
  local who, id = spec.identity or {}, check_id(spec.sandbox_id)
  local thread = who.thread ~= "" and who.thread or id  -- a fresh sandbox that nothing finds again has no thread
  local body, left_out = wire.create_body(io.json, {
    sandbox_id = id, thread_id = thread, user_id = who.user, mounts = spec.mounts,
    include_legacy_skills = options.include_legacy_skills,
    skills_container_path = options.skills_container_path or self.options.skills_root,
    provision_lark_cli_runtime = options.provision_lark_cli_runtime,
    provision_lark_cli_broker = options.provision_lark_cli_broker,
    max_shell_sessions = sessions_of(options, spec.env),
  })
  for _, target in ipairs(left_out) do
    io.log("info", "mount_not_sent", { sandbox_id = id, target = target, reason = "a provisioner mounts nothing there" })
  end
  return body
end

--- Why what was made cannot serve this request, or nil.
local function rejection(body, s)
  if body.provision_lark_cli_broker and s.broker == false then
    return "broker_mode", "the broker was asked for, and the sandbox has none"
  elseif body.provision_lark_cli_broker and s.broker == nil then
    return "version_skew", "the broker was asked for, and this provisioner does not say whether the sandbox has it: update it"
  elseif body.max_shell_sessions and s.sessions == nil then
    return "version_skew", ("%d shell sessions were asked for, and this provisioner does not say how many the sandbox has: "
      .. "update it"):format(body.max_shell_sessions)
  elseif body.max_shell_sessions and s.sessions < body.max_shell_sessions then
    return "insufficient_capacity", ("%d shell sessions were asked for, and the sandbox has %d")
      :format(body.max_shell_sessions, s.sessions)
  end
  return nil
end

--- Of a sandbox that was made, and of which more cannot be read: it is to be taken back.
local function rejected(info, reason, message)
  info.rejected = { reason = reason, message = message }
  return info
end

--- The answer to a create was lost: what is there? Never a second create. `answered`: the provisioner was through with it.
---@return paddock.ProvisionedSandbox
function Backend:_find_again(id, lost, answered, deadline)
  local began, pause, last = io.now(), SEARCH_PAUSE, lost
  io.log("warn", "create_answer_lost", { sandbox_id = id, reason = tostring(lost.reason), message = tostring(lost.message) })
  repeat
    local fine, found = pcall(self._get, self, id)
    if fine and found and found.status ~= "Terminating" then return found end
    local known, present, generation
    if fine then
      known, present, generation = pcall(self._presence, self, id)
      last = known and last or present
    else
      last = found
    end
    local over, absent = io.now() >= deadline, known and not present
    if absent and answered then error(lost, 0) end
    if known and present and over then return { sandbox_id = id, generation = generation } end -- never got an endpoint
    if over or (absent and io.now() - began >= SETTLE) then break end
    io.sleep(pause)
    pause = math.min(pause * 2, SEARCH_PAUSE_MAX)
  until false
  errors.raise("outcome_unknown", ("whether sandbox %s was made is unknown: %s; it is not asked for twice, and found by its id if it "
    .. "comes up: acquire again"):format(id, tostring(type(last) == "table" and last.message or last)),
    { reason = "create", sandbox_id = id, cause = errors.is(lost) and lost or nil })
end

local function lost_error(message, reason, id)
  return errors.new("backend_error", message, { reason = reason, sandbox_id = id })
end

--- Sends the create. Returns what was made, or raises; an answer that is not to be believed is `nil, problem`.
function Backend:_post(id, body, deadline)
  local what = "creating sandbox " .. id
  local response, err = self:_send("create", id, io.json.encode(body))
  if not response then
    if err.failure == "not_sent" then
      errors.raise(err.kind, what .. ": " .. tostring(err.message), { reason = err.reason, sandbox_id = id })
    end
    return self:_find_again(id, lost_error(what .. ": " .. tostring(err.message), err.reason, id), false, deadline)
  end
  local status = response.status
  if status == 409 then
    errors.raise("being_destroyed", ("%s: the provisioner says that it is still ending: %s"):format(what,
      wire.said(io.json, response.body)), { reason = "http_409", sandbox_id = id })
  elseif status == 408 or status >= 500 then
    local fine, refusal = pcall(self._refused, self, what, response, id)
    assert(not fine)
    return self:_find_again(id, refusal, status == 500 or status == 503, deadline)
  elseif status < 200 or status > 299 then
    self:_refused(what, response, id)
  end
  local object, problem = wire.object(io.json, response.body)
  if not object then
    return self:_find_again(id, lost_error(what .. ": the answer cannot be read: " .. problem, "protocol", id), true, deadline)
  end
  local sandbox, wrong, which = wire.read_sandbox(io.json, object, id)
  if which == "other" then unreadable(what, wrong, id) end
  return sandbox, wrong
end

--- A sandbox without an endpoint has one soon, or never. When the caller's time is over, or it has gone, the wait ends without
--- an error: what was made must get into the hands of the core, which takes it back.
function Backend:_with_endpoint(s, deadline)
  local pause = SEARCH_PAUSE
  while not s.url and io.now() < deadline and pcall(io.sleep, pause) do
    pause = math.min(pause * 2, SEARCH_PAUSE_MAX)
    local fine, now = pcall(self._get, self, s.sandbox_id)
    if fine and now and (s.generation == nil or now.generation == s.generation) then s = now end
  end
  return s
end

--- Asks for a sandbox. What was made and cannot serve is given back with `rejected`: the core stops it, under both fences.
---@param spec table
---@return table info
function Backend:create(spec)
  local id = check_id(spec.sandbox_id)
  local body = self:_request(spec)
  -- A time limit of the create itself leaves as long as a read may take to find out what became of it.
  local deadline = io.now() + self.options.create_timeout + self.options.read_timeout
  local s, problem = self:_post(id, body, deadline)
  if not s then
    return rejected(self:_info { sandbox_id = id }, "protocol",
      "the provisioner's answer cannot be used: " .. problem)
  end
  if s.status == "Terminating" then
    errors.raise("being_destroyed", ("sandbox %s is ending; try again"):format(id), { sandbox_id = id })
  end
  local reason, message = rejection(body, s)
  if reason then return rejected(self:_info(s), reason, message) end
  s = self:_with_endpoint(s, deadline)
  if not s.url then return rejected(self:_info(s), "no_endpoint", "the provisioner has given it no address in time") end
  return self:_info(s)
end

-- ---- looking --------------------------------------------------------------------------------------------------

--- Headers for the sandbox itself. Not in info, which operators look at.
function Backend:_sandbox_headers(info)
  local headers = {}
  for name, value in pairs(type(info.headers) == "table" and info.headers or {}) do headers[name] = value end
  if self.options.sandbox_api_key then headers["X-AIO-API-Key"] = self.options.sandbox_api_key end
  return headers
end

--- Remembers that a sandbox has answered just now.
function Backend:_note_answer(info)
  local key = info.generation or info.url
  if self.answered[key] == nil then self.answered_count = self.answered_count + 1 end
  if self.answered_count > ANSWERED_MOST then self.answered, self.answered_count = {}, 1 end
  self.answered[key] = io.now()
end

--- The one gate of all ways to hand a sandbox out: made, found, reclaimed or adopted, it has answered a moment ago.
function Backend:_gate(info)
  local at = self.answered[info.generation or info.url]
  if at and io.now() - at < ANSWERED_FRESH then return end
  if self:ready(info, self:_patience()) then return end
  fail(("sandbox %s runs but does not answer"):format(info.sandbox_id), "silent", info.sandbox_id)
end

--- Whether its server answers, asked for as long as `seconds`.
---@param info table
---@param seconds number
---@return boolean
function Backend:ready(info, seconds)
  id_of(info, "ready")
  if type(info.url) ~= "string" then return false end
  local deadline, interval = io.now() + seconds, self.runtime.ready_interval or 1
  while true do
    local left = deadline - io.now()
    local limit = math.max(0.05, math.min(PER_TRY, left))
    local response, err = io.http {
      method = "GET", url = info.url .. "/v1/sandbox", headers = self:_sandbox_headers(info), timeout = limit,
      connect_timeout = limit, max_body = ONE_ANSWER, ca_file = self.options.ca_file,
    }
    if response and response.status == 200 then
      self:_note_answer(info)
      return true
    end
    if err and (err.kind == "cancelled" or err.kind == "timeout") then error(err, 0) end
    left = deadline - io.now()
    if left <= 0 then return false end
    io.sleep(math.min(interval, left))
  end
end

--- How long a sandbox that should be there may take to answer, within the time that the caller has.
function Backend:_patience()
  local left = io.deadline()
  local own = self.runtime.discover_timeout or 5
  return left and math.max(0.05, math.min(own, left - 0.2)) or own
end

--- A running sandbox of that id that answers, made by whichever process; nil when there is none. One that is still starting
--- is none: the create that follows is answered with it, and waits until it is ready.
---@param id string
---@return table?
function Backend:discover(id)
  local s = self:_get(check_id(id))
  if not s or s.status ~= "Running" or not s.url then return nil end
  local info = self:_info(s)
  return self:ready(info, self:_patience()) and info or nil
end

--- Whether that generation runs. Nothing found is looked up once more, at the Pod: a 404 of somebody in between must not
--- pass for a death.
---@param info table
---@return boolean
function Backend:alive(info)
  local id = id_of(info, "alive")
  local s = self:_get(id)
  if not s then
    self:_presence(id)
    return false
  end
  if s.status ~= "Running" and not DEAD[s.status or ""] then
    fail(("the state of sandbox %s is unknown: the provisioner calls it %s"):format(id, s.status or "nothing"), "unknown_status", id)
  elseif info.generation and not s.generation then
    fail(("the provisioner does not say which Pod is behind sandbox %s"):format(id), "unknown_generation", id)
  end
  return s.status == "Running" and (info.generation == nil or s.generation == info.generation)
end

--- What is there now; nil = the Pod is certainly gone. Pending, Terminating and without a Service are present.
---@param id string
---@param _info table?
---@return table?
function Backend:inspect(id, _info)
  local present, generation = self:_presence(check_id(id))
  if not present then return nil end
  return self:_info(self:_get(id) or { sandbox_id = id, generation = generation, status = "Unreachable" })
end

--- All that the provisioner has.
---@return table[]
function Backend:list()
  local what = "listing the sandboxes"
  local object, missing = self:_read("list", nil, what)
  if not object then self:_refused(what, missing) end
  local found, skipped = wire.read_list(io.json, object)
  if not found then unreadable(what, skipped) end
  if skipped > 0 then io.log("warn", "list_entries_skipped", { entries = skipped, reason = "they cannot be read" }) end
  local infos = {}
  for _, s in ipairs(found) do
    if s.status ~= "Terminating" then infos[#infos + 1] = self:_info(s) end -- that one ends already
  end
  return infos
end

--- What the deployment can do. Asked each time: the core remembers the answer for all its callers.
---@return { lark_cli_init_image: boolean, lark_cli_broker_image: boolean }
function Backend:probe()
  local what = "asking what the provisioner can do"
  local object, missing = self:_read("capabilities", nil, what)
  if not object then self:_refused(what, missing) end
  local found, problem = wire.read_capabilities(io.json, object)
  return found or unreadable(what, problem)
end

-- ---- ending ---------------------------------------------------------------------------------------------------

--- Whether another Pod than info's is behind the id now. A server that knows If-Match checks the same once more.
function Backend:_superseded(info)
  if not info.generation then return false end
  if type(info.seen_at) == "number" and io.now() >= info.seen_at and io.now() - info.seen_at < SEEN_FRESH then return false end
  local s = self:_get(info.sandbox_id)
  local present, generation = s ~= nil, s and s.generation
  if not s then present, generation = self:_presence(info.sandbox_id) end -- one without a Service, or that ends, is seen there only
  return present and generation ~= nil and generation ~= info.generation
end

--- Waits until the Pod is gone: it ends gracefully, and a stop that is not over yet counts as one that failed. A look that
--- fails ends the wait; whether it is gone is `inspect`'s to say.
function Backend:_wait_gone(info)
  local seconds = math.min(self.options.gone_timeout, (io.deadline() or math.huge) - 1) -- an end of the wait, not of the stop
  local deadline, pause = io.now() + seconds, SEARCH_PAUSE / 2
  while io.now() < deadline do
    io.sleep(math.max(0, math.min(pause, deadline - io.now())))
    pause = math.min(pause * 2, SEARCH_PAUSE_MAX)
    local fine, present, generation = pcall(self._presence, self, info.sandbox_id)
    if not fine or not present or (generation and info.generation and generation ~= info.generation) then return end
  end
end

--- Asks for the end of that generation, and waits a while for it. Accepted is not gone: `inspect` says when it is.
---@param info table
---@param _opts table?
---@return boolean
function Backend:destroy(info, _opts)
  local id = id_of(info, "destroy")
  local what = "stopping sandbox " .. id
  if self:_superseded(info) then
    io.log("info", "generation_gone", { sandbox_id = id, generation = info.generation, reason = "another Pod has its id" })
    return true
  end
  local response, err = self:_send("delete", id, info.generation)
  if not response then
    errors.raise(err.kind, what .. ": " .. tostring(err.message), { reason = err.reason, sandbox_id = id })
  end
  local status = response.status
  if status >= 200 and status <= 299 then
    self:_wait_gone(info)
    return true
  end
  if status == 404 and wire.says_missing(io.json, response.body, id) then return true end
  if status == 412 then
    io.log("info", "generation_gone", { sandbox_id = id, generation = info.generation, reason = "the provisioner says so" })
    return true
  end
  return self:_refused(what, response, id)
end

--- Nothing is left outside a Pod: the provisioner removes its Service with it.
function Backend:finish(_id, _info) return true end

-- ---- speaking to it -------------------------------------------------------------------------------------------

--- The answer to a command was lost: where the provisioner says that the Pod was killed for its memory, that is what happened.
function Backend:_post_mortem(info, result)
  local fine, s = pcall(self._get, self, info.sandbox_id)
  if fine and s and s.status == "OOMKilled" and (info.generation == nil or s.generation == info.generation) then
    result.outcome, result.reason, result.exit_code, result.signal, result.session_reset = "oom", "sandbox", 137, 9, true
  end
  return result
end

--- A client of that sandbox; it carries what the sandbox attested when it was admitted.
---@param info table
---@param opts { command_timeout: number?, token: string?, own: boolean? }?   the token: for an image whose server is
---  paddock-guest, which wants one
---@return paddock.AioClient
function Backend:connect(info, opts)
  local id = id_of(info, "connect")
  if type(info.url) ~= "string" then
    errors.raise("lost", ("sandbox %s has no address"):format(id), { reason = "no_endpoint", sandbox_id = id })
  end
  if not opts or opts.own ~= false then self:_gate(info) end
  local client = aio.new {
    url = info.url, headers = self:_sandbox_headers(info), ca_file = self.options.ca_file, token = opts and opts.token,
    command_timeout = opts and opts.command_timeout or self.runtime.command_timeout,
  }
  client.sandbox_id = id
  client.attestation = type(info.attestation) == "table" and info.attestation or {}
  local exec = client.exec
  function client.exec(this, req)
    local result = exec(this, req)
    if result.outcome == "unknown" and result.reason == "response" then return self:_post_mortem(info, result) end
    return result
  end
  return client
end

return M
