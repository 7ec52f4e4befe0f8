--- The requests of the official TypeScript client for all-in-one sandboxes, as they were recorded (method, path, headers, body),
--- sent again: to a sandbox of the process backend, and on each engine to a container with the guest and to an all-in-one one.
--- Each answer is checked field by field against the API's description: what is missing fails, and what nobody knows, too.
local engines = require "tests.support.engines"
local support = require "tests.support"
local json = require "cjson.safe"
-- The module that backends have, in a plain Lua state.
local core_path = assert(package.searchpath("paddock.core", package.cpath))
package.preload["paddock.io"] = package.preload["paddock.io"] or assert(package.loadlib(core_path, "luaopen_paddock_io"))
local io_ = require "paddock.io"

-- ---- what an answer has to look like ------------------------------------------------------------------------

local function is(kind)
  return function(value) return type(value) == kind, "a " .. kind end
end
local text, number, flag, anything = is "string", is "number", is "boolean", function() return true end
local function integer(value) return math.type(value) == "integer" or value == math.floor(tonumber(value) or 0.5), "an integer" end
local function when(value) return type(value) == "string" and value:find("^%d%d%d%d%-%d%d%-%d%dT%d%d:%d%d:%d%d") ~= nil, "a time" end
local function one_of(...)
  local set, names = {}, table.concat({ ... }, ", ")
  for _, word in ipairs { ... } do set[word] = true end
  return function(value) return set[value] == true, "one of " .. names end
end
local function matching(pattern)
  return function(value) return type(value) == "string" and value:find(pattern) ~= nil, "text like " .. pattern end
end
local function optional(shape) return { optional = shape } end
local function list_of(shape) return { list = shape } end
local function map_of(shape) return { map = shape } end

