--- A runtime process is stopped past its lease at one step, another takes the sandbox over, then the first goes on: no command of
--- it runs, and nothing that the other holds is stopped (DESIGN, section 4).
local sandboxes = require "tests.live.sandboxes"
local support = require "tests.support"
local sh = support.sh

local WHO = { user = "alice", thread = "t1" }

local WORKER = [[
  local paddock = require "paddock"
  local folder, step, phase = arg[1], arg[2], arg[3]
  local rt = paddock.open { state_dir = folder .. "/state", backend = arg[4], scope = "stopped", threads = false,
    health_ttl = 0, ownership = { type = "file", ttl = 1, renew_interval = 0.4 }, log = function() end,
    backend_options = { folder = folder, step = step } }
  local who = { user = "alice", thread = "t1" }
  local said = {}
  local function try(what, fn, ...)
    local ok, a = pcall(fn, ...)
    local text = type(a) ~= "boolean" and a ~= nil and (ok and (a.outcome or a.source) or a.kind .. "/" .. (a.reason or ""))
    said[#said + 1] = what .. "=" .. tostring(text or a)
    return ok and a or nil
  end
  local function arm() assert(io.open(folder .. "/armed", "w")):close() end
  local box
  if phase == "create" then arm() end
  box = try("acquire", rt.acquire, rt, who)
  if phase == "exec" then
    arm()
    try("exec", box.exec, box, "sleep 0.2; echo stale > /workspace/stale", { timeout = 10 })
  elseif phase == "write" then
    arm()
    try("write", box.write, box, "/workspace/stale", "stale")
  elseif phase == "destroy" then
    local id = box.id
    box:release()
    arm()
    try("destroy", rt.destroy, rt, id)
  end
  local out = assert(io.open(folder .. "/result.new", "w"))
  out:write(table.concat(said, " "))
  out:close()
  os.rename(folder .. "/result.new", folder .. "/result")
  rt:reset()
]]

-- step, phase; takeover = false: the first has the identity's turn, so nobody can take over, and nothing of the second's runs
local STEPS = {
  { "before create", "create", takeover = false },
  { "after create", "create", takeover = false },
  { "before ready", "create", takeover = false },
  { "before connect", "create", takeover = false },
  { "before client.fence", "create", takeover = false },
  { "after client.fence", "create", takeover = false },
  { "before client.exec", "exec", result = "exec=lost" },
  { "before client.write", "write", result = "write=lost" },
  { "before connect", "destroy", never = "destroy=true" },
  { "before client.doom", "destroy", never = "destroy=true" },
  { "after client.doom", "destroy" },
  { "before destroy", "destroy" },
  { "after destroy", "destroy" },
  { "before inspect", "destroy" },
  { "before finish", "destroy" },
}

describe("a runtime that is stopped past its lease", function()
  if not sandboxes.works then
    it("runs nothing and stops nothing afterwards [B045, B051]", function() pending(sandboxes.why_not) end)
    return
  end
  local lua = os.getenv "LUA" or "lua5.4"

  for _, case in ipairs(STEPS) do
    it(("%s, in %s: no command of it runs, nothing of the other's is stopped [B045, B051, B052]"):format(case[1], case[2]), function()
      local folder = sandboxes.folder()
      support.write_file(folder .. "/worker.lua", WORKER)
      local engine = sh("pwd"):gsub("%s", "") .. "/tests/live/stopping_engine.lua"
      local pid = sh(("ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 %s %s/worker.lua %s '%s' %s %s >%s/out 2>&1 & echo $!"):format(lua,
        folder, folder, case[1], case[2], engine, folder)):gsub("%s", "")
      local function state() return (sh("cut -d' ' -f3 /proc/" .. pid .. "/stat"):gsub("%s", "")) end
      local function there(name) return not sh("ls " .. folder .. "/" .. name):find "cannot" end
      assert.is_true(support.eventually(function() return there "stopped" and state() == "T" end, 20),
        "the worker did not get there: " .. sh("cat " .. folder .. "/out"))
      os.execute "sleep 1.3" -- past its lease

      local world = sandboxes.new()
      local rt = world:open { state_dir = folder .. "/state", scope = "stopped", threads = false, health_ttl = 0,
        ownership = { type = "file", ttl = 60, renew_interval = 20 } }
      local got, box = pcall(rt.acquire, rt, { user = WHO.user, thread = WHO.thread, timeout = case.takeover == false and 1 or 20 })
      if case.takeover == false then
        assert.is_false(got)
        assert.equal("timeout", box.kind)
      else
        assert.is_true(got, tostring(box))
        assert.equal("completed", box:exec("echo mine > /workspace/mine").outcome)
      end
      sh("kill -CONT " .. pid)
      assert.is_true(support.eventually(function() return there "result" end, 20),
        "the worker did not end: " .. sh("cat " .. folder .. "/out"))
      local result = support.read_file(folder .. "/result")
      if case.result then assert.matches(case.result, result, 1, true) end
      if case.never then assert.is_nil(result:find(case.never, 1, true), result) end
      if case.takeover ~= false then
        local r = box:exec "cat /workspace/mine; test -e /workspace/stale && echo stale"
        assert.equal("mine\n", r.stdout, result)
        assert.equal("completed", r.outcome)
        box:release()
        assert.is_true(rt:destroy(box.id))
      else -- it had the turn all the time: what it made is in order
        assert.equal("acquire=created", result)
        assert.is_true(support.eventually(function() return sh("ls /proc/" .. pid):find "cannot" ~= nil end, 10))
        box = rt:acquire(WHO)
        assert.equal("discovered", box.source)
        box:release()
        assert.is_true(rt:destroy(box.id))
      end
      rt:reconcile()
      rt:shutdown()
      assert.equal("", (sh("ls " .. folder .. "/state/sandboxes"):gsub("%s", "")))
      sh("rm -rf " .. folder)
      world:close()
    end)
  end
end)
