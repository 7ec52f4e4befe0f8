--- The options of paddock.open: what is refused, in which words, and what the normalized table holds.
--- Most of it needs neither a runtime nor a sandbox: config.lua alone.
local config = require "paddock.config"
local errors = require "paddock.errors"
local support = require "tests.support"

local nan, inf = 0 / 0, math.huge

local function normalize(options)
  return config.normalize((config.split(options)))
end

--- The message of the invalid_argument that these options give; fails when there is none.
local function refused(options, kind)
  local ok, err = pcall(normalize, options)
  assert.is_false(ok, "these options were accepted")
  assert.is_true(errors.is(err), "no error of paddock: " .. tostring(err))
  assert.equal(kind or "invalid_argument", err.kind)
  assert.is_nil(err.message:find("\n"), "more than one line: " .. err.message)
  return err.message
end

--- Options with one value at a dotted path.
local function with(name, value)
  local options = {}
  local at = options
  for part, dot in name:gmatch("([^.]+)(%.?)") do
    if dot == "" then
      at[part] = value
    else
      at[part] = {}
      at = at[part]
    end
  end
  return options
end

local function assert_names(name, options)
  local message = refused(options)
  assert.is_truthy(message:find("`" .. name, 1, true), ("%q does not name %s"):format(message, name))
end

local SECONDS = { "reap_interval", "orphan_ttl", "ready_timeout", "ready_interval", "discover_timeout", "stop_timeout",
  "command_timeout", "ownership.ttl", "ownership.renew_interval" }
local SECONDS_OR_ZERO = { "idle_timeout", "health_ttl" }
local COUNTS = { "replicas", "max_sandboxes" }
local BOOLEANS = { "threads", "signals" }
local PATHS = { "state_dir", "data_dir" }
local TABLES = { "backend_options", "policy_options", "environment", "mounts", "mount_roots", "limits", "ownership", "workers" }
local STRINGS = { "image", "network", "scope" }
local CHOICES = { "clock", "ownership.type" }

