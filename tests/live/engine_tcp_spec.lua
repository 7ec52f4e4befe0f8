--- The docker backend over TCP, on real engines: a Docker daemon with --tlsverify, and Podman's service without TLS, both on loopback.
--- The engine's exec is the plane there: no guest can be mounted on a machine that is not known to be this one.
local containers = require "tests.live.containers"
local engines = require "tests.support.engines"
local paddock = require "paddock"
local support = require "tests.support"
local sh = support.sh

local ALICE = { user = "alice", thread = "t1" }
local docker, podman = engines.all "docker"[1], engines.all "podman"[1]
local address, folder, no_tls = engines.tls()
local plain, no_plain = engines.plain()
-- No TLS is no more to be had there than the daemon is.
docker.why = docker.why or no_tls or (not address and "the docker daemon has no TLS port" or nil)
podman.why = podman.why or no_plain
local SELF = address and "tcp://" .. address

--- The keys of backend_options for an authority's certificates.
local function keys(who, more)
  local from = folder .. "/" .. who
  local out = { host = SELF, tls_ca = from .. "/ca.pem", tls_cert = from .. "/cert.pem", tls_key = from .. "/key.pem" }
  for key, value in pairs(more or {}) do out[key] = value or nil end
  return out
end

--- What the program does with an environment: this process's own cannot be changed. @ stands for the configuration. Without the
--- engines' own clients in PATH: doctor would ask them, too, and they are slow.
local function program(world, env, more, words, under)
  local file = world.state .. "/config.lua"
  support.write_file(file, ([[return { backend = "docker", state_dir = %q, image = %q, ready_timeout = 30, %s }]]):format(world.state,
    engines.image "busybox", more))
  return sh(("%senv -u DOCKER_HOST -u DOCKER_CERT_PATH -u DOCKER_TLS_VERIFY PATH=\"$(dirname \"$(command -v paddock)\")\" %s "
    .. "paddock %s"):format(under or "", env, (words:gsub("@", "--config " .. file))))
end

