--- How the docker backend waits for a guest: on a clock of the test's own.
local core_path = assert(package.searchpath("paddock.core", package.cpath))
package.preload["paddock.io"] = package.preload["paddock.io"] or assert(package.loadlib(core_path, "luaopen_paddock_io"))
local io = require "paddock.io"
local guests = require "paddock.docker.plane_guest"

describe("the wait for a guest in a container", function()
  local now, sleep = io.now, io.sleep
  after_each(function() io.now, io.sleep = now, sleep end)

  --- Waits for a guest that answers from `at` on: whether it did, the time, and how often it and the engine were asked.
  local function wait(at, limit)
    local clock, looks, checks = 1000, 0, 0
    io.now = function() return clock end
    io.sleep = function(seconds) clock = clock + seconds end
    local plane = guests.new { engine = { unix = "/none" }, places = {} }
    function plane.ask(_, _, _)
      looks = looks + 1
      return clock - 1000 >= at
    end
    local fine = plane:ready({}, limit, function() checks = checks + 1 end)
    return fine, clock - 1000, looks, checks
  end

  it("ends soon after the guest has come, without asking much", function()
    for _, at in ipairs { 0, 0.0001, 0.001, 0.003, 0.02, 0.1, 0.35, 1, 4.9, 30 } do
      local fine, took, looks, checks = wait(at, 60)
      assert.is_true(fine)
      assert.truthy(took - at <= math.max(0.0005, math.min(at / 8, 0.05)) + 1e-9, ("%g s: %g s late"):format(at, took - at))
      assert.truthy(looks <= 60 + at / 0.05, ("%g s: %d looks"):format(at, looks))
      assert.truthy(checks <= 4 + at, ("%g s: %d questions to the engine"):format(at, checks))
    end
  end)

  it("ends at its limit where none comes", function()
    local fine, took = wait(math.huge, 2)
    assert.is_false(fine)
    assert.truthy(took >= 2 and took < 2.06)
  end)
end)

describe("a guest that is met for the first time", function()
  it("is known only once it is written down who it is: until then its creation fails, and after that a word of it says nothing", function()
    local full, noted = true, {}
    local keeper = { close_folder = function() if full == "closed" then error { kind = "io_error", message = "read-only" } end end,
      note = function(_, instance, facts)
        if full then error { kind = "io_error", message = "no space" } end
        noted[instance] = facts.peer
      end,
    }
    local plane = guests.new { engine = { unix = "/none" }, places = keeper }
    local talk = { seen_peer = 7, state = function() return { generation = "i" } end }
    function plane._client() return talk end
    plane.fresh.i = true
    for _ = 1, 2 do                    -- not by the second question either
      local fine, failure = pcall(plane.ask, plane, { instance = "i" })
      assert.is_false(fine)
      assert.equal("no space", failure.message)
      assert.is_nil(plane.peers.i)
    end
    full = false
    assert.is_table(plane:ask { instance = "i" })
    assert.same({ 7, 7 }, { noted.i, plane.peers.i })
    plane.closed.i, full = nil, "closed" -- another one's, seen in a list: no hindrance to the others
    local said, why, reason = plane:ask { instance = "i" }
    assert.same({ nil, "read-only", "unknown" }, { said, why, reason })
  end)
end)
