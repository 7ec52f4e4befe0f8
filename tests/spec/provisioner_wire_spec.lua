-- The provisioner's interface as a description, without a server: routes, addresses, requests, and how each answer is read.
local support = require "tests.support"
local wire = require "paddock.provisioner.wire"
-- The module that backends have, in a plain Lua state.
local json = assert(package.loadlib(assert(package.searchpath("paddock.core", package.cpath)), "luaopen_paddock_io"))().json

local GOOD = {
  sandbox_id = "abc", sandbox_url = "http://10.0.0.1:30001", container_id = "0b1c-uid", lark_cli_broker = true,
  max_shell_sessions = 13, status = "Running",
}

local function with(key, value)
  local copy = {}
  for k, v in pairs(GOOD) do copy[k] = v end
  copy[key] = value
  return copy
end

local function read(object, id) return wire.read_sandbox(json, object, id or "abc") end

describe("the provisioner's routes", function()
  it("lead to a path and back [H1 H10 H11 H12 H13]", function()
    for name, route in pairs(wire.routes) do
      local path = wire.path(name, "abc-1")
      local found, id = wire.route(route.method, path)
      assert.equal(name, found, path)
      assert.equal(route.path:find("{id}", 1, true) and "abc-1" or nil, id)
    end
    assert.equal("/api/sandboxes/abc-1/presence", wire.path("presence", "abc-1"))
    assert.is_nil(wire.route("PUT", "/api/sandboxes/abc"))
    assert.is_nil(wire.route("GET", "/api/sandboxes/abc/other"))
    assert.is_nil(wire.route("GET", "/apiXsandboxes"))
  end)

  it("take no id that would change the path", function()
    for _, id in ipairs { "", "a/b", "..", "a?b", "a#b", "a%2fb", "A", "a b", "a\nb", ("a"):rep(64), "a.b", "a\0b", "ä" } do
      assert.is_false(wire.is_id(id), id)
      assert.has_error(function() wire.path("get", id) end)
      assert.is_nil(wire.route("GET", "/api/sandboxes/" .. id .. "/presence"), id)
    end
    for _, id in ipairs { 1, true, {}, false } do assert.is_false(wire.is_id(id)) end
    assert.is_true(wire.is_id(("a"):rep(63)))
  end)
end)

describe("the provisioner's address", function()
  it("has a normal form: with a path, a trailing slash, an IPv6 host", function()
    for given, base in pairs {
      ["http://provisioner:8002"] = "http://provisioner:8002", ["http://provisioner:8002/"] = "http://provisioner:8002",
      ["HTTPS://Prov.Example.COM/base/path//"] = "https://prov.example.com/base/path",
      ["http://[::1]:8002/"] = "http://[::1]:8002", ["http://[fd00::5]"] = "http://[fd00::5]", ["http://10.1.2.3"] = "http://10.1.2.3",
    } do
      assert.equal(base, (wire.base_url(given)))
    end
  end)

  it("is refused with the reason", function()
    for given, why in pairs {
      ["provisioner:8002"] = "http://", ["//provisioner"] = "http://", [""] = "http://", ["ftp://provisioner"] = "http://",
      ["unix:///tmp/x"] = "http://", ["http://"] = "no host", ["http:///path"] = "no host", ["http://:8002"] = "no host",
      ["http://user:secret@host"] = "api_key", ["http://user@host:1"] = "api_key", ["http://host:0"] = "port",
      ["http://host:65536"] = "port", ["http://host:port"] = "port", ["http://host:"] = "port", ["http://host:8002x"] = "port",
      ["http://host/?q=1"] = "query", ["http://host/#x"] = "query", ["http://host/a/../b"] = '".."', ["http://host/./b"] = '".."',
      ["http://host/%2e%2e/b"] = '".."', ["http://ho st"] = "spaces", ["http://host/\r\nX: y"] = "spaces", ["http://ho\0st"] = "spaces",
      ["http://host\\@evil"] = "spaces", ["http://[::1"] = "no host", ["http://[::1]x"] = "port", ["http://höst"] = "spaces",
      ["http://host/" .. ("a"):rep(200)] = "140",
    } do
      local base, problem = wire.base_url(given)
      assert.is_nil(base, given)
      assert.matches(why, problem, 1, true)
      assert.is_nil(problem:find("secret", 1, true))
    end
    for _, given in ipairs { 1, true, {} } do assert.is_nil((wire.base_url(given))) end
  end)
end)

