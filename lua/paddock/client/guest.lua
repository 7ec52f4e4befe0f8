--- A client of paddock-guest's own plane: commands as byte frames, files as raw bytes, tokens on every call.
---
--- What it decides is whether a command certainly did not run (an error is raised), certainly ended (an outcome), or may
--- have run (outcome "unknown"). It never sends anything twice. Which plane and session a command gets is the core's
--- choice, and the fences of sessions are the core's too, since they outlive a client.
local common = require "paddock.client.common"
local errors = require "paddock.errors"

local check_seconds, check_text, check_token = common.check_seconds, common.check_text, common.check_token
local invalid, whole = common.invalid, common.whole

local M = {}

---@class paddock.GuestOptions: paddock.ClientOptions
---@field file_timeout? number          seconds for one file call (10, and 1 more for each 8 MiB)
---@field oom_kills? fun(): integer?    how many processes the kernel has killed for memory, as seen from outside
---@field gone? fun(): boolean          whether the guest has certainly ended; asked when an answer was lost
---@field on_close? fun()               called once, by close or collection

---@class paddock.GuestClient: paddock.Client
local Client = { _send = common.send, _decode = common.decode }
Client.__index = Client

local SHORT_LIMIT = 5       -- seconds, for tokens and sessions
local SESSION_GRACE = 1     -- seconds beyond the command's limit for the session that it wants
local CLOSE_LIMIT = 2       -- seconds for closing a session, on which nothing depends
local FILE_MAX = (64 << 20) - (64 << 10) -- bytes of a file in one call; core/box.c
local FILE_LIMIT, FILE_RATE = 10, 8 << 20 -- seconds for a file call, and how many bytes have one more second
local DOOM_LIMIT = 1        -- seconds; a guest that takes longer is treated as dead
local GRACE = 5             -- seconds between a command's limit and ours
local STDOUT, STDERR, END = 1, 2, 3

local OUTCOMES = { completed = true, signalled = true, hard_timeout = true, oom = true, cancelled = true }
-- What the caller asked for was wrong; anything else that a guest refuses is its own trouble.
local CALLERS_FAULT = { invalid_cwd = true, invalid_path = true, invalid_env = true, invalid_argument = true, too_large = true }

--- A path inside a query: its slashes stay.
local function percent_path(path)
  return (common.percent(path):gsub("%%2F", "/"))
end

local function check_path(path)
  return common.check_absolute(check_text(path, "path"))
end

---@param opts paddock.GuestOptions
---@return paddock.GuestClient
function M.new(opts)
  local self = common.new(Client, opts)
  self.file_timeout = opts.file_timeout and check_seconds(opts.file_timeout, "file_timeout")
  self.on_close, self.oom_kills, self.gone = opts.on_close, opts.oom_kills, opts.gone
  return self
end

-- ---- answers --------------------------------------------------------------------------------------------------

--- Raises what a refusal says. The guest refuses before it does anything, so nothing has happened.
---@param fault table   { error: string, message: string? }
---@param what string   what was asked for
---@param kind string   of a refusal that is neither the caller's fault nor a lost sandbox
local function refused(fault, what, kind)
  local code = fault.error
  if common.LOST[code] then
    errors.raise("lost", ("%s: the sandbox is no longer this holder's (%s)"):format(what, code), { reason = code })
  end
  local message = ("%s: %s"):format(what, type(fault.message) == "string" and fault.message or code)
  errors.raise(CALLERS_FAULT[code] and "invalid_argument" or kind, message, { reason = code })
end

--- A guest's refusal in a response, or nil.
function Client:_fault(response)
  if response.status < 400 then return nil end
  local fault = self:_decode(response.body)
  if fault and type(fault.error) == "string" then return fault end
  if response.status < 500 then
    return { error = response.status == 401 and "unauthorized" or "refused", message = "HTTP " .. response.status }
  end
  return nil                -- 5xx of somebody who does not say what it did
end

local function not_sent(err, what)
  errors.raise(err.kind or "backend_error", what .. ": " .. tostring(err.message), { reason = err.reason })
end

--- Sends a call that is either done or refused. What may have happened is outcome_unknown.
---@param call paddock.ClientCall
---@param what string
---@param kind string      of a refusal
---@param changes boolean  whether it matters that nobody knows
---@param reason string?   of outcome_unknown
function Client:_call(call, what, kind, changes, reason)
  local response, err = self:_send(call)
  return self:_answered(response, err, what, kind, changes, reason)