describe("options", function()
  it("have all the defaults of the design", function()
    local out = normalize(nil)
    assert.equal("process", out.backend)
    assert.same({ 600, 3, 60, 3600 }, { out.idle_timeout, out.replicas, out.reap_interval, out.orphan_ttl })
    assert.same({ 60, 1, 5, 120, 600, 5 }, { out.ready_timeout, out.ready_interval, out.discover_timeout,
      out.stop_timeout, out.command_timeout, out.health_ttl })
    assert.same({ type = "file", ttl = 180, renew_interval = 60 }, out.ownership)
    assert.same({ max = 1024 }, out.workers)
    assert.equal("monotonic", out.clock)
    assert.equal("none", out.network)
    assert.is_true(out.threads)
    assert.is_false(out.signals)
    assert.is_nil(out.max_sandboxes)
    for _, name in ipairs { "backend_options", "policy_options", "environment", "mounts", "mount_roots", "limits" } do
      assert.same({}, out[name])
    end
  end)

  it("are all refused with the key's name when they have the wrong type [B168]", function()
    for _, names in ipairs { SECONDS, SECONDS_OR_ZERO, COUNTS, BOOLEANS, TABLES, CHOICES, STRINGS, { "workers.max" } } do
      for _, name in ipairs(names) do assert_names(name, with(name, "\1")) end
    end
    for _, names in ipairs { SECONDS, SECONDS_OR_ZERO, COUNTS, PATHS, TABLES, CHOICES, STRINGS,
      { "policies", "backend", "user", "workers.max", "journal", "log" } } do
      for _, name in ipairs(names) do assert_names(name, with(name, true)) end
    end
    for _, names in ipairs { BOOLEANS, PATHS, TABLES, CHOICES, STRINGS, { "policies", "backend", "user", "journal", "log" } } do
      for _, name in ipairs(names) do assert_names(name, with(name, 5)) end
    end
    assert.is_truthy(refused(5):find("must be a table", 1, true))
  end)

  it("refuse NaN, infinite, negative and huge numbers, and zero where it has no meaning [B168 B176 B5]", function()
    local bad = { nan, inf, -inf, -1, 2 ^ 31, 2 ^ 53, 2 ^ 63 / 1000 + 1, tonumber("1e400"), math.mininteger, math.maxinteger }
    for _, names in ipairs { SECONDS, SECONDS_OR_ZERO, COUNTS, { "workers.max" } } do
      for _, name in ipairs(names) do
        for _, value in ipairs(bad) do assert_names(name, with(name, value)) end
      end
    end
    for _, name in ipairs(SECONDS) do assert_names(name, with(name, 0)) end
    assert_names("workers.max", with("workers.max", 0))
    assert_names("replicas", { replicas = 1.5 })
  end)

  it("say that a command's time limit must be positive [B5]", function()
    for _, value in ipairs { nan, inf, -inf, 0, -1 } do
      local message = refused { command_timeout = value }
      assert.is_truthy(message:find("command_timeout", 1, true))
      if value == 0 or value == -1 then assert.is_truthy(message:find("positive", 1, true)) end
    end
  end)

  it("keep fractions exactly as they are, and the command's default is 600 s [B4 B6]", function()
    assert.equal(42.5, normalize { command_timeout = 42.5 }.command_timeout)
    assert.equal(600, normalize {}.command_timeout)
    assert.equal(0.1, normalize { idle_timeout = 0.1 }.idle_timeout)
  end)

  it("take 0 as `never` for the idle limit, and leave the lease alone [B077 B15]", function()
    local out = normalize { idle_timeout = 0, health_ttl = 0 }
    assert.equal(0, out.idle_timeout)
    assert.equal(0, out.health_ttl)
    assert.equal(60, out.ownership.renew_interval)
  end)

  it("that are unknown are refused, with the nearest name", function()
    assert.is_truthy(refused { idle_timout = 5 }:find("unknown option `idle_timout`; did you mean `idle_timeout`", 1, true))
    assert.is_truthy(refused { ownership = { tll = 5 } }:find(
      "unknown option `ownership.tll`; did you mean `ownership.ttl`; `ownership` takes renew_interval, ttl, type, url", 1, true))
    assert.is_truthy(refused { limits = { mem = 5 } }:find("unknown option `limits.mem`; `limits` takes cpus, memory, pids", 1, true))
    local far = refused { completely_other = 5 }
    assert.is_truthy(far:find("unknown option `completely_other`", 1, true))
    assert.is_nil(far:find("did you mean", 1, true))
    for _, case in ipairs { { limits = { memroy = 5 } }, { workers = { min = 1 } }, { mounts = { { src = "/a", target = "/b" } } },
      { policies = { reus = "x.lua" } }, { policies = { reuse = { sauce = "return {}" } } } } do
      assert.is_truthy(refused(case):find("unknown", 1, true))
    end
    assert.is_truthy(refused { [1] = "process" }:find("a key that is no name", 1, true))
    assert.is_truthy(refused { ["a\nb"] = 1 }:find("unknown option", 1, true))
    refused { [("x"):rep(1e6)] = 1 }
  end)

  it("must fit together [O7 B174 B044]", function()
    assert_names("ownership.renew_interval", { ownership = { ttl = 100, renew_interval = 51 } })
    assert_names("ownership.renew_interval", { ownership = { ttl = 100 } })
    assert.equal(50, normalize { ownership = { ttl = 100, renew_interval = 50 } }.ownership.renew_interval)
    assert_names("ready_interval", { ready_timeout = 1, ready_interval = 2 })
    assert.equal(0.5, normalize { ready_timeout = 0.5 }.ready_interval)
    assert_names("replicas", { replicas = 4, max_sandboxes = 3 })
    assert.equal(1, normalize { max_sandboxes = 1 }.replicas)
    assert.equal(0, normalize { max_sandboxes = 0 }.replicas)
    assert_names("orphan_ttl", { orphan_ttl = 100 })
    assert.equal(100, normalize { orphan_ttl = 100, ownership = { renew_interval = 30 } }.orphan_ttl)
  end)

  it("have the stores `file`, `memory` and, with a URL, `redis` [O7]", function()
    for _, kind in ipairs { "file", "memory" } do
      assert.equal(kind, normalize { ownership = { type = kind } }.ownership.type)
    end
    local redis = normalize { ownership = { type = "redis", url = "redis://localhost" } }.ownership
    assert.same({ "redis", "redis://localhost" }, { redis.type, redis.url })
    assert_names("ownership.url", { ownership = { type = "redis" } })
    assert_names("ownership.type", { ownership = { type = "etcd" } })
    assert_names("ownership.type", { ownership = { type = "table" } })
    assert_names("ownership.url", { ownership = { url = "redis://localhost" } })
  end)

  it("take a backend's name or a path to a Lua file, and nothing else", function()
    for _, name in ipairs { "process", "docker", "./engine.lua", "/opt/engine.lua" } do
      assert.equal(name, normalize { backend = name }.backend)
    end
    assert.equal("provisioner", normalize { backend = "provisioner", backend_options = { url = "http://p" } }.backend)
    for _, name in ipairs { "e2b" } do
      assert.is_truthy(refused({ backend = name }, "unsupported"):find('"' .. name .. '"', 1, true))
    end
    assert.is_truthy(refused { backend = "proces" }:find('did you mean "process"', 1, true))
    assert_names("backend", { backend = "" })
    assert_names("backend", { backend = "/opt/engine.so" })
    assert_names("backend", { backend = "a\0.lua" })
    assert_names("backend", { backend = {} })
    assert_names("backend", { backend = { name = "no functions" } })
  end)

  it("that the process backend cannot fulfil are refused by name before there is a sandbox", function()
    for name, options in pairs {
      network = { network = "host" }, image = { image = "tools-1" },
    } do
      assert.is_truthy(refused(options, "unsupported"):find("option `" .. name .. "`", 1, true))
    end
    assert.equal("tools-1", normalize { image = "tools-1", backend_options = { images = "/srv/images" } }.image)
    assert_names("image", { image = "../x", backend_options = { images = "/srv/images" } })
    local other = { image = "x", network = "host", backend = "engine.lua" } -- of its own engine nobody knows what it can do
    assert.equal("x", normalize(other).image)
  end)

  it("that name folders are refused at open when these are not there", function()
    local dir = support.tmpdir()
    support.write_file(dir .. "/file", "x")
    local function at_open(options)
      options.state_dir, options.log = dir .. "/state", "off"
      return support.caught(require("paddock").open, options).message
    end
    for name, options in pairs {
      ["backend_options.rootfs"] = { backend_options = { rootfs = dir .. "/none" } },
      ["backend_options.images"] = { backend_options = { images = dir .. "/file" } },
      ["image"] = { backend_options = { images = dir }, image = "tools" },
      ["mounts[1].source"] = { mounts = { { source = dir .. "/none", target = "/x" } } },
      ["data_dir"] = { data_dir = dir .. "/a/b" },
    } do
      local message = at_open(options)
      assert.is_truthy(message:find("option `" .. name .. "` names " .. dir, 1, true), message)
    end
    assert.is_truthy(at_open { data_dir = dir .. "/file" }:find("is no folder", 1, true))
    local rt = require("paddock").open { state_dir = dir .. "/state", log = "off", data_dir = dir .. "/data",
      mounts = { { source = dir .. "/none", target = "/x", if_exists = true }, { source = dir .. "/file", target = "/y" },
        { source = dir .. "/new", target = "/z", create = "0755" } } }
    rt:shutdown()
    support.cleanup()
  end)

  it("have a log level, by default warnings and what is worse", function()
    assert.equal(os.getenv("PADDOCK_LOG") or "warn", normalize {}.log)
    for _, level in ipairs { "off", "error", "warn", "info", "debug" } do assert.equal(level, normalize { log = level }.log) end
    assert_names("log", { log = "loud" })
  end)

  it("may have functions in backend, ownership, journal and log only", function()
    local f = function() end
    assert_names("limits.memory", { limits = { memory = f } })
    assert_names("policy_options.deep.f", { policy_options = { deep = { f = f } } })
    assert_names("backend_options.x", { backend_options = { x = io.stdout } })
    assert_names("idle_timeout", { idle_timeout = f })
    local loop = {}
    loop.loop = loop
    assert_names("policy_options", { policy_options = loop })
    local class = { create = f }
    class.__index = class
    local plain, tables = config.split {
      backend = setmetatable({}, class), journal = { read = f }, log = f,
      ownership = { take = f, ttl = 30, renew_interval = 10 },
    }
    assert.is_function(tables.backend.create)
    assert.equal(f, tables.log)
    assert.equal(f, tables.journal.read)
    assert.same({ type = "table", ttl = 30, renew_interval = 10 }, plain.ownership)
    local out = config.normalize(plain)
    assert.is_nil(out.backend)
    assert.same({ type = "table", ttl = 30, renew_interval = 10 }, out.ownership)
  end)

  it("leave the caller's table as it was", function()
    local options = { backend = { create = function() end }, mounts = { { source = "/a", target = "/b" } } }
    normalize(options)
    assert.is_function(options.backend.create)
    assert.is_nil(options.mounts[1].read_only)
  end)

  it("resolve an environment value that starts with $ from this process's own environment [B14]", function()
    local home = assert(os.getenv("HOME"))
    local out = normalize { environment = { A = "$HOME", B = "plain $HOME", C = "$PDK_NOT_SET_ANYWHERE", D = "" } }
    assert.same({ A = home, B = "plain $HOME", C = "", D = "" }, out.environment)
  end)

  it("never show a value of the environment [B212]", function()
    for _, bad in ipairs { { environment = { ["NO-NAME"] = "s3cret" } }, { environment = { A = "s3cret\0" } },
      { environment = { A = { "s3cret" } } }, { environment = { ["1A"] = "s3cret" } } } do
      assert.is_nil(refused(bad):find("s3cret", 1, true))
    end
  end)

  it("check mounts, their roots and limits field by field", function()
    local out = normalize { mounts = { { source = "/data", target = "/mnt/data" } }, mount_roots = { "/data" },
      limits = { memory = 2 ^ 31, cpus = 0.5, pids = 100 } }
    assert.same({ { source = "/data", target = "/mnt/data", read_only = true } }, out.mounts)
    assert.same({ memory = 2147483648, cpus = 0.5, pids = 100 }, out.limits)
    assert.equal("integer", math.type(out.limits.memory))
    assert_names("mounts[1].target", { mounts = { { source = "/a", target = "relative" } } })
    assert_names("mounts[1].source", { mounts = { { target = "/a" } } })
    assert_names("mounts[2].create", { mounts = { { source = "/a", target = "/b" }, { source = "/a", target = "/b", create = "9" } } })
    assert_names("mounts[1].read_only", { mounts = { { source = "/a", target = "/b", read_only = "yes" } } })
    assert_names("mounts", { mounts = { first = {} } })
    assert_names("mounts", { mounts = { nil, { source = "/a", target = "/b" } } })
    assert_names("mount_roots[1]", { mount_roots = { "data" } })
    for _, value in ipairs { nan, inf, -1, 0, 2 ^ 53 } do
      assert_names("limits.memory", { limits = { memory = value } })
      assert_names("limits.cpus", { limits = { cpus = value } })
      assert_names("limits.pids", { limits = { pids = value } })
    end
  end)

  it("take policies as a folder, as paths, or as texts", function()
    assert.equal("my/policies", normalize { policies = "my/policies" }.policies)
    assert.same({ reuse = "r.lua", identity = { source = "return {}", name = "identity.lua" } },
      normalize { policies = { reuse = "r.lua", identity = { source = "return {}" } } }.policies)
    assert_names("policies.reuse.source", { policies = { reuse = {} } })
    assert_names("policies.reuse", { policies = { reuse = 5 } })
  end)

  it("give policies their own options and the numbers, and refuse a name that is both", function()
    local out = normalize { policy_options = { tier = "gold" }, idle_timeout = 90 }
    assert.equal("gold", out.policy_config.tier)
    assert.equal(90, out.policy_config.idle_timeout)
    assert.is_nil(out.policy_config.environment)
    for _, name in ipairs { "idle_timeout", "replicas", "reap_interval", "orphan_ttl", "ready_timeout", "ready_interval",
      "discover_timeout", "stop_timeout", "command_timeout", "health_ttl" } do
      assert.equal(out[name], out.policy_config[name])
    end
    assert_names("policy_options.idle_timeout", { policy_options = { idle_timeout = 5 } })
  end)

  it("take paths and names without NUL and control bytes only", function()
    assert_names("state_dir", { state_dir = "a\0b" })
    assert_names("state_dir", { state_dir = "" })
    assert_names("state_dir", { state_dir = ("x"):rep(5000) })
    assert_names("image", { image = "a\nb" })
    assert_names("user", { user = ("x"):rep(4097) })
    assert.equal("a\0b", normalize { user = "a\0b" }.user)
  end)
end)

