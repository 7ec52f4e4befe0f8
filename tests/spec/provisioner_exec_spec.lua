-- Commands over the AIO interface of provisioned sandboxes, when answers get lost on the way; and what of secrets is seen where.
local cli = require "tests.support.cli"
local json = require "cjson"
local provisioner = require "tests.support.provisioner"
local support = require "tests.support"

local driver_module = provisioner.driver()
local ALICE = { user = "alice", thread = "t1" }
local CANARY = "c4n4ry-k3y"

describe("a command in a provisioned sandbox", function()
  local double, rt
  setup(function() double = provisioner.start() end)
  teardown(function() double:stop() end)
  before_each(function()
    double:tell { reset = true }
    rt = support.open { backend = "provisioner", backend_options = { url = double.url }, ready_interval = 0.05 }
  end)
  after_each(function()
    double:tell { faults = json.decode "[]" }
    pcall(rt.shutdown, rt)
    support.cleanup()
  end)

  --- What the plane answers to an exec, once.
  local function answered(data)
    return { route = "plane", method = "POST", status = 200, body = json.encode { success = true, data = data } }
  end
  local function commands(id) return double:pod(id).commands end

  it("without scope and environment goes to the default shell; a lost answer is unknown, and nothing is sent again [J1]", function()
    for _, fault in ipairs { { drop = true }, { refuse = true }, { status = 502 }, { status = 200, body = "{" } } do
      local box = rt:acquire(ALICE)
      fault.route, fault.method = "plane", "POST"
      local before = #commands(box.id)
      double:tell { faults = { fault } }
      local result = box:exec "echo once"
      assert.same({ "unknown", "response" }, { result.outcome, result.reason })
      assert.equal(before + (fault.drop and 1 or 0), #commands(box.id))
      box:release()
      rt:destroy(box.id)
    end
  end)

  it("whose outcome is unknown leaves the default shell alone for good, also after release and reclaim [J2 J4 J6]", function()
    for _, fault in ipairs { { route = "plane", method = "POST", drop = true },
      answered { session_id = "d", status = "no_change_timeout" } } do
      local box = rt:acquire(ALICE)
      double:tell { faults = { fault } }
      assert.equal("unknown", box:exec("echo first").outcome)
      box:release()
      local again = rt:acquire(ALICE)
      local result = again:exec "echo second"
      assert.same({ "completed", "second\n" }, { result.outcome, result.stdout })
      if again.generation == box.generation then
        local sent = commands(again.id)
        assert.is_string(sent[#sent].id)
      end
      again:release()
      rt:destroy(again.id)
    end
  end)

  it("with a definite outcome leaves the shell clean [J3 J5]", function()
    local box = rt:acquire(ALICE)
    double:tell { faults = { answered { session_id = "d", status = "hard_timeout", output = "part" } } }
    local result = box:exec "sleep 99"
    assert.same({ "hard_timeout", 124 }, { result.outcome, result.exit_code })
    assert.matches("Exit Code: 124$", tostring(result))
    box:release()
    local again = rt:acquire(ALICE)
    assert.equal(box.generation, again.generation)
    assert.equal("x\n", again:exec("echo x").stdout)
    assert.is_nil(commands(box.id)[1].id)
    assert.equal(0, double:count "delete")
  end)

  it("is not sent when the making of its session has an unknown outcome [J7 J9]", function()
    local box = rt:acquire(ALICE)
    double:tell { faults = { { route = "plane", method = "POST", drop = true } } }
    box:exec "echo first"
    double:tell { faults = { { route = "plane", method = "POST", drop = true } } }
    local result = box:exec "echo second"
    assert.same({ "unknown", "session_creation" }, { result.outcome, result.reason })
    assert.equal(1, #commands(box.id))
    assert.equal("quarantined", support.caught(box.exec, box, "echo third").kind)
    local second = rt:acquire { user = "bob", thread = "t" }
    double:tell { faults = { { route = "plane", method = "POST", status = 400, body = '{"success":false,"message":"no"}' } } }
    assert.equal("backend_error", support.caught(second.exec, second, "echo x", { scope = "s" }).kind)
    assert.equal("x\n", second:exec("echo x", { scope = "s" }).stdout) -- a refusal leaves no fence
  end)

  it("with an environment has it in a field of its own, never in the text [J12 B213]", function()
    local box = rt:acquire(ALICE)
    assert.equal("completed", box:exec("echo x", { env = { TOKEN = CANARY } }).outcome)
    local sent = commands(box.id)[1]
    assert.equal(CANARY, sent.env.TOKEN)
    assert.is_nil(sent.command:find(CANARY, 1, true))
    assert.equal("invalid_argument", support.caught(box.exec, box, "x", { env = { ["A B"] = "1" } }).kind)
  end)

  it("goes through a client that carries what its sandbox attested when it was admitted [I11 B7]", function()
    local driver = driver_module.new({ url = double.url }, {})
    for _, broker in ipairs { true, false } do
      local client = driver:connect({ sandbox_id = "abc", url = double.url .. "/pods/x/", headers = { ["X-Pod"] = "h" },
        attestation = { broker = broker, capacity = 13 } }, { command_timeout = 42, own = false })
      assert.same({ "abc", broker, 42, double.url .. "/pods/x", "h" },
        { client.sandbox_id, client.attestation.broker, client.command_timeout, client.url, client.headers["X-Pod"] })
    end
    assert.equal(0, double:count "capabilities")
    assert.equal("lost", support.caught(driver.connect, driver, { sandbox_id = "abc" }, {}).kind)
  end)

  it("that ends with its Pod says so where the provisioner knows why: killed for its memory [B128]", function()
    local events = {}
    local second = support.open { backend = "provisioner", backend_options = { url = double.url }, ready_interval = 0.05,
      log = function(record) events[#events + 1] = record end }
    local box = second:acquire { user = "carol", thread = "t" }
    double:tell { faults = { { route = "plane", method = "POST", drop = true }, { route = "get", patch = { status = "OOMKilled" } } } }
    local result = box:exec "python3 big.py"
    assert.same({ "oom", "sandbox", 137 }, { result.outcome, result.reason, result.exit_code })
    double:tell { faults = { { route = "plane", method = "POST", drop = true },
      { route = "get", patch = { status = "OOMKilled", container_id = "of-another" } } } }
    assert.equal("unknown", box:exec("python3 big.py", { scope = "s" }).outcome)
    second:dispatch()
    local logged = false
    for _, record in ipairs(events) do logged = logged or record.event == "sandbox_oom" end
    assert.is_true(logged)
    pcall(second.shutdown, second)
  end)

  it("of a holder whose lease ran out is not sent: nothing inside the Pod would refuse it [E17]", function()
    local box = rt:acquire(ALICE)
    rt:advance(170) -- of a ttl of 180 with its margin
    local err = support.caught(box.exec, box, "echo x")
    assert.equal("lost", err.kind)
    assert.equal(0, #commands(box.id))
  end)
end)

describe("the keys of a provisioner and its sandboxes", function()
  it("are in no log, error, view, record, argument or answer [B212 B213 B215]", function()
    local have, why = cli.have_program()
    if not have then pending(why) return end
    local double = provisioner.start()
    local folder = support.tmpdir()
    double:tell { set = { api_key = CANARY .. "-p" } }
    support.write_file(folder .. "/c.lua", ([[return { backend = "provisioner", log = "debug", state_dir = %q, ready_interval = 0.05,
      backend_options = { url = %q, api_key = "$PDK_TEST_KEY", sandbox_api_key = %q } }]])
      :format(folder .. "/state", double.url, CANARY .. "-s"))
    local env = "PDK_TEST_KEY=" .. CANARY .. "-p http_proxy=http://127.0.0.1:1" -- nobody there: loopback is reached directly [E14]
    local seen = {}
    local function run(...)
      local code, out, err = cli.program({ env = env }, ...)
      seen[#seen + 1] = out .. err
      return code
    end
    local at = { "--config", folder .. "/c.lua", "--user", "a", "--thread", "t" }
    assert.equal(0, run("exec", "--keep", at[1], at[2], at[3], at[4], at[5], at[6], "--", "echo hi"))
    run("ps", "--json", at[1], at[2])
    run("doctor", "--json", at[1], at[2])
    run("policy", "explain", table.unpack(at))
    for _, fault in ipairs { { route = "create", status = 500 }, { route = "create", refuse = true }, { route = "create", half = true },
      { route = "get", status = 401 }, { route = "plane", status = 403, times = 4 } } do
      double:tell { faults = { fault } }
      run("exec", at[1], at[2], "--user", "b", at[5], at[6], "--", "echo hi")
    end
    double:tell { faults = json.decode "[]" }
    run("destroy", "--all", at[1], at[2])
    for _, text in ipairs(seen) do assert.is_nil(text:find(CANARY, 1, true), text) end
    local found = support.sh(("grep -rl %s '%s/state'"):format(CANARY, folder))
    assert.equal("", found)
    for _, one in ipairs(double:requests()) do assert.is_nil(one.path:find(CANARY, 1, true)) end
    double:stop()
    support.cleanup()
  end)

  it("reach the sandbox that they are for", function()
    local double = provisioner.start()
    local driver = driver_module.new({ url = double.url, api_key = "p", sandbox_api_key = "s" }, {})
    local info = { sandbox_id = "abc", url = "http://10.0.0.1:1", attestation = {} }
    local client = driver:connect(info, { own = false })
    assert.equal("s", client.headers["X-AIO-API-Key"])
    assert.is_nil(client.headers["X-API-Key"])
    assert.is_nil(info.headers)
    double:stop()
  end)
end)
