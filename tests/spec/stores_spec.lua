--- The stores of a state directory under real runtimes: leases and quarantine records in files (rows K3, K6, O1, O4, O7).
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

describe("in one state directory", function()
  local world, folder

  before_each(function()
    world, folder = support.world(), support.tmpdir()
  end)
  after_each(function() world:assert_quiet() end)

  local function open(opts)
    local options = {
      state_dir = folder, ownership = { type = "file", ttl = 30, renew_interval = 0.05 }, clock = "monotonic",
    }
    for key, value in pairs(opts or {}) do options[key] = value end
    return world:open(options)
  end

  --- Lets a runtime renew its leases.
  local function renew(rt)
    support.sh("sleep 0.06")
    rt:tick()
  end

  local function dirty(box)
    world.on["client.open_session"] = function() support.raise("outcome_unknown", "read timeout", "session_creation") end
    assert.equal("session_creation", box:exec("echo x", { scope = "s" }).reason)
    world.on["client.open_session"] = nil
  end

  it("the stores are files unless others are chosen, and private", function()
    local rt = world:open { state_dir = folder, ownership = {} }
    assert.equal("file", rt:capabilities().ownership)
    rt:acquire(ALICE)
    assert.matches("^700 [^\n]+/leases\n700 [^\n]+/quarantine$",
      (support.sh(("stat -c '%%a %%n' %s/leases %s/quarantine"):format(folder, folder)):gsub("\n$", "")))
    local other = support.tmpdir()
    local memory = world:open { state_dir = other, ownership = { type = "memory" }, journal = "memory" }
    assert.equal("memory", memory:capabilities().ownership)
    assert.equal("runtimes\nturns\n", (support.sh("ls " .. other)))
  end)

  it("an acquire takes a sandbox over from a runtime that keeps it warm, which forgets it without stopping it [O1, O5]", function()
    local one, two = open(), open()
    local first = one:acquire(ALICE)
    first:release()
    local second = two:acquire(ALICE)
    assert.same({ "discovered", first.generation }, { second.source, second.generation })
    assert.is_true(second.token > first.token)
    assert.equal(one:lease(first.id).owner, two:lease(first.id).owner)
    assert.is_true(two:lease(first.id).ours)
    assert.is_false(one:lease(first.id).ours)
    renew(one)
    assert.is_nil(one:inspect(first.id))
    one:shutdown()
    assert.equal(0, world:count("destroy"))
    assert.equal(1, #world:running())
    assert.equal("completed", second:exec("echo hi").outcome)
  end)

  it("a runtime's record has its lock before its name: what a killed one or a killed start left goes, and what is locked stays", function()
    local core_path = assert(package.searchpath("paddock.core", package.cpath))
    package.preload["paddock.io"] = package.preload["paddock.io"] or assert(package.loadlib(core_path, "luaopen_paddock_io"))
    local proc = require("paddock.io").proc
    local one = open()
    local record = (support.sh("ls " .. folder .. "/runtimes")):gsub("%s", "")
    assert.matches("^[^.]+%.json$", record)
    local starting <close> = proc.open(folder .. "/runtimes/starting.json.0.new", "wcx", 384)
    assert.is_true(starting:lock("w", 0))
    support.sh(("cd %s/runtimes; touch killed.json killed.json.0.new other"):format(folder))
    local two = open()
    local left = support.sh("ls " .. folder .. "/runtimes")
    for name, there in pairs { [record] = true, ["starting.json.0.new"] = true, other = true, ["killed.json"] = false,
      ["killed.json.0.new"] = false } do
      assert.equal(there, ("\n" .. left):find("\n" .. name .. "\n", 1, true) ~= nil, name)
    end
    one:shutdown()
    two:shutdown()
    assert.is_nil((support.sh("ls " .. folder .. "/runtimes")):find(record, 1, true))
  end)

  it("what one runtime has is not destroyed by another [O2]", function()
    local one, two = open(), open()
    local box = one:acquire(ALICE)
    local done, reason = two:destroy(box.id)
    assert.same({ false, "deferred" }, { done, reason })
    assert.equal(0, world:count("destroy"))
    assert.equal("completed", box:exec("echo hi").outcome)
    box:release()
    assert.is_false((two:destroy(box.id)))
    assert.is_true(one:destroy(box.id))
    assert.is_nil(two:lease(box.id))
  end)

  it("a record outlives its runtime: the generation stays fenced, its replacement is admitted [K3]", function()
    local one = open()
    local box = one:acquire(ALICE)
    dirty(box)
    world:fail("destroy", true, "engine is down")
    box:release()
    one:reset()
    local two = open()
    assert.same({ box.id, box.generation }, { two:quarantine()[1].sandbox_id, two:quarantine()[1].generation })
    local err = support.caught(two.acquire, two, ALICE)
    assert.same({ "replacement_deferred", "quarantined" }, { err.kind, err.reason })
    assert.equal(1, world:count("create"))
    world.failures = {}
    local again = two:acquire(ALICE)
    assert.equal("created", again.source)
    assert.same({}, two:quarantine())
  end)

  it("no record, no stop: a dirty sandbox stays tracked while the journal cannot be written [K6]", function()
    local rt = open()
    local box = rt:acquire(ALICE)
    local id = box.id
    support.sh(("mv %s/quarantine %s/away && : > %s/quarantine"):format(folder, folder, folder))
    dirty(box)
    box:release()
    assert.equal(0, world:count("destroy"))
    assert.equal(1, world:open_clients())
    local err = support.caught(rt.destroy, rt, id)
    assert.equal("io_error", err.kind)
    assert.equal(0, world:count("destroy"))
    assert.is_table(rt:inspect(id))
    support.sh(("rm %s/quarantine && mv %s/away %s/quarantine"):format(folder, folder, folder))
    world:fail("destroy", 1, "engine is down")
    err = support.caught(rt.destroy, rt, id)
    assert.equal("backend_error", err.kind)
    assert.equal(1, #rt:quarantine())
    assert.is_true(rt:destroy(id))
    assert.equal(0, #rt:quarantine())
  end)

  it("a lease table that cannot answer is an error where ownership is published, and nothing is handed out [O4]", function()
    local rt, peer = open(), open() -- the peer has the table open: nobody may make it anew
    rt:acquire(ALICE):release()
    local created = world:count("create")
    support.sh(("for f in %s/leases/table.*; do cp $f %s/kept; : > $f; done"):format(folder, folder))
    local err = support.caught(peer.acquire, peer, ALICE)
    assert.equal("ownership_unavailable", err.kind)
    assert.equal(created, world:count("create"))
    assert.equal(0, world:count("destroy"))
    assert.equal("ownership_unavailable", support.caught(support.open, { backend = world.backend, state_dir = folder,
      ownership = { type = "file" }, clock = "monotonic" }).kind)
    support.sh(("for f in %s/leases/table.*; do cat %s/kept > $f; done"):format(folder, folder))
    assert.equal("discovered", peer:acquire(ALICE).source)
    renew(rt)
  end)

  it("leases in memory are warned about where several runtimes are [O7]", function()
    local events = {}
    local function memory()
      return world:open { state_dir = folder, log = function(record) events[#events + 1] = record end }
    end
    local one = memory()
    one:dispatch()
    for _, record in ipairs(events) do assert.not_equal("ownership_in_memory", record.event) end
    local two = memory()
    two:dispatch()
    local found
    for _, record in ipairs(events) do found = found or record.event == "ownership_in_memory" and record end
    assert.equal("warn", found.level)
    assert.matches("file", found.reason)
  end)
end)
