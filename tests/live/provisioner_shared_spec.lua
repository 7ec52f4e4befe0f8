-- Several processes share one provisioner and one state directory, while its answers get lost, its Pods end slowly, and one of the
-- processes is killed. At the end nothing is left, and nobody met an error that says that something was done twice or wrongly.
local json = require "cjson"
local provisioner = require "tests.support.provisioner"
local support = require "tests.support"

local LUA = os.getenv "LUA" or "lua5.4"
local ROUTES = { "create", "get", "presence", "delete", "list", "plane" }
local FAULTS = {
  { drop = true }, { status = 500 }, { status = 502, acted = true }, { half = true }, { refuse = true }, { late = 1.3 }, { delay = 0.4 },
  { cut = 5 }, { status = 503 },
}

-- What a caller may be told: the service's own faults, and what is being taken down at that moment.
local ALLOWED = {
  ["acquire"] = { backend_error = true, cancelled = true, replacement_deferred = true, being_destroyed = true, outcome_unknown = true,
    timeout = true, lost = true, unready = true },
  ["exec"] = { lost = true, backend_error = true, being_destroyed = true },
  ["destroy"] = { backend_error = true, lost = true },
  ["shutdown"] = { backend_error = true },
}

local function check(text, totals)
  for count, what in text:gmatch("(%d+)\t([^\n]+)") do
    totals[what] = (totals[what] or 0) + tonumber(count)
    local op, kind = what:match("^(%l+) ([%l_]+) ")
    if op and ALLOWED[op] and not what:find("^exec %l+$") then assert.is_true(ALLOWED[op][kind] == true, what) end
  end
end

describe("a provisioner that several processes share", function()
  it("loses nothing and keeps nothing, with faults and a process that is killed [B126 B129 B131 B183]", function()
    local double = provisioner.start()
    local folder = support.tmpdir()
    double:tell { set = { grace = 0.3, slow_start = 0.1, latency = 0.005 } }
    local function start(number, seconds)
      os.execute((LUA .. " tests/live/provisioner_worker.lua %s %s/state %d %g > %s/out%d 2>&1 & echo $! > %s/pid%d"):format(double.url,
        folder, number, seconds, folder, number, folder, number))
    end
    local function running(number)
      return os.execute(("kill -0 $(cat %s/pid%d) 2>/dev/null"):format(folder, number)) == true
    end
    start(1, 8)
    start(2, 8)
    start(3, 60)                             -- this one will not see its end
    math.randomseed(5)
    local began = provisioner.io.now()
    while provisioner.io.now() - began < 7 do
      local faults = {}
      for i = 1, 3 do
        faults[i] = { route = ROUTES[math.random(#ROUTES)] }
        for k, v in pairs(FAULTS[math.random(#FAULTS)]) do faults[i][k] = v end
      end
      double:tell { faults = faults }
      support.sh "sleep 0.1"
      if running(3) and provisioner.io.now() - began > 3 then support.sh(("kill -9 $(cat %s/pid3)"):format(folder)) end
    end
    double:tell { faults = json.decode "[]", set = { latency = 0 } }
    start(4, 5)                              -- finds what the killed one has left
    assert.is_true(support.eventually(function() return not (running(1) or running(2) or running(4)) end, 60))
    local totals = {}
    for _, number in ipairs { 1, 2, 4 } do check(support.read_file(("%s/out%d"):format(folder, number)), totals) end
    assert.equal(3, totals.ended, json.encode(totals))
    assert.is_true((totals["acquired created"] or 0) > 3 and (totals["exec completed"] or 0) > 10, json.encode(totals))
    assert.same({}, double:seen().pods)
    double:stop()
    support.cleanup()
  end)
end)
