-- The provisioner backend inside a runtime: rejected creations, lost answers, quarantine and fences, over real HTTP. Where a row looks
-- at the fences from inside a driver's call, the driver itself is wrapped and given as a table.
local json = require "cjson"
local provisioner = require "tests.support.provisioner"
local support = require "tests.support"

local driver_module = provisioner.driver()
local ALICE = { user = "alice", thread = "t1" }
local METHODS = { "create", "destroy", "inspect", "discover", "alive", "ready", "list", "finish", "connect", "probe" }

--- The ways to acquire; each blocks, and raises what the operation raises.
local WAYS = {
  { name = "sync", acquire = function(rt, request) return rt:acquire(request) end },
  { name = "async", acquire = function(rt, request) return (select(2, rt:acquire_async(request):wait(30))) end },
}

describe("a runtime with the provisioner backend", function()
  local double, runtimes, world

  setup(function() double = provisioner.start() end)
  teardown(function() double:stop() end)
  before_each(function()
    double:tell { reset = true }
    runtimes, world = {}, support.world() -- its stores only
  end)
  after_each(function()
    double:tell { faults = json.decode "[]", set = { grace = 0 } }
    for _, rt in ipairs(runtimes) do pcall(rt.shutdown, rt) end
    support.cleanup()
  end)

  local function open(opts, own)
    local options = { backend = "provisioner", ready_interval = 0.05, ready_timeout = 5,
      backend_options = { url = double.url, create_timeout = 1, delete_timeout = 2, read_timeout = 2, gone_timeout = 0 } }
    for k, v in pairs(own or {}) do options.backend_options[k] = v end
    for k, v in pairs(opts or {}) do options[k] = v end
    if type(options.backend) == "table" then options.backend_options, options.network = nil, "open" end
    runtimes[#runtimes + 1] = support.open(options)
    return runtimes[#runtimes]
  end

  local function stores(opts)
    local all = { ownership = world.ownership, journal = world.journal }
    for k, v in pairs(opts or {}) do all[k] = v end
    return all
  end

  --- The driver as a table whose functions `on` may replace: on.destroy = function(next, info, opts) ... end.
  local function wrapped(on)
    local driver = driver_module.new({ url = double.url, create_timeout = 1, delete_timeout = 2, read_timeout = 2, gone_timeout = 0 },
      { ready_interval = 0.05, discover_timeout = 0.3, command_timeout = 10 })
    local backend = { name = "provisioner", capabilities = driver.capabilities, calls = {} }
    for _, name in ipairs(METHODS) do
      local function next(...) return driver[name](driver, ...) end
      backend[name] = function(_, ...)
        backend.calls[#backend.calls + 1] = name
        if on[name] then return on[name](next, ...) end
        return next(...)
      end
    end
    return backend
  end

  --- "reserved and del, ours", as seen from inside a driver's call.
  local function fences(rt, id)
    local seen = rt:inspect(id)
    return seen and seen.reserved and seen.lease and seen.lease.ours and seen.lease.state or "none"
  end

  local function free(rt, id)
    local seen = rt:inspect(id)
    return seen == nil or not seen.reserved
  end

  -- ---- a creation that cannot serve -----------------------------------------------------------------------------

  local REJECTIONS = {
    broker_mode = { options = { provision_lark_cli_runtime = true, provision_lark_cli_broker = true },
      patch = { lark_cli_broker = false } },
    version_skew = { options = { max_shell_sessions = 13 }, patch = { max_shell_sessions = "-" } },
    insufficient_capacity = { options = { max_shell_sessions = 13 }, patch = { max_shell_sessions = 10 } },
  }

  for _, way in ipairs(WAYS) do
    for reason, case in pairs(REJECTIONS) do
      it(("rejects what was made, %s, and deletes it once under both fences: %s [H8 H9]"):format(reason, way.name), function()
        local rt, seen
        rt = open(stores { backend = wrapped { destroy = function(next, info, opts)
          seen = fences(rt, info.sandbox_id)
          return next(info, opts)
        end } })
        local other = rt:acquire { user = "other", thread = "t" }
        double:tell { faults = { { route = "create", patch = case.patch } } }
        local err = support.caught(way.acquire, rt, { user = "alice", thread = "t1", requirements = { options = case.options } })
        assert.same({ "backend_error", reason, "create" }, { err.kind, err.reason, err.stage })
        assert.equal("del", seen)
        assert.equal(1, double:count "delete")
        local id = rt:explain(ALICE).id
        assert.is_nil(rt:inspect(id))
        assert.is_nil(double:pod(id))
        assert.equal("x\n", other:exec("echo x").stdout)
      end)

      it(("rejects what was made, %s, and leaves a peer's alone: %s [H8 H9]"):format(reason, way.name), function()
        local rt = open(stores())
        local id = rt:explain(ALICE).id
        world.leases[id] = { owner = "peer", state = "own", token = 7 }
        double:tell { faults = { { route = "create", patch = case.patch } } }
        local err = support.caught(way.acquire, rt, { user = "alice", thread = "t1", requirements = { options = case.options } })
        assert.same({ "backend_error", reason }, { err.kind, err.reason })
        assert.equal(0, double:count "delete")
        assert.is_not_nil(double:pod(id))
        assert.is_nil(rt:inspect(id))
        assert.equal("peer", world.leases[id].owner)
      end)
    end
  end

  for reason, case in pairs { insufficient_capacity = { max_shell_sessions = 4 }, version_skew = { max_shell_sessions = "-" },
    broker_mode = { lark_cli_broker = false } } do
    for _, way in ipairs(WAYS) do
      it(("rejects what was made, %s, and sends no delete beside another teardown's: %s [H9]"):format(reason, way.name), function()
        -- An orphan to the reconciliation in the background, which judges that it has to go and has it reserved meanwhile.
        local rt = open({ threads = true, clock = "monotonic", reap_interval = 0.05,
          policies = { reuse = { name = "reuse.lua", source = 'return { decide = function() return "replace", "old", "old" end }' } } },
          { create_timeout = 5, delete_timeout = 5 })
        local options = reason == "broker_mode" and REJECTIONS.broker_mode.options or { max_shell_sessions = 13 }
        double:tell { faults = { { route = "create", patch = case, late = 0.7 }, { route = "delete", delay = 1.5 } } }
        local err = support.caught(way.acquire, rt, { user = "alice", thread = "t1", requirements = { options = options } })
        assert.same({ "backend_error", reason }, { err.kind, err.reason })
        assert.equal(1, double:count "delete")
        local id = err.sandbox_id
        assert.is_true(support.eventually(function() return double:pod(id) == nil and free(rt, id) end))
      end)
    end
  end

  for reason, case in pairs(REJECTIONS) do
    it("rejects what was made, " .. reason .. ", and tells a caller who has left only when the clean-up is over [F12 H9]", function()
      local rt = open({ threads = true, clock = "monotonic" }, { create_timeout = 5, delete_timeout = 5 })
      double:tell { faults = { { route = "create", patch = case.patch, late = 0.5 }, { route = "delete", delay = 0.5 } } }
      local op = rt:acquire_async { user = "alice", thread = "t1", requirements = { options = case.options } }
      assert.is_true(support.eventually(function() return double:count "create" == 1 end))
      op:cancel()
      op:cancel()
      assert.is_nil((op:poll()))
      local err = support.caught(op.wait, op, 20)
      assert.equal("cancelled", err.kind)
      local id = rt:explain(ALICE).id
      assert.is_nil(double:pod(id))
      assert.equal(1, double:count "delete")
      assert.is_true(free(rt, id))
      assert.same({}, rt:list())
    end)
  end

  it("takes back what it cannot understand, or what never gets an address [H8]", function()
    for i, case in ipairs {
      { faults = { { route = "create", patch = { max_shell_sessions = "many" } } } }, { set = { endpoint = false } },
      { faults = { { route = "create", drop = true }, { route = "get", status = 404, times = 0 } } }, -- its answer was lost as well
    } do
      local reason = i == 1 and "protocol" or "no_endpoint"
      double:tell { reset = true }
      double:tell(case)
      local rt = open({}, { create_timeout = 0.3, read_timeout = 0.3 })
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.same({ "backend_error", reason }, { err.kind, err.reason })
      assert.is_nil(double:pod(rt:explain(ALICE).id))
      assert.equal(1, double:count "create")
    end
  end)

  for _, way in ipairs(WAYS) do
    it("takes back what has no address yet when its caller's time runs out: " .. way.name .. " [H8 H9]", function()
      double:tell { set = { endpoint = false } }
      -- An asynchronous one without threads runs inside tick, whatever time its caller has: it ends by the driver's own limit.
      local rt = open({}, { create_timeout = way.name == "sync" and 20 or 0.5, read_timeout = 0.5 })
      local ok = pcall(way.acquire, rt, { user = "alice", thread = "t1", timeout = 0.3 })
      assert.is_false(ok)
      local id = rt:explain(ALICE).id
      assert.is_true(support.eventually(function() return double:pod(id) == nil end, 20))
      assert.equal(1, double:count "create")
      assert.equal(1, double:count "delete")
    end)
  end

  it("hands out nothing when the answer is about another sandbox", function()
    for _, route in ipairs { "create", "get" } do
      double:tell { reset = true }
      local rt = open()
      double:tell { faults = { { route = route, patch = { sandbox_id = "other" }, status = route == "get" and 200 or nil, acted = true,
        body = route == "get" and '{"sandbox_id":"other","sandbox_url":"http://h","status":"Running"}' or nil } } }
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal("backend_error", err.kind)
      assert.matches("other", err.message, 1, true)
      assert.is_nil(rt:inspect(rt:explain(ALICE).id))
      assert.equal(0, double:count "delete")                     -- and stops nothing by it
      assert.equal(route == "create" and "discovered" or "created", rt:acquire(ALICE).source)
      assert.equal(1, double:count "create")
    end
  end)

  -- ---- answers that are lost ------------------------------------------------------------------------------------

  it("finds by its id what a lost answer made, and never asks for it twice [B131 H1]", function()
    for _, fault in ipairs { { drop = true }, { cut = 20 }, { cut = 0 }, { half = true }, { body = "<html>gateway</html>" },
      { status = 502, acted = true }, { status = 504, acted = true }, { status = 500, acted = true }, { status = 408, acted = true },
      { late = 3 }, { delay = 1.3 },
      { huge = 2 << 20 }, { twice = "status" } } do
      double:tell { reset = true }
      fault.route = "create"
      double:tell { faults = { fault } }
      local rt = open()
      local box = rt:acquire(ALICE)
      assert.equal("created", box.source, json.encode(fault))
      assert.equal(1, double:count "create", json.encode(fault))
      assert.equal(double:pod(box.id).uid, box.generation)
      assert.equal("x\n", box:exec("echo x").stdout)
      box:release()
      rt:shutdown()
      assert.same({}, double:seen().pods)
    end
  end)

  it("finds it also when the looks themselves fail for a while, and weighs what it finds [H8]", function()
    double:tell { faults = { { route = "create", drop = true }, { route = "get", after = 1, status = 503 },
      { route = "get", after = 1, refuse = true } } }
    local rt = open()
    assert.equal("created", rt:acquire(ALICE).source)
    assert.equal(1, double:count "create")
    double:tell { set = { attest = { lark_cli_broker = false } }, faults = { { route = "create", drop = true } } }
    local err = support.caught(rt.acquire, rt, { user = "bob", thread = "t", requirements = { options = { max_shell_sessions = 13 } } })
    assert.equal("version_skew", err.reason)
    assert.equal(1, double:count "delete")
  end)

  it("does not take what a gateway says for the provisioner's own word: what it has passed on may still come", function()
    local rt = open({ threads = true, clock = "monotonic" })
    for i, status in ipairs { 502, 504, 408 } do
      local who = { user = "u" .. i, thread = "t" }
      local id = rt:explain(who).id
      double:tell { faults = { { route = "create", status = status } } }
      local op = rt:acquire_async(who)
      assert.is_true(support.eventually(function() return double:count "presence" == i end)) -- it was not there
      double:tell { pods = { [id] = { state = "running" } } }
      assert.equal("created", select(2, op:wait(20)).source)
      assert.equal(i, double:count "create")
    end
  end)

  it("says that the outcome is unknown when nothing shows up, and finds later what comes late", function()
    double:tell { faults = { { route = "create", refuse = true } } }
    local rt = open({}, { create_timeout = 0.5 })
    local err = support.caught(rt.acquire, rt, ALICE)
    assert.same({ "outcome_unknown", "create", "create" }, { err.kind, err.reason, err.stage })
    assert.equal(1, double:count "create")
    local id = rt:explain(ALICE).id
    assert.is_nil(rt:inspect(id))
    double:tell { pods = { [id] = { state = "running" } } } -- it came after all
    assert.equal("discovered", rt:acquire(ALICE).source)
    assert.equal(1, double:count "create")
  end)

  it("says that a refused or failed create has made nothing, without a search where that is certain", function()
    local rt = open()
    for _, case in ipairs { { { status = 500 }, "backend_error", "http_500" }, { { status = 503 }, "backend_error", "http_503" },
      { { status = 401 }, "backend_error", "unauthorized" }, { { status = 422, body = '{"detail":[{"msg":"no such user"}]}' },
        "backend_error", "http_422" }, { { status = 429 }, "capacity_exhausted", "http_429" }, { { status = 409 }, "being_destroyed" },
      { { patch = { status = "Terminating" } }, "being_destroyed" },
      { { location = "/api/sandboxes/" }, "backend_error", "redirect" } } do
      double:tell { reset = true }
      case[1].route = "create"
      double:tell { faults = { case[1] } }
      local err = support.caught(rt.acquire, rt, ALICE)
      assert.equal(case[2], err.kind, err.message)
      if case[3] then assert.equal(case[3], err.reason) end
      assert.equal(1, double:count "create")
      assert.equal(0, double:count "delete")
    end
    local nobody = open({}, { url = "http://127.0.0.1:1" })
    local err = support.caught(nobody.acquire, nobody, ALICE)
    assert.equal("backend_error", err.kind)
  end)

  it("has as many Pods as it reports successes, whatever a third of the creates meet [B126]", function()
    local rt = open({ replicas = 100 }, { create_timeout = 0.5, read_timeout = 0.5 })
    local kinds = { { drop = true }, { status = 500 }, { status = 502, acted = true }, { patch = { max_shell_sessions = "x" } },
      { half = true } }
    local faults, succeeded = {}, 0
    for i, fault in ipairs(kinds) do
      for n = 1, 2 do
        local one = { route = "create", id = rt:explain { user = ("u%d"):format(i * 6 + n), thread = "t" }.id }
        for k, v in pairs(fault) do one[k] = v end
        faults[#faults + 1] = one
      end
    end
    double:tell { faults = faults }
    for i = 1, 40 do
      if pcall(rt.acquire, rt, { user = "u" .. i, thread = "t" }) then succeeded = succeeded + 1 end
    end
    local pods = 0
    for _ in pairs(double:seen().pods) do pods = pods + 1 end
    assert.equal(36, succeeded)
    assert.equal(succeeded, pods)
    assert.equal(succeeded, #rt:list())
  end)

  it("has as many Pods as it reports successes, also when they all come at once [B126]", function()
    local rt = open({ replicas = 200, threads = true, clock = "monotonic" }, { create_timeout = 1, read_timeout = 2 })
    local kinds = { { drop = true }, { status = 500 }, { status = 502, acted = true }, { patch = { max_shell_sessions = "x" } } }
    local faults, ops, succeeded = {}, {}, 0
    for i = 1, 100 do
      local kind = i % 3 == 0 and kinds[i % 4 + 1]
      if kind then
        local one = { route = "create", id = rt:explain { user = "u" .. i, thread = "t" }.id }
        for k, v in pairs(kind) do one[k] = v end
        faults[#faults + 1] = one
      end
    end
    double:tell { faults = faults, set = { latency = 0.05 } }
    for i = 1, 100 do ops[i] = rt:acquire_async { user = "u" .. i, thread = "t" } end
    for i = 1, 100 do
      if pcall(ops[i].wait, ops[i], 60) then succeeded = succeeded + 1 end
    end
    local pods = 0
    for _ in pairs(double:seen().pods) do pods = pods + 1 end
    assert.is_true(succeeded >= 67 and succeeded < 100, succeeded)
    assert.equal(succeeded, pods)
    double:tell { set = { latency = 0 } }
  end)

  it("hands out only what it understands, whatever one field of an answer is", function()
    local values = { missing = "-", null = json.null, text = "x y", empty = "", number = 5, negative = -1, fraction = 1.5, huge = 2 ^ 53,
      yes = true, list = { 1 }, object = { a = 1 }, long = ("x"):rep(5000) }
    local fields = { "sandbox_id", "sandbox_url", "container_id", "lark_cli_broker", "max_shell_sessions", "status" }
    local rt = open({ replicas = 1000 }, { create_timeout = 0.3, read_timeout = 0.3 })
    local users, served = 0, {}
    for _, route in ipairs { "create", "get", "presence" } do
      for _, field in ipairs(route == "presence" and { "present", "sandbox_id", "container_id" } or fields) do
        for name, value in pairs(values) do
          users = users + 1
          local who = { user = "u" .. users, thread = "t" }
          local id = rt:explain(who).id
          if route == "get" then double:tell { pods = { [id] = { state = "running" } } } end
          double:tell { faults = { { route = route, id = id, patch = { [field] = value } } } }
          local fine, box = pcall(rt.acquire, rt, who)
          if fine and route == "presence" then -- it is not asked before the end
            box:release()
          elseif fine then
            served[field] = (served[field] or "") .. name .. " "
            assert.equal(double:pod(id).uid, box.generation or double:pod(id).uid)
            box:release()
          else
            assert.is_true(box.kind == "backend_error" or box.kind == "being_destroyed", tostring(box))
          end
          pcall(rt.destroy, rt, id)
        end
      end
    end
    double:tell { faults = { { route = "create", twice = "container_id" }, { route = "presence", twice = "present" } } }
    assert.equal("created", rt:acquire(ALICE).source) -- by the next look, which has each field once
    for _, field in ipairs { "sandbox_id", "sandbox_url", "lark_cli_broker", "max_shell_sessions" } do
      for word in (served[field] or ""):gmatch("%S+") do
        local good = { missing = true, null = true, yes = field == "lark_cli_broker", number = field == "max_shell_sessions",
          empty = field == "sandbox_url" } -- without an address it waits for one
        assert.is_true(good[word] == true, field .. " " .. word)
      end
    end
  end)

  -- ---- what is recorded -----------------------------------------------------------------------------------------

  local function recorded(generation, state, opts)
    local rt = open(stores(opts))
    local id = rt:explain(ALICE).id
    double:tell { pods = { [id] = { state = state, uid = "uid-1" } } }
    world.records[id] = { [generation] = "test" }
    return rt, id
  end

  for _, way in ipairs(WAYS) do
    for _, generation in ipairs { "uid-1", "?" } do
      it(("stops a recorded one without an endpoint before it makes another, generation %s: %s [K5 K10]"):format(generation,
        way.name), function()
        local seen, rt, id = {}, nil, nil
        local on = { inspect = function(next, ...) seen[#seen + 1] = "inspect:" .. fences(rt, id) return next(...) end,
          destroy = function(next, info, opts)
            seen[#seen + 1] = "destroy:" .. fences(rt, id) .. ":" .. info.generation .. ":" .. tostring(opts.full)
            return next(info, opts)
          end,
          finish = function(next, ...) seen[#seen + 1] = "finish:" .. tostring(world.records[id] ~= nil) return next(...) end }
        rt, id = recorded(generation, "serviceless", { backend = wrapped(on) })
        local box = way.acquire(rt, ALICE)
        assert.same({ "inspect:del", "destroy:del:uid-1:true", "inspect:del", "finish:true" }, seen)
        assert.equal("get presence get delete presence create", double:trace())
        assert.is_nil(world.records[id])
        assert.not_equal("uid-1", box.generation)
        assert.equal(box.generation, double:pod(id).uid)
      end)
    end

    it("leaves alone a generation that is not recorded, and goes on with it: " .. way.name .. " [K11]", function()
      local rt, id = recorded("uid-of-before", "serviceless")
      local box = way.acquire(rt, ALICE)
      assert.equal("uid-1", box.generation)
      assert.equal(0, double:count "delete")
      assert.is_nil(world.records[id])
      assert.equal("created", box.source)
    end)

    it("keeps the record when an accepted stop leaves the Pod, until it is gone: " .. way.name .. " [K12]", function()
      local rt, id = recorded("uid-1", "serviceless")
      double:tell { set = { grace = 60 } }
      local err = support.caught(way.acquire, rt, ALICE)
      assert.same({ "replacement_deferred", "still_present" }, { err.kind, err.reason })
      assert.equal(1, double:count "delete")
      assert.equal(0, double:count "create")
      assert.is_truthy(world.records[id])
      assert.is_true(free(rt, id))
      double:tell { set = { grace = 0 } }
      assert.equal("created", way.acquire(rt, ALICE).source)
      assert.is_nil(world.records[id])
    end)

    it("keeps the record when nobody can say whether the Pod is gone: " .. way.name .. " [K12]", function()
      local rt, id = recorded("uid-1", "serviceless")
      double:tell { faults = { { route = "presence", after = 1, status = 503 } } }
      local err = support.caught(way.acquire, rt, ALICE)
      assert.equal("backend_error", err.kind)
      assert.equal(1, double:count "delete")
      assert.equal(0, double:count "create")
      assert.is_truthy(world.records[id])
      assert.is_true(free(rt, id))
      assert.equal("created", way.acquire(rt, ALICE).source)
      assert.is_nil(world.records[id])
    end)

    for name, case in pairs {
      ["the presence probe fails"] = { kind = "backend_error", faults = { { route = "presence", status = 503 } } },
      ["the metadata probe fails"] = { kind = "backend_error", faults = { { route = "get", after = 1, status = 503 } } },
      ["the metadata is another sandbox's"] = { kind = "backend_error", faults = { { route = "get", after = 1,
        body = '{"sandbox_id":"other"}', status = 200 } } },
      ["a peer owns it"] = { kind = "replacement_deferred", reason = "teardown_refused", probes = 0, arrange = function(id)
        world.leases[id] = { owner = "peer", state = "own", token = 7 } end },
      ["the journal cannot be read"] = { kind = "io_error", probes = 0, arrange = function()
        world:fail("journal.has", 1, "disk error") end },
    } do
      it(("stops nothing when %s: %s [K13]"):format(name, way.name), function()
        local rt, id = recorded("uid-1", "serviceless")
        if case.arrange then case.arrange(id) end
        double:tell { faults = case.faults or json.decode "[]" }
        local err = support.caught(way.acquire, rt, ALICE)
        assert.equal(case.kind, err.kind)
        if case.reason then assert.equal(case.reason, err.reason) end
        assert.same({ 0, 0, 1 }, { double:count "delete", double:count "create", double:count "get" - (case.probes and 0 or
          (name:find "metadata" and 1 or 0)) })
        assert.equal(case.probes or 1, double:count "presence")
        assert.is_truthy(world.records[id])
        assert.is_true(free(rt, id))
      end)
    end
  end

  -- ---- the order of an acquire ----------------------------------------------------------------------------------

  describe("whose identity has another id by now", function()
    local set = {
      identity = { name = "identity.lua", source = [[return { derive = function(ctx) return "box-" .. ctx.requirements.labels.v end }]] },
      requirements = { name = "requirements.lua",
        source = [[return { resolve = function(ctx) return { labels = { v = ctx.request and ctx.request.v or "1" } } end }]] },
    }
    local second = { user = "alice", thread = "t1", requirements = { v = "2" } }

    for _, way in ipairs(WAYS) do
      it("destroys the unheld predecessor and goes on: " .. way.name .. " [E7]", function()
        local rt = open { policies = set }
        rt:acquire { user = "alice", thread = "t1", holder = false }
        assert.equal("box-2", way.acquire(rt, second).id)
        assert.equal("box-1", double:requests "delete"[1].id)
        assert.is_nil(double:pod "box-1")
        assert.is_nil(rt:inspect "box-1")
      end)

      it("is deferred while the predecessor is held: " .. way.name .. " [E8]", function()
        local rt = open { policies = set }
        local box = rt:acquire(ALICE)
        local err = support.caught(way.acquire, rt, second)
        assert.same({ "replacement_deferred", "identity_outdated" }, { err.kind, err.reason })
        assert.equal(0, double:count "delete")
        assert.equal("x\n", box:exec("echo x").stdout)
      end)
    end
  end)

  for _, way in ipairs(WAYS) do
    for kind, arrange in pairs {
      io_error = function()
        world.on["lease.take"] = function(next, ...) world:fail("journal.has", 1, "disk error") return next(...) end
      end,
      policy_error = false,
    } do
      it(("hands out nothing when the last check of a discovered one fails, %s: %s [E12 I12]"):format(kind, way.name), function()
        local folder = support.tmpdir()
        if not arrange then
          support.write_file(folder .. "/reuse.lua", [[local n = 0
            return { decide = function(ctx)
              if ctx.source == "discovered" then n = n + 1 if n == 2 then error("broken") end end
              return "reuse" end }]])
        end
        local rt = open(stores { policies = not arrange and folder or nil })
        local other = rt:acquire { user = "other", thread = "t" }
        local id = rt:explain(ALICE).id
        double:tell { pods = { [id] = { state = "running" } } }
        if arrange then arrange() end
        local err = support.caught(way.acquire, rt, ALICE)
        assert.equal(kind, err.kind)
        assert.same({ 0, 1 }, { double:count "delete", double:count "create" })
        assert.is_nil(rt:inspect(id))
        assert.equal("x\n", other:exec("echo x").stdout)
      end)
    end

    for name, case in pairs {
      ["the probe is unknown"] = { kind = "unverified", reason = "capability",
        source = [[return { decide = function(ctx) if not ctx.capability then return "probe" end
          if ctx.capability.unknown then return "refuse", "capability", "cannot tell" end return "reuse" end }]],
        faults = { { route = "capabilities", status = 503, times = 0 } } },
      ["the journal fails"] = { kind = "io_error", journal = true },
      ["the decision is replace"] = { kind = "replacement_deferred", reason = "incompatible",
        source = [[return { decide = function() return "replace" end }]] },
    } do
      for _, peer in ipairs { false, true } do
        it(("takes back a created one when %s, %s: %s [E15 I12]"):format(name, peer and "unless a peer owns it" or "unowned",
          way.name), function()
          local rt
          rt = open(stores { backend = wrapped { ready = function(next, info, seconds)
            if case.journal then world:fail("journal.has", 1, "disk error") end
            if peer then world.leases[info.sandbox_id] = { owner = "peer", state = "own", token = 9 } end
            return next(info, seconds)
          end }, policies = case.source and { reuse = { name = "reuse.lua", source = case.source } } or nil })
          double:tell { faults = case.faults or json.decode "[]" }
          local id = rt:explain(ALICE).id
          local err = support.caught(way.acquire, rt, ALICE)
          assert.same({ case.kind, case.reason or "" }, { err.kind, err.reason or "" })
          assert.equal(peer and 0 or 1, double:count "delete")
          assert.equal(not peer, double:pod(id) == nil)
          assert.is_nil(rt:inspect(id))
        end)
      end
    end
  end

  -- ---- others' sandboxes ----------------------------------------------------------------------------------------

  it("goes on with a create whose caller has no time left, and keeps what it made for the next one [B201]", function()
    local rt = open({ threads = true, clock = "monotonic" }, { create_timeout = 5 })
    double:tell { faults = { { route = "create", late = 1 } } }
    local err = support.caught(rt.acquire, rt, { user = "alice", thread = "t1", timeout = 0.3 })
    assert.equal("timeout", err.kind)
    local id = rt:explain(ALICE).id
    assert.is_true(support.eventually(function() return (rt:inspect(id) or {}).state == "warm" end, 10))
    assert.equal("warm", rt:acquire(ALICE).source)
    assert.equal(1, double:count "create")
  end)

  it("adopts what a crashed runtime left, and lets it idle out; a peer's stays [B129]", function()
    local rt = open(stores { idle_timeout = 50 })
    local pods = { peers = { state = "running" } }
    for i = 1, 5 do pods["left-" .. i] = { state = "running" } end
    double:tell { pods = pods }
    world.leases.peers = { owner = "peer", state = "own", token = 3 }
    rt:reconcile()
    rt:advance(181) -- one time to live of nobody's
    rt:reconcile()
    for i = 1, 5 do assert.equal("warm", (rt:inspect("left-" .. i) or {}).state) end
    assert.is_nil(rt:inspect "peers")
    rt:advance(60)
    rt:tick()
    local left = {}
    for id in pairs(double:seen().pods) do left[#left + 1] = id end
    assert.same({ "peers" }, left)
  end)

  it("ends many at once: a shutdown does not wait for one Pod after the other [P2]", function()
    local rt = open({ threads = true, clock = "monotonic", replicas = 50 }, { gone_timeout = 30 })
    for i = 1, 12 do rt:acquire { user = "u" .. i, thread = "t" } end
    double:tell { set = { grace = 3 } }
    rt:shutdown()
    local deletes = double:requests "delete"
    assert.equal(12, #deletes)
    assert.is_true(deletes[12].at - deletes[1].at < 3, "the last delete came when the first Pod was gone already")
    assert.same({}, double:seen().pods)
  end)

  it("replaces one whose Pod has died, and counts no record without a Pod as running [B127 E3 E5]", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    box:release()
    double:tell { pods = { [box.id] = { state = "failed" } } }
    local second = rt:acquire(ALICE)
    assert.equal("created", second.source)
    assert.not_equal(box.generation, second.generation)
    assert.equal(1, double:count "delete")
  end)
end)

describe("commands in a provisioned sandbox", function()
  local double
  setup(function() double = provisioner.start { guest = "build/bin/paddock-guest" } end)
  teardown(function() double:stop() end)

  it("really run, in a server behind the AIO interface [B7 J10]", function()
    local rt = support.open { backend = "provisioner", backend_options = { url = double.url }, ready_interval = 0.05 }
    local box = rt:acquire(ALICE)
    local result = box:exec "echo $((6*7)); echo err >&2; exit 3"
    assert.same({ "completed", 3 }, { result.outcome, result.exit_code })
    assert.matches("42", result.stdout, 1, true)
    assert.equal("v\n", box:exec("echo $K", { env = { K = "v" } }).stdout)
    local folder = box:exec("pwd", { env = { K = "v" } }).stdout:gsub("%s", "")
    box:write(folder .. "/a.bin", "x\0y")
    assert.equal("x\0y", box:read(folder .. "/a.bin"))
    assert.equal("a.bin", box:list(folder)[1].name)
    assert.equal("hard_timeout", box:exec("sleep 30", { timeout = 0.3 }).outcome)
    box:exec("cd / && X=5", { scope = "s" })
    assert.matches("/ 5", box:exec("echo $PWD $X", { scope = "s" }).stdout, 1, true)
    box:release()
    assert.is_true(rt:destroy(box.id))
    assert.same({}, double:seen().pods)
    rt:shutdown()
    support.cleanup()
  end)
end)