--- The differences between `value` and `shape`, as lines. Tables have exactly the shape's keys.
local function differences(shape, value, at, found)
  found, at = found or {}, at or "answer"
  if type(shape) == "function" then
    local fits, what = shape(value)
    if not fits then found[#found + 1] = ("%s is %s, not %s"):format(at, json.encode(value), what or "right") end
  elseif type(shape) == "table" and shape.list then
    if type(value) ~= "table" then found[#found + 1] = at .. " is no list" return found end
    for i, item in ipairs(value) do differences(shape.list, item, ("%s[%d]"):format(at, i), found) end
    for key in pairs(value) do if math.type(key) ~= "integer" then found[#found + 1] = at .. " is no list" end end
  elseif type(shape) == "table" and shape.map then
    if type(value) ~= "table" then found[#found + 1] = at .. " is no map" return found end
    for key, item in pairs(value) do differences(shape.map, item, at .. "." .. key, found) end
  elseif type(shape) == "table" then
    if type(value) ~= "table" then found[#found + 1] = at .. " is " .. json.encode(value) .. ", not an object" return found end
    for key, part in pairs(shape) do
      local may_lack = type(part) == "table" and part.optional ~= nil
      if value[key] == nil then
        if not may_lack then found[#found + 1] = ("%s.%s is missing"):format(at, key) end
      elseif not (may_lack and value[key] == json.null) then
        differences(may_lack and part.optional or part, value[key], at .. "." .. key, found)
      end
    end
    for key in pairs(value) do
      if shape[key] == nil then found[#found + 1] = ("%s.%s is unknown"):format(at, key) end
    end
  elseif value ~= shape then
    found[#found + 1] = ("%s is %s, not %s"):format(at, json.encode(value), json.encode(shape))
  end
  return found
end

local function envelope(data) return { success = true, message = text, data = data, hint = optional(text) } end
local function refusal(message, data) return { success = false, message = message, data = data or json.null, hint = optional(text) } end

-- What every command's answer has beside the fields that matter in a row; `truncated` and `oom` are the guest's own.
local function shell_result(fields)
  local shape = { session_id = text, command = text, status = "completed", output = text, exit_code = 0,
    console = list_of { ps1 = text, command = text, output = text }, truncated = optional(flag), oom = optional(flag) }
  for key, value in pairs(fields) do shape[key] = value end
  return envelope(shape)
end
local function bash_result(fields)
  local shape = { session_id = text, command_id = text, command = text, status = "completed", stdout = "", stderr = "", exit_code = 0,
    offset = integer, stderr_offset = integer, truncated = optional(flag), oom = optional(flag), session_reset = optional(flag) }
  for key, value in pairs(fields) do shape[key] = value end
  return envelope(shape)
end
local function bash_output(stdout, stderr, status)
  return envelope { session_id = text, stdout = stdout, stderr = stderr, offset = integer, stderr_offset = integer,
    truncated = optional(flag), oom = optional(flag),
    command = { command_id = text, command = text, status = status, exit_code = optional(integer), oom = optional(flag) } }
end
local bash_session = { session_id = text, status = "ready", working_dir = text, created_at = when, last_used_at = when,
  current_command = optional(text), command_count = integer }
local file_entry = { name = text, path = text, is_directory = flag, size = optional(integer), modified_time = optional(anything),
  permissions = optional(text), extension = optional(text), is_link = optional(flag), encoded = optional(text) }

-- ---- the recorded requests ----------------------------------------------------------------------------------

-- In order: name, method and path, body, expected answer, status when it is not 200. HOME stands for the sandbox's home, and
-- {name} for a value that an earlier answer was asked to `keep`.
local rows = {
  { "sandbox.getContext", "GET /v1/sandbox", nil, { success = true, message = text, data = text, home_dir = "HOME", version = text,
    workspace = optional(text),
    detail = { system = { os = "Linux", os_version = text, arch = text, user = text, home_dir = "HOME", workspace = optional(text),
      timezone = text, occupied_ports = list_of(integer) }, runtime = { python = list_of(anything), nodejs = list_of(anything) },
      utils = list_of(anything) },
    paddock = optional(anything), standin = optional(anything) } },

  { "shell.execCommand", "POST /v1/shell/exec", { command = "echo hi", no_change_timeout = 600, hard_timeout = 30 },
    shell_result { command = "echo hi", output = matching "^hi\r?\n?$" } },
  { "shell.execCommand that fails", "POST /v1/shell/exec", { command = "(exit 7)" }, shell_result { exit_code = 7, output = "" } },
  { "shell.createSession", "POST /v1/shell/sessions/create", { id = "s 1", exec_dir = "HOME" },
    envelope { session_id = "s 1", working_dir = "HOME" } },
  { "shell.createSession again", "POST /v1/shell/sessions/create", { id = "s 1", exec_dir = "/" },
    envelope { session_id = "s 1", working_dir = "HOME" } },
  { "shell.execCommand in it", "POST /v1/shell/exec", { id = "s 1", command = "cd / && export A=7" }, shell_result { session_id = "s 1" } },
  { "shell.execCommand after it", "POST /v1/shell/exec", { id = "s 1", command = "echo $A $PWD" },
    shell_result { output = matching "^7 /\r?\n?$" } },
  { "shell.execCommand with async_mode", "POST /v1/shell/exec", { id = "s 1", command = "sleep 0.2; echo done", async_mode = true },
    shell_result { status = "running", exit_code = optional(anything), output = optional(text), console = optional(anything) } },
  { "shell.waitForProcess", "POST /v1/shell/wait", { id = "s 1", seconds = 20 }, envelope { status = "completed" } },
  { "shell.view", "POST /v1/shell/view", { id = "s 1" }, shell_result { output = matching "done" } },
  { "shell.execCommand that reads", "POST /v1/shell/exec", { id = "s 1", command = "read x; echo got $x", async_mode = true },
    shell_result { status = "running", exit_code = optional(anything), output = optional(text), console = optional(anything) } },
  { "shell.writeToProcess", "POST /v1/shell/write", { id = "s 1", input = "yes", press_enter = true },
    envelope { status = one_of("running", "completed") } },
  { "shell.waitForProcess on it", "POST /v1/shell/wait", { id = "s 1", seconds = 20 }, envelope { status = "completed" } },
  { "shell.view of it", "POST /v1/shell/view", { id = "s 1" }, shell_result { output = matching "got yes" } },
  { "shell.execCommand beyond its timeout", "POST /v1/shell/exec", { id = "s 1", command = "sleep 100", timeout = 0.2 },
    shell_result { status = "running", exit_code = optional(anything), output = optional(text), console = optional(anything) } },
  { "shell.killProcess", "POST /v1/shell/kill", { id = "s 1" },
    envelope { status = "terminated", exit_code = optional(integer), returncode = optional(integer) } },
  { "shell.listSessions", "GET /v1/shell/sessions", nil, envelope { sessions = map_of { working_dir = text, created_at = when,
    last_used_at = when, age_seconds = number, status = text, current_command = optional(text) } } },
  { "shell.getSessionStats", "GET /v1/shell/sessions/stats", nil, envelope { total_sessions = integer, active_sessions = integer,
    idle_sessions = integer, max_sessions = integer, session_timeout = optional(number), usage_ratio = number } },
  { "shell.cleanupSession", "DELETE /v1/shell/sessions/s%201", nil, envelope(anything) },
  { "shell.execCommand in a session that is gone", "POST /v1/shell/exec", { id = "s 1", command = "true" },
    refusal "Session not found", 404 },

  { "bash.exec", "POST /v1/bash/exec", { command = "echo $A; echo err >&2; exit 3", env = { A = "1" }, hard_timeout = 10 },
    bash_result { command = "echo $A; echo err >&2; exit 3", stdout = "1\n", stderr = "err\n", exit_code = 3, offset = 2,
      stderr_offset = 4 } },
  { "bash.exec at its hard_timeout", "POST /v1/bash/exec", { command = "echo part; sleep 100", hard_timeout = 0.3 },
    bash_result { status = "timed_out", stdout = "part\n", exit_code = optional(integer) } },
  { "bash.exec with async_mode", "POST /v1/bash/exec", { command = "read x; echo got $x", async_mode = true },
    bash_result { status = "running", exit_code = optional(integer), stdout = optional(text), stderr = optional(text) },
    keep = { session_id = "session", command_id = "command" } },
  { "bash.write", "POST /v1/bash/write", { session_id = "{session}", command_id = "{command}", input = "yes\n" }, envelope(anything) },
  { "bash.output", "POST /v1/bash/output", { session_id = "{session}", command_id = "{command}", offset = 0, stderr_offset = 0,
    wait = true, wait_timeout = 20 }, bash_output(optional(text), "", one_of("running", "completed")) },
  -- Output comes before the end: what comes next in this session must not find it still at work.
  { "bash.output after its last", "POST /v1/bash/output", { session_id = "{session}", command_id = "{command}", offset = 8,
    stderr_offset = 0, wait = true, wait_timeout = 20 }, bash_output("", "", "completed") },
  { "bash.exec to be killed", "POST /v1/bash/exec", { session_id = "{session}", command = "sleep 100", async_mode = true },
    bash_result { status = "running", exit_code = optional(integer), stdout = optional(text), stderr = optional(text) },
    keep = { command_id = "command" } },
  { "bash.kill", "POST /v1/bash/kill", { session_id = "{session}", signal = "SIGKILL" }, envelope(anything) },
  { "bash.output of it", "POST /v1/bash/output", { session_id = "{session}", command_id = "{command}", wait = true, wait_timeout = 20 },
    bash_output("", "", "killed") },
  { "bash.createSession", "POST /v1/bash/sessions/create", { session_id = "b 1", exec_dir = "/" }, envelope(bash_session) },
  { "bash.listSessions", "GET /v1/bash/sessions", nil, envelope(list_of(bash_session)) },
  { "bash.closeSession", "POST /v1/bash/sessions/{session}/close", "", envelope(anything) },
  { "bash.exec in a session that is closed", "POST /v1/bash/exec", { session_id = "{session}", command = "true" },
    refusal "Session not found", 404 },

  { "file.writeFile", "POST /v1/file/write", { file = "HOME/a b.txt", content = "one\ntwo\n" },
    envelope { file = "HOME/a b.txt", bytes_written = 8 } },
  { "file.writeFile with append", "POST /v1/file/write", { file = "HOME/a b.txt", content = "three\n", append = true },
    envelope { file = "HOME/a b.txt", bytes_written = 6 } },
  { "file.writeFile of bytes", "POST /v1/file/write", { file = "HOME/bytes", content = "AP8=", encoding = "base64" },
    envelope { file = "HOME/bytes", bytes_written = 2 } },
  { "file.readFile", "POST /v1/file/read", { file = "HOME/a b.txt" },
    envelope { file = "HOME/a b.txt", content = "one\ntwo\nthree\n", line_count = optional(integer) } },
  { "file.readFile of lines", "POST /v1/file/read", { file = "HOME/a b.txt", start_line = 1, end_line = 2 },
    envelope { file = "HOME/a b.txt", content = matching "^two\n?$", line_count = optional(integer) } },
  { "file.listPath", "POST /v1/file/list", { path = "HOME", show_hidden = false, sort_by = "name" },
    envelope { path = "HOME", files = list_of(file_entry), total_count = 2, directory_count = 0, file_count = 2,
      truncated = optional(flag) } },
  { "file.findFiles", "POST /v1/file/find", { path = "HOME", glob = "*.txt" },
    envelope { path = "HOME", files = list_of "HOME/a b.txt", truncated = optional(flag) } },
  { "file.grepFiles", "POST /v1/file/grep", { path = "HOME", pattern = "tw.", include = { "*.txt" } },
    envelope { path = "HOME", pattern = "tw.", match_count = 1, files_searched = optional(integer), files_matched = optional(integer),
      truncated = false, matches = list_of { file = "HOME/a b.txt", line_number = 2, line_content = "two",
        context_before = optional(list_of(text)), context_after = optional(list_of(text)) } } },
  { "file.searchInFile", "POST /v1/file/search", { file = "HOME/a b.txt", regex = "^t" },
    envelope { file = "HOME/a b.txt", matches = list_of(matching "^t"), line_numbers = list_of(integer) } },
  { "file.replaceInFile", "POST /v1/file/replace", { file = "HOME/a b.txt", old_str = "two", new_str = "2" },
    envelope { file = "HOME/a b.txt", replaced_count = 1 } },
  { "file.readFile of none", "POST /v1/file/read", { file = "HOME/none" }, refusal(text, { path = "HOME/none", operation = text,
    message = text, error_type = "not_found", retryable = flag, errno = optional(2), errno_name = optional "ENOENT",
    exception_type = optional(text) }) },
  { "file.uploadFile", "POST /v1/file/upload", { upload = "\0\1raw\r\n--x", path = "HOME/up" },
    envelope { file_path = "HOME/up", file_size = 10, success = true } },
  { "file.downloadFile", "GET /v1/file/download?path=HOME%2Fup&change_policy=abort", nil, "\0\1raw\r\n--x", raw = true },
  { "file.downloadFile of none", "GET /v1/file/download?path=HOME%2Fnone&change_policy=abort", nil, anything, 404 },

  { "a body without what it must have", "POST /v1/shell/exec", { id = "x" },
    { detail = list_of { loc = list_of(anything), msg = text, type = text } }, 422 },
  { "a route that does not exist", "POST /v1/nothing", { a = 1 }, { detail = "Not Found" }, 404 },
}

-- ---- who gets them ------------------------------------------------------------------------------------------

--- Replaces HOME and {kept} in all texts of a request or a shape.
local function filled(value, target, kept)
  if type(value) == "string" then
    return (value:gsub("HOME", function() return target.home end):gsub("{(%w+)}", function(name) return kept[name] end))
  end
  if type(value) ~= "table" then return value end
  local copy = {}
  for key, part in pairs(value) do copy[key] = filled(part, target, kept) end
  return copy
end

local function send(target, row, kept)
  local method, path = filled(row[2], target, kept):match("^(%u+) (.*)$")
  path = path:gsub("path=(%S-)%%2F", function(home) return "path=" .. home:gsub("/", "%%2F") .. "%2F" end)
  local request = { method = method, url = target.url .. path, unix = target.unix, timeout = 40, headers = {
    ["x-fern-language"] = "JavaScript", ["x-fern-runtime"] = "node", ["x-fern-runtime-version"] = "v22.0.0", accept = "*/*",
    ["accept-encoding"] = "gzip, deflate" } }
  for name, value in pairs(target.headers) do request.headers[name] = value end
  local body = filled(row[3], target, kept)
  if type(body) == "table" and body.upload then
    request.headers["content-type"] = "multipart/form-data; boundary=----form"
    request.body = ('------form\r\nContent-Disposition: form-data; name="file"; filename="blob"\r\n' ..
      "Content-Type: application/octet-stream\r\n\r\n%s\r\n------form\r\n" ..
      'Content-Disposition: form-data; name="path"\r\n\r\n%s\r\n------form--\r\n'):format(body.upload, body.path)
  elseif type(body) == "table" then
    request.headers["content-type"] = "application/json"
    request.body = json.encode(body)
  else
    request.body = body
  end
  return assert(io_.http(request))
end

--- Asks until the server is there.
local function await(target)
  for _ = 1, 500 do
    local answer = io_.http { method = "GET", url = target.url .. "/v1/sandbox", unix = target.unix, headers = target.headers, timeout = 5 }
    if answer and answer.status == 200 then return end
    os.execute("sleep 0.02")
  end
  error("no answer from " .. target.name)
end

--- A sandbox as a backend makes it: its guest, asked directly.
local function backend_target(target, backend, headers)
  local info = backend:create { sandbox_id = target.id, identity = { user = "u", thread = "t" } }
  target.close = function()
    backend:destroy(info)
    backend:finish(info.sandbox_id, info)
    if backend.close then backend:close() end
  end
  target.url, target.unix, target.headers = info.url, info.unix, headers(info)
  await(target)
end

local targets = {
  { name = "a sandbox of the process backend", open = function(target)
    target.id = "replay-" .. target.dir:match("(%w+)$"):lower()
    backend_target(target, require("paddock.backend.process").new({}, { state_dir = target.dir, runtime_id = "replay", orphan_ttl = 60 }),
      function() return { ["X-Paddock-Token"] = "1" } end)
  end },
}
for _, engine in ipairs(engines.all()) do
  targets[#targets + 1] = { name = "an all-in-one container on " .. engine.name, why = engine.why, open = function(target)
    local status, made = engine:call("POST", "/containers/create", { Image = engines.image "aio", ExposedPorts = { ["8080/tcp"] = {} },
      HostConfig = { PortBindings = { ["8080/tcp"] = { { HostIp = "127.0.0.1", HostPort = "" } } } } })
    assert(status == 201, "the container cannot be made: " .. tostring(made.message))
    target.close = function() engine:call("DELETE", "/containers/" .. made.Id .. "?force=true&v=true") end
    assert.equal(204, (engine:call("POST", "/containers/" .. made.Id .. "/start")))
    local _, seen = engine:call("GET", "/containers/" .. made.Id .. "/json")
    target.url, target.headers = "http://127.0.0.1:" .. seen.NetworkSettings.Ports["8080/tcp"][1].HostPort, {}
    await(target)
  end }
  targets[#targets + 1] = { name = "a container with the guest on " .. engine.name, why = engine.why, open = function(target)
    target.id = target.dir:match("(%w+)$"):lower()
    local backend = require("paddock.backend.docker").new({ host = "unix://" .. engine.socket, prefix = "pdk-replay" },
      { state_dir = target.dir, runtime_id = "replay", orphan_ttl = 60, image = engines.image "busybox" })
    backend_target(target, backend, function(info)
      return { ["X-Paddock-Token"] = "1", ["X-Paddock-Secret"] = backend.plane:_secret(info.instance) }
    end)
  end }
end

for _, target in ipairs(targets) do
  describe("the official client's requests, sent to " .. target.name .. ":", function()
    local kept = {}

    setup(function()
      if target.why then return end
      target.dir = support.tmpdir()
      target:open()
      local context = assert(io_.http { method = "GET", url = target.url .. "/v1/sandbox", unix = target.unix, headers = target.headers,
        timeout = 20 })
      target.home = assert(json.decode(context.body)).home_dir
    end)
    teardown(function()
      if target.close then target.close() end
      support.cleanup()
    end)

    for _, row in ipairs(rows) do
      it(row[1], function()
        if target.why then
          pending(target.why)
          return
        end
        local answer = send(target, row, kept)
        assert.equal(row[5] or 200, answer.status, answer.body)
        assert.is_nil(answer.headers["content-encoding"])
        if row.raw then
          assert.equal(row[4], answer.body)
          assert.truthy(answer.headers["content-type"]:find("^application/octet%-stream"))
          return
        end
        assert.truthy((answer.headers["content-type"] or ""):find("^application/json"), answer.headers["content-type"])
        local body = assert(json.decode(answer.body), answer.body)
        assert.same({}, differences(filled(row[4], target, kept), body), answer.body)
        for field, name in pairs(row.keep or {}) do kept[name] = body.data[field] end
      end)
    end
  end)
end
