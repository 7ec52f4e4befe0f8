-- The options of the provisioner backend: what is refused, by name, before anything is sent; and what doctor says of it.
local cli = require "tests.support.cli"
local provisioner_check = require "paddock.provisioner.check"
local config = require "paddock.config"
local errors = require "paddock.errors"
local provisioner = require "tests.support.provisioner"
local support = require "tests.support"

local SECRET = "s3cr3t-canary"

local function normalize(options)
  local all = { backend = "provisioner", backend_options = { url = "http://provisioner:8002" } }
  for k, v in pairs(options) do all[k] = v end
  return config.normalize((config.split(all)))
end

local function own(fields)
  local all = { url = "http://provisioner:8002" }
  for k, v in pairs(fields) do all[k] = v end
  return normalize { backend_options = all }
end

--- The message of the refusal; it is one line and has no secret in it.
local function refused(kind, fn, options)
  local err = support.caught(fn, options)
  assert.is_true(errors.is(err), tostring(err))
  assert.equal(kind, err.kind, err.message)
  assert.is_nil(err.message:find("\n"))
  assert.is_nil(err.message:find(SECRET, 1, true), err.message)
  return err.message
end

describe("the options of the provisioner backend", function()
  it("need an address, and say what is wrong with a bad one", function()
    assert.matches("`backend_options.url` is missing", refused("invalid_argument", normalize, { backend_options = {} }), 1, true)
    for _, url in ipairs { "provisioner:8002", "http://u:" .. SECRET .. "@host", "http://host/?x", "http://host:99999", "file:///x",
      "http://host/\r\nX-Admin: 1", 5, true } do
      assert.matches("`backend_options.url`", refused("invalid_argument", own, { url = url }), 1, true)
    end
    for _, url in ipairs { "http://provisioner:8002/", "https://host/base/path/", "http://[::1]:8002" } do
      assert.equal("provisioner", own { url = url }.backend)
    end
  end)

  it("are refused by name when unknown or impossible [B172]", function()
    assert.matches("`backend_options.urll`", refused("invalid_argument", own, { urll = "x" }), 1, true)
    for key, values in pairs {
      create_timeout = { 0, -1, "30", 1e9, true }, delete_timeout = { 0, -5, 2 ^ 53 }, read_timeout = { 0, {} },
      gone_timeout = { -1, "0", 1e9 },
      ca_file = { "relative.pem", 5, "" }, skills_root = { "skills", "/", "/a/../b", "/a//b", "/a/", 5 },
    } do
      for _, value in ipairs(values) do
        assert.matches("`backend_options." .. key .. "`", refused("invalid_argument", own, { [key] = value }), 1, true)
      end
    end
  end)

  it("take keys that are one header's value, never show them, and take $NAME from the environment", function()
    for _, key in ipairs { "api_key", "sandbox_api_key" } do
      for _, value in ipairs { SECRET .. "\r\nX-Admin: 1", SECRET .. "\n", SECRET .. "\0", "", SECRET .. " x", SECRET .. "\xff",
        SECRET:rep(1000), 5, { SECRET } } do
        assert.matches("`backend_options." .. key .. "`", refused("invalid_argument", own, { [key] = value }), 1, true)
      end
      assert.equal("provisioner", own { [key] = SECRET }.backend)
      assert.matches("PADDOCK_NOT_SET", refused("invalid_argument", own, { [key] = "$PADDOCK_NOT_SET" }), 1, true)
      assert.equal("$HOME", own { [key] = "$HOME" }.backend_options[key])
    end
  end)

  it("take no key from the environment that is more than one header's value", function()
    for _, key in ipairs { "api_key", "sandbox_api_key" } do
      local function read(value)
        return provisioner_check.own({ url = "http://provisioner:8002", [key] = "$PDK_KEY" },
          function(name) return name == "PDK_KEY" and value or nil end)
      end
      assert.equal(SECRET, read(SECRET)[key])
      for _, value in ipairs { SECRET .. "\r\nX-Admin: 1", SECRET .. "\n", SECRET .. "\0", SECRET .. " x", SECRET .. "\xff",
        SECRET:rep(1000) } do
        assert.matches("`backend_options." .. key .. "`", refused("invalid_argument", read, value), 1, true)
      end
      assert.matches("PDK_KEY", refused("invalid_argument", read, ""), 1, true) -- set, to nothing
    end
  end)

  it("leave no option without effect: what no provisioner takes is refused [B172]", function()
    for name, options in pairs {
      image = { image = "x" }, limits = { limits = { memory = 1 << 30 } }, data_dir = { data_dir = "/srv" },
      network = { network = "none" }, ["environment.TOKEN"] = { environment = { TOKEN = SECRET } },
      ["mounts[1].target"] = { mounts = { { source = "/a", target = "/data" } } },
    } do
      assert.matches("option `" .. name .. "`", refused("unsupported", normalize, options), 1, true)
    end
    assert.equal("open", normalize({}).network)
    assert.equal("13", normalize { environment = { MAX_SHELL_SESSIONS = "13" } }.environment.MAX_SHELL_SESSIONS)
    assert.equal("/mnt/acp-workspace", normalize { mounts = { { source = "/a", target = "/mnt/acp-workspace" } } }.mounts[1].target)
  end)

  it("must leave a margin between the longest stop and the ownership lease [B044]", function()
    assert.matches("`stop_timeout`", refused("invalid_argument", normalize, { stop_timeout = 170 }), 1, true)
    assert.matches("`stop_timeout`", refused("invalid_argument", normalize,
      { stop_timeout = 20, ownership = { ttl = 80, renew_interval = 10 } }), 1, true) -- the provisioner's own limits count too
    assert.equal(20, normalize { stop_timeout = 20, ownership = { ttl = 120, renew_interval = 10 } }.stop_timeout)
  end)

  it("name whose sandboxes the leases are about: the address, unless a scope is given", function()
    assert.equal("provisioner http://provisioner:8002", normalize({}).scope)
    assert.equal("provisioner https://host/base", own { url = "HTTPS://Host/base/" }.scope)
    assert.equal("mine", normalize { scope = "mine" }.scope)
    local err = support.caught(config.normalize, { scope = ("x"):rep(160) }) -- longer ones would be cut, and two then be one
    assert.matches("`scope`", err.message, 1, true)
  end)

  it("are looked at on the machine when it opens", function()
    local err = support.caught(support.open, { backend = "provisioner",
      backend_options = { url = "https://p", ca_file = "/no/such.pem" } })
    support.cleanup()
    assert.matches("`backend_options.ca_file` names /no/such.pem", err.message, 1, true)
  end)
end)

