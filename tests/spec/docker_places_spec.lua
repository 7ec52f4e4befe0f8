--- The places of the docker backend's sandboxes on this machine, and what a look at the engine may remove of them.
local support = require "tests.support"
local core_path = assert(package.searchpath("paddock.core", package.cpath))
package.preload["paddock.io"] = package.preload["paddock.io"] or assert(package.loadlib(core_path, "luaopen_paddock_io"))
local places = require "paddock.docker.places"

describe("a place of a container's guest", function()
  local mine, dir
  before_each(function()
    dir = support.tmpdir()
    mine = places.open(dir)
  end)
  after_each(support.cleanup)

  local function begin() return mine:begin("alice", function() return "generation=x\0" end) end

  it("is not swept when its creation ended between the look at the places and the sweep", function()
    local place = begin()
    local names = mine:instances()  -- a reconcile begins here; the engine does not know the container yet,
    mine:settle(place)              -- which is there when its answer has come
    mine:sweep(names, {})
    assert.is_not_nil(mine:find(place.instance))
    mine:sweep(mine:instances(), { [place.instance] = true })
    assert.is_not_nil(mine:find(place.instance))
  end)

  it("is swept when nobody makes it any more, and no container names it", function()
    local place = begin()
    mine:sweep(mine:instances(), {})
    assert.is_not_nil(mine:find(place.instance)) -- at work on it
    mine:settle(place)
    mine:sweep(mine:instances(), {})
    assert.same({}, mine:instances())
    assert.equal("", (support.sh("ls -A " .. mine.path)))
  end)

  it("without a record yet is left until the next look, and swept when it still has none", function()
    local place = begin()
    local record = mine.path .. "/" .. place.instance .. "/record.json"
    local text = support.read_file(record)
    for _, early in ipairs { "rm " .. record, ": > " .. record } do -- the folder is there, its record not, or not written
      support.sh(early)
      local names = mine:instances()
      support.write_file(record, text)
      mine:sweep(names, {})
      assert.is_not_nil(mine:find(place.instance))
    end
    mine:settle(place)
    support.sh("rm " .. record)
    mine:sweep(mine:instances(), {})
    assert.equal("", (support.sh("ls -A " .. mine.path)))
  end)
end)
