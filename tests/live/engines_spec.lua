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
  end)
end
