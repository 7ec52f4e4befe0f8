--- Renewal of leases, and what the guests of warm sandboxes have to do with it.
local support = require "tests.support"

describe("the renewal", function()
  local world, rt
  local boxes
  before_each(function()
    world = support.world()
    rt = world:open { ownership = world.ownership, idle_timeout = 0 }
    boxes = {}
    for i = 1, 3 do
      boxes[i] = rt:acquire { user = "alice", thread = "t" .. i }
      boxes[i]:release()
    end
  end)
  after_each(function()
    world.leases = {}
    world:assert_quiet()
  end)

  --- The calls of one renewal pass: "renew" and "alive", in order, and whom alive was asked about.
  local function pass()
    local from = #world.calls + 1
    rt:advance(60)
    rt:tick()
    local order, asked = {}, {}
    for i = from, #world.calls do
      local call = world.calls[i]
      if call.name == "lease.renew" then order[#order + 1] = "renew" end
      if call.name == "alive" then
        order[#order + 1] = "alive"
        asked[#asked + 1] = call.sandbox_id
      end
    end
    return table.concat(order, " "), asked
  end

  it("renews all leases before it speaks to any guest, so that none that hangs holds up another sandbox's lease", function()
    assert.equal("renew renew renew alive alive alive", (pass()))
  end)

  it("speaks last to guests that did not answer, and first to those it has not spoken to for longest", function()
    local _, order = pass()
    local hung = order[1]
    world.on.alive = function(next, backend, info)
      if info.sandbox_id == hung then support.raise("timeout", "no answer") end
      return next(backend, info)
    end
    pass()
    local _, third = pass()
    assert.equal(hung, third[3])
    world.on.alive = nil
    local _, fourth = pass()
    assert.equal(hung, fourth[3])
  end)

  it("stops speaking to guests when the next renewal is due, and goes on there in the next pass", function()
    local slow = 60
    world.on.alive = function(next, backend, info)
      rt:advance(slow) -- as long as a whole interval
      return next(backend, info)
    end
    local seen = {}
    for _ = 1, 3 do
      local order, asked = pass()
      assert.equal("renew renew renew alive", order)
      seen[asked[1]] = true
    end
    for _, box in ipairs(boxes) do assert.is_true(seen[box.id]) end
    slow = 0
  end)

  it("does not speak to what is being used or torn down meanwhile", function()
    local busy = rt:acquire { user = "alice", thread = "t1" }
    local _, asked = pass()
    assert.equal(2, #asked)
    world.on.alive = function(next, backend, info)
      world.on.alive = nil
      for _, box in ipairs(boxes) do
        if box.id ~= info.sandbox_id and box.id ~= busy.id then world.leases[box.id] = { owner = "peer", state = "own", token = 99 } end
      end
      return next(backend, info)
    end
    pass() -- the lease of the third went to a peer after its renewal: the guest is spoken to with our token, and refuses or not
    local _, after = pass()
    assert.equal(1, #after) -- forgotten at its next renewal
    busy:release()
    world.leases = {}
    for _, c in ipairs(world:running()) do
      if rt:inspect(c.sandbox_id) == nil then c.running = false end
    end
  end)
end)
