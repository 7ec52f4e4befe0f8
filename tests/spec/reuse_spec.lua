--- Attestation against requirements: capacity, broker mode, and what an operator adds. Rows I, with the set policies/deerflow over
--- a scripted provisioner, and the general tables with the built-in policies.
local support = require "tests.support"

local SOURCES = { "active", "warm", "discovered" }
local BOTH = { true, false }

describe("reuse", function()
  local world, root, can
  before_each(function()
    can = { lark_cli_broker_image = false, lark_cli_init_image = true }   -- nil = the probe fails
    world = support.world { methods = { probe = function()
      if can == nil then support.raise("timeout", "the provisioner does not answer") end
      return { lark_cli_broker_image = can.lark_cli_broker_image, lark_cli_init_image = can.lark_cli_init_image }
    end } }
    root = support.tmpdir()
    -- What is made attests what was asked for, but for what world.attested says.
    world.on.create = function(next, this, spec)
      next(this, spec)
      local c, options = world:container(spec.sandbox_id), spec.requirements.options or {}
      c.attestation = { capacity = options.max_shell_sessions }
      if options.provision_lark_cli_runtime then c.attestation.broker = options.provision_lark_cli_broker end
      for key, value in pairs(world.attested or {}) do c.attestation[key] = value end
      return world:info(c)
    end
  end)
  after_each(function() world:assert_quiet() end)

  local function open(opts)
    local all = { policies = "policies/deerflow", policy_options = { remote = true, base_dir = root }, mount_roots = { root },
      ownership = world.ownership, journal = world.journal }
    for key, value in pairs(opts or {}) do all[key] = value end
    return world:open(all)
  end
  local function alice(requirements)
    return { user = "alice", thread = "t1", requirements = requirements }
  end
  local function lark() return alice { lark_cli = true } end

  --- A sandbox of alice's that attests this, where `source` finds it. Nobody holds it.
  local function prepare(rt, source, attestation)
    local id = rt:explain(alice()).id
    if source == "discovered" then
      world:add(id, { attestation = attestation, identity = { user = "alice", thread = "t1" } })
      return id
    end
    world.attested = attestation
    local request = alice()
    if source == "active" then request.holder = false end
    local box = rt:acquire(request)
    if source == "warm" then box:release() end
    world.attested = nil
    assert.equal(source, world:state_of(id, rt))
    return id
  end

  --- Somebody else's turn, so that the deployment's answer is in memory.
  local function remember(rt, broker)
    can.lark_cli_broker_image = broker
    rt:acquire { user = "bob", thread = "t1", requirements = { lark_cli = true } }
  end

  local function counts() return world:count "destroy", world:count "create", world:count "probe" end

  --- One test for each source.
  local function each(title, fn)
    for _, source in ipairs(SOURCES) do
      it(("%s (%s)"):format(title, source), function() fn(source) end)
    end
  end
  local function each_mode(title, fn)
    for _, mode in ipairs(BOTH) do
      each(("%s, %s"):format(title, mode), function(source) fn(source, mode) end)
    end
  end

  --- Watches the teardown of `id` from inside the engine: both fences must be held.
  local function watch_fences(rt, id)
    local seen = {}
    world.on.destroy = function(next, this, info, opts)
      if info.sandbox_id == id then
        seen.lease, seen.reserved = world.leases[id] and world.leases[id].state, rt:inspect(id).reserved
      end
      return next(this, info, opts)
    end
    return seen
  end

  -- ---- capacity ------------------------------------------------------------------------------------------

  for capacity, replaced in pairs { [4] = true, [8] = true, [9] = false, [13] = false, [100] = false } do
    each(("room for %d sessions where 9 are needed is %s [I2]"):format(capacity, replaced and "replaced" or "taken"), function(source)
      local rt = open()
      local id = prepare(rt, source, { capacity = capacity })
      world.attested = { capacity = 9 }
      local destroys, creates = counts()
      local box = rt:acquire(alice { require = { capacity = { at_least = 9 } } })
      assert.equal(replaced and "created" or source, box.source)
      assert.equal(destroys + (replaced and 1 or 0), world:count "destroy")
      assert.equal(creates + (replaced and 1 or 0), world:count "create")
      assert.equal(replaced and 9 or capacity, rt:inspect(id).info.attestation.capacity)
    end)
  end

  it("the needed room is max_running + 1 of the configuration in force, also when none is requested [I2, B10]", function()
    local first = open { policy_options = { remote = true, base_dir = root, max_running = 3 } }
    world.attested = { capacity = 6 }
    local box = first:acquire(alice())
    local id = box.id
    assert.is_nil(world:container(id).spec.requirements.options.max_shell_sessions)
    assert.equal("active", first:acquire(alice()).source)
    first:shutdown()
    world.leases = {}
    world:add(id, { attestation = { capacity = 6 } })
    world.attested = { capacity = 9 }
    local second = open { policy_options = { remote = true, base_dir = root, max_running = 8 } }
    assert.equal("created", second:acquire(alice()).source)
    assert.equal(9, second:inspect(id).info.attestation.capacity)
  end)

  it("where nothing is attested, the image's own room of 10 counts [I2]", function()
    local rt = open()
    prepare(rt, "warm", {})
    assert.equal("warm", rt:acquire(alice { require = { capacity = { at_least = 10 } } }).source)
    local err = support.caught(rt.acquire, rt, alice({ require = { capacity = { at_least = 11 } } }))
    assert.same({ "replacement_deferred", "incompatible" }, { err.kind, err.reason })   -- it is held
  end)

  it("orphans with too little room are taken down, the others are adopted [I2]", function()
    local rt = open { policy_options = { remote = true, base_dir = root, max_running = 8 }, replicas = 10 }
    for capacity = 4, 13, 3 do
      world:add("orphan-" .. capacity, { attestation = { capacity = capacity }, identity = { user = "u", thread = "t" .. capacity } })
    end
    rt:reconcile()
    rt:advance(400)
    rt:reconcile()
    for capacity = 4, 13, 3 do
      local id = "orphan-" .. capacity
      assert.equal(capacity >= 9, world:container(id).running, id)
      assert.equal(capacity >= 9 and "warm" or nil, world:state_of(id, rt), id)
    end
    for _, c in ipairs(world.order) do c.running = false end
  end)

  it("an exact number is compared as any other name, and other names too [I2]", function()
    local rt = open()
    prepare(rt, "warm", { capacity = 12, gpu = "a100" })
    local function turn(require) return rt:acquire(alice { require = require }) end
    turn({ capacity = 12, gpu = "a100" }):release()
    assert.equal(0, world:count "destroy")
    assert.equal("unverified", support.caught(turn, { tpu = "v5" }).kind)      -- nobody says anything about it
    assert.equal(0, world:count "destroy")
    world.attested = { capacity = 13 }
    assert.equal("created", turn({ capacity = 13 }).source)
  end)

  -- ---- broker mode ---------------------------------------------------------------------------------------

  each_mode("attested while the deployment cannot be asked: its own attestation decides [I3]", function(source, mode)
    local rt = open()
    local id = prepare(rt, source, { broker = mode })
    can = nil
    local destroys, creates = counts()
    assert.equal(source, rt:acquire(lark()).source)
    assert.same({ destroys, creates, 1 }, { counts() })
    assert.is_false(rt:inspect(id).retry)
  end)

  each_mode("unattested is refused, whatever the deployment wants, and nobody is asked [I4]", function(source, mode)
    for i, down in ipairs { true, false, true, false } do
      local way = support.WAYS[i > 2 and 1 or 2]
      local rt = open()
      can = { lark_cli_broker_image = mode }
      local id = prepare(rt, source, {})
      if down then can = nil end
      local destroys, creates = counts()
      local err = support.caught(way.acquire, rt, lark())
      assert.same({ "unverified", "broker_mode" }, { err.kind, err.reason })
      assert.same({ destroys, creates, 0 }, { counts() })
      local known = rt:inspect(id)
      if source ~= "discovered" then assert.same({ source, false, false }, { known.state, known.retry, known.reserved }) end
      -- It lives on until it is attested.
      local c = world:container(id)
      assert.is_true(c.running)
      rt:shutdown()
      c.running = false
      world.leases = {}
    end
  end)

  it("unattested is taken as soon as it is attested [I4]", function()
    local rt = open()
    local id = prepare(rt, "discovered", {})
    assert.equal("unverified", support.caught(rt.acquire, rt, lark()).kind)
    world:container(id).attestation.broker = false
    assert.equal("discovered", rt:acquire(lark()).source)
  end)

  each_mode("against what is remembered: asked afresh once, and taken when the answer agrees [I5]", function(source, mode)
    local rt = open()
    local id = prepare(rt, source, { broker = mode })
    local client = #world.clients
    remember(rt, not mode)
    can.lark_cli_broker_image = mode
    local destroys, creates = counts()
    local box = rt:acquire(lark())
    assert.same({ id, source }, { box.id, box.source })
    assert.same({ destroys, creates, 2 }, { counts() })
    assert.equal(mode, rt:inspect(id).info.attestation.broker)
    assert.is_false(rt:inspect(id).retry)
    if source == "active" then return end
    local connected
    for _, call in ipairs(world.calls) do
      if call.name == "connect" and call.sandbox_id == id then connected = call[1][1] end
    end
    assert.equal(mode, connected.attestation.broker)     -- the client carries it
    assert.is_true(#world.clients > client)
  end)

  each_mode("against a fresh answer too: replaced under both fences [I6]", function(source, mode)
    local rt = open()
    local id = prepare(rt, source, { broker = mode })
    remember(rt, not mode)
    local destroys, creates = counts()
    local seen = watch_fences(rt, id)
    local box = rt:acquire(lark())
    assert.equal("created", box.source)
    assert.same({ lease = "del", reserved = true }, seen)
    assert.same({ destroys + 1, creates + 1, 2 }, { counts() })
    assert.equal(not mode, rt:inspect(id).info.attestation.broker)
  end)

  it("confirmed, while it is held: deferred, and it lives on [I6]", function()
    local rt = open()
    world.attested = { broker = true }
    local held = rt:acquire(alice())
    world.attested = nil
    remember(rt, false)
    local err = support.caught(rt.acquire, rt, lark())
    assert.same({ "replacement_deferred", "incompatible" }, { err.kind, err.reason })
    assert.equal("ok\n", held:exec("echo ok").stdout)
    assert.equal(0, world:count "destroy")
  end)

  each("confirmed, with a fence refused: deferred, and it lives on [I6]", function(source)
    local rt = open()
    local id = prepare(rt, source, { broker = true })
    remember(rt, false)
    world.leases[id] = { owner = "a peer", state = "own", token = 99 }
    local err = support.caught(rt.acquire, rt, lark())
    assert.same({ "replacement_deferred", "teardown_refused" }, { err.kind, err.reason })
    assert.equal(0, world:count "destroy")
    assert.is_true(world:container(id).running)
    rt:shutdown()
    for _, c in ipairs(world.order) do c.running = false end
    world:assert_quiet { id }
    world = support.world()
  end)

  each("an outage, and what the deployment wants after it [I7]", function(source)
    local rt = open()
    local id = prepare(rt, source, { broker = false })
    can = nil
    local first = rt:acquire(lark())
    assert.equal(source, first.source)
    local before = rt:inspect(id).generation
    first:release()
    can = { lark_cli_broker_image = true, lark_cli_init_image = true }
    rt:advance(29)                                         -- the time of the next try has not come
    local second = rt:acquire(lark())
    assert.equal("warm", second.source)
    second:release()
    assert.equal(1, world:count "probe")
    rt:advance(2)
    local seen = watch_fences(rt, id)
    local box = rt:acquire(lark())
    assert.same({ id, "created" }, { box.id, box.source })
    assert.same({ lease = "del", reserved = true }, seen)
    assert.is_true(world:container(id).spec.requirements.options.provision_lark_cli_broker)
    assert.is_true(rt:inspect(id).info.attestation.broker)
    assert.not_equal(before, rt:inspect(id).generation)
    assert.equal(2, world:count "probe")
    assert.equal(0, world:count "client.exec")
  end)

  -- ---- what the deployment can do ------------------------------------------------------------------------

  it("a yes is remembered for 60 seconds, a no for 300, a failure for none [I8]", function()
    local rt, n = open(), 0
    local function turn()
      n = n + 1
      local ok, err = pcall(rt.acquire, rt, { user = "u" .. n, thread = "t", requirements = { lark_cli = true } })
      return ok or err.kind
    end
    local function asked_after(seconds)
      local before = world:count "probe"
      rt:advance(seconds)
      assert.is_true(turn())
      return world:count "probe" - before
    end
    can = { lark_cli_broker_image = true }
    assert.equal(1, asked_after(0))
    assert.equal(0, asked_after(59))
    can = { lark_cli_broker_image = false, lark_cli_init_image = false }
    assert.equal(1, asked_after(1))
    assert.equal(0, asked_after(299))
    assert.equal(1, asked_after(1))
    rt:advance(300)
    can = nil
    assert.equal("unverified", turn())
    local before = world:count "probe"
    can = { lark_cli_broker_image = true }
    rt:advance(29)
    assert.equal("unverified", turn())                     -- unknown until it is asked again, and never "no"
    assert.equal(before, world:count "probe")
    rt:advance(1)
    assert.is_true(turn())
    assert.equal(before + 1, world:count "probe")
  end)

  it("an answer that is no table is no answer [I8]", function()
    for _, answer in ipairs { false, true, 3, "yes" } do
      world = support.world { methods = { probe = function() return answer end } }
      local rt = open()
      local err = support.caught(rt.acquire, rt, lark())
      assert.same({ "unverified", "capability" }, { err.kind, err.reason })
      rt:shutdown()
    end
  end)

  it("is not asked where the integration is inactive, and nothing is requested for it [I9]", function()
    local rt = open()
    local box = rt:acquire(alice())
    box:release()
    assert.equal("warm", rt:acquire(alice()).source)
    local options = world:container(box.id).spec.requirements.options
    assert.same({ false, false }, { options.provision_lark_cli_runtime, options.provision_lark_cli_broker })
    for _, mount in ipairs(world:container(box.id).spec.mounts) do assert.is_nil(mount.target:find("lark")) end
    assert.equal(0, world:count "probe")
  end)

  for _, way in ipairs(support.WAYS) do
    it("unknown at creation: nothing is created on a guess [I10], " .. way.name, function()
      can = nil
      local rt = open()
      local err = support.caught(way.acquire, rt, lark())
      assert.same({ "unverified", "capability" }, { err.kind, err.reason })
      assert.equal(0, world:count "create")
      assert.equal("", (support.sh("find " .. root .. " -mindepth 1")))      -- no credential folder was made either
    end)
  end

  it("a command uses what its sandbox attests, and asks nobody [I11, B7]", function()
    local rt = open { command_timeout = 42 }
    local box = rt:acquire(lark())
    local calls = {}
    for _, call in ipairs(world.calls) do
      if call.name == "connect" then calls[#calls + 1] = call end
    end
    assert.equal(1, #calls)                                 -- its client is made once
    local info, opts = calls[1][1][1], calls[1][1][2]
    local c = world:container(box.id)
    assert.same({ box.id, c.url, {}, false }, { info.sandbox_id, info.url, info.headers, info.attestation.broker })
    assert.equal(42, opts.command_timeout)
    local probes = world:count "probe"
    rt:advance(1000)
    assert.equal("ok\n", box:exec("echo ok").stdout)
    assert.equal(probes, world:count "probe")
  end)

  it("asked again of one just created: unknown by then is unverified, and it is taken down [I12, E15]", function()
    local rt = open()
    world.on.ready = function(next, ...)
      rt:advance(301)
      can = nil
      return next(...)
    end
    local err = support.caught(rt.acquire, rt, lark())
    assert.same({ "unverified", "capability" }, { err.kind, err.reason })
    assert.same({ 1, 1 }, { (counts()) , world:count "create" })
    assert.is_nil(rt:inspect(rt:explain(alice()).id))
  end)

  it("asked again of a discovered one, once ownership is published [I12]", function()
    local rt = open()
    local id = prepare(rt, "discovered", { broker = false })
    local asked = {}
    world.on["lease.take"] = function(next, ...) asked[#asked + 1] = "take" return next(...) end
    world.on.probe = function(next, ...) asked[#asked + 1] = "probe" return next(...) end
    local policy = rt:explain { user = "alice", thread = "t1", requirements = { lark_cli = true },
      candidate = { source = "discovered", attestation = { broker = false }, capability = { lark_cli_broker_image = false } } }
    assert.equal("reuse", policy.decision)
    assert.equal("discovered", rt:acquire(lark()).source)
    assert.same({ "probe", "take" }, asked)                 -- the second judgement had the first one's answer
    assert.equal(false, rt:inspect(id).info.attestation.broker)
  end)

  -- ---- in general ----------------------------------------------------------------------------------------

  it("compares whatever name an operator requires, with the built-in policies too [I1]", function()
    local rt = world:open { image = "img:2", network = "open" }
    world.attested = { image = "img:2", network = "open", gpu = "a100", memory_gib = 16, skills_root = "/mnt/skills" }
    local function ask(require)
      return { user = "u", thread = "t", requirements = { require = require } }
    end
    rt:acquire(ask { gpu = "a100" }):release()
    for _, fine in ipairs { { gpu = "a100" }, { memory_gib = { at_least = 8 } }, { memory_gib = 16.0, skills_root = "/mnt/skills" } } do
      local box = rt:acquire(ask(fine))
      assert.equal("warm", box.source)
      box:release()
    end
    assert.equal(0, world:count "destroy")
    local err = support.caught(rt.acquire, rt, ask { gpu = "h100" })       -- replaced, and what is made then has none either
    assert.same({ "replacement_deferred", "incompatible" }, { err.kind, err.reason })
    assert.equal(2, world:count "destroy")
  end)

  it("refuses requirements of a wrong form, naming them [I1]", function()
    for answer, text in pairs {
      ["{ options = 3 }"] = "options must be a table", ["{ options = { 1 } }"] = "options must be a table",
      ["{ probe = 1 }"] = "probe must be true or false", ["{ require = 'x' }"] = "require must be a table",
      ["{ option = {} }"] = "unknown field 'option'",
    } do
      local rt = world:open { policies = { requirements = { name = "r.lua",
        source = "return { resolve = function() return " .. answer .. " end }" } } }
      local err = support.caught(rt.acquire, rt, alice())
      assert.equal("policy_error", err.kind)
      assert.matches(text, err.message, 1, true)
    end
  end)

  it("gives up on a policy that probes for ever [I1]", function()
    local rt = world:open { policies = { reuse = { name = "reuse.lua", source = [[return { decide = function(ctx)
      if ctx.source == "created" then return "reuse" end return "probe" end }]] } } }
    rt:acquire(alice())
    local err = support.caught(rt.acquire, rt, alice())
    assert.equal("policy_error", err.kind)
    assert.matches("third probe", err.message)
    assert.equal(2, world:count "probe")
    assert.equal(0, world:count "destroy")
  end)

  -- ---- explained -----------------------------------------------------------------------------------------

  describe("explained", function()
    local function steps(answer)
      local out = {}
      for i, one in ipairs(answer.path) do out[i] = one.step .. ": " .. one.answer end
      return out
    end
    local function question(candidate, requirements)
      return { user = "alice", thread = "t1", requirements = requirements or { lark_cli = true }, candidate = candidate }
    end

    it("shows the steps of a decision about what is tracked, touches nothing, and acquire does the same [I1]", function()
      local rt = open()
      prepare(rt, "warm", { broker = true, capacity = 13 })
      remember(rt, false)
      local before = #world.calls
      local answer = rt:explain(question())
      assert.equal(before, #world.calls)
      assert.same({ "warm: looked at", "policy: probe", "probe: from memory", "policy: probe", "probe: the engine is asked" },
        steps(answer))
      assert.equal("probe", answer.decision)
      assert.equal("created", rt:acquire(lark()).source)
    end)

    it("says of every decision what acquire then does [I1]", function()
      for _, decision in ipairs { "reuse", "replace", "refuse", "defer" } do
        for _, case in ipairs { { "warm", 0 }, { "active", 0 }, { "active", 2 } } do
          local rt = world:open { policies = { reuse = { name = "reuse.lua", source = ([[return { decide = function(ctx)
            if ctx.source == "created" then return "reuse" end return %q end }]]):format(decision) } } }
          local id = prepare(rt, case[1])
          for i = 1, case[2] do rt:retain(id, { holder = "h" .. i }) end
          local path = rt:explain(alice()).path
          local destroys = world:count "destroy"
          local ok, box = pcall(rt.acquire, rt, alice())
          local happened = not ok and box.kind or world:count "destroy" > destroys and "torn down" or "handed out"
          assert.equal(happened, path[#path].answer, ("%s %s %d"):format(decision, case[1], case[2]))
          if not ok then assert.matches(box.reason, path[#path].because, 1, true) end
          rt:shutdown()
        end
      end
    end)

    it("judges a sandbox that is described [I1]", function()
      local rt = open { policy_options = { remote = true, base_dir = root, max_running = 12 } }
      local answer = rt:explain(question({ source = "warm", attestation = { capacity = 4 } }, {}))
      assert.same({ "warm: looked at", "policy: replace", "then: torn down" }, steps(answer))
      assert.matches("insufficient_capacity: room for 4", answer.path[2].because, 1, true)
      assert.matches("compared: capacity differs", answer.path[2].because, 1, true)
      answer = rt:explain(question { source = "active", attestation = { capacity = 13 } })
      assert.same({ "active: looked at", "policy: refuse", "then: unverified" }, steps(answer))
      answer = rt:explain(question { source = "active", holders = 2, attestation = { capacity = 13, broker = false },
        capability = { lark_cli_broker_image = true } })
      assert.same({ "active: looked at", "policy: probe", "probe: as given", "policy: replace", "then: replacement_deferred" },
        steps(answer))
      answer = rt:explain(question { source = "discovered", attestation = { capacity = 13, broker = true },
        capability = { lark_cli_broker_image = true } })
      assert.equal("reuse", answer.decision)
      assert.equal("then: handed out", steps(answer)[5])
      answer = rt:explain(question { source = "created", attestation = { capacity = 13, broker = true }, capability = { unknown = true } })
      assert.same({ "refuse", "capability" }, { answer.decision, answer.code })
    end)

    it("says what comes before the policy: another id, a quarantine, nothing at all [E7, E8]", function()
      local rt = world:open { policies = { identity = { name = "i.lua", source = [[return { derive = function(ctx)
        return "box-" .. (ctx.requirements.labels and ctx.requirements.labels.v or "1") end }]] } } }
      local held = rt:acquire(alice())
      local answer = rt:explain(question(nil, { labels = { v = "2" } }))
      assert.same({ "active: replacement_deferred" }, steps(answer))
      assert.matches("identity_outdated", answer.path[1].because)
      held:release()
      answer = rt:explain { user = "alice", thread = "t2", requirements = { labels = { v = "3" } } }
      assert.equal("active, warm: nothing", steps(answer)[1])
      assert.is_nil(answer.decision)
    end)

    it("refuses a description that makes no sense, naming it", function()
      local rt = open()
      for name, candidate in pairs { source = { source = "cold" }, holders = { holders = -1 } } do
        local err = support.caught(rt.explain, rt, question(candidate))
        assert.equal("invalid_argument", err.kind)
        assert.matches("candidate." .. name, err.message, 1, true)
      end
    end)

    it("shows a policy's fault in its place [I1]", function()
      local rt = world:open { policies = { reuse = { name = "reuse.lua", source = "return { decide = function() error('broken') end }" } } }
      local answer = rt:explain(question({ source = "warm" }, {}))
      assert.equal("policy_error", answer.decision.error)
      assert.same({ "warm: looked at", "policy: policy_error" }, steps(answer))
    end)
  end)
end)
