--- Each call of the engine that a life needs, spoilt in each way: nobody waits for ever, no container is made twice or forgotten,
--- and the next try works. Suites: containers_faults_docker_spec.lua, containers_faults_podman_spec.lua.
local busted = require "busted"
local containers = require "tests.live.containers"
local core = require "paddock.core"
local support = require "tests.support"
local assert, describe = require "luassert", busted.describe

local WHO = { user = "alice", thread = "t1" }

local THOROUGH = os.getenv "PDK_THOROUGH"
local FAILURE = { message = "something failed" }
--- Ways to spoil a call. All of them on each engine, and every call, is what PDK_THOROUGH=1 means:
--- else each engine has those that name it, and what takes long spoils the first and the third call only.
local FAULTS = {
  { "is cut before the engine sees it", { action = "cut", at = "before" }, docker = true },
  { "is carried out, and its answer lost", { action = "cut", at = "after" }, docker = true, podman = true },
  { "is answered in part", { action = "cut", at = "middle" } },
  { "is refused by an engine with a fault", { action = "rewrite", status = 500, body = FAILURE, pass = false } },
  { "is carried out, and called a failure", { action = "rewrite", status = 500, body = FAILURE }, docker = true, podman = true },
  { "is answered with what nobody can read", { action = "rewrite", body = "<html>" }, podman = true },
  { "hangs before the engine sees it", { action = "hang", at = "before" } },
  { "is carried out, and its answer hangs", { action = "hang", at = "after" }, docker = true, calls = { 0, 2 } },
  { "is answered in part, and hangs", { action = "hang", at = "middle" } },
}
local ENGINE_LIMIT = 5 -- seconds for a call of the engine where calls hang: more than a busy machine needs for one that does not
local LIMIT = 90       -- seconds that no operation may take there

--- What a rule's call does to fn: its results, and how long it took.
local function spoilt(world, skip, fault, fn)
  local rule = { skip = skip, path = "^(?!/events|/containers/json)" } -- not those of the stream of events, which come at any time
  for key, value in pairs(fault[2]) do rule[key] = value end
  world.proxy:reset()
  local id = world.proxy:rule(rule)
  local started = core.now()
  local results = table.pack(pcall(fn))
  local seconds = core.now() - started
  local call
  for _, one in ipairs(world.proxy:calls()) do
    if one.rule == id then call = one end
  end
  world.proxy:reset()
  assert(seconds < LIMIT, "it took " .. seconds .. " s")
  return call ~= nil, call, table.unpack(results, 1, results.n)
end

--- What an error may be: one that says that the engine is the reason, in one line.
local function explained(err)
  assert.is_table(err, tostring(err))
  assert.truthy(({ backend_error = true, timeout = true, io_error = true })[err.kind], tostring(err))
  assert.falsy(tostring(err):find("\n"), tostring(err))
end

--- Containers of this world that run, and all of them.
local function running(world)
  local all, n = world:containers(), 0
  for _, item in ipairs(all) do n = n + (item.State == "running" and 1 or 0) end
  return n, #all
end

local function faults_on(engine, fault)
  describe(("on %s, when a call %s,"):format(engine.name, fault[1]), function()
    local behind = containers.on(engine, { proxy = true })
    local hangs = fault[2].action == "hang"
    local options = { backend_options = { engine_timeout = hangs and ENGINE_LIMIT or nil }, stop_timeout = hangs and ENGINE_LIMIT or nil }

    --- The n-th call of an acquire is spoilt: whether there was one.
    local function acquire(world, rt, nth)
      local struck, call, fine, box = spoilt(world, nth, fault, function() return rt:acquire(WHO) end)
      local at = call and ("call %d, %s %s"):format(nth + 1, call.method, call.path) or "no fault"
      if not fine then explained(box) end
      assert(running(world) <= 1, at .. ": two containers run")
      if fine then
        assert.equal("x", box:exec("printf x").stdout, at)
        box:release()
      end
      local again = rt:acquire(WHO)
      assert.equal("y", again:exec("printf y").stdout, at)
      if fine then assert.equal(box.generation, again.generation, at) end
      assert.equal(1, (running(world)), at)
      again:release()
      return struck, again.id
    end

    --- The same of a destroy, which can be repeated.
    local function destroy(world, rt, id, nth)
      local struck, call, fine, result = spoilt(world, nth, fault, function() return rt:destroy(id) end)
      local at = call and ("call %d, %s %s"):format(nth + 1, call.method, call.path) or "no fault"
      if not fine then explained(result) end
      if not (fine and result) then assert(rt:destroy(id) ~= nil, at) end
      assert.equal(0, (select(2, running(world))), at)
      return struck
    end

    behind("an acquire makes one container or says why not, a destroy is done or can be repeated", function(world)
      local rt = world:open(options)
      local calls = not THOROUGH and fault.calls
      for i = 1, calls and #calls or 12 do
        local nth = calls and calls[i] or i - 1
        local struck, id = acquire(world, rt, nth)
        struck = destroy(world, rt, id, nth) or struck
        if not struck then break end -- a life has no more calls
        assert(calls or i < 12, "a life needs a dozen calls of the engine?")
      end
      -- A teardown that failed may be at its next try just now: then a shutdown says that it is to be repeated.
      assert.is_true(support.eventually(function() return (pcall(rt.shutdown, rt)) end, 30))
    end)
  end)
end

--- Describes them all for one engine.
---@param engine tests.Engine
return function(engine)
  for _, fault in ipairs(FAULTS) do
    if fault[engine.name] or THOROUGH then faults_on(engine, fault) end
  end
end
