-- What io.http does on its own account: redirects, whom it believes over TLS, how much of an answer it reads. Over real connections.
local provisioner = require "tests.support.provisioner"
local support = require "tests.support"
local http = provisioner.io.http

describe("a redirect", function()
  local double
  setup(function() double = provisioner.start() end)
  teardown(function() double:stop() end)
  before_each(function() double:tell { reset = true, pods = { abc = { state = "running" } } } end)

  local function get(fields)
    local request = { url = double.url .. "/api/sandboxes/abc", redirects = 3, timeout = 5, headers = { ["X-API-Key"] = "k" } }
    for k, v in pairs(fields or {}) do request[k] = v end
    return http(request)
  end
  local function lead(to, fields)
    local fault = { route = "get", location = to }
    for k, v in pairs(fields or {}) do fault[k] = v end
    double:tell { faults = { fault } }
  end

  it("of a read is followed on its own host, absolute or relative, with its headers", function()
    for _, status in ipairs { 301, 302, 303, 307, 308 } do
      for _, to in ipairs { "/api/sandboxes/abc/presence", "abc/presence", double.url .. "/api/sandboxes/abc/presence" } do
        lead(to, { status = status })
        local response = assert(get())
        assert.equal(200, response.status)
        assert.matches("present", response.body, 1, true)
        local log = double:requests()
        assert.equal("k", log[#log].headers["x-api-key"])
      end
    end
  end)

  it("to another host, port, scheme or user is refused, and nothing is sent there", function()
    local other = provisioner.start()
    for _, to in ipairs { other.url .. "/api/sandboxes", ("http://localhost:%d/api/sandboxes"):format(double.port),
      ("//localhost:%d/x"):format(double.port), ("https://127.0.0.1:%d/"):format(double.port), "http://127.0.0.1/", "file:///etc/passwd",
      ("http://u:p@127.0.0.1:%d/api/sandboxes"):format(double.port), "gopher://127.0.0.1/", "http://[::1]/" } do
      lead(to)
      local before = double:count()
      local response, err = get()
      assert.is_nil(response, to)
      assert.equal("redirect", err.reason, to)
      assert.is_nil(err.message:find("u:p", 1, true))
      assert.equal(before + 1, double:count(), to)
    end
    assert.equal(0, other:count())
    other:stop()
  end)

  it("that never ends is an error, in the time that the request has", function()
    lead("/api/sandboxes/abc", { times = 0 })
    local _, err = get()
    assert.equal("redirect", err.reason)
    assert.equal(4, double:count "get")
    lead("/api/sandboxes/abc", { times = 0, delay = 0.3 })
    local began = provisioner.io.now()
    _, err = get { timeout = 0.5 }
    assert.equal("read_timeout", err.reason)
    assert.is_true(provisioner.io.now() - began < 5)
  end)

  it("of anything but a read, without a place, or when none is to be followed, is the answer", function()
    for _, method in ipairs { "POST", "DELETE", "PUT" } do
      double:tell { faults = { { location = "/api/sandboxes/abc/presence", status = 307 } } }
      assert.equal(307, assert(get { method = method, body = method ~= "DELETE" and "{}" or nil }).status)
    end
    lead("/api/sandboxes/abc/presence")
    assert.equal(302, assert(get { redirects = 0 }).status)
    double:tell { faults = { { route = "get", status = 302, body = "" } } }
    assert.equal(302, assert(get()).status)
    for _, bad in ipairs { -1, 11, 1.5, "1" } do assert.has_error(function() get { redirects = bad } end) end
  end)

  it("does not leave connections or descriptors behind", function()
    local before = support.fds()
    for _ = 1, 50 do
      lead "/api/sandboxes/abc/presence"
      get()
      lead "http://localhost:1/"
      get()
    end
    local grown = select(2, support.fds():gsub("socket", "")) - select(2, before:gsub("socket", ""))
    assert.is_true(grown <= 2, "sockets: " .. grown)
  end)
end)

describe("an answer", function()
  it("is read up to its limit and no further", function()
    local double = provisioner.start()
    double:tell { faults = { { route = "list", huge = 1 << 20, times = 0 } } }
    local response, err = http { url = double.url .. "/api/sandboxes", max_body = 1 << 19, timeout = 5 }
    assert.is_nil(response)
    assert.equal("too_large", err.reason)
    assert.equal(200, assert(http { url = double.url .. "/api/sandboxes", max_body = 2 << 20, timeout = 5 }).status)
    double:stop()
  end)
end)

describe("a TLS server", function()
  local folder, double
  local function certificate(name, host)
    local out, status = support.sh(("cd '%s' && openssl req -x509 -newkey rsa:2048 -nodes -keyout %s.key -out %s.pem -days 2 " ..
      "-subj /CN=%s -addext 'subjectAltName=%s'"):format(folder, name, name, name, host))
    assert(status == 0, out)
  end
  setup(function()
    folder = support.sh("mktemp -d \"${TMPDIR:-/tmp}/pdk-tls.XXXXXX\""):gsub("\n", "")
    certificate("right", "IP:127.0.0.1")
    certificate("other", "IP:127.0.0.1")
    double = provisioner.start { cert = folder .. "/right.pem", key = folder .. "/right.key" }
  end)
  teardown(function()
    double:stop()
    os.execute("rm -rf '" .. folder .. "'")
  end)

  it("is believed when the file's authority vouches for it, and by no other, also after that", function()
    local url = double.url .. "/api/sandboxes"
    local function ask(ca) return http { url = url, ca_file = ca, timeout = 5 } end
    assert.equal(200, assert(ask(folder .. "/right.pem")).status)
    for _, ca in ipairs { folder .. "/other.pem", folder .. "/no-such.pem", false } do
      local response, err = ask(ca or nil) -- not over the connection that is open and was believed
      assert.is_nil(response)
      assert.equal("tls", err.reason)
      assert.equal("not_sent", err.failure)
    end
    assert.equal(200, assert(ask(folder .. "/right.pem")).status)
    assert.has_error(function() ask "right.pem" end)
  end)

  it("is believed by what the file says now, not by what it said before", function()
    local ca = folder .. "/replaced.pem"
    local function ask(name)
      support.sh(("cp '%s/%s.pem' '%s'"):format(folder, name, ca))
      return http { url = double.url .. "/api/sandboxes", ca_file = ca, timeout = 5, fresh = true }
    end
    assert.equal(200, assert(ask "right").status)
    local response, err = ask "other"
    assert.is_nil(response)
    assert.equal("tls", err.reason)
    assert.equal(200, assert(ask "right").status)
  end)

  it("that has a certificate of another name is refused", function()
    local wrong = provisioner.start { cert = folder .. "/right.pem", key = folder .. "/right.key" }
    local url = ("https://localhost:%d/api/sandboxes"):format(wrong.port)
    local response, err = http { url = url, ca_file = folder .. "/right.pem", timeout = 5 }
    assert.is_nil(response)
    assert.equal("tls", err.reason)
    wrong:stop()
  end)

  it("serves a runtime whose backend names the file [E14]", function()
    local rt = support.open { backend = "provisioner", ready_interval = 0.05,
      backend_options = { url = double.url, ca_file = folder .. "/right.pem" } }
    local box = rt:acquire { user = "alice", thread = "t1" }
    assert.equal("x\n", box:exec("echo x").stdout)
    box:release()
    rt:shutdown()
    local other = support.open { backend = "provisioner", backend_options = { url = double.url } }
    assert.equal("tls", support.caught(other.acquire, other, { user = "alice", thread = "t1" }).reason)
    other:shutdown()
    support.cleanup()
  end)
end)
