--- The real engines that other suites run on (tests/support/engines.py), and the proxy that makes them fail.
local engines = require "tests.support.engines"
local support = require "tests.support"

for _, engine in ipairs(engines.all()) do
  describe(engine.name .. " in its own namespaces", function()
    --- Like `it`, skipped with the reason where the engine cannot run.
    local function on_engine(name, fn)
      it(name, function()
        if engine.why then
          pending(engine.why)
          return
        end
        fn()
      end)
    end

    on_engine("answers a ping and says its version", function()
      local status, body = engine:call("GET", "/_ping")
      assert.equal(200, status)
      assert.equal("OK", body)
      assert.equal(engine.version, select(2, engine:call("GET", "/version")).Version)
    end)

    on_engine("runs a container whose port is reached on loopback, and is not the host's", function()
      local status, made = engine:call("POST", "/containers/create?name=pdk-test-port", {
        Image = engines.image "busybox",
        Cmd = { "sh", "-c", "cd /tmp && echo hello > index.html && exec httpd -f -p 8080" },
        ExposedPorts = { ["8080/tcp"] = {} },
        HostConfig = { PortBindings = { ["8080/tcp"] = { { HostIp = "127.0.0.1", HostPort = "" } } }, Memory = 64000000 },
      })
      assert.equal(201, status)
      finally(function() engine:call("DELETE", "/containers/" .. made.Id .. "?force=true&v=true") end)
      assert.equal(204, (engine:call("POST", "/containers/" .. made.Id .. "/start")))
      local _, seen = engine:call("GET", "/containers/" .. made.Id .. "/json")
      local port = seen.NetworkSettings.Ports["8080/tcp"][1].HostPort
      local answer = support.sh("curl -sS --retry 20 --retry-connrefused --retry-delay 0 --max-time 20 http://127.0.0.1:" .. port)
      assert.equal("hello\n", answer)
    end)

    on_engine("serves an all-in-one image: no token, and nothing of the guest's own", function()
      local status, made = engine:call("POST", "/containers/create", { Image = engines.image "aio", ExposedPorts = { ["8080/tcp"] = {} },
        HostConfig = { PortBindings = { ["8080/tcp"] = { { HostIp = "127.0.0.1", HostPort = "" } } }, ReadonlyRootfs = true } })
      assert.equal(201, status)
      finally(function() engine:call("DELETE", "/containers/" .. made.Id .. "?force=true&v=true") end)
      assert.equal(204, (engine:call("POST", "/containers/" .. made.Id .. "/start")))
      local _, seen = engine:call("GET", "/containers/" .. made.Id .. "/json")
      local url = "http://127.0.0.1:" .. seen.NetworkSettings.Ports["8080/tcp"][1].HostPort
      local curl = "curl -sS --retry 20 --retry-all-errors --retry-delay 0 --max-time 20 "
      local context = support.sh(curl .. url .. "/v1/sandbox")
      assert.truthy(context:find('"home_dir":"/home/gem"', 1, true), context)
      assert.falsy(context:find('"paddock"', 1, true))
      assert.equal('{"detail":"Not Found"}', (support.sh(curl .. url .. "/v1/paddock/list?path=/")))
      local done = support.sh(curl .. url .. "/v1/bash/exec -H 'Content-Type: application/json' -d '{\"command\":\"echo hi\"}'")
      assert.truthy(done:find('"stdout":"hi\\n"', 1, true), done)
    end)

    on_engine("cleans up after a container that ended", function() -- podman waits for its own clean-up, 20 s when that fails
      local _, made = engine:call("POST", "/containers/create", { Image = engines.image "busybox", Cmd = { "sh", "-c", "exit 3" } })
      finally(function() engine:call("DELETE", "/containers/" .. made.Id .. "?force=true&v=true") end)
      assert.equal(204, (engine:call("POST", "/containers/" .. made.Id .. "/start")))
      local status, ended = engine:call("POST", "/containers/" .. made.Id .. "/wait", nil, { timeout = 15 })
      assert.equal("200 3", ("%d %d"):format(status, ended.StatusCode))
    end)

    on_engine("pulls from the registry on loopback", function()
      local address, why = engines.registry()
      if why then
        pending(why)
        return
      end
      local image = address .. "/pdk/busybox"
      finally(function() engine:call("DELETE", "/images/" .. image .. ":1") end)
      assert.equal(404, (engine:call("GET", "/images/" .. image .. ":1/json")))
      local status, _, lines = engine:call("POST", "/images/create?fromImage=" .. image .. "&tag=1")
      assert.equal(200, status, lines)
      assert.falsy(lines:find("errorDetail", 1, true), lines)
      assert.equal(200, (engine:call("GET", "/images/" .. image .. ":1/json")))
    end)
  end)
