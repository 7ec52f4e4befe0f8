--- A client of the all-in-one (AIO) sandbox HTTP API: an agent image's server, or paddock-guest's plane of that name.
---
--- It decides one thing that everything above leans on: whether a command certainly did not run (an error is raised),
--- certainly ended (an outcome), or may have run (outcome "unknown"). It never sends anything twice, it chooses neither
--- plane nor session, and it keeps no fences: the core does, per generation, since they outlive a client.
local common = require "paddock.client.common"
local errors = require "paddock.errors"

local check_seconds, check_token, invalid = common.check_seconds, common.check_token, common.invalid
local percent, whole = common.percent, common.whole

local M = {}

---@class paddock.AioOptions: paddock.ClientOptions
---@field fenced? boolean            the server has paddock's fence and doom routes
---@field file_timeout? number       seconds for one file call (60)

---@class paddock.ExecRequest
---@field name? string           by which the command can be cancelled, where the client can
---@field plane "shell"|"bash"
---@field command string
---@field session? string            an explicit session; nil = the plane's default shell
---@field env? table<string, string> bash plane only, where it travels in a field of its own
---@field cwd? string
---@field stdin? string              only an empty one: this API has no way to end an input
---@field timeout? number            seconds

---@class paddock.ExecResult
---@field outcome "completed"|"signalled"|"hard_timeout"|"oom"|"cancelled"|"unknown"
---@field reason? string             of "unknown": "response"
---@field detail? string             of "unknown": what was seen, for a person
---@field exit_code? integer
---@field signal? integer
---@field stdout string
---@field stderr string
---@field truncated boolean
---@field duration number            seconds
---@field session_reset boolean      the session is a new one although the caller had one of that name

---@class paddock.AioClient: paddock.Client
---@field no_bash boolean            the server answered that it has no bash plane
local Client = { _send = common.send, _decode = common.decode }
Client.__index = Client

local SESSION_LIMIT = 5               -- seconds, to make a session or to clean one up (J11)
local DOOM_LIMIT = 1                  -- seconds; a guest that takes longer is treated as dead
local GRACE = 5                       -- seconds between a command's limit and ours
local MIN_NO_CHANGE = 600             -- the server's own 120 s would call a silent build finished
local SHELL_CUT = 30000               -- characters after which the shell plane cuts its output
-- What an image answers, as ordinary output and with status 200, once two commands met in one shell.
local CORRUPTED = "'ErrorObservation' object has no attribute 'exit_code'"

local EXEC_ROUTE = { shell = "/v1/shell/exec", bash = "/v1/bash/exec" }

-- What a shell session (a pty) and a bash session (pipes) call their ends. What is not listed may still be running.
local SHELL_STATUS = { completed = "completed", hard_timeout = "hard_timeout", terminated = "completed" }
local BASH_STATUS = { completed = "completed", timed_out = "hard_timeout", killed = "signalled" }

--- A JSON integer where it is one: some servers take no fractions.
local function plain(seconds)
  return math.tointeger(seconds) or seconds
end

---@param text any
---@param what string
local function check_text(text, what)
  if not utf8.len(common.check_text(text, what)) then
    invalid(what .. " must be valid UTF-8: this API carries it as JSON")
  end
  return text
end

local function check_path(path)
  return common.check_absolute(check_text(path, "path"))
end

---@param opts paddock.AioOptions
---@return paddock.AioClient
function M.new(opts)
  local self = common.new(Client, opts)
  self.fenced = opts.fenced == true
  self.file_timeout = check_seconds(opts.file_timeout or 60, "file_timeout")
  self.no_bash = false
  return self
end

-- ---- answers --------------------------------------------------------------------------------------------------

---@param answer table?
local function said(answer, fallback)
  for _, key in ipairs { "message", "error", "detail" } do
    local text = answer and answer[key]
    if type(text) == "string" and text ~= "" then
      return text
    end
  end
  return fallback
end

--- Raises what a 4xx answer means. What it refuses it has not done.
---@param response table
---@param answer table?   its JSON
---@param what string     what was asked for, for the message
local function refused(response, answer, what)
  local status = response.status
  local text = ("%s: HTTP %d: %s"):format(what, status, said(answer, "no reason given"))
  local code = answer and answer.error
  if status == 409 and common.LOST[code] then
    errors.raise("lost", what .. ": the sandbox has a newer owner (" .. code .. ")", { reason = code })
  elseif status == 404 then
    -- A missing session has the envelope; a missing route has the framework's own 404 or some HTML.
    if answer and answer.success == false then
      errors.raise("backend_error", text, { reason = "no_session" })
    end
    errors.raise("unsupported", what .. ": this server has no such route", { reason = "no_route" })
  elseif status == 422 then
    invalid(text)
  elseif status == 400 and said(answer, ""):find("session limit", 1, true) then
    errors.raise("capacity_exhausted", text, { reason = "session_limit" })
  end
  errors.raise("backend_error", text, { reason = "http_" .. status })