describe("a sandbox in an answer", function()
  it("is read with all that it attests [H7]", function()
    assert.same({ sandbox_id = "abc", url = "http://10.0.0.1:30001", generation = "0b1c-uid", broker = true, sessions = 13,
      status = "Running" }, (read(GOOD)))
    assert.is_false(read(with("lark_cli_broker", false)).broker)
    assert.equal("https://host/base", read(with("sandbox_url", "https://host/base/")).url)
  end)

  it("may leave each field out, or have null: then that is unknown, not no [H7]", function()
    local fields = { sandbox_url = "url", container_id = "generation", lark_cli_broker = "broker", max_shell_sessions = "sessions",
      status = "status" }
    for field, key in pairs(fields) do
      for _, nothing in ipairs { "missing", "null" } do
        local object = with(field, nothing == "null" and json.null or nil)
        local sandbox = read(object)
        assert.is_nil(sandbox[key], field)
        for other, other_key in pairs(fields) do
          if other ~= field then assert.is_not_nil(sandbox[other_key], other) end
        end
      end
    end
    assert.equal("abc", read(with("sandbox_id", json.null)).sandbox_id)
    assert.is_nil((wire.read_sandbox(json, with("sandbox_id", nil)))) -- of a list, where nobody asked for one
  end)

  it("with one field of another kind is not believed at all [H7]", function()
    local bad = {
      sandbox_id = { "", 5, true, {}, "../x", "A", ("a"):rep(64) },
      sandbox_url = { 5, true, {}, "host:80", "ftp://host", "http://", "http://u:p@host", "http://host/a b", "http://host\r\nX: y",
        "javascript:x", "http://h/" .. ("a"):rep(3000) },
      container_id = { 5, false, {}, "", "a b", "a\nb", ("a"):rep(300), "ü" },
      lark_cli_broker = { "true", 1, 0, {}, "" },
      max_shell_sessions = { "13", -1, 1.5, 1e300, 2 ^ 53, {}, true, math.huge },
      status = { 1, true, {}, "", ("a"):rep(100), "a\nb" },
    }
    for field, values in pairs(bad) do
      for _, value in ipairs(values) do
        local sandbox, problem = read(with(field, value))
        assert.is_nil(sandbox, field .. " " .. tostring(value))
        assert.is_string(problem)
        assert.is_nil(problem:find("%c"), "one line")
      end
    end
    for _, object in ipairs { 1, "x", true } do assert.is_nil((read(object))) end
  end)

  it("that is about another one is told apart", function()
    local sandbox, problem, which = read(GOOD, "abd")
    assert.is_nil(sandbox)
    assert.equal("other", which)
    assert.matches("abc", problem, 1, true)
  end)
end)