end

function Client:_answered(response, err, what, kind, changes, reason)
  if not response then
    if err.failure == "not_sent" or not changes then not_sent(err, what) end
    errors.raise("outcome_unknown", what .. ": " .. tostring(err.message), { reason = reason or "response" })
  end
  if response.status == 200 then return response end
  local fault = self:_fault(response)
  if fault then refused(fault, what, kind) end
  errors.raise(changes and "outcome_unknown" or "backend_error", ("%s: HTTP %d"):format(what, response.status),
    { reason = changes and (reason or "response") or "protocol" })
end

-- ---- commands -------------------------------------------------------------------------------------------------

local function frame(kind, bytes)
  return kind .. string.pack(">s4", bytes)
end

---@param req paddock.ExecRequest
---@param limit number
function Client:_exec_body(req, limit)
  local parts = { frame("c", check_text(req.command, "command")) }
  for name, value in pairs(req.env == nil and {} or common.check_env(req.env, check_text)) do
    parts[#parts + 1] = frame("e", name .. "=" .. value)
  end
  if req.cwd ~= nil then
    parts[#parts + 1] = frame("d", check_text(req.cwd, "cwd"))
  end
  -- A session is a shell that lives on; on the bash plane every command is a process of its own.
  if req.plane == "shell" and req.session ~= nil then
    parts[#parts + 1] = frame("s", check_text(req.session, "session"))
  end
  parts[#parts + 1] = frame("t", ("%.3f"):format(limit))
  parts[#parts + 1] = frame("m", ("%d"):format(self.max_output))
  if req.stdin ~= nil and type(req.stdin) ~= "string" then
    invalid("stdin must be a string")
  end
  parts[#parts + 1] = frame("0", "")
  parts[#parts + 1] = req.stdin
  return table.concat(parts)
end

--- Takes an answer's frames apart while it comes, and passes what the command prints on.
---@class paddock.FrameReader
---@field io table
---@field most integer    bytes that it takes
---@field size integer    bytes that have come
---@field out string[]
---@field err string[]
---@field last string?    the last frame's text
---@field rest string     the start of a frame that is not complete
---@field raw string[]?   what has come in place of frames: a refusal
local Reader = {}
Reader.__index = Reader

---@param io table
---@param most integer
---@return paddock.FrameReader
local function new_reader(io, most)
  return setmetatable({ io = io, most = most, size = 0, out = {}, err = {}, rest = "" }, Reader)
end

---@param bytes string
---@return boolean go_on
function Reader:take(bytes)
  if self.size == 0 and bytes:byte() > END then self.raw = {} end
  self.size = self.size + #bytes
  if self.raw then
    self.raw[#self.raw + 1] = bytes
    return self.size <= self.most
  end
  local at = 1
  if self.rest ~= "" then bytes = self.rest .. bytes end
  while #bytes - at + 1 >= 8 do
    local kind, length = string.unpack(">Bxxx I4", bytes, at)
    if #bytes - at + 1 < 8 + length then break end
    local piece = bytes:sub(at + 8, at + 7 + length)
    if kind == END then
      self.last = piece
    elseif kind == STDOUT or kind == STDERR then
      local list = kind == STDOUT and self.out or self.err
      list[#list + 1] = piece
      self.io.output(kind, piece)
    end
    at = at + 8 + length
  end
  self.rest = bytes:sub(at)
  return self.size <= self.most
end

--- As read_frames.
function Reader:frames(client)
  return table.concat(self.out), table.concat(self.err), self.last and client:_decode(self.last) or nil
end

--- Splits an answer into its streams. The third result is the last frame's object, nil when the answer is cut off.
local function read_frames(self, bytes)
  local out, err, at = {}, {}, 1
  while #bytes - at + 1 >= 8 do
    local kind, length = string.unpack(">Bxxx I4", bytes, at)
    local piece = bytes:sub(at + 8, at + 7 + length)
    if kind == END then
      return table.concat(out), table.concat(err), #piece == length and self:_decode(piece) or nil
    elseif kind == STDOUT then
      out[#out + 1] = piece
    elseif kind == STDERR then
      err[#err + 1] = piece
    else
      break
    end
    at = at + 8 + length
  end
  return table.concat(out), table.concat(err), nil
end

--- An answer was lost. Where the guest itself fell to the memory limit, the command ended with it, and that is known.
---@param result paddock.ExecResult
---@param before integer?  oom kills before the command
---@return paddock.ExecResult
function Client:_post_mortem(result, before)
  if before and self.gone and self.gone() and (self.oom_kills() or 0) > before then
    result.outcome, result.reason, result.exit_code, result.signal = "oom", "sandbox", 137, 9
    result.session_reset = true
  end
  return result
end

--- Runs a command and waits for its end. Raises only when it certainly did not run.
---@param req paddock.ExecRequest
---@return paddock.ExecResult
function Client:exec(req)
  if type(req) ~= "table" or (req.plane ~= "shell" and req.plane ~= "bash") then
    invalid('plane must be "shell" or "bash"')
  end
  local limit = check_seconds(req.timeout or self.command_timeout, "timeout")
  local body = self:_exec_body(req, limit)
  local started, oom_before = self.io.now(), self.oom_kills and self.oom_kills()
  local most = 2 * self.max_output + (1 << 20)
  local reader = self.io.output and self.io.output() and new_reader(self.io, most) or nil
  local response, err = self:_send {
    method = "POST", path = "/v1/paddock/exec", body = body, limit = limit + GRACE, max_body = most,
    headers = { ["X-Paddock-Command"] = req.name }, on_body = reader and function(bytes) return reader:take(bytes) end,
  }
  local result = { outcome = "unknown", reason = "response", stdout = "", stderr = "", truncated = false,
                   session_reset = false, duration = self.io.now() - started }
  if not response then
    if err.failure == "not_sent" then not_sent(err, "exec") end
    result.detail = tostring(err.message)
    if reader then result.stdout, result.stderr = reader:frames(self) end
    return self:_post_mortem(result, oom_before)
  end
  if reader then response.body = table.concat(reader.raw or {}) end
  local fault = self:_fault(response)
  if fault and fault.error == "cancelled" then
    result.outcome, result.reason = "cancelled", nil
    return result
  end
  if fault then refused(fault, "exec", "backend_error") end
  if response.status ~= 200 then
    result.detail = "HTTP " .. response.status
    return result
  end
  local last
  if reader then
    result.stdout, result.stderr, last = reader:frames(self)
  else
    result.stdout, result.stderr, last = read_frames(self, response.body)
  end
  if not last then
    result.detail = "the answer is cut off"
    return self:_post_mortem(result, oom_before)
  end
  if type(last.error) == "string" and not OUTCOMES[last.outcome] then
    refused(last, "exec", "backend_error")
  elseif not OUTCOMES[last.outcome] then
    result.detail = "outcome " .. tostring(last.outcome)
    return result
  end
  result.outcome, result.reason = last.outcome, nil
  result.exit_code = whole(last.exit_code)
  result.signal = whole(last.signal) ~= 0 and whole(last.signal) or nil
  result.truncated = last.truncated == true
  result.session_reset = last.session_reset == true
  result.duration = type(last.duration) == "number" and last.duration or result.duration
  return result
end

--- Ends the command that was sent with `name`; its own answer says when it has ended, and how.
---@param name string
---@return boolean found   false = it is not there: not yet, or no longer
function Client:cancel(name)
  local response = self:_call({ method = "POST", path = "/v1/paddock/cancel/" .. common.percent(check_text(name, "name")), body = "",
    limit = SHORT_LIMIT }, "cancel", "backend_error", false)
  local answer = self:_decode(response.body)
  return answer ~= nil and answer.cancelled == true
end

-- ---- sessions -------------------------------------------------------------------------------------------------

local function check_plane(plane)
  if plane ~= "shell" and plane ~= "bash" then
    invalid('plane must be "shell" or "bash"')
  end
  return plane
end

--- Makes a shell session. On the bash plane there is nothing to make.
---@param plane "shell"|"bash"
---@param id string
---@param seconds number?   the limit of the command that wants it
---@return string id
function Client:open_session(plane, id, seconds)
  check_text(id, "session")
  if check_plane(plane) == "bash" then return id end
  local limit = math.min(SHORT_LIMIT, check_seconds(seconds or SHORT_LIMIT, "timeout") + SESSION_GRACE)
  self:_call({ method = "POST", path = "/v1/paddock/sessions/" .. common.percent(id), body = "", limit = limit },
    "session creation", "backend_error", true, "session_creation")
  return id
end

--- Ends a shell session, at best effort: nothing depends on it, so a failure is an answer.
---@param plane "shell"|"bash"
---@param id string
---@return boolean done      also when it was not there
---@return string? message
function Client:close_session(plane, id)
  check_text(id, "session")
  if check_plane(plane) == "bash" then return true end
  local response, err = self:_send {
    method = "DELETE", path = "/v1/paddock/sessions/" .. common.percent(id), limit = CLOSE_LIMIT,
  }
  if not response then return false, tostring(err.message) end
  if response.status == 200 or response.status == 404 then return true end
  local fault = self:_fault(response)
  return false, fault and (fault.message or fault.error) or "HTTP " .. response.status
end

-- ---- files ----------------------------------------------------------------------------------------------------

--- The limit of a call that moves up to so many bytes.
function Client:_file_limit(bytes)
  return self.file_timeout or FILE_LIMIT + bytes / FILE_RATE
end

--- The bytes of a file.
---@param path string
---@return string
function Client:read(path)
  local response, err = self:_send {
    method = "GET", path = "/v1/paddock/file?path=" .. percent_path(check_path(path)), limit = self:_file_limit(FILE_MAX),
    max_body = FILE_MAX,
  }
  local what = "read " .. path
  if not response and err.reason == "too_large" then
    errors.raise("invalid_argument", ("%s: the file has more bytes than one call takes (%d): read it by parts, or mount its "
      .. "directory"):format(what, FILE_MAX), { reason = "too_large" })
  end
  return self:_answered(response, err, what, "io_error", false).body
end

--- Writes a file, all of it or nothing.
---@param path string
---@param bytes string
---@param opts? { no_overwrite: boolean? }
---@return boolean
function Client:write(path, bytes, opts)
  check_path(path)
  if type(bytes) ~= "string" then
    invalid("bytes must be a string")
  end
  local query = "?path=" .. percent_path(path) .. (opts and opts.no_overwrite and "&no_overwrite=1" or "")
  self:_call({ method = "PUT", path = "/v1/paddock/file" .. query, body = bytes, limit = self:_file_limit(#bytes) },
    "write " .. path, "io_error", true)
  return true
end

--- The entries of a directory: { name, path, is_directory, is_link, size, modified_time, mode }.
---@param path string
---@return table[]
function Client:list(path)
  local what = "list " .. check_path(path)
  local response = self:_call({ method = "GET", path = "/v1/paddock/list?path=" .. percent_path(path), limit = self:_file_limit(0) },
    what, "io_error", false)
  local answer = self:_decode(response.body)
  if not answer or type(answer.files) ~= "table" then
    errors.raise("backend_error", what .. ": the answer has no files", { reason = "protocol" })
  end
  return answer.files
end

-- ---- tokens and state -----------------------------------------------------------------------------------------

--- What the guest says of itself: { generation, token, doomed, commands, idle_seconds, ... }; nil and a message when it
--- does not answer.
---@param seconds number
---@return table?
---@return string? message
---@return string? reason   of the transport: "connect", "read_timeout", ...
function Client:state(seconds)
  local response, err = self:_send { method = "GET", path = "/v1/sandbox", limit = seconds }
  if not response then return nil, tostring(err.message), err.reason end
  local answer = response.status == 200 and self:_decode(response.body)
  if not answer or type(answer.paddock) ~= "table" then
    return nil, "HTTP " .. response.status .. " is not paddock-guest's answer"
  end
  return answer.paddock
end

--- Makes `token` the smallest one that the guest accepts; later calls of this client carry it.
---@param token integer|string
function Client:fence(token)
  local text = check_token(token, "token")
  self:_call({ method = "POST", path = "/v1/paddock/fence", body = "", token = text, limit = SHORT_LIMIT }, "fence",
    "backend_error", true)
  self.token = text
  return true
end

--- Makes the guest refuse every later request, provided that `expected` is the largest token that it has seen. Over a
--- connection of its own, so that it never waits behind a command.
---@param expected integer|string
---@param token integer|string
function Client:doom(expected, token)
  self:_call({
    method = "POST", path = "/v1/paddock/doom", body = "", token = check_token(token, "token"), limit = DOOM_LIMIT, fresh = true,
    headers = { ["X-Paddock-Expected"] = check_token(expected, "expected") },
  }, "doom", "backend_error", true)
  return true
end

--- Ends this client; the sandbox goes on.
function Client:close()
  if self.closed then return end
  self.closed = true
  if self.on_close then self.on_close() end
end

Client.__gc = Client.close
Client.__close = Client.close

return M