end

describe("the fault proxy before an engine", function()
  local engine, proxy
  for _, candidate in ipairs(engines.all()) do
    if engine == nil or engine.why then engine = candidate end
  end

  setup(function() if engine.why == nil then proxy = engine:proxy() end end)
  teardown(function() if proxy then proxy:close() end end)
  before_each(function() if proxy then proxy:reset() end end)

  local function on_engine(name, fn)
    it(name, function()
      if engine.why then
        pending(engine.why)
        return
      end
      fn()
    end)
  end

  local function call(method, path, body, timeout)
    return engine:call(method, path, body, { socket = proxy.socket, timeout = timeout or 20 })
  end
  local function volumes()
    local _, answer = engine:call("GET", "/volumes")
    return type(answer.Volumes) == "table" and #answer.Volumes or 0
  end
  local function removed(name)
    finally(function() engine:call("DELETE", "/volumes/" .. name) end)
    return { Name = name }
  end

  on_engine("changes nothing without a rule, and counts", function()
    local plain, passed = engine:call("GET", "/version"), call("GET", "/v1.41/version")
    assert.equal(plain, passed)
    assert.equal(404, (call("GET", "/containers/nobody/json?size=0")))
    assert.equal(1, proxy:count("GET", "^/version$"))
    assert.equal(2, proxy:count())
    local calls = proxy:calls()
    assert.equal("/containers/nobody/json size=0 404", ("%s %s %d"):format(calls[2].path, calls[2].query, calls[2].status))
  end)

  on_engine("passes an exec's stream on, both ways when the client asks for that", function()
    local _, made = engine:call("POST", "/containers/create", { Image = engines.image "busybox", Cmd = { "sleep", "600" } })
    finally(function() engine:call("DELETE", "/containers/" .. made.Id .. "?force=true&v=true") end)
    engine:call("POST", "/containers/" .. made.Id .. "/start")
    local function exec(stdin)
      return select(2, call("POST", "/containers/" .. made.Id .. "/exec", { AttachStdin = stdin, AttachStdout = true,
        Cmd = stdin and { "cat" } or { "echo", "hello" } })).Id
    end
    local _, _, raw = call("POST", "/exec/" .. exec(false) .. "/start", '{"Detach":false,"Tty":false}')
    assert.equal("\1\0\0\0\0\0\0\6hello\n", raw)
    local id = exec(true)
    local echoed = support.sh(([[python3 -c '
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(20)
s.connect(sys.argv[1])
s.sendall(b"POST /exec/" + sys.argv[2].encode() + b"/start HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
          b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
f = s.makefile("rb")
print(f.readline().split()[1].decode())
while f.readline().strip():
    pass
s.sendall(b"back and forth")
s.shutdown(socket.SHUT_WR)
print(f.read()[8:].decode())' %s %s]]):format(proxy.socket, id))
    assert.equal("101\nback and forth\n", echoed)
  end)

  on_engine("keeps a connection for further calls", function()
    local output = support.sh(("curl -sv --unix-socket %s http://x/_ping http://x/_ping"):format(proxy.socket))
    assert.truthy(output:find("Re%-using existing connection"), output)
  end)

  on_engine("cuts a call before the engine sees it, once", function()
    local before = volumes()
    local rule = proxy:cut("POST", "^/volumes/create$", "before")
    local name = removed "pdk-cut-before"
    assert.equal(0, (call("POST", "/volumes/create", name)))
    assert.equal(before, volumes())
    assert.equal(1, proxy:hits(rule))
    assert.equal(201, (call("POST", "/volumes/create", name)))
    assert.equal(1, proxy:hits(rule))
    assert.same({ false, true }, { proxy:calls()[1].passed, proxy:calls()[2].passed })
  end)

  on_engine("loses the answer of a call that the engine has carried out", function()
    local before = volumes()
    proxy:cut("POST", "^/volumes/create$", "after")
    assert.equal(0, (call("POST", "/volumes/create", removed "pdk-cut-after")))
    assert.equal(before + 1, volumes())
  end)

  on_engine("cuts an answer in its middle, or where it is told to", function()
    local output = support.sh
    proxy:cut("GET", "^/version$", "middle", { times = 2, bytes = 5 })
    local got = output(("curl -s --unix-socket %s http://x/version; echo $?"):format(proxy.socket))
    assert.truthy(got:match('^{"%a%a%a18\n$'), got) -- 18: a part of the file only
    proxy:reset()
    proxy:cut("GET", "^/_ping$", "middle")
    assert.equal("O18\n", output(("curl -s --unix-socket %s http://x/_ping; echo $?"):format(proxy.socket)))
  end)

  on_engine("leaves alone as many calls as it is told to", function()
    proxy:cut("GET", "^/_ping$", "before", { skip = 1, times = 2 })
    local seen = {}
    for i = 1, 4 do seen[i] = (call("GET", "/_ping")) end
    assert.same({ 200, 0, 0, 200 }, seen)
  end)

  on_engine("delays, and hangs until released", function()
    local delayed = proxy:delay("GET", "^/_ping$", 0.3)
    assert.equal(200, (call("GET", "/_ping")))
    assert.equal(1, proxy:hits(delayed))
    proxy:hang("GET", "^/version$", "before")
    local waiting <close> = assert(io.popen(("curl -s --max-time 20 --unix-socket %s http://x/version"):format(proxy.socket)))
    for _ = 1, 500 do
      if proxy:open_now().calls == 1 then break end
      os.execute("sleep 0.01")
    end
    assert.equal(1, proxy:open_now().calls)
    assert.is_false(proxy:calls()[2].passed)
    proxy:release()
    assert.truthy(waiting:read("a"):find(engine.version, 1, true))
  end)

  on_engine("ends a hanging call when its client gives up", function()
    proxy:hang("GET", "^/_ping$", "after")
    assert.equal(0, (call("GET", "/_ping", nil, 0.3)))
    for _ = 1, 500 do
      if proxy:open_now().connections == 0 then break end
      os.execute("sleep 0.01")
    end
    assert.same({ connections = 0, calls = 0 }, proxy:open_now())
  end)

  on_engine("rewrites an answer, with and without asking the engine", function()
    proxy:rewrite("GET", "^/version$", { replace = { engine.version, "99.9" } })
    assert.equal("99.9", select(2, call("GET", "/version")).Version)
    local before = volumes()
    proxy:rewrite("POST", "^/volumes/create$", { status = 500, body = { message = "no space left" }, pass = false })
    local status, body = call("POST", "/volumes/create", { Name = "pdk-never" })
    assert.equal("500 no space left", status .. " " .. body.message)
    assert.equal(before, volumes())
  end)

  on_engine("sends a request or an answer twice", function()
    proxy:duplicate("DELETE", "^/volumes/", "request")
    call("POST", "/volumes/create", removed "pdk-twice")
    assert.equal(404, (call("DELETE", "/volumes/pdk-twice"))) -- the second time it is gone
    proxy:duplicate("GET", "^/_ping$", "answer")
    local raw = support.sh(("printf 'GET /_ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n' | " ..
      "python3 -c 'import socket,sys;s=socket.socket(socket.AF_UNIX);s.connect(sys.argv[1]);s.sendall(sys.stdin.buffer.read());" ..
      "print(s.makefile(\"rb\").read().count(b\"\\r\\n\\r\\nOK\"))' %s"):format(proxy.socket))
    assert.equal("2\n", raw)
  end)

  on_engine("cuts and repeats an event stream", function()
    local function events()
      local pipe = assert(io.popen(("curl -sN --max-time 20 --unix-socket %s 'http://x/events'; echo end"):format(proxy.socket)))
      for _ = 1, 500 do
        if proxy:open_now().calls == 1 then break end
        os.execute("sleep 0.01")
      end
      return pipe
    end
    local function happen()
      local _, made = engine:call("POST", "/containers/create", { Image = engines.image "busybox" })
      engine:call("DELETE", "/containers/" .. made.Id)
    end
    proxy:duplicate("GET", "^/events$", "lines")
    local stream <close> = events()
    happen()
    local first, second = stream:read("l", "l")
    assert.truthy(first:find('"create"', 1, true), first)
    assert.equal(first, second)
    proxy:drop()
    assert.truthy(stream:read("a"):find("end\n$"))
    proxy:reset()
    proxy:cut("GET", "^/events$", "middle")
    local cut <close> = events()
    happen()
    assert.truthy(cut:read("a"):find('^{[^}]*end\n$'))
  end)

  on_engine("is not there while it is down", function()
    proxy:down()
    assert.equal(0, (call("GET", "/_ping")))
    proxy:up()
    assert.equal(200, (call("GET", "/_ping")))
  end)
end)
