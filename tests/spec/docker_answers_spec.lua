--- What the docker backend makes of an engine's answers, one by one: alive, inspect, discover, list. The engine is scripted.
local support = require "tests.support"
local core_path = assert(package.searchpath("paddock.core", package.cpath))
package.preload["paddock.io"] = package.preload["paddock.io"] or assert(package.loadlib(core_path, "luaopen_paddock_io"))
local docker = require "paddock.backend.docker"
local engines = require "paddock.docker.engine"
local io = require "paddock.io"

local ID, OTHER = ("ab"):rep(32), ("cd"):rep(32)

describe("an engine's answer about a container", function()
  local driver, answer, calls, says, dir
  local find = engines.find

  before_each(function()
    dir = support.tmpdir()
    local engine = engines.new({ address = "unix:///scripted", unix = "/scripted", url = "http://e" }, {})
    engine.id, calls = "docker/scripted", 0
    function engine.send(_, call)
      calls = calls + 1
      return answer(call)
    end
    engines.find = function() return engine end
    driver = docker.new({ plane = "guest" }, { state_dir = dir })
    says = { nil, "no answer", "timeout" }                         -- its guest
    function driver.plane.ask() return says[1], says[2], says[3] end
    function driver.plane.doubt() error({ kind = "backend_error", message = "it was asked about" }, 0) end
  end)
  after_each(function()
    engines.find = find
    support.cleanup()
  end)

  local function labels(changed)
    local out = { role = "sandbox", sandbox_id = "s1", instance = ("12"):rep(16), deployment = driver.deployment, plane = "guest",
      network_mode = "none", image = "i", networks = "" }
    for name, value in pairs(changed or {}) do out[name] = value or nil end
    local all = {}
    for name, value in pairs(out) do all["paddock." .. name] = value end
    return all
  end
  local function container(fields)
    local one = { Id = ID, Name = "/paddock-s1", Created = "2026-11-30T17:02:13.6Z", State = { Status = "running", Running = true },
      Config = { Labels = labels(), Env = {} }, NetworkSettings = {} }
    for key, value in pairs(fields or {}) do one[key] = value end
    return one
  end
  local function state(status) return { State = { Status = status, Running = status == "running" or status == "paused" } } end
  --- The engine answers that to everything.
  local function answers(status, data)
    answer = function() return { status = status, body = io.json.encode(data), headers = {}, data = data } end
  end
  local function raises(fn, ...)
    local fine, err = pcall(fn, driver, ...)
    assert.is_false(fine, "it did not raise")
    assert.equal("backend_error", err.kind, tostring(err))
    return err
  end

  local INFO = { sandbox_id = "s1", generation = ID }
  local ABSENT = { { 404, { message = "No such container: " .. ID } },
    { 404, { message = "no container with name or ID \"" .. ID .. "\" found: no such container", cause = "no such container" } } }
  local UNKNOWN = {
    { 404, { message = "page not found" } }, { 404, { message = "No such container: " .. OTHER } }, { 404, { message = "not found" } },
    { 404, {} }, { 500, { message = "No such container: " .. ID } }, { 500, { message = "daemon is busy" } }, { 401, {} }, { 403, {} },
    { 429, {} }, { 503, {} }, { 200, {} }, { 200, { Id = ID } }, { 200, { Id = ID:sub(1, 12), State = {} } },
  }

  it("says that it lives, that it certainly does not, or nothing: the last of these raises [G6]", function()
    says = { {} }
    answers(500, {})
    assert.is_true(driver:alive(INFO))                             -- its own word is enough
    assert.equal(0, calls)
    says = { nil, "no answer", "timeout" }
    for _, one in ipairs(ABSENT) do
      answers(one[1], one[2])
      assert.is_false(driver:alive(INFO), one[2].message)
    end
    for _, status in ipairs { "exited", "created", "dead", "removing" } do
      answers(200, container(state(status)))
      assert.is_false(driver:alive(INFO), status)
    end
    for _, one in ipairs(UNKNOWN) do
      answers(one[1], one[2])
      raises(driver.alive, INFO)
    end
    answers(200, container { Id = OTHER })
    assert.equal("protocol", raises(driver.alive, INFO).reason)
    answers(200, container(state "paused"))
    assert.equal("paused", raises(driver.alive, INFO).reason)
    answers(200, container())
    assert.equal("it was asked about", raises(driver.alive, INFO).message) -- it runs: what its silence means is the plane's to say
    answer = function() return nil, { kind = "backend_error", reason = "timeout", failure = "ambiguous", message = "no answer" } end
    raises(driver.alive, INFO)
  end)

  it("says that it is there, whatever its health, or that exactly this one is not [G8]", function()
    for _, status in ipairs { "running", "exited", "created", "dead", "removing", "paused" } do
      answers(200, container(state(status)))
      for _, info in ipairs { INFO, false } do
        local seen = driver:inspect("s1", info or nil)
        assert.same({ "s1", ID, status }, { seen.sandbox_id, seen.generation, seen.status })
        assert.equal(not (status == "running" or status == "paused") or nil, seen.doomed)
      end
    end
    answers(ABSENT[1][1], ABSENT[1][2])
    assert.is_nil(driver:inspect("s1", INFO))
    answers(404, { message = "No such container: paddock-s1" })
    assert.is_nil(driver:inspect("s1"))
    raises(driver.inspect, "s1", INFO)                             -- a name is not the generation
    for _, one in ipairs(UNKNOWN) do
      answers(one[1], one[2])
      raises(driver.inspect, "s1", INFO)
    end
  end)

  it("that cannot be verified leads to nothing, rather than to an adoption [G7]", function()
    answers(200, container())
    assert.is_nil(driver:discover "s1")                            -- it runs, and nobody answers in it
    says = { { token = 7 } }
    local found = driver:discover "s1"
    assert.same({ ID, "7", "none" }, { found.generation, found.token, found.attestation.network })
    for _, fields in ipairs {
      state "exited", state "created", { Name = "/paddock-s2" }, { Name = "/x-paddock-s1" }, { Config = {} },
      { Config = { Labels = labels { role = false } } }, { Config = { Labels = labels { deployment = "another" } } },
      { Config = { Labels = labels { sandbox_id = "s2" } } },
      { Config = { Labels = labels { instance = false } } }, { Config = { Labels = labels { instance = "../x" } } },
    } do
      answers(200, container(fields))
      local fine, seen = pcall(driver.discover, driver, "s1")
      assert.is_nil(fine and seen or nil, io.json.encode(fields))
    end
    for _, one in ipairs(UNKNOWN) do
      if (one[2].message or ""):find(ID, 1, true) == nil then
        answers(one[1], one[2])
        raises(driver.discover, "s1")
      end
    end
  end)

  it("with many of them is read in one: what has another name, or is another's, is left out [G3, I13]", function()
    says = { {} }
    local function item(fields)
      local one = { Id = ID, Names = { "/paddock-s1" }, State = "running", Labels = labels(), Created = 1796058133, Ports = {} }
      for key, value in pairs(fields or {}) do one[key] = value end
      return one
    end
    local function id(n) return ("%064x"):format(n) end
    answers(200, {
      item { Id = id(1) }, item { Id = id(2), Names = { "/paddock-s1-old" } }, item { Id = id(3), Names = { "/my-paddock-s1" } },
      item { Id = id(4), Labels = labels { deployment = "another" } }, item { Id = id(5), Labels = labels { plane = false } },
      item { Id = id(6), Names = { "/paddock-s2" }, Labels = labels { sandbox_id = "s2", instance = "34" }, State = "exited" },
      item { Id = "short" }, 7, {}, item { Id = id(7), Labels = 5 }, item { Id = id(8), Names = 5 },
    })
    local seen = {}
    for i, info in ipairs(driver:list()) do seen[i] = ("%s %s %s"):format(info.sandbox_id, info.generation:sub(-1), info.status) end
    assert.same({ "s1 1 running", "s2 6 exited" }, seen)
    assert.equal(1, calls)
    answers(500, {})
    raises(driver.list)
  end)

  it("about its end is no success, unless it says that it is gone; it is named by its id [G9]", function()
    local ended, seen
    answer = function(call)
      if call.method == "GET" then return { status = 200, body = "", headers = {}, data = container() } end
      seen[#seen + 1] = call.method .. " " .. call.path
      if type(ended) == "string" then return nil, { kind = "backend_error", reason = ended, failure = "ambiguous", message = ended } end
      return { status = ended[1], body = "", headers = {}, data = ended[2] }
    end
    local function destroy(one)
      ended, seen = one, {}
      local fine, err = pcall(driver.destroy, driver, INFO, { timeout = 0.1 })
      for _, call in ipairs(seen) do assert.matches("^%u+ /containers/" .. ID, call) end
      assert.is_true(#seen >= 1)
      return fine, fine and "gone" or err.kind
    end
    for _, one in ipairs { { 204, {} }, { 200, {} }, ABSENT[1], ABSENT[2] } do assert.same({ true, "gone" }, { destroy(one) }) end
    for _, one in ipairs {
      { 500, { message = "device busy" } }, { 404, { message = "page not found" } }, { 404, { message = "No such container: " .. OTHER } },
      { 401, {} }, { 409, { message = "removal of container " .. ID .. " is already in progress" } }, "read_timeout", "connect",
    } do
      assert.same({ false, "backend_error" }, { destroy(one) })
    end
  end)

  it("leads to the removal of what was made for it alone, and of nothing that only has its name [G10]", function()
    local mine, seen, shown, ended = ("12"):rep(16), nil, nil, nil
    answer = function(call)
      seen[#seen + 1] = call.method .. " " .. call.path
      local one = call.method == "GET" and shown or ended
      return { status = one[1], body = "", headers = {}, data = one[2] }
    end
    local function finish(look, removal)
      shown, ended, seen = look, removal or { 204, {} }, {}
      local fine = pcall(driver.leftovers.finish, driver.leftovers, { instance = mine, networks = { "n" }, volume = "v" })
      return fine, table.concat(seen, ", ")
    end
    local function made(changed)
      local all = { ["paddock.instance"] = mine, ["paddock.deployment"] = driver.deployment }
      for key, value in pairs(changed or {}) do all["paddock." .. key] = value or nil end
      return { 200, { Labels = all } }
    end
    local LOOKS = "GET /networks/n, GET /volumes/v"
    assert.same({ true, "GET /networks/n, DELETE /networks/n, GET /volumes/v, DELETE /volumes/v" }, { finish(made()) })
    for _, other in ipairs {
      made { instance = "34" }, made { deployment = "x" }, made { instance = false }, { 200, {} }, { 200, { Labels = 5 } },
    } do
      assert.same({ true, LOOKS }, { finish(other) })
    end
    assert.same({ true, LOOKS }, { finish { 404, { message = "network n not found" } } })   -- gone already
    assert.is_true((finish(made(), { 404, { message = "no such volume" } })))              -- meanwhile
    for _, unclear in ipairs { { { 500, {} } }, { { 403, {} } }, { made(), { 500, {} } }, { made(), { 409, { message = "in use" } } } } do
      assert.is_false((finish(unclear[1], unclear[2])))
    end
  end)

  it("is the only proof that it is gone [G9, G10]", function()
    local asked = {}
    function driver.leftovers.finish(_, info) asked[#asked + 1] = info.generation end
    answers(200, container(state "exited"))
    assert.equal("alive", raises(driver.finish, "s1", INFO).reason)
    for _, one in ipairs(UNKNOWN) do
      answers(one[1], one[2])
      raises(driver.finish, "s1", INFO)
    end
    assert.same({}, asked)
    answers(ABSENT[1][1], ABSENT[1][2])
    for _ = 1, 2 do driver:finish("s1", INFO) end                  -- as often as anybody likes
    assert.same({ ID, ID }, asked)
  end)
end)
