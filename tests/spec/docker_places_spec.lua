--- The places of the docker backend's sandboxes on this machine, and what a look at the engine may remove of them.
local support = require "tests.support"
local core_path = assert(package.searchpath("paddock.core", package.cpath))
package.preload["paddock.io"] = package.preload["paddock.io"] or assert(package.loadlib(core_path, "luaopen_paddock_io"))
local places = require "paddock.docker.places"

describe("a place of a container's guest", function()
  local mine, dir
  before_each(function()
    dir = support.tmpdir()
    mine = places.open(dir, "engine", "deployment")
  end)
  after_each(support.cleanup)

  local function begin(whose) return (whose or mine):begin("alice", function() return "generation=x\0" end) end
  local function yes() return true end
  --- What is there of places.
  local function left() return (support.sh("ls " .. mine.path)) end

  it("is not swept when its creation ended between the look at the places and the sweep", function()
    local place = begin()
    local names = mine:instances()  -- a reconcile begins here; the engine does not know the container yet,
    mine:settle(place)              -- which is there when its answer has come
    mine:sweep(names, {}, yes)
    assert.is_not_nil(mine:find(place.instance))
    mine:sweep(mine:instances(), { [place.instance] = true }, yes)
    assert.is_not_nil(mine:find(place.instance))
  end)

  it("is swept when nobody makes it any more, and no container names it", function()
    local place = begin()
    mine:sweep(mine:instances(), {}, yes)
    assert.is_not_nil(mine:find(place.instance)) -- at work on it
    mine:settle(place)
    mine:sweep(mine:instances(), {}, yes)
    assert.same({}, mine:instances())
    assert.equal("", left())
  end)

  it("without a record is swept, but not while any process may be about to write one", function()
    local place = begin()
    local record = mine.path .. "/" .. place.instance .. "/record.json"
    local text = support.read_file(record)
    mine:settle(place)
    for _, early in ipairs { "rm -f " .. record, ": > " .. record } do -- the folder is there, its record not, or not written
      support.sh(early)
      local share = mine:_share()        -- that creation stands still, for longer than the whole look at the engine
      mine:sweep(mine:instances(), {}, yes)
      share:close()
      assert.equal(place.instance .. "\n", left())
      local names = mine:instances()
      support.write_file(record, text)
      mine:sweep(names, {}, yes)
      assert.is_not_nil(mine:find(place.instance))
    end
    support.sh("rm " .. record)
    mine:sweep(mine:instances(), {}, yes)
    assert.equal("", left())
  end)

  it("is none of the business of who speaks to another engine, or for another deployment", function()
    local theirs = {}
    for i, other in ipairs { places.open(dir, "engine", "another"), places.open(dir, "another", "deployment") } do
      theirs[i] = begin(other)
      other:settle(theirs[i])
    end
    mine:sweep(mine:instances(), {}, yes)
    for _, place in ipairs(theirs) do assert.is_not_nil(mine:find(place.instance)) end
  end)

  it("stays locked, and known, when something is learned of its guest before its creation has ended", function()
    local place = begin()
    mine:note(place.instance, { peer = 7, pid_ns = 1 })
    assert.same({}, mine:instances())
    local found = mine:find(place.instance)
    assert.same({ 7, place.secret }, { found.peer, found.secret })
    mine:settle(place)
    mine:sweep(mine:instances(), {}, yes)
    assert.equal("", left())
    mine:note(place.instance, { peer = 7, pid_ns = 1 })        -- somebody else has removed it
    assert.equal("", left())
  end)

  it("is left where nobody can tell: its record cannot be read, or the engine cannot be asked about it", function()
    local unread, asked, gone = begin(), begin(), begin()
    for _, place in ipairs { unread, asked, gone } do mine:settle(place) end
    local record = mine.path .. "/" .. unread.instance .. "/record.json"
    support.sh(("mv %s %s.away; mkdir %s"):format(record, record, record))
    mine:sweep(mine:instances(), {}, function(it) return it.instance == gone.instance or error "no answer" end)
    support.sh(("rmdir %s; mv %s.away %s"):format(record, record, record))
    assert.is_not_nil(mine:find(unread.instance))
    assert.is_not_nil(mine:find(asked.instance))
    assert.is_nil(mine:find(gone.instance))
  end)

  it("whose record cannot be read is one without a record, with the reason; and who listens there is believed by no half of it", function()
    local place = begin()
    mine:settle(place)
    mine:note(place.instance, { peer = 7, pid_ns = 1, secret = "another", instance = "another" })
    assert.equal(place.secret, mine:find(place.instance).secret)
    local folder = mine.path .. "/" .. place.instance
    for _, name in ipairs { "peer.json", "record.json" } do
      local path = folder .. "/" .. name
      local text = support.read_file(path)
      for spoil, words in pairs { ["rm -f %s; mkdir %s"] = "cannot read", ["head -c 100000 /dev/zero > %s"] = "cannot read",
        ["echo garbage > %s"] = "garbled", [": > %s"] = "garbled" } do
        support.sh((spoil:gsub("%%s", path)))
        local found, why = mine:find(place.instance)
        assert.is_nil(found)
        assert.matches(words, why)
        support.sh("rm -rf " .. path)
        support.write_file(path, text)
        assert.equal(7, mine:find(place.instance).peer)
      end
    end
    support.sh("rm " .. folder .. "/record.json")
    assert.matches("not in this state directory", select(2, mine:find(place.instance)))
  end)
end)
