--- Whom an engine over TCP is believed to be, and who we say that we are to it.
---
--- There is no unverified TLS here, and no plain TCP to another machine unless the options say so: an engine runs what it is sent as
--- root, so that whoever answers in its place has all that a sandbox is given, and whoever reaches its port has its machine.
local errors = require "paddock.errors"
local io = require "paddock.io"

local M = {}

local FILE_MAX = 4 << 20             -- bytes of a PEM file; the bundle of all public authorities has 0.2 MiB

-- By the field of paddock.io's http: the option, the name of Docker's own client, and what must be in it.
local FILES = {
  { field = "ca_file", option = "backend_options.tls_ca", name = "ca.pem", what = "certificate",
    begins = "%-%-%-%-%-BEGIN [%u ]*CERTIFICATE%-%-%-%-%-" },
  { field = "cert_file", option = "backend_options.tls_cert", name = "cert.pem", what = "certificate",
    begins = "%-%-%-%-%-BEGIN [%u ]*CERTIFICATE%-%-%-%-%-" },
  { field = "key_file", option = "backend_options.tls_key", name = "key.pem", what = "private key",
    begins = "%-%-%-%-%-BEGIN [%u ]*PRIVATE KEY%-%-%-%-%-" },
}

---@class paddock.EngineTrust
---@field ca_file string?
---@field cert_file string?
---@field key_file string?

--- The certificates to use: the options', else those that Docker's own client would; nil when neither names any. With
--- DOCKER_CERT_PATH alone that client would encrypt and believe anyone: here both variables mean the same, verified TLS.
---@param options paddock.EngineTrust?
---@param env fun(name: string): string?
---@return paddock.EngineTrust?
---@return string? folder   of the environment, when they are from there
function M.find(options, env)
  if options and next(options) then return options end
  local verify, folder = env "DOCKER_TLS_VERIFY" or "", env "DOCKER_CERT_PATH" or ""
  if verify == "" and folder == "" then return nil end
  if folder == "" then folder = (env "HOME" or "") .. "/.docker" end
  if folder:sub(1, 1) ~= "/" then
    local path, err = io.fs.realpath(folder)
    if not path then
      errors.raise("invalid_argument", ("DOCKER_CERT_PATH names the folder %s, which cannot be used: %s"):format(folder, err.message))
    end
    folder = path
  end
  local out = {}
  for _, file in ipairs(FILES) do out[file.field] = folder .. "/" .. file.name end
  return out, folder
end

--- Looks at the files, so that what is wrong with one is said of that one, before anything is sent.
---@param trust paddock.EngineTrust
---@param folder string?
function M.check(trust, folder)
  for _, file in ipairs(FILES) do
    local path = trust[file.field]
    local function refuse(why)
      errors.raise("invalid_argument", ("%s: %s"):format(folder and "DOCKER_CERT_PATH" or file.option, why))
    end
    if path then
      local text, err = io.fs.read(path, FILE_MAX)
      if not text then
        refuse(("%s; name a PEM file that this user may read"):format(err.message))
      elseif not text:find(file.begins) then
        refuse(("%s has no %s in PEM form (a line -----BEGIN ...): name the file that has it"):format(path, file.what))
      elseif file.field == "key_file" and text:find("ENCRYPTED", 1, true) then
        refuse(("%s has a key under a password, which nobody is there to type: write it without one (openssl pkey -in %s -out NEW)")
          :format(path, path))
      end
    end
  end
end

--- Whether an address is this machine's alone.
---@param host string
---@return boolean
function M.is_loopback(host)
  return host == "localhost" or host == "[::1]" or host:find("^127%.%d+%.%d+%.%d+$") ~= nil
end

--- Refuses plain TCP to another machine.
---@param parts table       of engine.parse
---@param source string     what names it
function M.refuse_plain(parts, source)
  errors.raise("invalid_argument", ("%s names %s: over plain TCP, whoever is in between reads and answers all. Use its TLS port with "
    .. "backend_options.tls_ca, tls_cert, tls_key or DOCKER_CERT_PATH, or a forwarded socket (ssh -L); in a network of yours alone, set "
    .. "backend_options.plain_tcp = true"):format(source, parts.address))
end

-- What libcurl and OpenSSL say, and what can be done about it; the first that is found counts.
local ADVICE = {
  { "expired", function(trust) return "renew the certificate: the engine's, or the client's " .. (trust.cert_file or "(none is named)") end,
    "alert" },
  { "has expired", function() return "renew the engine's certificate" end },
  { "not yet valid", function() return "set the clocks of both machines" end },
  { "subject name", function() return "name the engine by a name that its certificate has, or give it a certificate with this one" end },
  { "issuer certificate", function(trust) return M.distrusts(trust) end },
  { "self.signed", function(trust) return M.distrusts(trust) end },
  { "setting certificate", function(trust) return "put the certificates of its authorities into " .. (trust.ca_file or "a file") end },
  { "set private key", function(trust) return M.pair(trust) end },
  { "client certificate", function(trust) return M.pair(trust) end },
  { "does not match the certificate", function(trust) return M.pair(trust) end },
  { "wrong version number", function() return "what listens there speaks no TLS: name the engine's TLS port" end },
  { "packet length", function() return "what listens there speaks no TLS: name the engine's TLS port" end },
  { " alert ", function(trust) return M.unknown(trust) end },
  { "", function(trust) return M.unknown(trust) end, "reset by peer" },
}

--- Whether a connection ended at a word of the peer's system, not of the peer.
---@param message string
function M.was_cut(message)
  return message:find("reset by peer", 1, true) ~= nil
end

function M.unknown(trust)
  if not trust.cert_file then
    return "it wants to know its clients: name a certificate that its authority has signed, in backend_options.tls_cert and tls_key"
  end
  return ("it does not take %s: name a certificate that the engine's own authority (its tlscacert) has signed"):format(trust.cert_file)
end

function M.distrusts(trust)
  return trust.ca_file and ("none of the authorities in %s has signed its certificate: name the right file"):format(trust.ca_file)
    or "none of the system's authorities has signed its certificate: name the file of its own in backend_options.tls_ca"
end

function M.pair(trust)
  return ("%s and %s must be a certificate and its key, in PEM form"):format(trust.cert_file or "?", trust.key_file or "?")
end

--- What to do about a failure over TLS.
---@param message string      the transport's words
---@param trust paddock.EngineTrust?
---@return string?
function M.advice(message, trust)
  for _, one in ipairs(ADVICE) do
    if message:find(one[1]) and (not one[3] or message:find(one[3], 1, true)) then return one[2](trust or {}) end
  end
  return nil
end

return M