describe("doctor, asked about a provisioner", function()
  local doctor = require "paddock.cli.doctor"
  local driver_module = provisioner.driver()
  local double
  setup(function() double = provisioner.start() end)
  teardown(function() double:stop() end)
  before_each(function() double:tell { reset = true } end)

  local function check(backend_options, backend)
    local probe = setmetatable({ provisioner = function(options) return driver_module.new(options) end },
      { __index = function() return function() return nil end end })
    local options = { url = double.url }
    for k, v in pairs(backend_options or {}) do options[k] = v end
    local asked = { backend = backend or "provisioner", backend_options = options, state_dir = "/" }
    for _, one in ipairs(doctor.examine(probe, asked, {})) do
      if one.name == "provisioner" then return one end
    end
  end

  it("says that it answers, and what it can do", function()
    double:tell { pods = { a = { state = "running" } },
      set = { capabilities = { lark_cli_init_image = true, lark_cli_broker_image = false } } }
    local answer = check()
    assert.equal("ok", answer.status)
    assert.matches("1 sandboxes, helper runtime yes, broker no", answer.message, 1, true)
    assert.is_nil(check({}, "process"))
  end)

  it("fails with advice when it does not answer, refuses the key, or is too old", function()
    assert.equal("fail", check({ url = "http://127.0.0.1:1" }).status)
    double:tell { set = { api_key = "other" } }
    local answer = check { api_key = SECRET }
    assert.equal("fail", answer.status)
    assert.matches("api_key", answer.message .. answer.advice, 1, true)
    assert.is_nil((answer.message .. answer.advice):find(SECRET, 1, true))
    double:tell { reset = true, faults = { { route = "presence", status = 404, body = '{"detail":"Not Found"}' } } }
    answer = check()
    assert.equal("fail", answer.status)
    assert.matches("presence route", answer.advice, 1, true)
    double:tell { faults = { { route = "list", status = 500 } } }
    assert.equal("fail", check().status)
  end)

  it("warns of a key that leaves the house in clear text", function()
    local fake = { options = { url = "http://provisioner.example.com" }, probe = function() return {} end,
      inspect = function() return nil end, list = function() return {} end }
    local probe = setmetatable({ provisioner = function() return fake end },
      { __index = function() return function() return nil end end })
    local function status(url, key)
      fake.options.url = url
      local asked = { backend = "provisioner", backend_options = { api_key = key }, state_dir = "/" }
      for _, one in ipairs(doctor.examine(probe, asked, {})) do
        if one.name == "provisioner" then return one.status end
      end
    end
    assert.equal("warn", status("http://provisioner.example.com", "k"))
    for _, url in ipairs { "https://provisioner.example.com", "http://provisioner:8002", "http://10.0.0.5", "http://p.ns.svc:80",
      "http://[::1]:80" } do
      assert.equal("ok", status(url, "k"))
    end
    assert.equal("ok", status "http://provisioner.example.com")
  end)

  it("does not hold what only process sandboxes need against another backend", function()
    local have, why = cli.have_program()
    if not have then pending(why) return end
    local folder = support.tmpdir()
    support.write_file(folder .. "/c.lua", ('return { backend = "provisioner", backend_options = { url = %q }, state_dir = %q }')
      :format(double.url, folder .. "/state"))
    support.sh("mkdir " .. folder .. "/bin; ln -s $(command -v paddock) $(command -v env) " .. folder .. "/bin/")
    local code, out = cli.program({ env = ("PATH=%s/bin"):format(folder) }, "doctor", "--config", folder .. "/c.lua")
    assert.matches("ok +provisioner", out)
    assert.matches("not needed by the backend provisioner", out, 1, true)
    assert.equal(0, code)
    code, out = cli.program({}, "policy", "explain", "--config", folder .. "/c.lua", "--user", "a", "--thread", "t")
    assert.equal(0, code)
    assert.matches('network = "open"', out, 1, true)
    support.cleanup()
  end)
end)