describe("an answer's text", function()
  it("must be one JSON object, in which nothing comes twice", function()
    for text, why in pairs {
      [""] = "no JSON object", ["[]"] = "no JSON object", ["null"] = "no JSON object", ["<html>"] = "no JSON object",
      ['{"a": 1'] = "no JSON", ['{"a": }'] = "no JSON", ["{} x"] = "no JSON", ['{"a": 1e999999}'] = false,
      ['{"a":1,"b":2,"a":3}'] = "a comes twice", ['{"a":1,"\\u0061":2}'] = "a comes twice",
      ['{"x":{"k":1,"k":2}}'] = "k comes twice", ['{"l":[{"k":1},{"k":2}], "k": 3}'] = false, ['{"a":"\\"a\\":","b":"{\\"a\\":1"}'] = false,
      ['{"a" : 1, "a"\n: 2}'] = "a comes twice", ['{"a":"a","b":["a","a"]}'] = false,
    } do
      local object, problem = wire.object(json, text)
      if why then
        assert.is_nil(object, text)
        assert.matches(why, problem, 1, true)
      else
        assert.is_table(object, text)
      end
    end
    assert.is_nil((wire.object(json, ('{"a":'):rep(5000)))) -- nested without end
  end)

  it("says whether a sandbox is missing only where it names it [H12]", function()
    local function says(text) return wire.says_missing(json, text, "abc") end
    assert.is_true(says '{"detail":"Sandbox \'abc\' not found"}')
    assert.is_true(says '{"sandbox_id":"abc"}')
    assert.is_true(says '{"detail":{"sandbox_id":"abc"}}')
    for _, detail in ipairs { "no sandbox abc", "Sandbox abc: not found", "not found: abc.", "no sandbox (abc)", "abc" } do
      assert.is_true(says(json.encode { detail = detail }), detail)
    end
    for _, text in ipairs { '{"detail":"Not Found"}', "", "<html>404</html>", '{"detail":"abcd not found"}', '{"detail":5}', "{}",
      '{"detail":"Cannot GET /api/sandboxes/abc"}', '{"detail":"no route for http://p/api/sandboxes/abc/presence"}',
      '{"detail":"/abc"}', '{"detail":"abc/presence"}', '{"detail":"x-abc"}', '{"detail":"ABC"}', '{"detail":"abc","detail":"abc"}',
      '{"sandbox_id":"abd","detail":"Not Found"}' } do
      assert.is_false(says(text), text)
    end
  end)

  it("gives a reason for people without control characters", function()
    assert.equal("no reason given", wire.said(json, "<html>"))
    assert.equal("a?b", wire.said(json, '{"detail":"a\\nb"}'))
    assert.equal("bad field", wire.said(json, '{"detail":[{"loc":["x"],"msg":"bad field","type":"t"}]}'))
    assert.equal(160, #wire.said(json, json.encode { detail = ("x"):rep(9999) }))
  end)
end)

describe("the other answers", function()
  it("of a list skip what cannot be read, also a second one of an id [H10]", function()
    local found, skipped = wire.read_list(json, { sandboxes = { GOOD, 5, {}, with("sandbox_id", "b2"), with("lark_cli_broker", 7),
      GOOD, json.null } })
    assert.equal(2, #found)
    assert.equal("abc", found[1].sandbox_id)
    assert.equal("b2", found[2].sandbox_id)
    assert.equal(5, skipped)
    assert.same({}, (wire.read_list(json, { sandboxes = {} })))
    for _, wrong in ipairs { {}, { sandboxes = 5 }, { sandboxes = json.null }, { sandboxes = { a = GOOD } } } do
      assert.is_nil((wire.read_list(json, wrong)))
    end
  end)

  it("of presence are yes, no, or not understood [H12]", function()
    assert.is_true((wire.read_presence(json, { sandbox_id = "abc", present = true }, "abc")))
    local present, generation = wire.read_presence(json, { present = true, container_id = "u" }, "abc")
    assert.is_true(present)
    assert.equal("u", generation)
    assert.is_false((wire.read_presence(json, { present = false, container_id = json.null }, "abc")))
    for _, wrong in ipairs { {}, { present = json.null }, { present = "false" }, { present = 0 }, { present = {} },
      { present = false, sandbox_id = "other" }, { present = false, sandbox_id = 5 }, { present = false, container_id = 5 } } do
      assert.is_nil((wire.read_presence(json, wrong, "abc")))
    end
  end)

  it("of capabilities are two booleans, or not understood [H13]", function()
    assert.same({ lark_cli_init_image = true, lark_cli_broker_image = false },
      wire.read_capabilities(json, { lark_cli_init_image = true, lark_cli_broker_image = false }))
    for _, key in ipairs { "lark_cli_init_image", "lark_cli_broker_image" } do
      for _, value in ipairs { json.null, 1, "true", {} } do
        local object = { lark_cli_init_image = true, lark_cli_broker_image = true }
        object[key] = value
        assert.is_nil((wire.read_capabilities(json, object)))
      end
      assert.is_nil((wire.read_capabilities(json, { [key] = true })))
    end
  end)
end)

describe("a create request", function()
  local function body(fields)
    local req = { sandbox_id = "abc", thread_id = "t1", user_id = "alice" }
    for k, v in pairs(fields or {}) do req[k] = v end
    return wire.create_body(json, req)
  end
  local function mount(target, source) return { source = source or "/srv" .. target, target = target, read_only = true } end

  it("has exactly the seven fields when nothing more is asked for [H1]", function()
    assert.same({ sandbox_id = "abc", thread_id = "t1", user_id = "alice", include_legacy_skills = false,
      skills_container_path = "/mnt/skills", provision_lark_cli_runtime = false, provision_lark_cli_broker = false }, (body()))
  end)

  it("carries the mounts that a provisioner takes, in their order, and leaves the rest out [D10 H6 H14]", function()
    local lark, mounts = "/mnt/integrations/lark-cli/", {}
    for i, target in ipairs { "/mnt/user-data/workspace", "/mnt/user-data/uploads", "/mnt/user-data/outputs", "/mnt/acp-workspace",
      "/mnt/skills/public", "/mnt/skills/custom", "/mnt/skills/legacy", "/mnt/skills/integrations", lark .. "config",
      lark .. "config/locks", lark .. "data", lark .. "runtime", "/mnt/skills/public" } do
      mounts[i] = mount(target)
    end
    local sent, left_out = body { mounts = mounts, provision_lark_cli_runtime = true }
    local targets = {}
    for i, one in ipairs(sent.extra_mounts) do targets[i] = one.container_path end
    assert.same({ "/mnt/acp-workspace", "/mnt/skills/public", "/mnt/skills/custom", "/mnt/skills/legacy", "/mnt/skills/integrations",
      lark .. "config", lark .. "config/locks", lark .. "data" }, targets)
    assert.same({ "/mnt/user-data/workspace", "/mnt/user-data/uploads", "/mnt/user-data/outputs", "/mnt/skills/public" }, left_out)
    assert.is_nil(wire.check_create(json, sent))
    assert.equal(9, #body { mounts = mounts }.extra_mounts) -- with the runtime, which nobody supplies then
    assert.is_nil(body { mounts = { mount "/data" } }.extra_mounts)
    local words = { yes = true, no = false }
    for said, shut in pairs { nothing = true, yes = true, no = false } do -- what does not say that it may be written to is read-only
      local one = { source = "/srv/x", target = "/mnt/acp-workspace", read_only = words[said] }
      assert.equal(shut, body({ mounts = { one } }).extra_mounts[1].read_only)
    end
    assert.same({ host_path = "/srv/x", container_path = "/skills/public", read_only = true },
      body { skills_container_path = "/skills", mounts = { mount("/skills/public", "/srv/x") } }.extra_mounts[1])
  end)

  it("is refused by a server for what is wrong in it [H14]", function()
    local function problem(key, value)
      local b = body { mounts = { mount "/mnt/acp-workspace" } }
      b[key] = value
      return wire.check_create(json, b)
    end
    for key, values in pairs {
      sandbox_id = { "", "A", "a/b", 5, json.null }, thread_id = { "", "a b", "../x", 5, json.null, ("a"):rep(200) },
      user_id = { "", "a/b", {}, json.null }, include_legacy_skills = { 1, "true" }, provision_lark_cli_runtime = { 0, {} },
      provision_lark_cli_broker = { "x" }, skills_container_path = { "relative", 5, "/a/../b" },
      max_shell_sessions = { 0, -1, 1.5, "13", 1e9 }, extra_mounts = { 5, "x" },
    } do
      for _, value in ipairs(values) do assert.matches(key, problem(key, value) or "accepted", 1, true) end
    end
    local one = { host_path = "/a", container_path = "/mnt/acp-workspace", read_only = true }
    for why, list in pairs {
      ["more than 10"] = { one, one, one, one, one, one, one, one, one, one, one },
      repeated = { one, one }, host_path = { { host_path = "a", container_path = "/mnt/acp-workspace" } },
      ["not one that is mounted on"] = { { host_path = "/a", container_path = "/etc" } }, object = { 5 },
      read_only = { { host_path = "/a", container_path = "/mnt/acp-workspace", read_only = "yes" } },
    } do
      assert.matches(why, problem("extra_mounts", list), 1, true)
    end
    assert.is_nil(problem("max_shell_sessions", 13))
    assert.is_nil(problem("extra_mounts", json.null))
  end)
end)

describe("the table of answers", function()
  it("has an answer with a status for each state and route [H10 H12]", function()
    local text = support.read_file "tests/support/provisioner.answers"
    local states, statuses = {}, {}
    for line in text:gmatch("[^\n]+") do
      local words = {}
      for word in line:gsub("#.*", ""):gmatch("%S+") do words[#words + 1] = word end
      if words[1] == "state" then states[words[2]] = words end
      if words[1] == "answer" then statuses[words[2]] = tonumber(words[3]) end
    end
    for _, name in ipairs { "absent", "pending", "running", "serviceless", "terminating", "failed" } do
      local row = assert(states[name], name)
      for i = 3, 6 do assert.is_number(statuses[row[i]], name .. " " .. tostring(row[i])) end
      assert.equal(name == "absent" and "gone" or "there", row[5], name)
    end
  end)
end)
