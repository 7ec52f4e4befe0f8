--- What the docker backend remembers of containers that are gone, without an engine.
local core_path = assert(package.searchpath("paddock.core", package.cpath))
package.preload["paddock.io"] = package.preload["paddock.io"] or assert(package.loadlib(core_path, "luaopen_paddock_io"))
local events = require "paddock.docker.events"

local function size(t)
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  return n
end

describe("the deaths that are remembered", function()
  it("stay as many however many sandboxes there were, and are the latest ones", function()
    local mine = events.new({})
    mine.standing = true
    local cycles = 2 * events.REMEMBERED + 100
    for i = 1, cycles do
      local generation = ("%064x"):format(i)
      mine:saw_running(generation, "s" .. i)
      local expected <close> = mine:expect(generation)
      expected.done = true
      mine:forget(generation)
      mine:forget(generation) -- the stream says so, too
    end
    assert.equal(events.REMEMBERED, size(mine.dead))
    assert.equal(events.REMEMBERED, size(mine.order))
    assert.equal(0, size(mine.running))
    assert.equal(0, size(mine.expected))
    assert.equal("dead", mine:state(("%064x"):format(cycles)))
    assert.equal("dead", mine:state(("%064x"):format(cycles - events.REMEMBERED + 1)))
    assert.is_nil(mine:state(("%064x"):format(cycles - events.REMEMBERED)))
  end)
end)