describe("a configuration file", function()
  it("is Lua text that returns the options, with nothing that reaches the machine", function()
    local out = config.load_text("local n = 2 * 300 return { idle_timeout = n, network = ('none'):lower() }", "c.lua")
    assert.same({ idle_timeout = 600, network = "none" }, out)
    for _, name in ipairs { "io", "os", "debug", "load", "loadfile", "dofile", "require", "package", "setmetatable",
      "getmetatable", "collectgarbage", "_G", "coroutine" } do
      assert.same({}, config.load_text(("return { x = %s }"):format(name), "c.lua"))
    end
    assert.is_nil(config.load_text("return { x = string.dump }", "c.lua").x)
  end)

  it("cannot change the libraries of others", function()
    config.load_text("string.rep = nil; table.concat = nil; return {}", "c.lua")
    assert.is_function(string.rep)
    assert.is_function(table.concat)
  end)

  it("has its policies and its engine beside it, wherever the process runs", function()
    local folder = support.tmpdir()
    local function loaded(text)
      support.write_file(folder .. "/c.lua", text)
      return config.load_file(folder .. "/c.lua")
    end
    local out = loaded "return { policies = 'p', backend = 'e.lua', state_dir = 'x' }"
    assert.same({ policies = folder .. "/p", backend = folder .. "/e.lua", state_dir = "x" }, out)
    out = loaded "return { policies = { reuse = 'r.lua', mounts = '/m.lua', network = { source = 's' } }, backend = 'process' }"
    assert.same({ policies = { reuse = folder .. "/r.lua", mounts = "/m.lua", network = { source = "s" } }, backend = "process" }, out)
    support.cleanup()
  end)

  it("that is broken is refused with its name and line", function()
    for _, text in ipairs { "return {", "error('no')", "return 5", "", string.dump(function() return {} end) } do
      local ok, err = pcall(config.load_text, text, "my/c.lua")
      assert.is_false(ok)
      assert.equal("invalid_argument", err.kind)
      assert.is_truthy(err.message:find("c.lua", 1, true))
    end
  end)

  it("that cannot be read is an io_error that names it", function()
    local ok, err = pcall(require("paddock").open, "/no/such/file.lua")
    assert.is_false(ok)
    assert.equal("io_error", err.kind)
    ok, err = pcall(config.load_file, "/no/such/file.lua")
    assert.is_false(ok)
    assert.equal("io_error", err.kind)
    assert.is_truthy(err.message:find("/no/such/file.lua", 1, true))
  end)

  it("may be a folder, which is no configuration", function()
    local ok, err = pcall(config.load_file, "/")
    assert.is_false(ok)
    assert.is_true(errors.is(err))
  end)
end)
