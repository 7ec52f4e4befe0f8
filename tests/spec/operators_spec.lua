--- What operators ask for: who has a lease, what is quarantined, and how a record is done with; the same on the command line.
local support = require "tests.support"
local cli = require "tests.support.cli"

local ALICE = { user = "alice", thread = "t1" }

describe("on record", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  local function open(opts)
    local options = { ownership = world.ownership, journal = world.journal }
    for key, value in pairs(opts or {}) do options[key] = value end
    return world:open(options)
  end

  it("is whoever has the lease of any sandbox, and nothing where nobody has", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    assert.same({ state = "own", owner = rt:stats().runtime_id, ours = true, token = box.token }, rt:lease(box.id))
    world.leases["stranger"] = { owner = "peer", state = "del", token = 7 }
    assert.same({ state = "del", owner = "peer", ours = false, token = 7 }, rt:lease "stranger")
    assert.is_nil(rt:lease "nobodys")
    world:fail("lease.owner", 1, "the store is down")
    assert.equal("ownership_unavailable", support.caught(rt.lease, rt, box.id).kind) -- unknown is not nobody
    for _, bad in ipairs { "", "A", "a/b", ("x"):rep(64) } do
      assert.equal("invalid_argument", support.caught(rt.lease, rt, bad).kind)
      assert.equal("invalid_argument", support.caught(rt.retire, rt, bad).kind)
    end
  end)

  it("are the quarantined generations, and why", function()
    local rt = open()
    assert.same({}, rt:quarantine())
    world.records = { one = { g9 = "stop failed" } }
    assert.same({ { sandbox_id = "one", generation = "g9", why = "stop failed" } }, rt:quarantine())
    world:fail("journal.list", 1, "the disk is gone")
    assert.equal("io_error", support.caught(rt.quarantine, rt).kind) -- an error is not "none"
  end)

  it("a record of what is gone is retired once that was asked, under the lease, after finish [K9]", function()
    local rt = open()
    local id = rt:explain(ALICE).id
    world.records[id] = { ["?"] = "uncertain" }
    local seen
    world.on.inspect = function(next, ...)
      seen = { lease = world.leases[id] and world.leases[id].state, record = world.records[id] ~= nil }
      return next(...)
    end
    assert.is_true(rt:retire(id))
    assert.same({ lease = "del", record = true }, seen)
    assert.same({}, world.records)
    assert.same({}, world.leases)
    assert.is_true(rt:retire(id)) -- nothing is recorded: nothing to do
  end)

  it("what is recorded and still runs is stopped before its record goes; another generation is left alone [K10, K11]", function()
    local rt = open()
    world:add("one", { spec = {} })
    world:add("two")
    world.records = { one = { g1 = "stop failed" }, two = { old = "stop failed" } }
    assert.is_true(rt:retire "one")
    assert.is_true(rt:retire "two")
    assert.same({}, world.records)
    assert.equal(0, #world:running "one")
    assert.equal(1, #world:running "two")
    assert.equal(1, world:count "destroy")
    assert.same({}, world.leases)
  end)

  it("a record stays while the absence of what it names is not proven [K8, K12, K13]", function()
    local rt = open()
    world:add("one", { spec = {}, stubborn = true })
    world.records = { one = { g1 = "stop failed" } }
    assert.equal("still_present", support.caught(rt.retire, rt, "one").reason)
    assert.is_not_nil(world.records.one)
    assert.equal("still_present", support.caught(rt.retire, rt, "one").reason) -- however often
    world.order[1].stubborn = nil
    assert.is_true(rt:retire "one")
    world.records = { two = { g7 = "stop failed" } }
    world:fail("inspect", 1, "the engine is down")
    assert.equal("backend_error", support.caught(rt.retire, rt, "two").kind)
    world:fail("journal.has", 1, "the disk is gone")
    assert.equal("io_error", support.caught(rt.retire, rt, "two").kind)
    world.leases.two = { owner = "peer", state = "own", token = 1 }
    assert.same({ false, "deferred", "peer" }, { rt:retire "two" })
    assert.is_not_nil(world.records.two)
    world.leases = {}
  end)

  it("what another process holds is neither doomed nor stopped, whatever is recorded of it", function()
    local rt = open()
    world:add "one"
    world.records = { one = { g1 = "uncertain" } }
    world.on.inspect = function(next, ...)
      local info = next(...)
      if info then info.held = true end
      return info
    end
    assert.same({ false, "deferred", "holders" }, { rt:retire "one" })
    assert.same({ 0, 0 }, { world:count "destroy", world:count "client.doom" })
    assert.is_not_nil(world.records.one)
  end)

  it("retiring what this runtime failed to stop tries the stop again; while it has holders it is deferred", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    world:fail("destroy", 1, "engine is down")
    box:release()
    assert.equal("backend_error", support.caught(rt.destroy, rt, box.id).kind)
    assert.equal(1, #rt:quarantine())
    assert.is_true(rt:retire(box.id))
    assert.same({ 0, 0 }, { #rt:quarantine(), #world:running(box.id) })
  end)

  it("destroy says what stands in the way", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    assert.same({ false, "deferred", "holders" }, { rt:destroy(box.id) })
    box:release()
    world.leases[box.id] = { owner = "peer", state = "own", token = 99 }
    assert.same({ false, "deferred", "peer" }, { rt:destroy(box.id) })
    world.leases = {}
  end)

  it("shutdown leaves to a peer what the peer has taken over, and ends [O5, P4]", function()
    local one, two = open(), open()
    local box = one:acquire(ALICE)
    local taken = two:acquire(ALICE)
    assert.equal(box.generation, taken.generation)
    one:shutdown()
    assert.equal(0, world:count "destroy")
    assert.equal("still", taken:exec("echo still") and "still")
  end)

  it("a stop says that its guest is doomed, so that nobody's old client stands in its way", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    box:release()
    local opts
    world.on.destroy = function(next, backend, info, given)
      opts = given
      return next(backend, info, given)
    end
    assert.is_true(rt:destroy(box.id))
    assert.is_true(opts.doomed)
  end)
end)

describe("paddock quarantine", function()
  local folder
  before_each(function()
    folder = support.tmpdir()
    -- An engine as a file: what runs are the lines of `there`; a stop fails while `broken` exists.
    support.write_file(folder .. "/engine.lua", ([[
      local folder = %q
      local function lines()
        local out = {}
        local file = io.open(folder .. "/there")
        for line in file and file:lines() or function() end do
          local id, generation = line:match("^(%%S+) (%%S+)$")
          if id then out[#out + 1] = { sandbox_id = id, generation = generation } end
        end
        if file then file:close() end
        return out
      end
      local function find(id, generation)
        for _, info in ipairs(lines()) do
          if info.sandbox_id == id and (generation == nil or info.generation == generation) then return info end
        end
      end
      return {
        name = "lines", capabilities = { fenced = false },
        create = function() error("none is made here") end,
        destroy = function()
          if io.open(folder .. "/broken") then error("the engine is down", 0) end
          while io.open(folder .. "/slow") do require("paddock.io").sleep(0.01) end
          os.remove(folder .. "/there")
        end,
        inspect = function(_, id, info) return find(id, info and info.generation) end,
        discover = function(_, id) return find(id) end,
        alive = function(_, info) return find(info.sandbox_id, info.generation) ~= nil end,
        ready = function() return true end,
        list = lines, finish = function() end,
        connect = function() error("nobody answers", 0) end,
      }]]):format(folder))
    support.write_file(folder .. "/config.lua",
      ("return { backend = %q, state_dir = %q }"):format(folder .. "/engine.lua", folder .. "/state"))
  end)
  after_each(support.cleanup)

  local have, why = cli.have_program()
  local function with_config(...)
    local words = { ... }
    return cli.program({}, table.unpack(table.move({ "--config", folder .. "/config.lua" }, 1, 2, #words + 1, words)))
  end
  local function it_runs(name, fn)
    it(name, function()
      if have then fn() else pending(why) end
    end)
  end
  local function json(...)
    local code, out, err = with_config(...)
    assert.equal("", err)
    return require("cjson").decode(out), code
  end

  it("wants a verb, and an id where one belongs", function()
    for _, words in ipairs { {}, { "lss" }, { "show" }, { "retire" }, { "ls", "x" }, { "show", "a", "b" } } do
      local code, out, err = cli.run("quarantine", table.unpack(words))
      assert.same({ 64, "" }, { code, out })
      assert.matches("^paddock: [^\n]+\n$", err)
    end
  end)

  it_runs("lists, shows and retires what a failed stop has left, only once it is gone", function()
    assert.equal("nothing is quarantined\n", (select(2, with_config("quarantine", "ls"))))
    support.write_file(folder .. "/there", "sandbox-one gen1\n")
    support.write_file(folder .. "/broken", "")
    assert.equal(69, (with_config("destroy", "sandbox-one")))
    local listed = json("quarantine", "ls", "--json")
    assert.equal(1, #listed)
    assert.same({ "sandbox-one", "gen1", "destroy", true },
      { listed[1].sandbox_id, listed[1].generation, listed[1].why, listed[1].there })
    assert.matches("sandbox%-one +gen1 +destroy +free", (select(2, with_config("quarantine", "ls"))))
    assert.matches("generation  gen1\n  why         destroy\n  now         still there, nobody's",
      (select(2, with_config("quarantine", "show", "sand"))))
    assert.matches("quarantined: destroy", (select(2, with_config("ps"))))
    assert.equal("destroy", json("ps", "--json")[1].quarantined)
    local code, out, err = with_config("quarantine", "retire", "sandbox-one")
    assert.same({ 69, "" }, { code, out })
    assert.matches("^paddock: 'sandbox%-one' stays quarantined: [^\n]+\n$", err)
    os.remove(folder .. "/broken")
    assert.same({ 0, "sandbox-one\n", "" }, { with_config("quarantine", "retire", "sand") })
    assert.equal("nothing is quarantined\n", (select(2, with_config("quarantine", "ls"))))
    assert.equal(64, (with_config("quarantine", "show", "sandbox-one")))
    assert.same({ 0, "sandbox-one: nothing was quarantined\n", "" }, { with_config("quarantine", "retire", "sandbox-one") })
  end)

  it_runs("says, like ps, gc and destroy, who is taking a sandbox down, and keeps off", function()
    support.write_file(folder .. "/there", "sandbox-one gen1\n")
    support.write_file(folder .. "/slow", "")
    support.sh(("paddock destroy --config %s/config.lua sandbox-one > %s/out 2>&1 < /dev/null & echo $! > %s/pid")
      :format(folder, folder, folder))
    local pid = tonumber(support.read_file(folder .. "/pid"))
    local one
    assert.is_true(support.eventually(function()
      one = json("ps", "--json")[1]
      return one.lease and one.lease.state == "del" and one.quarantined
    end))
    assert.same({ "ending", pid, "destroy" }, { one.state, one.lease.owner_pid, one.quarantined })
    assert.matches("sandbox%-one +ending +.*del " .. pid .. " +quarantined: destroy", (select(2, with_config("ps"))))
    local code, out, err = with_config("gc")
    assert.same({ 0, ("left: sandbox-one (being taken down by process %d; quarantined: destroy)\n0 taken down, 1 left\n"):format(pid), "" },
      { code, out, err })
    os.rename(folder .. "/there", folder .. "/gone") -- and when the engine does not list it any more, at whose stop it works
    code, out, err = with_config("gc")
    assert.same({ 0, "0 taken down, 0 left\n" }, { code, out })
    assert.equal("paddock: sandbox-one stays quarantined: somebody is at work on it (peer); try again later\n", err)
    os.rename(folder .. "/gone", folder .. "/there")
    code, out, err = with_config("destroy", "sandbox-one")
    assert.same({ 75, "", ("paddock: sandbox-one was not destroyed: process %d has its lease; try again later\n"):format(pid) },
      { code, out, err })
    assert.matches("now         still there, ending %(process " .. pid .. "%)", (select(2, with_config("quarantine", "show", "sand"))))
    code, out, err = with_config("quarantine", "retire", "sandbox-one")
    assert.same({ 75, "" }, { code, out })
    assert.matches("stays quarantined: process " .. pid .. " uses it or is at work on it; try again later\n$", err)
    os.remove(folder .. "/slow")
    support.eventually(function() return support.read_file(folder .. "/out") ~= "" end)
    assert.equal("sandbox-one\n", support.read_file(folder .. "/out"))
    assert.equal("nothing is quarantined\n", (select(2, with_config("quarantine", "ls"))))
  end)

  it_runs("is cleared by gc of what is gone by itself", function()
    support.write_file(folder .. "/there", "sandbox-one gen1\n")
    support.write_file(folder .. "/broken", "")
    with_config("destroy", "sandbox-one")
    assert.equal(1, #json("quarantine", "ls", "--json"))
    os.remove(folder .. "/there")
    assert.same({ gone = {}, kept = 0, left = {} }, (json("gc", "--json")))
    assert.same({}, (json("quarantine", "ls", "--json")))
  end)
end)
