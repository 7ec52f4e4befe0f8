-- The provisioner backend over real HTTP: what it asks for, and what it makes of each answer. The service is a double
-- (tests/support/provisioner.py); the driver is asked directly where a row is about one of its functions.
local json = require "cjson"
local provisioner = require "tests.support.provisioner"
local support = require "tests.support"

local driver_module = provisioner.driver()
local ALICE = { user = "alice", thread = "t1" }

describe("the provisioner backend", function()
  local double, runtimes

  setup(function() double = provisioner.start() end)
  teardown(function() double:stop() end)
  before_each(function()
    double:tell { reset = true }
    runtimes = {}
  end)
  after_each(function()
    double:tell { faults = json.decode "[]", set = { endpoint = true } }
    for _, rt in ipairs(runtimes) do pcall(rt.shutdown, rt) end
    support.cleanup()
  end)

  local function open(opts, own)
    local options = { backend = "provisioner", backend_options = { url = double.url }, ready_interval = 0.05, ready_timeout = 5 }
    for k, v in pairs(own or {}) do options.backend_options[k] = v end
    for k, v in pairs(opts or {}) do options[k] = v end
    runtimes[#runtimes + 1] = support.open(options)
    return runtimes[#runtimes]
  end

  --- A runtime with the deer-flow policies and a state directory of its own.
  local function open_deerflow(policy_options, opts, own)
    local base = support.tmpdir()
    local config = { base_dir = base, remote = true }
    for k, v in pairs(policy_options or {}) do config[k] = v end
    local options = { policies = "policies/deerflow", policy_options = config, mount_roots = { base } }
    for k, v in pairs(opts or {}) do options[k] = v end
    return open(options, own), base
  end

  local function driver(own)
    local options = { url = double.url, read_timeout = 1, create_timeout = 1, delete_timeout = 1, gone_timeout = 0 }
    for k, v in pairs(own or {}) do options[k] = v end
    return driver_module.new(options, { ready_interval = 0.05, discover_timeout = 0.3 })
  end

  local function created() return double:requests "create"[1].body end
  local function spec(fields)
    local all = { sandbox_id = "abc", identity = ALICE, network = "open", mounts = {}, env = {}, requirements = {} }
    for k, v in pairs(fields or {}) do all[k] = v end
    return all
  end

  -- ---- create -------------------------------------------------------------------------------------------------

  it("asks for a sandbox with exactly the seven fields, and uses the address that comes back [H1]", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    local request = double:requests "create"[1]
    assert.same({ sandbox_id = box.id, thread_id = "t1", user_id = "alice", include_legacy_skills = false,
      skills_container_path = "/mnt/skills", provision_lark_cli_runtime = false, provision_lark_cli_broker = false }, request.body)
    assert.equal("POST /api/sandboxes", request.method .. " " .. request.path)
    assert.equal("application/json", request.headers["content-type"])
    local info = rt:inspect(box.id).info
    assert.equal(double.url .. "/pods/" .. double:pod(box.id).uid, info.url)
    assert.equal(double:pod(box.id).uid, box.generation)
    assert.equal("get create", double:trace())
  end)

  it("names a sandbox without a thread by its own id [C11]", function()
    local rt = open()
    local box = rt:acquire { user = "alice" }
    assert.equal(box.id, created().thread_id)
    assert.not_equal(box.id, rt:acquire({ user = "alice" }).id)
    assert.equal(0, double:count "get") -- nobody can have made it before
  end)

  it("names the effective user, and computes for exactly that one [C10 H2]", function()
    for _, case in ipairs { { ambient = "ambient", user = nil, effective = "ambient", legacy = true },
      { ambient = "ambient", user = "explicit", effective = "explicit", legacy = false } } do
      double:tell { reset = true }
      local rt = open_deerflow({ legacy_skills = { "ambient" } }, { user = case.ambient })
      rt:acquire { user = case.user, thread = "t1" }
      assert.equal(case.effective, created().user_id)
      assert.equal(case.legacy, created().include_legacy_skills)
    end
  end)

  it("names a capacity only when one is requested, and wants it attested [H3]", function()
    open_deerflow({ max_running = 8 }):acquire(ALICE) -- 9 fits the image's own 10
    assert.is_nil(created().max_shell_sessions)
    double:tell { reset = true }
    local rt = open_deerflow { max_running = 12 }
    local box = rt:acquire(ALICE)
    assert.equal(13, created().max_shell_sessions)
    assert.equal(13, rt:inspect(box.id).info.attestation.capacity)
    double:tell { reset = true }
    open({ environment = { MAX_SHELL_SESSIONS = "13" } }):acquire(ALICE)
    assert.equal(13, created().max_shell_sessions)
  end)

  it("names the configured skills root, sync and async [B3 H4]", function()
    open_deerflow({ skills_root = "/custom-skills" }):acquire(ALICE)
    assert.equal("/custom-skills", created().skills_container_path)
    double:tell { reset = true }
    open_deerflow({ skills_root = "/custom-skills" }):acquire_async(ALICE):wait(20)
    assert.equal("/custom-skills", created().skills_container_path)
    double:tell { reset = true }
    open({}, { skills_root = "/own-skills" }):acquire(ALICE)
    assert.equal("/own-skills", created().skills_container_path)
  end)

  it("asks for the helper's runtime and broker exactly when they are wanted [H5]", function()
    for _, case in ipairs { { lark = true, broker = true }, { lark = true, broker = false }, { lark = false, broker = false } } do
      double:tell { reset = true, set = { capabilities = { lark_cli_init_image = true, lark_cli_broker_image = case.broker } } }
      open_deerflow({ lark_cli = case.lark and { "alice" } or { "bob" } }):acquire(ALICE)
      assert.equal(case.lark, created().provision_lark_cli_runtime)
      assert.equal(case.broker, created().provision_lark_cli_broker)
      assert.equal(case.lark and 1 or 0, double:count "capabilities")
    end
  end)

  it("sends extra mounts when there are any, in three fields each, and not the runtime that the provisioner supplies [H6]", function()
    driver():create(spec())
    assert.is_nil(created().extra_mounts)
    double:tell { reset = true }
    local runtime = "/mnt/integrations/lark-cli/runtime"
    driver():create(spec { mounts = {
      { source = "/srv/acp", target = "/mnt/acp-workspace", read_only = true }, { source = "/srv/rt", target = runtime, read_only = true },
      { source = "/srv/d", target = "/mnt/integrations/lark-cli/data", read_only = false }, { source = "/x", target = "/elsewhere" },
    }, requirements = { options = { provision_lark_cli_runtime = true } } })
    assert.same({
      { host_path = "/srv/acp", container_path = "/mnt/acp-workspace", read_only = true },
      { host_path = "/srv/d", container_path = "/mnt/integrations/lark-cli/data", read_only = false },
    }, created().extra_mounts)
  end)

  it("has the composed mounts accepted, and a refused list is an error that says why [D10 H14]", function()
    local rt, base = open_deerflow { lark_cli = true }
    double:tell { set = { state_root = base, capabilities = { lark_cli_init_image = true, lark_cli_broker_image = false } } }
    rt:acquire(ALICE)
    local seen = {}
    for _, mount in ipairs(created().extra_mounts or {}) do
      assert.is_nil(seen[mount.container_path])
      seen[mount.container_path] = true
    end
    assert.is_true(seen["/mnt/acp-workspace"])
    assert.is_nil(seen["/mnt/user-data/workspace"])
    local err = support.caught(driver().create, driver(), spec { sandbox_id = "other",
      mounts = { { source = "/outside", target = "/mnt/acp-workspace", read_only = true } } })
    assert.equal("backend_error", err.kind)
    assert.equal("http_400", err.reason)
    assert.matches("outside the state root", err.message, 1, true)
  end)

  it("is answered with what exists when the id exists: one Pod, however often it is asked for [H14]", function()
    local d = driver()
    local first, second = d:create(spec()), d:create(spec())
    assert.equal(first.generation, second.generation)
    assert.equal(2, double:count "create")
  end)

  it("says why what was made cannot serve: what does not attest what was asked for does not have it [H3 H8]", function()
    local broker, room = { provision_lark_cli_runtime = true, provision_lark_cli_broker = true }, { max_shell_sessions = 13 }
    for i, case in ipairs {
      { broker, { lark_cli_broker = false }, "broker_mode" }, { broker, { lark_cli_broker = "-" }, "version_skew" },
      { broker, { lark_cli_broker = json.null }, "version_skew" }, { broker, { lark_cli_broker = true } },
      { room, { max_shell_sessions = "-" }, "version_skew" }, { room, { max_shell_sessions = json.null }, "version_skew" },
      { room, { max_shell_sessions = 12 }, "insufficient_capacity" }, { room, { max_shell_sessions = 13 } },
      { room, { max_shell_sessions = 14 } }, { {}, { lark_cli_broker = "-", max_shell_sessions = "-" } },
    } do
      double:tell { faults = { { route = "create", patch = case[2] } } }
      local info = driver():create(spec { sandbox_id = "s" .. i, requirements = { options = case[1] } })
      assert.equal(case[3], info.rejected and info.rejected.reason, i)
      assert.equal(double:pod("s" .. i).uid, info.generation)   -- what has to go is named
    end
  end)

  it("takes no other Pod for the one that it made, while it waits for that one's address [H1]", function()
    double:tell { faults = { { route = "create", patch = { sandbox_url = "-" } },
      { route = "get", patch = { container_id = "of-another" }, times = 0 } } }
    local d = driver { create_timeout = 0.2, read_timeout = 0.2 }
    local info = d:create(spec())
    assert.same({ double:pod("abc").uid, "no_endpoint" }, { info.generation, info.rejected.reason })
    double:tell { faults = json.decode "[]" }
    double:tell { reset = true, faults = { { route = "create", patch = { sandbox_url = "-" } } } }
    info = d:create(spec())
    assert.same({ double:pod("abc").uid, double.url .. "/pods/" .. info.generation }, { info.generation, info.url })
  end)

  it("refuses a request that it has no field for, before anything is sent", function()
    for name, fields in pairs {
      image = { image = "x" }, limits = { limits = { memory = 5 } }, network = { network = "none" },
      TOKEN = { env = { TOKEN = "secret-canary" } }, MAX_SHELL_SESSIONS = { env = { MAX_SHELL_SESSIONS = "many" } },
      ["from 1"] = { env = { MAX_SHELL_SESSIONS = "0" } }, unheard = { requirements = { options = { unheard = 1 } } },
      include_legacy_skills = { requirements = { options = { include_legacy_skills = "yes" } } },
      sandbox_id = { sandbox_id = "../x" }, ["1 to 63"] = { sandbox_id = "a/b" },
    } do
      local d = driver()
      local err = support.caught(d.create, d, spec(fields))
      assert.matches(name, err.message, 1, true)
      assert.is_nil(err.message:find("canary", 1, true))
    end
    assert.equal(0, double:count())
  end)

  it("asks nothing about an id that would change the path of a URL", function()
    local d = driver()
    for _, id in ipairs { "../x", "a/b", "a?b", "a#b", "a%2fb", "", "A", ("a"):rep(64), "a\r\nb", 5 } do
      for name, asked in pairs {
        create = spec { sandbox_id = id }, inspect = id, discover = id, alive = { sandbox_id = id }, destroy = { sandbox_id = id },
        connect = { sandbox_id = id, url = double.url }, ready = { sandbox_id = id, url = double.url },
      } do
        local fine, err = pcall(d[name], d, asked, 0.1)
        assert.is_false(fine, name .. " " .. id)
        assert.equal("invalid_argument", err.kind, tostring(err))
      end
    end
    assert.equal(0, double:count())
  end)

  -- ---- metadata -----------------------------------------------------------------------------------------------

  it("reads the same metadata from create, get and list [H7]", function()
    double:tell { set = { attest = { lark_cli_broker = true, max_shell_sessions = 4 } } }
    local d = driver()
    local infos = { d:create(spec()), d:discover("abc"), d:inspect("abc"), d:list()[1] }
    assert.equal(4, #infos)
    for _, info in ipairs(infos) do
      assert.same({ broker = true, capacity = 4 }, info.attestation)
      assert.equal(double:pod("abc").uid, info.generation)
      assert.equal("Running", info.status)
      assert.equal(infos[1].url, info.url)
    end
    double:tell { pods = { abc = { attest = { lark_cli_broker = "-", max_shell_sessions = "-" } } } }
    for _, info in ipairs { d:discover("abc"), d:list()[1] } do assert.same({}, info.attestation) end
  end)

  it("weighs an attested capacity against the minimum, discovered or listed [G2 H7 I2]", function()
    for capacity, replaced in pairs { [4] = true, [9] = false, [13] = false } do
      for _, how in ipairs { "discover", "list" } do
        local rt = open_deerflow({ max_running = 8 })
        local id = rt:explain(ALICE).id
        double:tell { reset = true, pods = { [id] = { attest = { max_shell_sessions = capacity } } } }
        local uid = double:pod(id).uid
        if how == "discover" then
          local box = rt:acquire(ALICE)
          assert.equal(replaced and "created" or "discovered", box.source)
          assert.equal(replaced, box.generation ~= uid)
        else
          rt:reconcile()
          assert.equal(replaced and 1 or 0, double:count "delete", how .. capacity)
          assert.equal(not replaced and "warm" or nil, (rt:inspect(id) or {}).state)
        end
        rt:reset()
      end
    end
  end)

  -- ---- looking ------------------------------------------------------------------------------------------------

  it("finds nothing at 404, a living one where the status is Running, and raises at anything else [H10]", function()
    local d = driver()
    local info = d:create(spec())
    assert.is_true(d:alive(info))
    for state, alive in pairs { pending = false, failed = false, serviceless = false, running = true } do
      double:tell { pods = { abc = { state = state } } }
      assert.equal(alive, d:alive(info), state)
      assert.equal(alive, d:discover("abc") ~= nil, state)
    end
    double:tell { pods = { abc = { state = "running" } }, faults = { { route = "plane", status = 503, times = 0 } } }
    assert.is_nil(d:discover("abc"))                                      -- it runs, and does not answer
    for _, status in ipairs { "Pending", "Failed", "Terminating", "Suspended", "-" } do -- something answers there, and it does not run
      double:tell { faults = { { route = "get", patch = { status = status } } } }
      assert.is_nil(d:discover("abc"), status)
    end
    double:tell { faults = json.decode "[]" }
    for _, fault in ipairs { { status = 500 }, { status = 403 }, { status = 302, body = "" }, { refuse = true }, { half = true },
      { cut = 10 }, { body = "<html>" }, { body = "[]" }, { patch = { status = "Unknown" } }, { patch = { status = "-" } },
      { patch = { container_id = "-" } }, { patch = { sandbox_id = "other" } }, { patch = { lark_cli_broker = 5 } }, { twice = "status" },
      { huge = 1 << 20 }, { delay = 2 } } do
      fault.route = "get"
      double:tell { faults = { fault } }
      local err = support.caught(d.alive, d, info)
      assert.equal("backend_error", err.kind, json.encode(fault))
    end
    -- Somebody in between answers 404 for everything: that is no death.
    double:tell { faults = { { route = "get", status = 404 }, { route = "presence", status = 404, body = '{"detail":"Not Found"}' } } }
    assert.equal("no_route", support.caught(d.alive, d, info).reason)
    info.generation = "of-before"
    assert.is_false(d:alive(info))
    double:tell { pods = { abc = { state = "absent" } } }
    assert.is_false(d:alive(info))
    assert.is_nil(d:discover("abc"))
  end)

  it("lists what it can read, and raises where there is no list [H10]", function()
    local d = driver()
    double:tell { pods = { a1 = { state = "running" }, b2 = { state = "pending" }, c3 = { state = "terminating" } }, set = { grace = 60 } }
    double:tell { pods = { c3 = { state = "terminating" } } }
    local ids = {}
    for i, info in ipairs(d:list()) do ids[i] = info.sandbox_id end
    assert.same({ "a1", "b2" }, ids)
    double:tell { faults = { { route = "list", body = [[{"sandboxes":[{"sandbox_id":"ok"},7,{"sandbox_id":"../x"},{},
      {"sandbox_id":"bye","status":"Terminating"}]}]] } } } -- that one ends already: nobody is to adopt it
    local listed = d:list()
    assert.same({ 1, "ok" }, { #listed, listed[1].sandbox_id })
    for _, fault in ipairs { { status = 500 }, { status = 404 }, { body = "{}" }, { body = '{"sandboxes":{"a":1}}' }, { half = true } } do
      fault.route = "list"
      double:tell { faults = { fault } }
      assert.equal("backend_error", support.caught(d.list, d).kind)
    end
  end)

  it("counts a Pod as present while it is there in any phase, whatever the ordinary read says [H12]", function()
    local d = driver()
    double:tell { set = { grace = 60 } }
    for _, state in ipairs { "pending", "running", "serviceless", "failed", "terminating" } do
      double:tell { pods = { abc = { state = state } } }
      local info = assert(d:inspect("abc"), state)
      assert.equal(double:pod("abc").uid, info.generation)
      assert.equal(state == "serviceless" or state == "terminating", info.url == nil)
    end
    assert.is_nil(d:inspect("absent"))
    for _, fault in ipairs { { status = 500 }, { status = 404, body = '{"detail":"Not Found"}' }, { status = 404, body = "" },
      { body = '{"present":null}' }, { body = '{"present":"false"}' }, { body = '{}' }, { body = '{"present":false,"sandbox_id":"zz"}' },
      { body = '{"present":true,"present":false}' }, { half = true }, { refuse = true }, { delay = 2 } } do
      fault.route = "presence"
      double:tell { faults = { fault } }
      assert.equal("backend_error", support.caught(d.inspect, d, "abc").kind, json.encode(fault))
    end
    double:tell { faults = { { route = "get", status = 503 } } } -- present, but what it is cannot be told
    assert.equal("http_503", support.caught(d.inspect, d, "abc").reason)
  end)

  it("admits a discovered one only once it answers, however it was found [B121]", function()
    local rt = open { discover_timeout = 3 }
    local id = rt:explain(ALICE).id
    double:tell { pods = { [id] = { state = "running" } }, faults = { { route = "plane", refuse = true, times = 3 } } }
    local box = rt:acquire(ALICE)
    assert.equal("discovered", box.source)
    assert.equal(0, double:count "create")
    assert.equal("hi\n", box:exec("echo hi").stdout)
  end)

  it("admits a reclaimed or adopted one through the same gate [B121]", function()
    for _, how in ipairs { "reclaimed", "adopted" } do
      local rt = open { discover_timeout = 3 }
      local id = rt:explain(ALICE).id
      double:tell { reset = true }
      if how == "reclaimed" then
        rt:acquire(ALICE):release()
      else
        double:tell { pods = { [id] = { state = "running" } } }
        rt:reconcile()
      end
      support.sh "sleep 5.1" -- what it answered a moment ago counts no more
      double:tell { faults = { { route = "plane", refuse = true, times = 3 } } }
      local box = rt:acquire(ALICE)
      assert.equal("warm", box.source)
      assert.equal("hi\n", box:exec("echo hi").stdout)
      rt:shutdown()
    end
  end)

  it("does not take a word that it does not know for a death: it may be suspended [B120]", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    box:release()
    for _, patch in ipairs { { status = "Suspended" }, { status = "Suspended", sandbox_url = json.null } } do
      double:tell { faults = { { route = "get", patch = patch } } }
      local again = rt:acquire(ALICE)
      assert.equal(box.generation, again.generation)
      again:release()
    end
    assert.equal(0, double:count "delete")
  end)

  it("waits for one that is still starting, and takes back one that never answers [B127 E13]", function()
    local rt = open { ready_timeout = 3 }
    double:tell { set = { slow_start = 0.4 } }
    assert.equal("created", rt:acquire(ALICE).source)
    double:tell { set = { slow_start = 0 }, faults = { { route = "plane", status = 503, times = 0 } } }
    local short = open { ready_timeout = 0.3 }
    local err = support.caught(short.acquire, short, { user = "bob", thread = "t" })
    assert.equal("unready", err.kind)
    assert.is_nil(double:pod(err.sandbox_id))
    assert.equal(1, double:count "delete")
  end)

  -- ---- deleting -----------------------------------------------------------------------------------------------

  it("takes a delete that fails, or is not answered, for an error [H11]", function()
    local d = driver()
    for _, fault in ipairs { { status = 500 }, { status = 400 }, { status = 401 }, { status = 302, body = "" }, { refuse = true },
      { drop = true }, { cut = 0 }, { delay = 1.5 }, { status = 404, body = '{"detail":"Not Found"}' } } do
      double:tell { reset = true }
      local info = d:create(spec())
      fault.route = "delete"
      double:tell { faults = { fault } }
      local err = support.caught(d.destroy, d, info)
      assert.equal("backend_error", err.kind, json.encode(fault))
      assert.equal(1, double:count "delete")
    end
  end)

  it("takes an accepted delete for no more than that [H11 M11]", function()
    double:tell { set = { grace = 60 } }
    local rt = open({}, { gone_timeout = 0.3 })
    local box = rt:acquire(ALICE)
    box:release()
    local err = support.caught(rt.destroy, rt, box.id)
    assert.equal("still_present", err.reason)
    assert.equal("terminating", double:pod(box.id).state)
    assert.equal(1, #rt:quarantine())
    double:tell { set = { grace = 0 } }
    assert.is_true(rt:destroy(box.id))
    assert.equal(0, #rt:quarantine())
    assert.equal(1, double:count "delete") -- the second time it was gone before it was asked for again
  end)

  it("waits while a Pod ends gracefully, and no longer than a look fails [M11]", function()
    double:tell { set = { grace = 0.6 } }
    local rt = open()
    local box = rt:acquire(ALICE)
    box:release()
    assert.is_true(rt:destroy(box.id))
    assert.equal(0, #rt:quarantine())
    assert.equal(1, double:count "delete")
    assert.is_true(double:count "presence" <= 6, "it asked " .. double:count "presence" .. " times")
    double:tell { set = { grace = 60 }, faults = { { route = "presence", status = 503, times = 0 } } }
    box = rt:acquire(ALICE)
    box:release()
    local began = provisioner.io.now()
    assert.equal("http_503", support.caught(rt.destroy, rt, box.id).reason)
    assert.is_true(provisioner.io.now() - began < 5)
    double:tell { set = { grace = 0 }, faults = json.decode "[]" }
  end)

  it("deletes the Pod that it means, never the next one of its name [M6 M13]", function()
    for _, preconditions in ipairs { true, false } do
      double:tell { reset = true, set = { preconditions = preconditions } }
      local d = driver()
      local info = d:create(spec())
      assert.is_true(d:destroy(info))
      assert.equal('"' .. info.generation .. '"', double:requests "delete"[1].headers["if-match"])
      local second = d:create(spec())
      info.seen_at = 0                         -- as it is after a while
      assert.is_true(d:destroy(info))
      assert.equal(second.generation, double:pod("abc").uid)
      assert.equal(1, double:count "delete")
      for _, state in ipairs { "serviceless", "terminating" } do -- the ordinary read does not show it then
        double:tell { pods = { abc = { state = state } }, set = { grace = 60 } }
        local there = double:pod("abc").uid
        assert.is_true(d:destroy(info))
        assert.equal(there, double:pod("abc").uid)
        assert.equal(1, double:count "delete", state)
      end
      double:tell { reset = true, set = { preconditions = preconditions, grace = 0 } }
      second = d:create(spec())
      if preconditions then                    -- replaced between the look and the delete
        info.seen_at = second.seen_at + 1e-9
        info.seen_at = math.min(info.seen_at, d:inspect("abc").seen_at)
        assert.is_true(d:destroy(info))
        assert.equal(1, double:count "delete")
        assert.equal(second.generation, double:pod("abc").uid)
      end
      double:tell { faults = { { route = "get", patch = { container_id = "-" } } } } -- which Pod is not said: it may well be that one
      assert.is_true(d:destroy { sandbox_id = "abc", generation = second.generation, seen_at = 0 })
      assert.is_nil(double:pod "abc")
    end
  end)

  -- ---- the key, capabilities ----------------------------------------------------------------------------------

  it("carries the key with every request to the provisioner, and to nobody else [B222 H13]", function()
    double:tell { set = { api_key = "k-1" } }
    local rt = open({}, { api_key = "k-1" })
    local box = rt:acquire(ALICE)
    assert.equal("x\n", box:exec("echo x").stdout)
    box:release()
    rt:reconcile()
    rt:destroy(box.id)
    driver({ api_key = "k-1" }):probe()
    local routes = {}
    for _, one in ipairs(double:requests()) do
      assert.equal("k-1", one.headers["x-api-key"], one.route)
      routes[one.route] = true
    end
    assert.is_true(routes.create and routes.get and routes.presence and routes.delete and routes.list and routes.capabilities)
    for _, key in ipairs { "k-2", "" } do
      local other = open({}, { api_key = key ~= "" and key or nil })
      local err = support.caught(other.acquire, other, ALICE)
      assert.equal("unauthorized", err.reason)
      assert.is_nil(tostring(err):find("k-2", 1, true))
    end
  end)

  it("answers what the deployment can do with two booleans, or raises [H13]", function()
    local d = driver()
    double:tell { set = { capabilities = { lark_cli_init_image = true, lark_cli_broker_image = false } } }
    assert.same({ lark_cli_init_image = true, lark_cli_broker_image = false }, d:probe())
    for _, fault in ipairs { { status = 500 }, { status = 404 }, { patch = { lark_cli_broker_image = "-" } },
      { patch = { lark_cli_init_image = 1 } }, { body = "{}" }, { half = true }, { refuse = true }, { delay = 2 } } do
      fault.route = "capabilities"
      double:tell { faults = { fault } }
      assert.equal("backend_error", support.caught(d.probe, d).kind)
    end
  end)

  it("asks for capabilities once for many, and remembers only answers [I8]", function()
    local rt = open_deerflow { lark_cli = true }
    double:tell { set = { capabilities = { lark_cli_init_image = true, lark_cli_broker_image = false } } }
    for i = 1, 3 do rt:acquire { user = "u" .. i, thread = "t" } end
    assert.equal(1, double:count "capabilities")
    rt:advance(61)
    rt:acquire { user = "u9", thread = "t" }
    assert.equal(2, double:count "capabilities")
    double:tell { faults = { { route = "capabilities", status = 500, times = 0 } } }
    rt:advance(61)
    for _ = 1, 3 do
      assert.equal("unverified", support.caught(rt.acquire, rt, { user = "u10", thread = "t" }).kind)
    end
    assert.equal(3, double:count "capabilities") -- the failure set the time of the next try
    assert.equal(4, double:count "create")
    double:tell { faults = json.decode "[]" }
    rt:advance(31)
    rt:acquire { user = "u10", thread = "t" }
  end)

  it("does not take a path from an address's path: a base with a path is kept before each route", function()
    double:tell { pods = { abc = { state = "running" } } }
    local d = driver { url = double.url .. "/base/" }
    assert.equal("abc", d:inspect("abc").sandbox_id)
    for _, one in ipairs(double:requests()) do assert.equal("/base/api/sandboxes/abc", one.path:sub(1, 23)) end
  end)
end)
