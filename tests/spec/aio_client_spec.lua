-- The AIO client against a scripted transport: what it sends, how often, and what it makes of each answer. Then the same
-- client and the real guest, over its socket.
local json = require "cjson.safe"
local support = require "tests.support"
local aio = require "paddock.client.aio"
-- The module that backends have, in a plain Lua state.
local real_io = assert(package.loadlib(assert(package.searchpath("paddock.core", package.cpath)), "luaopen_paddock_io"))()

--- An io table whose answers are taken from `script`: responses, errors, or functions of the request.
local function scripted(script)
  local fake = { sent = {}, clock = 0 }
  fake.json = { encode = json.encode, decode = json.decode }
  fake.now = function() fake.clock = fake.clock + 1; return fake.clock end
  fake.http = function(request)
    fake.sent[#fake.sent + 1] = request
    local step = assert(table.remove(script, 1), "a request that no answer was scripted for: " .. request.url)
    if type(step) == "function" then step = step(request) end
    if step.failure then return nil, step end
    return step
  end
  return fake
end

local function client_of(script, opts)
  local fake = scripted(script)
  opts = opts or {}
  opts.url, opts.io = opts.url or "http://sandbox", fake
  return aio.new(opts), fake.sent
end

local function ok(data) return { status = 200, body = json.encode { success = true, data = data }, headers = {} } end
local function refusal(status, body) return { status = status, body = json.encode(body), headers = {} } end
local function no_session() return refusal(404, { success = false, message = "Session not found", data = json.null }) end
local function lost(reason)
  return { failure = "ambiguous", kind = "backend_error", reason = reason, message = reason .. " from sandbox" }
end
local function refused_connection()
  return { failure = "not_sent", kind = "backend_error", reason = "connect", message = "connection refused" }
end

--- The error that fn raises: a paddock error table.
local function failure(fn, ...)
  local done, err = pcall(fn, ...)
  assert.is_false(done, "expected an error")
  assert.is_table(err, tostring(err))
  return err
end

describe("a command's outcome on the AIO plane", function()
  it("sends a command without a scope to the default shell, with the limits of its timeout [J1 J11]", function()
    for _, row in ipairs { { 5, 10, 600 }, { 0.5, 6, 600 }, { 596, 601, 601 }, { 1000.2, 1006, 1006 } } do
      local client, sent = client_of { ok { session_id = "d", command = "x", status = "completed", exit_code = 0, output = "hi\n" } }
      local result = client:exec { plane = "shell", command = "echo hi", timeout = row[1] }
      assert.equal("completed", result.outcome)
      assert.equal("hi\n", result.stdout)
      local body = json.decode(sent[1].body)
      assert.equal("POST http://sandbox/v1/shell/exec", sent[1].method .. " " .. sent[1].url)
      assert.equal(row[2], sent[1].timeout)
      assert.equal(row[3], body.no_change_timeout)
      assert.equal(row[1], body.hard_timeout)
      assert.is_nil(body.id)
      assert.equal(1, #sent)
    end
  end)

  it("is unknown when the answer is lost, and the command is sent once [J1 J12]", function()
    for _, plane in ipairs { "shell", "bash" } do
      for _, reason in ipairs { "read_timeout", "read", "write", "protocol", "tls" } do
        local client, sent = client_of { lost(reason) }
        local result = client:exec { plane = plane, command = "touch /tmp/x" }
        assert.equal("unknown", result.outcome)
        assert.equal("response", result.reason)
        assert.is_nil(result.exit_code)
        assert.equal(1, #sent)
      end
    end
  end)

  it("is unknown for a status that promises no end, for a 5xx and for an unreadable answer [J2 J12]", function()
    local answers = {
      ok { session_id = "d", status = "no_change_timeout", output = "so far" },
      ok { session_id = "d", status = "running" },
      ok { session_id = "d", status = "terminated" },
      ok { session_id = "d", status = "completed" },
      ok { session_id = "d", status = "something_new", exit_code = 0 },
      ok { session_id = "d", status = "completed", exit_code = 0, output = "'ErrorObservation' object has no attribute 'exit_code'\n" },
      { status = 200, body = json.encode { success = false, message = "internal" } },
      { status = 200, body = "<html>" }, { status = 200, body = "" }, { status = 204, body = "" },
      { status = 302, body = "" }, { status = 500, body = "oops" }, { status = 502, body = "" }, { status = 504, body = "" },
    }
    for i, answer in ipairs(answers) do
      local client, sent = client_of { answer }
      local result = client:exec { plane = "shell", command = "make" }
      assert.equal("unknown", result.outcome, "answer " .. i)
      assert.equal("response", result.reason)
      assert.equal(1, #sent)
    end
  end)

  it("is definite for a hard timeout and for a completed command [J3]", function()
    local client = client_of {
      ok { session_id = "d", status = "hard_timeout", exit_code = 124, output = "part" },
      ok { session_id = "d", status = "completed", exit_code = 0, output = "" },
      ok { session_id = "b", status = "timed_out", stdout = "part", stderr = "" },
      ok { session_id = "b", status = "completed", exit_code = 3, stdout = "o", stderr = "e", offset = 1, stderr_offset = 1 },
      ok { session_id = "b", status = "killed" },
      ok { session_id = "b", status = "completed", exit_code = 137, oom = true },
    }
    local r = client:exec { plane = "shell", command = "sleep 9", timeout = 1 }
    assert.same({ "hard_timeout", 124, "part" }, { r.outcome, r.exit_code, r.stdout })
    r = client:exec { plane = "shell", command = "true" }
    assert.same({ "completed", 0 }, { r.outcome, r.exit_code })
    r = client:exec { plane = "bash", command = "sleep 9" }
    assert.same({ "hard_timeout", 124, "part" }, { r.outcome, r.exit_code, r.stdout })
    r = client:exec { plane = "bash", command = "exit 3" }
    assert.same({ "completed", 3, "o", "e", false }, { r.outcome, r.exit_code, r.stdout, r.stderr, r.truncated })
    r = client:exec { plane = "bash", command = "sleep 9" }
    assert.same({ "signalled", 9, 137 }, { r.outcome, r.signal, r.exit_code })
    r = client:exec { plane = "bash", command = "eat all memory" }
    assert.same({ "oom", 137 }, { r.outcome, r.exit_code })
  end)

  it("says that output was cut, and that a session is a new one [B087 B094]", function()
    local client = client_of {
      ok { session_id = "b", status = "completed", exit_code = 0, stdout = "abc", stderr = "", offset = 100, stderr_offset = 0 },
      ok { session_id = "s", status = "completed", exit_code = 0, output = ("x"):rep(30000) },
      ok { session_id = "s", status = "completed", exit_code = 0, output = "", session_reset = true },
    }
    assert.is_true(client:exec({ plane = "bash", command = "yes" }).truncated)
    assert.is_true(client:exec({ plane = "shell", command = "yes" }).truncated)
    assert.is_true(client:exec({ plane = "shell", command = "true", session = "s" }).session_reset)
  end)

  it("raises what certainly did not run: refused connections and 4xx [J9 J12]", function()
    local rows = {
      { refused_connection(), "backend_error", "connect" },
      { refusal(400, { success = false, message = "Cannot create shell session: session limit reached and all 2 existing "
        .. "sessions have active commands" }), "capacity_exhausted", "session_limit" },
      { refusal(401, { error = "no token" }), "backend_error", "http_401" },
      { no_session(), "backend_error", "no_session" },
      { refusal(404, { detail = "Not Found" }), "unsupported", "no_route" },
      { { status = 404, body = "<html>" }, "unsupported", "no_route" },
      { refusal(409, { error = "stale_token", token = "9" }), "lost", "stale_token" },
      { refusal(409, { error = "doomed" }), "lost", "doomed" },
      { refusal(422, { detail = { { loc = { "body" }, msg = "bad", type = "x" } } }), "invalid_argument" },
    }
    for _, row in ipairs(rows) do
      local client, sent = client_of { row[1] }
      local err = failure(client.exec, client, { plane = "shell", command = "true", session = "s" })
      assert.equal(row[2], err.kind)
      assert.equal(row[3], err.reason)
      assert.equal(1, #sent)
    end
  end)

  it("remembers that a server has no bash plane", function()
    local client, sent = client_of { refusal(404, { detail = "Not Found" }) }
    assert.equal("unsupported", failure(client.exec, client, { plane = "bash", command = "true" }).kind)
    assert.equal("unsupported", failure(client.exec, client, { plane = "bash", command = "true" }).kind)
    assert.equal(1, #sent)
  end)

  it("carries an environment in the bash plane's own field, never in the command [J12]", function()
    local client, sent = client_of { ok { session_id = "b", status = "completed", exit_code = 0 } }
    client:exec { plane = "bash", command = "printenv K", env = { K = "a secret" }, session = "b1", cwd = "/tmp", timeout = 3 }
    local body = json.decode(sent[1].body)
    assert.same({ command = "printenv K", env = { K = "a secret" }, session_id = "b1", exec_dir = "/tmp", hard_timeout = 3,
      max_output_length = 1 << 20 }, body)
  end)

  it("refuses a bad request before anything is sent [J12]", function()
    local client, sent = client_of {}
    local bad = {
      { plane = "bash", command = "x", env = { ["A=B"] = "1" } }, { plane = "bash", command = "x", env = { ["1A"] = "1" } },
      { plane = "bash", command = "x", env = { [""] = "1" } }, { plane = "bash", command = "x", env = { "v" } },
      { plane = "bash", command = "x", env = { A = 1 } }, { plane = "bash", command = "x", env = { A = "\0" } },
      { plane = "bash", command = "x", env = "A=1" }, { plane = "shell", command = "x", env = { A = "1" } },
      { plane = "pty", command = "x" }, { plane = "shell" }, { plane = "shell", command = "a\0b" },
      { plane = "shell", command = "\xff" }, { plane = "shell", command = "x", timeout = 0 },
      { plane = "shell", command = "x", timeout = -1 }, { plane = "shell", command = "x", timeout = 0 / 0 },
      { plane = "shell", command = "x", timeout = math.huge }, { plane = "shell", command = "x", timeout = "5" },
      { plane = "shell", command = "x", session = 7 }, { plane = "shell", command = "x", cwd = {} },
    }
    for i, req in ipairs(bad) do
      assert.equal("invalid_argument", failure(client.exec, client, req).kind, "request " .. i)
    end
    assert.equal("unsupported", failure(client.exec, client, { plane = "bash", command = "cat", stdin = "x" }).kind)
    assert.equal(0, #sent)
  end)
end)

describe("a session on the AIO plane", function()
  it("is made with a limit of 5 s, by the id that the caller chose [J6 J11]", function()
    local client, sent = client_of { ok { session_id = "s 1", working_dir = "/" }, ok { session_id = "s 1" } }
    assert.equal("s 1", client:open_session("shell", "s 1"))
    assert.equal("s 1", client:open_session("bash", "s 1"))
    assert.equal("http://sandbox/v1/shell/sessions/create", sent[1].url)
    assert.same({ id = "s 1" }, json.decode(sent[1].body))
    assert.equal(5, sent[1].timeout)
    assert.equal("http://sandbox/v1/bash/sessions/create", sent[2].url)
    assert.same({ session_id = "s 1" }, json.decode(sent[2].body))
  end)

  it("whose creation is refused leaves nothing open [J9]", function()
    for _, step in ipairs { refused_connection(), refusal(400, { success = false, message = "no" }), refusal(422, {}),
      refusal(429, {}), refusal(409, { error = "stale_token" }) } do
      for _, plane in ipairs { "shell", "bash" } do
        local client, sent = client_of { step }
        assert.not_equal("outcome_unknown", failure(client.open_session, client, plane, "s").kind)
        assert.equal(1, #sent)
      end
    end
  end)

  it("whose creation ends otherwise may be there [J7 J9]", function()
    for _, step in ipairs { lost "read_timeout", lost "read", { status = 500, body = "" }, { status = 503, body = "" },
      { status = 200, body = "{" }, { status = 200, body = json.encode { success = false, message = "no" } },
      { status = 302, body = "" } } do
      for _, plane in ipairs { "shell", "bash" } do
        local client, sent = client_of { step }
        local err = failure(client.open_session, client, plane, "s")
        assert.same({ "outcome_unknown", "session_creation" }, { err.kind, err.reason })
        assert.equal(1, #sent)
      end
    end
  end)

  it("is cleaned up at best effort within 5 s [J9 J11]", function()
    local client, sent = client_of { ok {}, ok {}, no_session(), lost "read_timeout", { status = 500, body = "" } }
    assert.is_true(client:close_session("shell", "s 1"))
    assert.equal("DELETE http://sandbox/v1/shell/sessions/s%201", sent[1].method .. " " .. sent[1].url)
    assert.is_true(client:close_session("bash", "s 1"))
    assert.equal("POST http://sandbox/v1/bash/sessions/s%201/close", sent[2].method .. " " .. sent[2].url)
    assert.equal("", sent[2].body)
    assert.is_true(client:close_session("shell", "gone"))
    assert.is_false((client:close_session("shell", "s")))
    assert.is_false((client:close_session("shell", "s")))
    for _, request in ipairs(sent) do assert.equal(5, request.timeout) end
  end)
end)

describe("a file on the AIO plane", function()
  it("is read by download, as raw bytes", function()
    local client, sent = client_of { { status = 200, body = "\0\xff raw" } }
    assert.equal("\0\xff raw", client:read "/tmp/a b")
    assert.equal("GET http://sandbox/v1/file/download?path=%2Ftmp%2Fa%20b", sent[1].method .. " " .. sent[1].url)
  end)

  it("is written by upload, as raw bytes", function()
    local client, sent = client_of { ok { file_path = "/tmp/x", file_size = 4, success = true } }
    assert.is_true(client:write("/tmp/x", "\0\r\n\xff"))
    local boundary = sent[1].headers["Content-Type"]:match("^multipart/form%-data; boundary=(.+)$")
    assert.truthy(sent[1].body:find("\r\n\r\n\0\r\n\xff\r\n--" .. boundary .. "--\r\n", 1, true))
    assert.truthy(sent[1].body:find('name="path"\r\n\r\n/tmp/x\r\n', 1, true))
  end)

  it("that could not be written is an io_error, one whose answer is lost is unknown", function()
    local function bad(data) return { status = 200, body = json.encode { success = false, message = "no", data = data } } end
    local client = client_of {
      bad { error_type = "permission_denied", message = "denied" }, lost "read_timeout", { status = 500, body = "" },
      refused_connection(), ok { file_path = "/tmp/other", file_size = 1 },
    }
    local function write() return failure(client.write, client, "/tmp/x", "1") end
    local err = write()
    assert.same({ "io_error", "permission_denied" }, { err.kind, err.reason })
    assert.equal("outcome_unknown", write().kind)
    assert.equal("outcome_unknown", write().kind)
    assert.equal("backend_error", write().kind)
    assert.equal("io_error", write().kind)
    assert.equal("unsupported", failure(client.write, client, "/tmp/x", "1", { no_overwrite = true }).kind)
  end)

  it("listing gives the entries, or the reason why not", function()
    local client = client_of {
      ok { path = "/d", files = { { name = "a", path = "/d/a", is_directory = false, size = 3 } } },
      { status = 200, body = json.encode { success = false, data = { error_type = "not_found", message = "no /d" } } },
      lost "read_timeout",
    }
    assert.equal("a", client:list("/d")[1].name)
    assert.equal("not_found", failure(client.list, client, "/d").reason)
    assert.equal("backend_error", failure(client.list, client, "/d").kind)
  end)

  it("needs an absolute path", function()
    local client, sent = client_of {}
    for _, path in ipairs { "", "a", "./a", "/a\0b", 7 } do
      assert.equal("invalid_argument", failure(client.read, client, path).kind)
      assert.equal("invalid_argument", failure(client.write, client, path, "").kind)
      assert.equal("invalid_argument", failure(client.list, client, path).kind)
    end
    assert.equal(0, #sent)
  end)
end)

describe("tokens on the AIO plane", function()
  it("are unsupported where the server does not know them", function()
    local client = client_of {}
    assert.equal("unsupported", failure(client.fence, client, 1).kind)
    assert.equal("unsupported", failure(client.doom, client, 1, 2).kind)
  end)

  it("travel as decimal text, with all their digits, from the fence on", function()
    local client, sent = client_of({ { status = 200, body = '{"token":"9007199254740993"}' }, ok { status = "completed", exit_code = 0 } },
      { fenced = true, token = 5, headers = { ["X-AIO-API-Key"] = "k" } })
    client:fence(9007199254740993)
    assert.equal("9007199254740993", sent[1].headers["X-Paddock-Token"])
    client:exec { plane = "bash", command = "true" }
    assert.equal("9007199254740993", sent[2].headers["X-Paddock-Token"])
    assert.equal("k", sent[2].headers["X-AIO-API-Key"])
  end)

  it("that are refused mean lost, and change nothing here", function()
    local client, sent = client_of({ refusal(409, { error = "stale_token", token = "9" }), lost "read_timeout",
      refusal(409, { error = "token_mismatch", token = "9" }), ok { status = "completed", exit_code = 0 } }, { fenced = true, token = 5 })
    assert.same("lost", failure(client.fence, client, 4).kind)
    assert.same("outcome_unknown", failure(client.fence, client, 6).kind)
    local err = failure(client.doom, client, 7, 8)
    assert.same({ "lost", "token_mismatch" }, { err.kind, err.reason })
    assert.same({ "7", "8", true, 1 }, { sent[3].headers["X-Paddock-Expected"], sent[3].headers["X-Paddock-Token"], sent[3].fresh,
      sent[3].timeout })
    client:exec { plane = "bash", command = "true" }
    assert.equal("5", sent[4].headers["X-Paddock-Token"])
  end)
end)

describe("a closed AIO client", function()
  it("answers closed", function()
    local client, sent = client_of {}
    client:close()
    assert.equal("closed", failure(client.exec, client, { plane = "shell", command = "true" }).kind)
    assert.equal(0, #sent)
  end)
end)

--- Starts paddock-guest on a socket, as the process backend does but without a sandbox around it.
---@param settings? string[]  "name=value", after the usual ones
local function start_guest(settings)
  local proc = real_io.proc
  local dir = support.tmpdir()
  local binary = support.sh("command -v paddock-guest"):match("^%S+")
  assert(binary, "paddock-guest is not in PATH: source build/env.sh")
  local lines = { "generation=g1", "token=7", "orphan_ttl=0", "workspace=" .. dir, "home=" .. dir }
  for _, line in ipairs(settings or {}) do lines[#lines + 1] = line end
  local folder = assert(proc.open(dir, "pd"))
  local listen = assert(proc.listen(folder, "sock"))
  local conf = assert(proc.memfd(table.concat(lines, "\0") .. "\0"))
  local start_read, start = proc.pipe()
  start:write("g")
  local child = proc.spawn { argv = { binary }, fds = { [3] = conf, [4] = listen, [6] = start_read } }
  for _, fd in ipairs { folder, listen, conf, start_read, start } do fd:close() end
  local guest = { dir = dir, child = child }
  function guest.client(opts)
    opts = opts or {}
    opts.url, opts.unix, opts.io = "http://sandbox", dir .. "/sock", real_io
    opts.token, opts.fenced = opts.token or 7, true
    return aio.new(opts)
  end
  function guest.stop()
    child:kill()
    assert(child:wait(5), "the guest did not end")
    child:close()
  end
  return guest
end

describe("the AIO client and the real guest", function()
  local guest, client
  setup(function()
    guest = start_guest()
    client = guest.client()
  end)
  teardown(function()
    guest.stop()
    support.cleanup()
  end)

  it("run a command in the default shell and in explicit sessions of both planes", function()
    local r = client:exec { plane = "shell", command = "echo hi; (exit 3)", timeout = 5 }
    assert.same({ "completed", 3, "hi\n", "" }, { r.outcome, r.exit_code, r.stdout, r.stderr })
    assert.is_true(r.duration > 0 and r.duration < 5)
    assert.equal("s 1", client:open_session("shell", "s 1"))
    client:exec { plane = "shell", session = "s 1", command = "A=1; cd /" }
    assert.equal("1 /\n", client:exec({ plane = "shell", session = "s 1", command = "echo $A $PWD" }).stdout)
    assert.is_true(client:close_session("shell", "s 1"))
    local err = failure(client.exec, client, { plane = "shell", session = "s 1", command = "true" })
    assert.same({ "backend_error", "no_session" }, { err.kind, err.reason })
    client:open_session("bash", "b")
    r = client:exec { plane = "bash", session = "b", command = "printenv K; pwd; echo e >&2", env = { K = "v" }, cwd = "/usr" }
    assert.same({ "completed", 0, "v\n/usr\n", "e\n" }, { r.outcome, r.exit_code, r.stdout, r.stderr })
    assert.is_true(client:close_session("bash", "b"))
  end)

  it("are definite about a time limit, and go on in a fresh shell that says so [J3 B096]", function()
    client:open_session("shell", "limit")
    client:exec { plane = "shell", session = "limit", command = "A=1" }
    local r = client:exec { plane = "shell", session = "limit", command = "echo part; sleep 30", timeout = 0.4 }
    assert.same({ "hard_timeout", 124, "part\n", false }, { r.outcome, r.exit_code, r.stdout, r.session_reset })
    r = client:exec { plane = "shell", session = "limit", command = "echo [$A]" }
    assert.same({ "completed", "[]\n", true }, { r.outcome, r.stdout, r.session_reset })
    r = client:exec { plane = "shell", command = "sleep 30", timeout = 0.3 }
    assert.equal("hard_timeout", r.outcome)
    r = client:exec { plane = "bash", command = "sleep 30", timeout = 0.3 }
    assert.same({ "hard_timeout", 124 }, { r.outcome, r.exit_code })
  end)

  it("survive what ends a shell [B091 B094]", function()
    client:open_session("shell", "ends")
    for _, row in ipairs { { "echo x; exit 0", "completed", 0 }, { "exit 3", "completed", 3 }, { "kill -9 $$", "signalled", 137 } } do
      local r = client:exec { plane = "shell", session = "ends", command = row[1] }
      assert.same({ row[2], row[3] }, { r.outcome, r.exit_code }, row[1])
      r = client:exec { plane = "shell", session = "ends", command = "echo ok" }
      assert.same({ "completed", "ok\n", true }, { r.outcome, r.stdout, r.session_reset }, row[1])
    end
  end)

  it("bring text with replacements for bytes that are none, and say what was cut [B085 B087]", function()
    local r = client:exec { plane = "bash", command = "printf 'a\\377b\\000c'" }
    assert.equal("a\xef\xbf\xbdb\0c", r.stdout)
    r = client:exec { plane = "bash", command = "head -c 3000000 /dev/zero | tr '\\0' x" }
    assert.is_true(r.truncated)
    assert.is_true(#r.stdout > 1000000 and #r.stdout < 1100000)
  end)

  it("write, read and list files as raw bytes", function()
    local bytes = ("\0\r\n--x\xff"):rep(50000)
    local path = guest.dir .. "/a file"
    assert.is_true(client:write(path, bytes))
    assert.equal(bytes, client:read(path))
    assert.is_true(client:write(path, ""))
    assert.equal("", client:read(path))
    local seen = {}
    for _, entry in ipairs(client:list(guest.dir)) do seen[entry.name] = entry end
    assert.equal(path, seen["a file"].path)
    assert.is_false(seen["a file"].is_directory)
    for _, call in ipairs { "read", "write", "list" } do
      local err = failure(client[call], client, guest.dir .. "/none/x", "1")
      assert.same({ "io_error", "not_found" }, { err.kind, err.reason }, call)
    end
  end)

  it("do not wait for a stuck session with file calls [B095]", function()
    client:open_session("shell", "stuck")
    client:exec { plane = "shell", session = "stuck", command = "sleep 30", timeout = 0.2 }
    local started = real_io.now()
    client:list(guest.dir)
    client:write(guest.dir .. "/x", "1")
    client:read(guest.dir .. "/x")
    assert.is_true(real_io.now() - started < 15) -- and not the thirty seconds
  end)

  it("are lost to each other once somebody fenced or doomed", function()
    local own = start_guest()
    local old, new = own.client(), own.client()
    old:exec { plane = "bash", command = "true" }
    new:fence(9)
    for _, call in ipairs {
      function() old:exec { plane = "shell", command = "true" } end, function() old:open_session("bash", "x") end,
      function() old:write("/tmp/never", "") end, function() old:fence(8) end, function() old:doom(7, 8) end,
    } do
      assert.equal("lost", failure(call).kind)
    end
    assert.equal("token_mismatch", failure(new.doom, new, 8, 10).reason)
    assert.is_true(new:doom(9, 10))
    assert.equal("doomed", failure(new.exec, new, { plane = "shell", command = "true" }).reason)
    own.stop()
  end)

  it("tell a lost answer from a command that was never sent [J1 J9 J12]", function()
    local own = start_guest()
    local lone = own.client()
    local r = lone:exec { plane = "shell", command = "kill -9 " .. own.child:pid(), timeout = 5 }
    assert.same({ "unknown", "response" }, { r.outcome, r.reason })
    assert.is_true(own.child:wait(5))
    for _, plane in ipairs { "shell", "bash" } do
      assert.equal("backend_error", failure(lone.exec, lone, { plane = plane, command = "true" }).kind)
      assert.not_equal("outcome_unknown", failure(lone.open_session, lone, plane, "s").kind)
    end
  end)
end)
