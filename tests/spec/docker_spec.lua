--- The docker backend's parts that need no engine: what answers mean, times, labels, frames, addresses, options.
local config = require "paddock.config"
local support = require "tests.support"

-- A Lua host finds paddock.io in the core's library.
local open = assert(package.loadlib(assert(package.searchpath("paddock.core", package.cpath)), "luaopen_paddock_io"))
package.preload["paddock.io"] = package.preload["paddock.io"] or open

local certificates = require "paddock.docker.certificates"
local engine = require "paddock.docker.engine"
local images = require "paddock.docker.images"
local labels = require "paddock.docker.labels"
local planes = require "paddock.docker.planes"
local streams = require "paddock.docker.stream"
local view = require "paddock.docker.view"

local ID = ("ab"):rep(32)

describe("an engine's answer", function()
  local function meaning(status, message, cause, name)
    return engine.fault({ status = status, body = "", data = { message = message, cause = cause } }, name).meaning
  end

  it("means absent only when it names what was asked about [G6, G8]", function()
    assert.equal("absent", meaning(404, "No such container: " .. ID, nil, ID))
    assert.equal("absent", meaning(404, 'no container with name or ID "' .. ID .. '" found: no such container', "no such container", ID))
    assert.equal("not_found", meaning(404, "No such container: other", nil, ID))
    assert.equal("not_found", meaning(404, "page not found", nil, ID))
    assert.equal("not_found", engine.fault({ status = 404, body = "Not Found" }, ID).meaning)
    assert.equal("other", meaning(500, "something with " .. ID .. " failed", nil, ID))
  end)

  it("means the same in the words of both engines", function()
    assert.equal("name_taken", meaning(409, 'Conflict. The container name "/x" is already in use by container "' .. ID .. '".'))
    assert.equal("name_taken", meaning(500, 'creating container storage: the container name "x" is already in use by ' .. ID,
      "that name is already in use"))
    assert.equal("no_image", meaning(404, "No such image: x:latest"))
    assert.equal("no_image", meaning(404, "no such image: x: image not known"))
    assert.equal("port_taken", meaning(500, "driver failed: Bind for 127.0.0.1:80 failed: port is already allocated"))
    assert.equal("port_taken", meaning(500, "cannot listen on the TCP port: listen tcp4 :80: bind: address already in use"))
    assert.equal("busy", meaning(409, "removal of container " .. ID .. " is already in progress"))
    assert.equal("state", meaning(409, "Container " .. ID .. " is not running"))
    assert.equal("state", meaning(500, "can only kill running containers", "container state improper"))
  end)

  it("is told in its own words, on one line and not too long", function()
    assert.equal("a b", engine.words { status = 500, body = "a\nb\n" })
    assert.equal("m", engine.words { status = 500, body = '{"message":"m"}' })
    assert.is_true(#engine.words { status = 500, body = ("x"):rep(5000) } < 400)
    -- Looked at once: as many spaces as a sandbox likes to print must not cost their square.
    local spaces = "x" .. (" "):rep(1 << 22) .. "x"
    assert.equal("x x", engine.words { status = 500, body = spaces })
    assert.equal("x x", planes.plain_text(spaces))
    assert.equal("x x", planes.plain_text(string.pack(">B xxx s4", 2, spaces)))
  end)
end)

describe("an engine's times", function()
  it("are read with any number of digits and any offset, and never is no time", function()
    assert.equal(0, view.time "1970-01-01T00:00:00Z")
    assert.equal(1796058133, view.time "2026-11-30T17:02:13Z")
    assert.is_true(math.abs(view.time "2026-11-30T17:02:13.640151063Z" - 1796058133.640151063) < 1e-6)
    assert.is_true(math.abs(view.time "2026-11-30T17:02:13.6Z" - 1796058133.6) < 1e-6)
    assert.equal(1796058133, view.time "2026-11-30T18:02:13+01:00")
    assert.equal(951782400, view.time "2000-02-29T00:00:00Z")
    assert.equal(1796058133, view.time(1796058133))
    for _, text in ipairs { "0001-01-01T00:00:00Z", "", "yesterday", "2026-13-01T00:00:00Z", "2026-11-30" } do
      assert.is_nil(view.time(text))
    end
    assert.is_nil(view.time(nil))
  end)
end)

describe("a container", function()
  it("is the same in a list and by itself: port, address, state, what is attested [G1]", function()
    local all = labels.of("paddock.", { sandbox_id = "s1", instance = "ab", deployment = "d", plane = "aio", network = "open",
      image = "i:1", networks = { "n1", "n2" }, env = { MAX_SHELL_SESSIONS = "13" }, limits = { pids = 50 } })
    local nets = { Networks = { n1 = { IPAddress = "172.18.0.2" } } }
    local item = { Id = ID, Names = { "/x-s1" }, State = "running", Created = 1796058133, Labels = all, NetworkSettings = nets,
      Ports = { { PrivatePort = 22, PublicPort = 2222, Type = "tcp" }, { PrivatePort = 8080, Type = "tcp" },
        { IP = "127.0.0.1", PrivatePort = 8080, PublicPort = 23001, Type = "tcp" } } }
    local data = { Id = ID, Name = "/x-s1", Created = "2026-11-30T17:02:13Z", State = { Status = "running", Running = true },
      Config = { Labels = all }, NetworkSettings = { Networks = nets.Networks, Ports = { ["22/tcp"] = { { HostPort = "2222" } },
        ["8080/tcp"] = { { HostIp = "127.0.0.1", HostPort = "23001" } } } } }
    local listed, inspected = view.listed(item, 8080), view.inspected(data, 8080)
    assert.same({ 23001, "172.18.0.2", true, "x-s1" }, { listed.port, listed.address, listed.running, listed.name })
    assert.same(view.info(inspected, "paddock."), view.info(listed, "paddock."))
    local attested = view.info(listed, "paddock.").attestation
    assert.same({ "sandbox", "s1", "open", "i:1", 23001, 13 }, { attested.role, attested.sandbox_id, attested.network_mode,
      attested.image, attested.published_port, attested.max_shell_sessions })
    assert.same({ "n1", "n2" }, attested.networks)
    item.Ports, data.NetworkSettings.Ports = { { PrivatePort = 8080, Type = "tcp" } }, { ["8080/tcp"] = false }
    assert.is_nil(view.listed(item, 8080).port)
    assert.is_nil(view.inspected(data, 8080).port)
  end)
end)

describe("labels", function()
  local facts = {
    sandbox_id = "s1", instance = "abcd", deployment = "d1", plane = "guest", network = "none", image = "i",
    identity = { user = "a=b,c\0\255", thread = "t%1" }, limits = { memory = 1 << 31, cpus = 1.5 }, labels = { team = "x" },
    env = { MAX_SHELL_SESSIONS = "9" },
  }

  it("say whose a container is: all of ours, or it is not ours [I13]", function()
    local all = labels.of("paddock.", facts)
    assert.equal("ours", labels.whose("paddock.", all, "d1"))
    assert.equal("foreign", labels.whose("paddock.", all, "d2"))
    assert.equal("none", labels.whose("paddock.", { team = "x" }, "d1"))
    assert.equal("none", labels.whose("paddock.", nil, "d1"))
    for _, name in ipairs { "role", "sandbox_id", "instance", "deployment", "plane" } do
      local part = labels.of("paddock.", facts)
      part["paddock." .. name] = nil
      assert.equal("foreign", labels.whose("paddock.", part, "d1"))
    end
  end)

  it("come back as what was written [G1, G2]", function()
    local read = labels.read("deerflow.", labels.of("deerflow.", facts))
    assert.same(facts.identity, read.identity)
    assert.equal(1 << 31, read.limits.memory)
    assert.equal(1.5, read.limits.cpus)
    assert.equal(9, read.max_shell_sessions)
    assert.same({ team = "x" }, read.labels)
    for _, value in pairs(labels.of("paddock.", facts)) do
      assert.is_truthy(utf8.len(value))
      assert.is_nil(value:find("%c"))
    end
  end)

  it("without a network mode mean an open one [I13]", function()
    local all = labels.of("paddock.", facts)
    all["paddock.network_mode"] = nil
    assert.equal("open", labels.attest("paddock.", all).network)
  end)
end)

describe("a creation", function()
  local io = require "paddock.io"
  local option_rules = require "paddock.docker.options"
  local spec_of = require "paddock.docker.spec"

  --- What the engine is sent.
  local function body(options, fields)
    local plan = { image = "i:1", labels = { a = "b" }, options = option_rules.read(options), mounts = {}, env = {}, limits = {},
      network = "open", sandbox_id = "s1", cap_add = {}, image_env = {} }
    for key, value in pairs(fields or {}) do plan[key] = value end
    return io.json.decode(io.json.encode(spec_of.body(plan)))
  end

  it("says all that holds a sandbox in, also where an engine's own default would be the same [G5]", function()
    local host = body({ plane = "aio" }, { limits = { memory = 1 << 30, cpus = 1.5, pids = 50 } }).HostConfig
    assert.same({ Name = "no" }, host.RestartPolicy)
    assert.same({ { "ALL" }, {}, { "no-new-privileges" } }, { host.CapDrop, host.CapAdd, host.SecurityOpt })
    assert.same({ false, "bridge", 64 << 20 }, { host.ReadonlyRootfs, host.NetworkMode, host.ShmSize })
    assert.same({ 1 << 30, 1 << 30, 1500000000, 50 }, { host.Memory, host.MemorySwap, host.NanoCpus, host.PidsLimit })
    assert.same({}, { host.Binds, host.Privileged, host.PublishAllPorts, host.PidMode, host.IpcMode })
    host = body({ plane = "exec", cap_drop = { "CHOWN" }, security_opt = { "x=y" }, read_only_root = true, init = true, runtime = "runsc" },
      { cap_add = { "KILL" }, network = "none" }).HostConfig
    assert.same({ { "CHOWN" }, { "KILL" }, { "x=y" }, true, true, "runsc", "none" },
      { host.CapDrop, host.CapAdd, host.SecurityOpt, host.ReadonlyRootfs, host.Init, host.Runtime, host.NetworkMode })
    assert.is_truthy(host.Tmpfs["/tmp"])
    assert.equal("n1", body({ plane = "aio" }, { helper = "n1", network = "none" }).HostConfig.NetworkMode)
  end)

  it("names mounts in the long form, drive letters and colons as they are [G5]", function()
    local mounts = { { source = [[D:\state\a]], target = "/a", read_only = true }, { source = "/b:c,d", target = "/b", read_only = false } }
    local host = body({ plane = "aio" }, { mounts = mounts }).HostConfig
    assert.same({
      { Type = "bind", Source = [[D:\state\a]], Target = "/a", ReadOnly = true },
      { Type = "bind", Source = "/b:c,d", Target = "/b", ReadOnly = false },
    }, host.Mounts)
  end)

  it("publishes the one port where it is told to, and none otherwise [G5]", function()
    local made = body({ plane = "aio" }, { port = { address = "127.0.0.1", port = 8081 } })
    assert.same({ ["8080/tcp"] = { { HostIp = "127.0.0.1", HostPort = "8081" } } }, made.HostConfig.PortBindings)
    assert.same({ ["8080/tcp"] = {} }, made.ExposedPorts)
    made = body({ plane = "aio" }, { port = { address = "::1" } })
    assert.same({ ["8080/tcp"] = { { HostIp = "::1", HostPort = "" } } }, made.HostConfig.PortBindings) -- the engine's choice
    made = body({ plane = "aio" }, {})
    assert.is_nil(made.HostConfig.PortBindings)
    assert.is_nil(made.ExposedPorts)
  end)

  it("takes no variable that is none [G5]", function()
    assert.same({ "A=1", "B=x=y" }, body({ plane = "aio" }, { env = { B = "x=y", A = "1" } }).Env)
    for name, value in pairs { ["a b"] = "x", ["A=B"] = "x", [""] = "x", A = "x\0y", B = 5 } do
      assert.equal("invalid_argument", support.caught(body, { plane = "aio" }, { env = { [name] = value } }).kind)
    end
  end)
end)

describe("the address of an all-in-one server", function()
  local aio = require "paddock.docker.plane_aio"
  local function plane(options, host)
    options.aio_port = 8080
    return aio.new { options = options, engine = { host = host }, ports = {}, drop_place = function() end }
  end

  it("is published on loopback where it is reached there, on all addresses otherwise, or where the operator says [G5]", function()
    for _, case in ipairs {
      { {}, nil, "127.0.0.1", "127.0.0.1" }, { { reach_host = "localhost" }, nil, "127.0.0.1", "localhost" },
      { { reach_host = "127.0.0.9" }, nil, "127.0.0.1", "127.0.0.9" },
      { { reach_host = "::1" }, nil, "::1", "[::1]" }, { { reach_host = "[::1]" }, nil, "::1", "[::1]" },
      { { reach_host = "10.0.0.7" }, nil, "", "10.0.0.7" }, { {}, "engine.lan", "", "engine.lan" },
      { { publish_address = "10.1.1.1" }, nil, "10.1.1.1", "10.1.1.1" }, { { publish_address = "::1" }, nil, "::1", "[::1]" },
      { { publish_address = "10.1.1.1", reach_host = "127.0.0.1" }, nil, "10.1.1.1", "127.0.0.1" },
    } do
      local one = plane(case[1], case[2])
      assert.equal(case[3], one:port({}).address)
      local info = { url = "", networks = {} }
      one:describe(info, { port = 4711 })
      assert.equal(("http://%s:4711"):format(case[4]), info.url)
    end
  end)

  it("is empty without a published port or a network of its own, and such a one is never asked [G3]", function()
    local one = plane {}
    for _, state in ipairs { {}, { address = "172.17.0.2" } } do
      local info = { url = "", networks = {} }
      one:describe(info, state)
      assert.equal("", info.url)
      assert.is_nil((one:ask(info)))
      assert.equal("no_address", support.caught(one.connect, one, info, {}).reason)
    end
    local info = { url = "", networks = { "n" } }
    one:describe(info, { address = "172.18.0.2" })
    assert.equal("http://172.18.0.2:8080", info.url)
  end)

  it("has a port that is its generation's until that is gone, and goes back once [G4, G9, G10]", function()
    local one = plane({ base_port = 20000 }, "engine")
    local function make(generation)
      local plan = {}
      plan.port = one:port(plan, 1)
      one:made(plan, { id = generation })
      return plan.port.port
    end
    assert.same({ 20000, 20001 }, { make "a", make "b" })
    one:finish { generation = "another" }                        -- a stop that failed has no end: nothing comes back
    assert.equal(20002, make "c")
    one:finish { generation = "a" }
    assert.equal(20000, make "d")                                -- a newer generation, whose own it is:
    one:finish { generation = "a" }                              -- the dead one's end, once more, takes nothing from it
    assert.equal(20003, make "e")
    local failed, next_one = {}, {}
    failed.port = one:port(failed, 1)
    next_one.port = one:port(next_one, 1)                        -- while one is being made, its port is nobody else's
    assert.same({ 20004, 20005 }, { failed.port.port, next_one.port.port })
    one:port_failed(failed)
    one:port_failed(failed)
    assert.equal(20006, one:port(failed, 2).port)                -- whoever has it, it is not tried again
    assert.equal(20004, make "f")
    one:port_failed { port = { port = 20004 } }                  -- it is f's
    assert.equal(20007, make "g")
  end)

  it("is another one for each of forty that are made at once, and all of them come back [G9, B102]", function()
    local one = plane({ base_port = 20000 }, "engine")
    local plans, seen = {}, {}
    for i = 1, 40 do
      plans[i] = {}
      plans[i].port = one:port(plans[i], 1)
      assert.is_nil(seen[plans[i].port.port])
      seen[plans[i].port.port] = true
    end
    for i = 1, 40 do
      if i % 4 == 0 then one:port_failed(plans[i]) else one:made(plans[i], { id = "c" .. i }) end
    end
    for i = 40, 1, -1 do one:finish { generation = "c" .. i } end
    assert.same({}, one.backend.ports)
  end)

  it("is looked for at ten ports, and no more [G4]", function()
    local one = plane({ base_port = 20000 }, "engine")
    local plan = {}
    for i = 1, 10 do
      plan.port = one:port(plan, i)
      assert.equal(19999 + i, plan.port.port)
      one:port_failed(plan)
    end
    assert.equal("port_taken", support.caught(one.port, one, plan, 11).reason)
    assert.same({}, one.backend.ports)
  end)
end)

describe("a stream of frames", function()
  it("is read wherever the transport cuts it", function()
    local bytes = string.pack(">B I3 I4", 1, 0, 5) .. "hello" .. string.pack(">B I3 I4", 2, 0, 0) ..
      string.pack(">B I3 I4", 2, 0, 3) .. "err" .. string.pack(">B I3 I4", 1, 0, 1) .. "!"
    for size = 1, #bytes do
      local got = { "", "" }
      local take, reader = streams.reader(function(stream, piece) got[stream] = got[stream] .. piece end)
      for at = 1, #bytes, size do take(bytes:sub(at, at + size - 1)) end
      assert.same({ "hello!", "err" }, got)
      assert.is_false(reader.damaged)
    end
  end)

  it("that is none is said to be damaged, and nothing of it is taken", function()
    local got = 0
    local take, reader = streams.reader(function() got = got + 1 end)
    take "this is plain text, and no frame"
    assert.is_true(reader.damaged)
    assert.equal(0, got)
  end)

  it("keeps the first bytes of a flood, and says that there were more [B087]", function()
    local keeper = streams.keeper(1000)
    for _ = 1, 10000 do keeper.add "abc" end
    assert.equal(1000, #keeper.text())
    assert.is_true(keeper.truncated)
  end)
end)

describe("progress of a pull", function()
  it("is read line by line, wherever it is cut", function()
    local seen = {}
    local take, finish = images.lines(function(value) seen[#seen + 1] = value.status or value.error end)
    for piece in ('{"status":"a"}\r\n{"status":"b"}\nnot json\n{"error":"c"}'):gmatch("..?.?") do take(piece) end
    finish()
    assert.same({ "a", "b", "c" }, seen)
    -- A long line is read in one pass too, and one that is too long passed over.
    for _, size in ipairs { 1000000, 4000000 } do
      local line = ('{"status":"%s"}\n{"status":"z"}\n'):format(("y"):rep(size))
      for at = 1, #line, 1000 do take(line:sub(at, at + 999)) end
    end
    assert.equal(6, #seen)
    assert.equal(1000000, #seen[4])
    assert.same({ "z", "z" }, { seen[5], seen[6] })
  end)

  it("names repository, tag and registry", function()
    assert.same({ "r:5000/a/b", "1.2" }, { images.split "r:5000/a/b:1.2" })
    assert.same({ "r:5000/a/b" }, { images.split "r:5000/a/b" })
    assert.same({ "a", "sha256:12" }, { images.split "a@sha256:12" })
    assert.equal("r:5000", images.registry "r:5000/a")
    assert.equal("docker.io", images.registry "library/a")
  end)
end)

describe("an engine's address", function()
  it("is given engine_timeout for a call, or less where it answers at once [B104]", function()
    local slow, quick = engine.new(engine.parse "unix:///x", { limit = 30 }), engine.new(engine.parse "unix:///x", { limit = 2 })
    assert.same({ 10, 2 }, { slow:within(10), quick:within(10) })
  end)

  it("is a unix socket or TCP; anything else is refused by the name of what said so", function()
    assert.equal("/run/x.sock", engine.parse("unix:///run/x.sock").unix)
    assert.equal("http://h:2375", engine.parse("tcp://h").url)
    assert.is_true(engine.parse("tcp://h:2376").tls)
    for _, address in ipairs { "ssh://h", "npipe://x", "h:2375", "", "tcp://h:0", "tcp://h:65536", "tcp://h:999999",
      "unix:///" .. ("a"):rep(200), "tcp://::1:2375", "tcp://[::1", "tcp://::1]:2375", "tcp://[h]:2375", "tcp://h:2375/path", "tcp://",
      "tcp://user:word@h:2375", "tcp://a:b:2375" } do
      assert.is_nil(engine.parse(address), address)
    end
    assert.equal("http://[::1]:2375", engine.parse("tcp://[::1]").url)
    assert.equal("http://h:2375", engine.parse("tcp://h:/").url)
    local secret = support.caught(engine.find, { host = "tcp://user:pass/word@h:2375" })
    assert.equal("invalid_argument", secret.kind)
    assert.is_nil(secret.message:find("word", 1, true))
    local err = support.caught(engine.find, { host = "ssh://h" })
    assert.equal("invalid_argument", err.kind)
    assert.matches("backend_options.host", err.message, 1, true)
    err = support.caught(engine.find, {}, function(name) return name == "DOCKER_HOST" and "ssh://h" or nil end)
    assert.matches("DOCKER_HOST", err.message, 1, true)
    err = support.caught(engine.find, { host = "unix:///no/such.sock" })
    assert.equal("backend_error", err.kind)
    assert.matches("/no/such.sock", err.message, 1, true)
  end)

  it("of another machine is not spoken to over plain TCP, unless that is asked for", function()
    for _, host in ipairs { "tcp://192.0.2.1:2375", "tcp://engine", "tcp://127.0.0.1.example:2375", "tcp://127.0.0.1x", "tcp://localhost.x",
      "http://[::2]:2375", "tcp://0.0.0.0:2375" } do
      local err = support.caught(engine.find, { host = host }, function() end)
      assert.equal("invalid_argument", err.kind)
      assert.matches("backend_options.host names " .. host, err.message, 1, true)
      assert.matches("plain_tcp", err.message, 1, true)
    end
    for _, options in ipairs { { host = "tcp://127.0.0.1:1" }, { host = "tcp://127.9.9.9:1" }, { host = "tcp://localhost:1" },
      { host = "tcp://x.invalid:1", plain_tcp = true } } do
      local err = support.caught(engine.find, options, function() end)  -- it was tried
      assert.equal("backend_error", err.kind)
      assert.matches("GET http://", err.message, 1, true)
    end
  end)

  it("comes with certificates by the options, else by Docker's own variables; they are for TCP only", function()
    local own = { ca_file = "/o/ca.pem" }
    local function find(options, env) return certificates.find(options, function(name) return env[name] end) end
    assert.is_nil(find({}, { DOCKER_TLS_VERIFY = "", HOME = "/home/x" }))
    assert.equal(own, find(own, { DOCKER_CERT_PATH = "/c", DOCKER_TLS_VERIFY = "1" }))
    assert.equal("/c/key.pem", find({}, { DOCKER_CERT_PATH = "/c" }).key_file)
    assert.equal("/home/x/.docker/ca.pem", find({}, { DOCKER_TLS_VERIFY = "1", HOME = "/home/x" }).ca_file)
    local err = support.caught(find, {}, { DOCKER_CERT_PATH = "no/such/folder" })
    assert.equal("invalid_argument", err.kind)
    assert.matches("DOCKER_CERT_PATH names the folder no/such/folder", err.message, 1, true)
    err = support.caught(engine.find, { host = "tcp://127.0.0.1:1" }, function(name) return name == "DOCKER_CERT_PATH" and "/no" or nil end)
    assert.matches("DOCKER_CERT_PATH: cannot read /no/ca.pem", err.message, 1, true)
    err = support.caught(engine.find, { host = "unix:///no/such.sock" }, function() return "/no" end)
    assert.equal("backend_error", err.kind)
  end)

  it("is looked for in the rootless places first", function()
    local env = { XDG_RUNTIME_DIR = "/run/user/7", HOME = "/home/x" }
    local usual = engine.usual(function(name) return env[name] end, 7)
    assert.equal("unix:///run/user/7/docker.sock", usual[1])
    assert.equal("unix:///run/user/7/podman/podman.sock", usual[2])
    assert.equal("unix:///var/run/docker.sock", engine.usual(function() end, 0)[1])
  end)
end)

describe("the plane of a runtime that names none", function()
  local options = { label_prefix = "paddock.", aio_port = 8080 }
  local function plane(reference, made, near)
    return (planes.choose(reference, made and { Config = made }, options, near ~= false))
  end
  local PORT = { ["8080/tcp"] = {} }

  it("is the all-in-one server's where the image starts one, not where it merely has the port", function()
    assert.equal("aio", plane("x/y:1", { ExposedPorts = PORT, Entrypoint = { "/opt/gem/run.sh" } }))
    assert.equal("aio", plane("x/y:1", { ExposedPorts = PORT, Cmd = { "/usr/bin/aio-server" } }))
    assert.equal("aio", plane("ghcr.io/agent-infra/sandbox:1.9.3", { ExposedPorts = PORT }))
    assert.equal("aio", plane("r.example:5000/v/all-in-one-sandbox@sha256:ab", nil))  -- not fetched yet: by its name
    assert.equal("guest", plane("tomcat:9", { ExposedPorts = PORT, Cmd = { "catalina.sh", "run" } }))
    assert.equal("guest", plane("x/y:1", { Entrypoint = { "/opt/gem/run.sh" } }))
    assert.equal("guest", plane("x/y:1", nil))
    assert.equal("guest", plane(nil, nil))
    assert.equal("guest", plane("x/y:1", { ExposedPorts = false, Entrypoint = "x", Labels = false }))
  end)

  it("is what the image's label says, and exec on another machine's engine, where no guest can be mounted", function()
    assert.equal("exec", plane("x/y:1", { Labels = { ["paddock.plane"] = "exec" } }))
    assert.equal("guest", plane("x/y:1", { ExposedPorts = PORT, Cmd = { "/a/aio-x" }, Labels = { ["paddock.plane"] = "guest" } }))
    assert.equal("guest", plane("x/y:1", { Labels = { ["paddock.plane"] = "telnet" } }))
    assert.equal("exec", plane("x/y:1", {}, false))
    assert.equal("exec", plane("x/y:1", { Labels = { ["paddock.plane"] = "guest" } }, false))
    assert.equal("aio", plane("x/y:1", { ExposedPorts = PORT, Cmd = { "/a/aio-x" } }, false))
  end)
end)

describe("the docker backend's options", function()
  local function refused(own, more)
    local options = { backend = "docker", backend_options = own }
    for key, value in pairs(more or {}) do options[key] = value end
    return support.caught(config.normalize, options)
  end

  it("are refused by name", function()
    for key, value in pairs {
      host = 1, plane = "ssh", prefix = "-x", label_prefix = "Paddock", workdir = "/", workspace = "nfs", cap_drop = { "cap_chown" },
      pull = "sometimes", base_port = 0, publish_address = "localhost", registry_auth = { x = { name = "y" } }, engine_timeout = 0,
      tls_cert = "/x", guess = true, guest = "relative",
    } do
      local err = refused { [key] = value }
      assert.equal("invalid_argument", err.kind)
      assert.matches("backend_options", err.message, 1, true)
    end
  end)

  it("that the engine or a URL would take apart are what they seem to be", function()
    local bad = {
      publish_address = { "...", "dead", "256.1.1.1", "1.2.3", ":1", "1::2::3", "1:2:3:4:5:6:7", "12345::", "::1%lo" },
      reach_host = { "http://h", "h:1", "a/b", "a@b", "h x", "[::1", "..", "\xff" }, runtime = { "a b", "../x", "-x" },
      user = { "..", ":", "0:", "1:2:3", "a b", "/x", "$HOME" }, aio_key = { "a b", "a\nb", "\xff", "" }, command = { {} },
    }
    for key, values in pairs(bad) do
      for _, value in ipairs(values) do
        local err = refused { plane = "aio", [key] = value }
        assert.equal("invalid_argument", err.kind)
        assert.matches("backend_options." .. key, err.message, 1, true)
      end
    end
    for key, values in pairs {
      publish_address = { "0.0.0.0", "::", "::1", "1:2:3:4:5:6:7:8", "fe80::1" }, reach_host = { "h", "a.b-c", "10.0.0.1", "::1", "[::1]" },
      runtime = { "runc", "io.containerd.runsc.v1", "nvidia" }, user = { "0", "1000:1000", "www-data", "gem:users" },
    } do
      for _, value in ipairs(values) do
        local options = { backend = "docker", backend_options = { plane = "aio", [key] = value } }
        assert.equal(value, config.normalize(options).backend_options[key])
      end
    end
  end)

  it("keep a stop within the lease where no guest refuses a former owner [B044]", function()
    for _, plane in ipairs { "exec", "aio" } do
      local err = refused({ plane = plane }, { stop_timeout = 170 })
      assert.equal("invalid_argument", err.kind)
      assert.matches("stop_timeout", err.message, 1, true)
    end
    assert.equal("docker", config.normalize { backend = "docker", stop_timeout = 170 }.backend)
    assert.equal("docker", config.normalize { backend = "docker", backend_options = { plane = "exec" } }.backend)
  end)
end)