end

local function is_refusal(status)
  return status >= 400 and status < 500
end

--- Raises the transport's error for a request that certainly was not sent.
local function not_sent(err, what)
  errors.raise(err.kind or "backend_error", what .. ": " .. tostring(err.message), { reason = err.reason, cause = err })
end

-- ---- commands -------------------------------------------------------------------------------------------------

---@return paddock.ExecResult
local function unknown(result, detail)
  result.outcome, result.reason, result.detail = "unknown", "response", detail
  result.exit_code, result.signal = nil, nil
  return result
end

--- The body of an exec call; its limits are row J11's.
---@param req paddock.ExecRequest
---@param limit number
function Client:_exec_body(req, limit)
  local body = { command = check_text(req.command, "command"), hard_timeout = plain(limit) }
  if req.cwd ~= nil then
    body.exec_dir = check_text(req.cwd, "cwd")
  end
  local session = req.session ~= nil and check_text(req.session, "session") or nil
  if req.plane == "shell" then
    body.id = session
    body.no_change_timeout = math.max(MIN_NO_CHANGE, math.ceil(limit + GRACE))
    if req.cwd ~= nil then
      body.strict = true             -- else a missing directory means: silently somewhere else
    end
  else
    body.session_id = session
    body.max_output_length = self.max_output
    if req.env and next(req.env) ~= nil then
      body.env = req.env
    end
  end
  return body
end

---@param req paddock.ExecRequest
function Client:_check_exec(req)
  if type(req) ~= "table" or EXEC_ROUTE[req.plane] == nil then
    invalid('plane must be "shell" or "bash"')
  end
  if req.env ~= nil then
    common.check_env(req.env, check_text)
    if req.plane == "shell" and next(req.env) ~= nil then
      invalid("env needs the bash plane: a shell session would carry it in the command's text")
    end
  end
  if req.stdin ~= nil and req.stdin ~= "" then
    errors.raise("unsupported", "this server has no way to pass standard input; write a file and redirect it")
  end
  if req.plane == "bash" and self.no_bash then
    errors.raise("unsupported", "this server has no bash plane", { reason = "no_route" })
  end
end

