--- Images: whether the engine has one, and fetching it with progress.
local engine_words = require "paddock.docker.engine"
local errors = require "paddock.errors"
local io = require "paddock.io"
local streams = require "paddock.docker.stream"

local M = {}

local KNOWN_FOR = 60                 -- seconds for which an image's facts are trusted: they hardly change, and create says when gone
local MOST_LINE = 1 << 20            -- bytes of one value in a stream
local REPORT_EVERY = 5               -- seconds between two lines about a pull

---@class paddock.Images
---@field engine paddock.Engine
---@field options paddock.DockerOptions
---@field known table<string, { at: number, facts: table }>
local Images = {}
Images.__index = Images

---@param engine paddock.Engine
---@param options paddock.DockerOptions
function M.new(engine, options)
  return setmetatable({ engine = engine, options = options, known = {}, pulled = {} }, Images)
end

--- Repository and tag (or digest) of a reference.
---@param reference string
---@return string repository
---@return string? tag
function M.split(reference)
  local repository, digest = reference:match("^(.-)@(.+)$")
  if repository then return repository, digest end
  local name, tag = reference:match("^(.*):([%w_][%w_.%-]*)$")
  if name and not tag:find("/", 1, true) then return name, tag end
  return reference, nil
end

--- The registry of a reference, as logins name it.
function M.registry(reference)
  local first = reference:match("^([^/]+)/")
  if first and (first:find("[.:]") or first == "localhost") then return first end
  return "docker.io"
end

--- What the engine knows of an image, or nil when it has none of that name.
---@param reference string
---@return table?
function Images:look(reference)
  local known = self.known[reference]
  if known and io.now() - known.at < KNOWN_FOR then return known.facts end
  local what = "look at the image " .. reference
  local response, fault = self.engine:call({ method = "GET", path = "/images/" .. engine_words.path(reference) .. "/json" }, what)
  if not response then
    self.known[reference] = nil
    if fault.meaning == "no_image" then return nil end
    engine_words.refuse(what, fault)
  end
  local facts = type(response.data) == "table" and response.data or {}
  self.known[reference] = { at = io.now(), facts = facts }
  return facts
end

--- One after the other, the JSON values of a stream that is cut anywhere. A line of more than MOST_LINE bytes is passed over.
local function lines(each)
  local parts, size = {}, 0            -- of the line that has not ended
  local function keep(bytes)
    size = size + #bytes
    if size <= MOST_LINE then parts[#parts + 1] = bytes else parts = {} end
  end
  local function finish()
    local line = size <= MOST_LINE and table.concat(parts) or ""
    parts, size = {}, 0
    local fine, value = pcall(io.json.decode, line)
    if line ~= "" and fine and type(value) == "table" then each(value) end
  end
  return function(piece)
    local at = 1
    while true do
      local stop = piece:find("\n", at, true)
      keep(piece:sub(at, (stop or 0) - 1))
      if not stop then return end
      finish()
      at = stop + 1
    end
  end, finish
end
M.lines = lines

local function text_of(value)
  return type(value) == "string" and value ~= "" and value or nil
end

--- Sums up a pull: what failed, and how far each layer is.
local function progress(reference)
  local seen = { layers = {}, said = io.now(), error = nil }
  function seen.take(value)
    local detail = type(value.errorDetail) == "table" and text_of(value.errorDetail.message)
    seen.error = seen.error or detail or text_of(value.error) or nil
    local p = type(value.progressDetail) == "table" and value.progressDetail or nil
    if text_of(value.id) and p and type(p.current) == "number" then
      seen.layers[value.id] = { p.current, type(p.total) == "number" and p.total or p.current }
    end
    if io.now() - seen.said >= REPORT_EVERY then
      local done, all = 0, 0
      for _, layer in pairs(seen.layers) do done, all = done + layer[1], all + layer[2] end
      io.log("info", "image_pull", { image = reference, bytes = done // 1, of = all // 1 })
      seen.said = io.now()
    end
  end
  return seen
end

--- Fetches an image. Success is an answer without an error in it, and an image that is there afterwards: engines answer 200
--- before they have begun.
---@param reference string
function Images:pull(reference)
  local repository, tag = M.split(reference)
  local login = self.options.registry_auth and self.options.registry_auth[M.registry(reference)]
  local what = "pull the image " .. reference
  local seen = progress(reference)
  local take, finish = lines(seen.take)
  local headers
  if login then
    local coded = io.base64(io.json.encode(login)):gsub("+", "-"):gsub("/", "_")
    headers = { ["X-Registry-Auth"] = coded }
  end
  io.log("info", "image_pull", { image = reference })
  local said = {}
  local response, err = self.engine:send {
    method = "POST", path = "/images/create", query = { fromImage = repository, tag = tag or "latest" }, body = "", headers = headers,
    limit = self.options.pull_timeout,
    on_body = function(piece)
      if #said < 16 then said[#said + 1] = piece end
      take(piece)
    end,
  }
  if not response then engine_words.unreachable(self.engine, what, err) end
  finish()
  if response.status >= 400 then
    engine_words.refuse(what, engine_words.fault { status = response.status, body = table.concat(said), headers = {} },
      "name an image that its registry has, and give backend_options.registry_auth where it wants a login")
  elseif seen.error then
    errors.raise("backend_error", ("%s: the engine says: %s"):format(what, streams.one_line(seen.error):sub(1, 1000)), { reason = "pull" })
  end
  self.known[reference] = nil
  if not self:look(reference) then
    errors.raise("backend_error", what .. ": the engine says that it is done, and has no such image", { reason = "pull" })
  end
  io.log("info", "image_pulled", { image = reference })
end

--- The facts of an image that a sandbox is about to be made of; it is fetched where the options say so.
---@param reference string
---@return table facts
function Images:ensure(reference)
  local policy = self.options.pull
  local facts = (policy ~= "always" or self.pulled[reference]) and self:look(reference) or nil
  if facts then return facts end
  if policy == "never" then
    errors.raise("backend_error", ("the engine at %s has no image %s, and backend_options.pull is \"never\": load or pull it")
      :format(self.engine.address, reference), { reason = "no_image" })
  end
  self:pull(reference)
  self.pulled[reference] = true        -- "always" means once per runtime: each acquire must not ask a registry
  return self:look(reference)
end

--- A create has found it gone.
function Images:forget(reference)
  self.known[reference], self.pulled[reference] = nil, nil
end

return M
