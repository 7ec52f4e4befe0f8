--- What the two clients share: checks of what a caller hands in, and the sending of one request.
---
--- How an answer is read is each client's own matter: it is what the two planes differ in.
local errors = require "paddock.errors"

local M = {}

local CONNECT_LIMIT = 5               -- seconds

--- What a guest says to an owner whose time is over.
M.LOST = { stale_token = true, doomed = true, token_mismatch = true }

---@param message string
function M.invalid(message)
  errors.raise("invalid_argument", message)
end

--- Percent-encoded: all but letters, digits and `-._~`.
---@param bytes string
---@return string
function M.percent(bytes)
  return (bytes:gsub("[^A-Za-z0-9%-._~]", function(c) return ("%%%02X"):format(c:byte()) end))
end

---@param value any
---@param what string
---@return number
function M.check_seconds(value, what)
  if type(value) ~= "number" or value ~= value or value <= 0 or value > 2 ^ 31 then
    M.invalid(what .. " must be a number of seconds above 0")
  end
  return value
end

---@param text any
---@param what string
---@return string
function M.check_text(text, what)
  if type(text) ~= "string" then
    M.invalid(what .. " must be a string")
  elseif text:find("\0", 1, true) then
    M.invalid(what .. " must not contain a NUL byte")
  end
  return text
end

---@param path string   what a client's own check of texts has let through
---@return string
function M.check_absolute(path)
  if path:sub(1, 1) ~= "/" then
    M.invalid("path must be absolute, not " .. ("%q"):format(path:sub(1, 100)))
  end
  return path
end

---@param token any
---@param what string
---@return string
function M.check_token(token, what)
  local text = math.type(token) == "integer" and ("%d"):format(token) or token
  if type(text) ~= "string" or not text:find("^%d+$") or #text > 20 then
    M.invalid(what .. " must be a token: an integer or its decimal text")
  end
  return text
end

--- Checks names, and values by `check_text`, which is the client's own.
---@param env any
---@param check_text fun(text: any, what: string): string
---@return table<string, string>
function M.check_env(env, check_text)
  if type(env) ~= "table" then
    M.invalid("env must be a table of names and values")
  end
  for name, value in pairs(env) do
    if type(name) ~= "string" or not name:find("^[A-Za-z_][A-Za-z0-9_]*$") then
      local shown = type(name) == "string" and ("%q"):format(name:sub(1, 64)) or tostring(name)
      M.invalid("env: " .. shown .. " is no variable name (letters, digits and _)")
    end
    check_text(value, "env: the value of " .. name)
  end
  return env
end

--- An integer as one, anything else as nil.
---@param value any
---@return integer?
function M.whole(value)
  return type(value) == "number" and math.tointeger(value) or nil
end

---@class paddock.ClientOptions
---@field url string                 base URL; with `unix` its host is only a name
---@field unix? string               path of a unix socket to speak over
---@field peer? integer              the pid, as this process sees it, that must be listening there
---@field headers? table<string, string>  sent with each request, e.g. an API key
---@field token? integer|string      sent with each call: a server of paddock's refuses a smaller one than it knows
---@field command_timeout? number    seconds, for commands that name no limit (600)
---@field max_output? integer        bytes kept per stream of a command (1 MiB)
---@field ca_file? string            of an https server: the authorities that may vouch for it
---@field io? table                  in place of `require "paddock.io"`

---@class paddock.Client             what both clients are, as far as this file knows them
---@field io table
---@field url string
---@field unix? string
---@field ca_file? string
---@field headers table<string, string>
---@field token? string
---@field command_timeout number
---@field max_output integer
---@field closed boolean
---@field seen_peer? integer         who listens at the last answer's connection, where it could be seen

--- A new object of `class`, with the fields of paddock.Client.
---@param class table
---@param opts paddock.ClientOptions
function M.new(class, opts)
  if type(opts) ~= "table" or type(opts.url) ~= "string" then
    M.invalid("url must be a string: the sandbox's base URL")
  end
  return setmetatable({
    io = opts.io or require "paddock.io",
    url = opts.url:gsub("/+$", ""),
    unix = opts.unix, peer = opts.peer, ca_file = opts.ca_file,
    headers = opts.headers or {},
    token = opts.token ~= nil and M.check_token(opts.token, "token") or nil,
    command_timeout = M.check_seconds(opts.command_timeout or 600, "command_timeout"),
    max_output = opts.max_output or 1 << 20,
    closed = false,
  }, class)
end

---@class paddock.ClientCall
---@field method string
---@field path string
---@field json? table            the body, or
---@field body? string           raw bytes, with
---@field type? string           their type (application/octet-stream)
---@field headers? table<string, string>
---@field token? string          in place of the client's own
---@field limit number           seconds
---@field fresh? boolean         over a connection of its own
---@field max_body? integer      bytes of answer that are kept
---@field on_body? fun(bytes: string): boolean?   gets the answer's body as it comes, in place of `body`; false = enough

--- Sends `call`, once. Returns the response, or nil and the transport's error.
---@param client paddock.Client
---@param call paddock.ClientCall
function M.send(client, call)
  if client.closed then
    errors.raise("closed", "this client was closed")
  end
  local headers = {}
  for name, value in pairs(client.headers) do headers[name] = value end
  for name, value in pairs(call.headers or {}) do headers[name] = value end
  headers["X-Paddock-Token"] = call.token or client.token
  local body = call.body
  if call.json then
    body = client.io.json.encode(call.json)
    headers["Content-Type"] = "application/json"
  elseif body then
    headers["Content-Type"] = call.type or "application/octet-stream"
  end
  local response, err = client.io.http {
    method = call.method, url = client.url .. call.path, unix = client.unix, headers = headers, body = body,
    timeout = call.limit, connect_timeout = math.min(call.limit, CONNECT_LIMIT), fresh = call.fresh, max_body = call.max_body,
    on_body = call.on_body,
    ca_file = client.ca_file, peer = client.peer,
  }
  client.seen_peer = response and response.peer or client.seen_peer
  return response, err
end

--- The JSON object (or array) of a text, or nil.
---@param client paddock.Client
---@param text string
---@return table?
function M.decode(client, text)
  local ok, value = pcall(client.io.json.decode, text)
  return ok and type(value) == "table" and value or nil
end

return M