--- Reads status and outputs of `data` into `result`.
---@param req paddock.ExecRequest
---@param data table
---@param result paddock.ExecResult
---@return paddock.ExecResult
local function read_exec(req, data, result)
  local shell = req.plane == "shell"
  local out = shell and data.output or data.stdout
  result.stdout = type(out) == "string" and out or ""
  result.stderr = not shell and type(data.stderr) == "string" and data.stderr or ""
  result.session_reset = data.session_reset == true
    or (req.session ~= nil and type(data.session_id) == "string" and data.session_id ~= req.session)
  if shell then
    result.truncated = data.truncated == true or (utf8.len(result.stdout) or #result.stdout) >= SHELL_CUT
  else
    -- The offsets count what was printed; the texts, what was kept of it. paddock-guest also says it.
    result.truncated = data.truncated == true or (whole(data.offset) or 0) > #result.stdout
      or (whole(data.stderr_offset) or 0) > #result.stderr
  end
  local code = whole(data.exit_code)
  local outcome = (shell and SHELL_STATUS or BASH_STATUS)[data.status]
  if shell and result.stdout:match("^%s*(.-)%s*$") == CORRUPTED then
    return unknown(result, "the session is corrupted")
  elseif outcome == nil then
    return unknown(result, "status " .. tostring(data.status))
  elseif outcome == "completed" and code == nil then
    return unknown(result, "status " .. tostring(data.status) .. " without an exit code")
  end
  if data.status == "terminated" and code > 128 then
    outcome = "signalled"            -- the shell itself was killed
  end
  result.outcome, result.exit_code = outcome, code
  if outcome == "hard_timeout" then
    result.exit_code = 124
  elseif outcome == "signalled" then
    if code and code > 128 then
      result.signal = code - 128
    elseif code and code < 0 then
      result.signal = -code
    else
      result.signal = 9              -- the plane's kill, whose last word is SIGKILL
    end
    result.exit_code = 128 + result.signal
  end
  if data.oom == true and outcome ~= "hard_timeout" then
    result.outcome = "oom"           -- paddock-guest has seen the kernel do it
  end
  return result
end

--- Runs a command and waits for its end. Raises only when it certainly did not run.
---@param req paddock.ExecRequest
---@return paddock.ExecResult
function Client:exec(req)
  self:_check_exec(req)
  local limit = check_seconds(req.timeout or self.command_timeout, "timeout")
  local started = self.io.now()
  local response, err = self:_send {
    method = "POST", path = EXEC_ROUTE[req.plane], json = self:_exec_body(req, limit), limit = math.ceil(limit + GRACE),
  }
  local result = { stdout = "", stderr = "", truncated = false, session_reset = false, duration = self.io.now() - started }
  if not response then
    if err.failure == "not_sent" then
      not_sent(err, "exec")
    end
    return unknown(result, tostring(err.message or err.reason))
  end
  local answer = self:_decode(response.body)
  if is_refusal(response.status) then
    if response.status == 404 and req.plane == "bash" and not (answer and answer.success == false) then
      self.no_bash = true
    end
    refused(response, answer, "exec")
  end
  if response.status ~= 200 or not answer or answer.success == false or type(answer.data) ~= "table" then
    return unknown(result, ("HTTP %d: %s"):format(response.status, said(answer, "an answer that cannot be read")))
  end
  return read_exec(req, answer.data, result)
end

-- ---- sessions -------------------------------------------------------------------------------------------------

--- Makes a session. A definite failure (refused, 4xx) raises its own kind; of any other nobody knows whether the session
--- is there: outcome_unknown, reason session_creation.
---@param plane "shell"|"bash"
---@param id string
---@return string id   as the server names it
function Client:open_session(plane, id)
  if EXEC_ROUTE[plane] == nil then
    invalid('plane must be "shell" or "bash"')
  end
  check_text(id, "session")
  local body = plane == "shell" and { id = id } or { session_id = id }
  local response, err = self:_send {
    method = "POST", path = "/v1/" .. plane .. "/sessions/create", json = body, limit = SESSION_LIMIT,
  }
  if not response and err.failure == "not_sent" then
    not_sent(err, "session creation")
  end
  local answer = response and self:_decode(response.body)
  if response and is_refusal(response.status) then
    refused(response, answer, "session creation")
  end
  local data = answer and answer.data
  if response and response.status == 200 and answer and answer.success ~= false and type(data) == "table" then
    return type(data.session_id) == "string" and data.session_id or id
  end
  local seen = response and ("HTTP %d: %s"):format(response.status, said(answer, "an answer that cannot be read"))
    or tostring(err.message or err.reason)
  errors.raise("outcome_unknown", "whether session " .. id .. " was made is unknown: " .. seen, { reason = "session_creation" })
end

--- Cleans a session up, at best effort: a failure is an answer, since nothing depends on it.
---@return boolean done      also when it was not there
---@return string? message
function Client:close_session(plane, id)
  if EXEC_ROUTE[plane] == nil then
    invalid('plane must be "shell" or "bash"')
  end
  check_text(id, "session")
  local call = plane == "shell" and { method = "DELETE", path = "/v1/shell/sessions/" .. percent(id) }
    or { method = "POST", path = "/v1/bash/sessions/" .. percent(id) .. "/close", body = "", type = "application/json" }
  call.limit = SESSION_LIMIT
  local response, err = self:_send(call)
  if not response then
    return false, tostring(err.message or err.reason)
  end
  if response.status == 200 or response.status == 404 then
    return true
  end
  return false, ("HTTP %d: %s"):format(response.status, said(self:_decode(response.body), "no reason given"))
end

-- ---- files ----------------------------------------------------------------------------------------------------

--- Sends a file call and deals with all that is not an answer to it. Returns the response.
---@param what string
---@param changes boolean   whether a lost answer leaves something unknown
function Client:_file_call(call, what, changes)
  call.limit = self.file_timeout
  local response, err = self:_send(call)
  if not response then
    if err.failure == "not_sent" or not changes then
      not_sent(err, what)
    end
    errors.raise("outcome_unknown", what .. ": " .. tostring(err.message or err.reason), { reason = "response", cause = err })
  end
  if response.status == 200 then
    return response
  end
  local answer = self:_decode(response.body)
  local data = answer and type(answer.data) == "table" and answer.data or nil
  if data and type(data.error_type) == "string" then
    errors.raise("io_error", what .. ": " .. said(data, data.error_type), { reason = data.error_type })
  elseif is_refusal(response.status) then
    if response.status == 404 and call.method == "GET" then
      errors.raise("io_error", what .. ": not found", { reason = "not_found" })
    end
    refused(response, answer, what)
  end
  errors.raise(changes and "outcome_unknown" or "backend_error",
    ("%s: HTTP %d: %s"):format(what, response.status, said(answer, "no reason given")), { reason = "response" })
end

--- The `data` of a file call's envelope; raises io_error when that says that it failed.
function Client:_file_data(response, what)
  local answer = self:_decode(response.body)
  local data = answer and type(answer.data) == "table" and answer.data or nil
  if not answer or (answer.success ~= false and not data) then
    errors.raise("backend_error", what .. ": the answer cannot be read", { reason = "protocol" })
  elseif answer.success == false then
    local reason = data and type(data.error_type) == "string" and data.error_type or "io_error"
    errors.raise("io_error", what .. ": " .. said(data, said(answer, reason)), { reason = reason })
  end
  return data
end

--- The bytes of a file. By download, since the API's own `read` is for text.
---@param path string
---@return string bytes
function Client:read(path)
  check_path(path)
  return self:_file_call({ method = "GET", path = "/v1/file/download?path=" .. percent(path) }, "read " .. path, false).body
end

--- A boundary that does not occur in `bytes`.
local function boundary_for(bytes)
  local mark
  repeat
    mark = ("----paddock%08x%08x"):format(math.random(0, 0xffffffff), math.random(0, 0xffffffff))
  until not bytes:find(mark, 1, true)
  return mark
end

--- Writes a file. By upload, which carries raw bytes.
---@param path string
---@param bytes string
---@param opts? { no_overwrite: boolean? }
---@return boolean
function Client:write(path, bytes, opts)
  check_path(path)
  if type(bytes) ~= "string" then
    invalid("bytes must be a string")
  end
  if opts and opts.no_overwrite then
    errors.raise("unsupported", "this server cannot refuse to overwrite a file", { reason = "no_overwrite" })
  end
  local mark = boundary_for(bytes)
  local body = table.concat {
    "--", mark, '\r\nContent-Disposition: form-data; name="path"\r\n\r\n', path,
    "\r\n--", mark, '\r\nContent-Disposition: form-data; name="file"; filename="blob"\r\n',
    "Content-Type: application/octet-stream\r\n\r\n", bytes, "\r\n--", mark, "--\r\n",
  }
  local what = "write " .. path
  local response = self:_file_call({
    method = "POST", path = "/v1/file/upload", body = body, type = "multipart/form-data; boundary=" .. mark,
  }, what, true)
  local data = self:_file_data(response, what)
  local size = whole(data.file_size)
  if data.success == false or (size and size ~= #bytes) or (type(data.file_path) == "string" and data.file_path ~= path) then
    errors.raise("io_error", what .. ": the server stored something else", { reason = "io_error" })
  end
  return true
end

--- The entries of a directory: { name, path, is_directory, size, modified_time }.
---@param path string
---@return table[]
function Client:list(path)
  check_path(path)
  local what = "list " .. path
  local response = self:_file_call({
    method = "POST", path = "/v1/file/list", json = { path = path, recursive = false, show_hidden = true, include_size = true },
  }, what, false)
  local data = self:_file_data(response, what)
  if type(data.files) ~= "table" then
    errors.raise("backend_error", what .. ": the answer has no files", { reason = "protocol" })
  end
  return data.files
end

-- ---- tokens ---------------------------------------------------------------------------------------------------

function Client:_need_fence(what)
  if not self.fenced then
    errors.raise("unsupported", what .. ": this server does not know tokens")
  end
end

--- A call of the token routes: true, or it raises (`lost` = refused, because somebody else owns the sandbox).
function Client:_token_call(call, what)
  call.body = ""
  local response, err = self:_send(call)
  if not response then
    if err.failure == "not_sent" then
      not_sent(err, what)
    end
    errors.raise("outcome_unknown", what .. ": " .. tostring(err.message or err.reason), { reason = "response", cause = err })
  end
  if response.status == 200 then
    return true
  end
  local answer = self:_decode(response.body)
  if is_refusal(response.status) then
    refused(response, answer, what)
  end
  errors.raise("outcome_unknown", ("%s: HTTP %d"):format(what, response.status), { reason = "response" })
end

--- Makes `token` the smallest one that the guest accepts; later calls of this client carry it.
---@param token integer|string
function Client:fence(token)
  self:_need_fence("fence")
  local text = check_token(token, "token")
  self:_token_call({ method = "POST", path = "/v1/paddock/fence", token = text, limit = SESSION_LIMIT }, "fence")
  self.token = text
  return true
end

--- Makes the guest refuse every later request, provided that `expected` is the largest token that it has seen.
--- Over a connection of its own, so that it does not wait behind a command.
---@param expected integer|string
---@param token integer|string
function Client:doom(expected, token)
  self:_need_fence("doom")
  return self:_token_call({
    method = "POST", path = "/v1/paddock/doom", token = check_token(token, "token"), limit = DOOM_LIMIT, fresh = true,
    headers = { ["X-Paddock-Expected"] = check_token(expected, "expected") },
  }, "doom")
end

--- Ends this client; the sandbox goes on.
function Client:close()
  self.closed = true
end

return M