--- Everything that goes over the wire to an engine: calls, the stream of events, and the stream of an exec in both directions.
local function whole_life(rt, world)
  local box = rt:acquire(ALICE)
  assert.equal("created", box.source)
  local r = box:exec "echo out; echo err >&2; exit 3"
  assert.same({ "out\n", "err\n", 3 }, { r.stdout, r.stderr, r.exit_code })
  -- More than a record of TLS or a buffer of libcurl's holds, and no text, both ways.
  local bytes = ("\0\1\255\n"):rep(100000)
  box:write("/workspace/b", bytes)
  assert.is_true(box:read "/workspace/b" == bytes)
  assert.equal("400003\n", box:exec("(cat; echo ab) | wc -c", { stdin = bytes }).stdout)
  -- Who leaves input unread, reads none of none, or is refused before reading ends at once, not at the limit.
  assert.equal(0, box:exec("head -c 5 >/dev/null", { stdin = bytes, timeout = 20 }).exit_code)
  assert.equal("0\n", box:exec("wc -c", { stdin = "", timeout = 20 }).stdout)
  local err = support.caught(box.exec, box, "cat", { stdin = bytes, cwd = "/no/such", timeout = 20 })
  assert.equal("invalid_cwd", err.reason)
  assert.equal("io_error", support.caught(box.write, box, "/no/such/file", bytes).kind)
  -- A shell's state that a command with input has changed is kept.
  box:exec("cd /tmp; read A", { scope = "s", stdin = "x\n" })
  assert.equal("/tmp x\n", box:exec('echo "$PWD $A"', { scope = "s" }).stdout)
  r = box:exec("sleep 30", { timeout = 0.5 })
  assert.equal("hard_timeout", r.outcome)
  local id, generation = box.id, box.generation
  box:release()
  -- Nobody asks: the stream of events tells of a death.
  assert.equal("warm", rt:inspect(id).state)
  world.engine:call("POST", "/containers/" .. generation .. "/kill?signal=KILL")
  assert.is_true(support.eventually(function() return rt:inspect(id) == nil or rt:inspect(id).state ~= "warm" end, 20))
  assert.is_true(support.eventually(function() return #world:containers() == 0 end, 20))
  box = rt:acquire(ALICE)
  id = box.id
  box:release()
  assert.is_true(rt:destroy(id))
  assert.equal(0, #world:containers())
end

describe("an engine over TLS", function()
  local on = containers.on(docker)

  on("serves a whole life of a sandbox, by the options' certificates [E5, E11]", function(world)
    local rt = world:open { health_ttl = 0, backend_options = keys "ours" }
    assert.is_false(rt:capabilities().fenced)                  -- a plane was chosen that needs no mount
    whole_life(rt, world)
  end)

  on("is found by DOCKER_HOST with DOCKER_CERT_PATH, verified with and without DOCKER_TLS_VERIFY, and doctor says so", function(world)
    local own = ("backend_options = { prefix = %q }"):format(world.prefix)
    local path = ("DOCKER_HOST=%s DOCKER_CERT_PATH=%s/"):format(SELF, folder)
    local out, status = program(world, path .. "ours DOCKER_TLS_VERIFY=1", own, "doctor @")
    assert.equal(0, status, out)
    assert.matches("Docker [%d%.+a-z]+ at tcp://127%.0%.0%.1:2376 over TLS", out)
    -- The client's way to switch verification off is none here.
    out, status = program(world, ("DOCKER_HOST=%s HOME=%s DOCKER_CERT_PATH=%s/ours"):format(SELF, world.state, folder), own,
      "exec @ -- echo hello")
    assert.equal("hello\n", out)
    assert.equal(0, status)
    -- That file's word counts alone, whatever the system's authorities have signed.
    local trusting = ("unshare -m sh -c 'd=%s/certs; mkdir -p $d && cp %s/ours/ca.pem $d/"
      .. "$(openssl x509 -hash -noout -in %s/ours/ca.pem).0 && mount --bind $d /etc/ssl/certs && exec \"$@\"' sh "):format(
      world.state, folder, folder)
    for _, verify in ipairs { "", " DOCKER_TLS_VERIFY=1" } do
      out, status = program(world, path .. "other" .. verify, own, "doctor @", trusting)
      assert.not_equal(0, status)
      assert.matches("none of the authorities in " .. folder .. "/other/ca.pem", out, 1, true)
    end
    out, status = program(world, path .. "nowhere DOCKER_TLS_VERIFY=1", own, "doctor @")
    assert.not_equal(0, status)
    assert.matches("DOCKER_CERT_PATH: cannot read " .. folder .. "/nowhere/ca.pem", out, 1, true)
  end)

  --- A server that takes any client, with one of our certificates; nil, and it is gone, at the block's end.
  local function server(certificate, more)
    local port = "2399"
    local pid = sh(("openssl s_server -accept 127.0.0.1:%s -cert %s/ours/%s -key %s/ours/server.key -www -quiet %s " ..
      ">/dev/null 2>&1 & echo $!"):format(port, folder, certificate, folder, more or "")):match("%d+")
    assert.is_true(support.eventually(function()
      return select(2, sh("python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", " .. port .. "), 1)'")) == 0
    end))
    return setmetatable({ host = "tcp://127.0.0.1:" .. port }, { __close = function() sh("kill " .. pid) end })
  end

  on("is refused in one line that names what is wrong and what to do, and never spoken to otherwise [E14]", function(world)
    local state = world.state
    support.write_file(state .. "/garbage.pem", "no key at all\n")
    support.write_file(state .. "/cut.pem", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    support.write_file(state .. "/cut-ca.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    sh(("openssl pkcs8 -topk8 -v2 aes128 -passout pass:secret -in %s/ours/key.pem -out %s/locked.pem"):format(folder, state))
    local expired <close> = server "expired.pem"
    local other = folder .. "/other/"
    local foreign = { tls_cert = other .. "cert.pem", tls_key = other .. "key.pem" }
    local cases = {
      -- the engine's word against ours
      { "tls", keys("ours", { tls_cert = false, tls_key = false }), SELF, "wants to know its clients" },
      { "tls", keys("ours", foreign), SELF, "does not take " .. other .. "cert.pem" },
      -- ours against the engine's
      { "tls", keys("ours", { tls_ca = other .. "ca.pem" }), SELF, "none of the authorities in " .. other .. "ca.pem" },
      { "tls", { host = SELF }, SELF, "none of the system's authorities" },
      { "tls", keys("ours", { host = "tcp://localhost:2376" }), "tcp://localhost:2376", "by a name that its certificate has" },
      { "tls", keys("ours", { host = expired.host }), expired.host, "renew the engine's certificate" },
      -- what does not fit together, which only the TLS library sees
      { "tls", keys("ours", { tls_key = other .. "key.pem" }), other .. "key.pem", "a certificate and its key" },
      { "tls", keys("ours", { tls_key = state .. "/cut.pem" }), state .. "/cut.pem", "a certificate and its key" },
      { "tls", keys("ours", { tls_ca = state .. "/cut-ca.pem" }), state .. "/cut-ca.pem", "put the certificates of its authorities" },
      -- files
      { nil, keys("ours", { tls_ca = state .. "/none.pem" }), state .. "/none.pem", "backend_options.tls_ca: cannot read" },
      { nil, keys("ours", { tls_cert = state }), state, "backend_options.tls_cert: " },
      { nil, keys("ours", { tls_key = state .. "/garbage.pem/x" }), state .. "/garbage.pem/x", "backend_options.tls_key: cannot read" },
      { nil, keys("ours", { tls_key = state .. "/garbage.pem" }), state .. "/garbage.pem", "no private key in PEM form" },
      { nil, keys("ours", { tls_ca = folder .. "/ours/key.pem" }), folder .. "/ours/key.pem", "no certificate in PEM form" },
      { nil, keys("ours", { tls_key = state .. "/locked.pem" }), state .. "/locked.pem", "under a password" },
      -- who speaks what
      { "tls", keys("ours", { host = "tcp://" .. (plain or "127.0.0.1:5000") }), "127.0.0.1:", "speaks no TLS" },
      { "tls", { host = "http://" .. address }, "http://" .. address, "it speaks TLS alone" },
      { nil, { host = "tcp://192.0.2.1:2375" }, "tcp://192.0.2.1:2375", "backend_options.plain_tcp" },
      { nil, { host = "tcp://127.0.0.1.example:2375" }, "127.0.0.1.example", "backend_options.plain_tcp" },
    }
    for _, case in ipairs(cases) do
      local reason, own, names, advice = table.unpack(case, 1, 4)
      local options = world:options { backend_options = own }
      local err = support.caught(paddock.open, options)
      local text = tostring(err) .. "\n" .. tostring(names)
      assert.equal(reason == "tls" and "backend_error" or "invalid_argument", err.kind, text)
      assert.equal(reason, err.reason, text)
      assert.matches(names, err.message, 1, true)
      assert.matches(advice, err.message, 1, true)
      assert.is_nil(err.message:find("\n", 1, true), text)
    end
  end)
end)

describe("an engine over plain TCP", function()
  containers.on(podman)("serves on loopback, and doctor warns of it", function(world)
    local rt = world:open { backend_options = { host = "tcp://" .. plain } }
    local box = rt:acquire(ALICE)
    assert.equal("3\n", box:exec("wc -c", { stdin = "abc" }).stdout)
    box:release()
    assert.is_true(rt:destroy(box.id))
    local out = program(world, "DOCKER_HOST=tcp://" .. plain, ("backend_options = { prefix = %q }"):format(world.prefix), "doctor @")
    assert.matches("over plain TCP", out, 1, true)
    assert.matches("whoever reaches its plain TCP port commands it", out, 1, true)
  end)
end)
