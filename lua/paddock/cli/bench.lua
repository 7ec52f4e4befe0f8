--- paddock bench: what acquiring, running and giving back cost, beside what the machine needs for the least of it.
---
--- The peers run in the same minutes on the same machine, one measurement of each between two of ours, since absolute times say
--- more about the machine than about paddock. What is compared is therefore a ratio of medians; the spread stands beside it.
local args = require "paddock.cli.args"
local native = require "paddock.cli.native"
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local world = require "paddock.cli.world"

local M = {
  name = "bench",
  usage = "bench [SCENARIO] [OPTIONS]",
  summary = "Measures acquire, exec and release on this machine, beside bwrap and a bare spawn.",
  most = 1,
  options = {
    { "--config,-c", "F", "a Lua file that returns the options of paddock.open" },
    { "--backend,-b", "B", "process, docker, provisioner, or path/to/engine.lua" },
    { "--workload,-w", "W", "only this one; may be given several times", list = true },
    { "--rounds,-n", "N", "rounds of each (default: 10; of sleep_2s: 2)" },
    { "--json", nil, "print one JSON document" },
    { "--verbose,-v", nil, "log lines (JSON) on stderr" },
  },
  notes = [[
Scenarios: warm_same_thread (the same sandbox each round), cold_unique_thread (a new one each round),
warm_miss_many_threads (a new one while 8 others are kept warm), idle_timeout (taken down for idleness after each round),
replica_pressure (six threads in turn with room for two).
Workloads: noop, python_small, fs_1mb, sleep_2s, state_reuse.
It works in a state directory of its own, and leaves nothing. Times are milliseconds; a row's figures are medians.]],
}

local WARM_OTHERS, PRESSED, ROOM = 8, 6, 2
local IDLE = 0.02 -- seconds

local WORKLOADS = {
  { name = "noop", command = "true" },
  { name = "python_small", command = "python3 -c 'print(sum(i * i for i in range(10000)))'" },
  { name = "fs_1mb", command = "head -c 1048576 /dev/zero > blob && cat blob > /dev/null && rm blob" },
  { name = "sleep_2s", command = "sleep 2", rounds = 2 },
  { name = "state_reuse", command = "if test -e state; then echo found; else echo kept > state; fi", finds = true },
}

--- The peers: what is started bare, and what bubblewrap alone needs for a sandbox that does nothing.
local PEERS = {
  { name = "spawn", argv = { "/bin/true" } },
  { name = "bwrap", argv = { "/usr/bin/bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "/bin/true" } },
}

-- ---- figures --------------------------------------------------------------------------------------------------

local function quantile(sorted, q)
  local at = 1 + (#sorted - 1) * q
  local low = math.floor(at)
  local high = math.min(low + 1, #sorted)
  return sorted[low] + (sorted[high] - sorted[low]) * (at - low)
end

--- The median of a list of seconds, and where its middle eight tenths lie: all in milliseconds.
local function summary(values)
  if #values == 0 then return nil end
  local sorted = table.move(values, 1, #values, 1, {})
  table.sort(sorted)
  return { median = quantile(sorted, 0.5) * 1000, p10 = quantile(sorted, 0.1) * 1000, p90 = quantile(sorted, 0.9) * 1000,
    rounds = #sorted }
end

-- ---- peers ----------------------------------------------------------------------------------------------------

---@class paddock.bench.Peer
---@field name string
---@field argv string[]
---@field seconds number[]
---@field missing string?   why it cannot be measured here

local function new_peers()
  local peers = {}
  for i, peer in ipairs(PEERS) do
    peers[i] = { name = peer.name, argv = peer.argv, seconds = {} }
    local ok, _, code = pcall(native.spawn, peer.argv) -- warms it up
    if not ok then
      peers[i].missing = "not there"
    elseif code ~= 0 then
      peers[i].missing = ("does not work here (status %d)"):format(code)
    end
  end
  return peers
end

local function measure_peers(peers)
  for _, peer in ipairs(peers) do
    if not peer.missing then peer.seconds[#peer.seconds + 1] = native.spawn(peer.argv) end
  end
end

-- ---- scenarios ------------------------------------------------------------------------------------------------

--- Runs fn and says how long it took.
local function timed(fn, ...)
  local now = require("paddock").now
  local start = now()
  local value = fn(...)
  return now() - start, value
end

--- One round: acquire, run, release; the three times, and the sandbox's id. Raises when the command did not do its work.
local function turn(rt, thread, workload)
  local acquire, box = timed(rt.acquire, rt, { user = "bench", thread = thread, timeout = 120 })
  local exec, result = timed(box.exec, box, workload.command, { timeout = 60 })
  local release = timed(box.release, box)
  if result.outcome ~= "completed" or result.exit_code ~= 0 then
    local why = (result.stderr or ""):match("[^\n]+") or result.outcome
    error({ failed = ("exit %s: %s"):format(result.exit_code, render.plain(why)) }, 0)
  end
  return { acquire = acquire, exec = exec, release = release, id = box.id, source = box.source,
    found = result.stdout == "found\n" }
end

local function take_down(rt, id)
  local done, why = rt:destroy(id)
  if not done then error({ failed = "could not be taken down: " .. tostring(why) }, 0) end
end

--- Each: options for the runtime, what is done before the rounds, and a round.
local SCENARIOS = {
  { name = "warm_same_thread", options = {},
    before = function(rt, workload) turn(rt, "same", workload) end,
    round = function(rt, workload) return turn(rt, "same", workload) end },
  { name = "cold_unique_thread", options = {},
    round = function(rt, workload, n)
      local t = turn(rt, "unique-" .. n, workload)
      t.teardown = timed(take_down, rt, t.id)
      return t
    end },
  { name = "warm_miss_many_threads", options = { replicas = 1000 },
    before = function(rt)
      for i = 1, WARM_OTHERS do turn(rt, "other-" .. i, WORKLOADS[1]) end
    end,
    round = function(rt, workload, n)
      local t = turn(rt, "miss-" .. n, workload)
      t.teardown = timed(take_down, rt, t.id)
      return t
    end },
  { name = "idle_timeout", options = { idle_timeout = IDLE },
    round = function(rt, workload)
      local t = turn(rt, "idler", workload)
      require("paddock.io").sleep(IDLE * 2)
      t.teardown = timed(rt.tick, rt)
      local left = rt:inspect(t.id)
      if left and (left.state == "active" or left.state == "warm") then error({ failed = "was not taken down when idle" }, 0) end
      return t
    end },
  { name = "replica_pressure", options = { replicas = ROOM },
    before = function(rt, workload)
      for i = 1, PRESSED do turn(rt, "pressed-" .. i, workload) end
    end,
    round = function(rt, workload, n) return turn(rt, "pressed-" .. (n - 1) % PRESSED + 1, workload) end },
}

--- A state directory for this run, removed with the runtime.
local function open(ctx, options, scenario)
  local fs = require("paddock.io").fs
  local config = world.config(options)
  for name, value in pairs(scenario.options) do config[name] = value end
  config.state_dir = fs.tmpname(os.getenv("TMPDIR") or "/tmp", "pdk-bench")
  config.threads = false -- nothing but the rounds runs
  local ok, why = fs.mkdir(config.state_dir)
  if not ok then status.fail(status.CONFIG, status.line(why)) end
  return world.open(ctx, options, config), config.state_dir
end

local function remove(directory)
  require("paddock.io").proc.run { argv = { "/bin/rm", "-rf", directory }, max = 4096, timeout = 60 }
end

local PARTS = { "acquire", "exec", "release", "teardown" }

local function measure(rt, scenario, workload, rounds, peers)
  local seen = { first = {}, total = {} }
  for _, name in ipairs(PARTS) do seen[name] = {} end
  local sources, found = {}, 0
  if scenario.before then scenario.before(rt, workload) end
  for n = 1, rounds do
    measure_peers(peers)
    local t = scenario.round(rt, workload, n)
    for _, name in ipairs(PARTS) do seen[name][#seen[name] + 1] = t[name] end
    seen.first[n], seen.total[n] = t.acquire + t.exec, t.acquire + t.exec + t.release
    sources[t.source] = (sources[t.source] or 0) + 1
    if t.found then found = found + 1 end
  end
  local row = { scenario = scenario.name, workload = workload.name, rounds = rounds, sources = sources,
    found = workload.finds and found or nil }
  for name, values in pairs(seen) do row[name] = summary(values) end
  return row
end

--- One scenario with one workload, in a runtime of its own: a row, or a row that says why there are no figures.
local function run_one(ctx, options, scenario, workload, peers)
  local rounds = math.tointeger(tonumber(options.rounds)) or workload.rounds or 10
  local rt, directory = open(ctx, options, scenario)
  local ok, row = pcall(measure, rt, scenario, workload, rounds, peers)
  native.calm()
  local down, why = pcall(rt.shutdown, rt)
  if not down then ctx.warn("something is left: " .. status.line(why)) else remove(directory) end
  if ok then return row end
  if native.ended_by() or type(row) ~= "table" then error(row, 0) end
  return { scenario = scenario.name, workload = workload.name, failed = row.failed or status.line(row) }
end

-- ---- the answer -----------------------------------------------------------------------------------------------

local function ratio(figures, peer)
  local base = not peer.missing and summary(peer.seconds)
  return base and figures and figures.median / base.median or nil
end

--- Ours in relation to the peers: the acquire and the first output to bwrap, the command to a bare spawn (only where that
--- is what the workload does).
local function compare(rows, peers)
  local spawn, bwrap = peers[1], peers[2]
  for _, row in ipairs(rows) do
    if not row.failed then
      local cold = row.sources.created ~= nil
      row.ratios = {
        acquire_to_bwrap = cold and ratio(row.acquire, bwrap) or nil,
        first_output_to_bwrap = cold and row.workload == "noop" and ratio(row.first, bwrap) or nil,
        exec_to_spawn = row.workload == "noop" and ratio(row.exec, spawn) or nil,
      }
    end
  end
end

local function ms(figures) return figures and ("%.2f"):format(figures.median) or nil end
local function times(value) return value and ("%.2f"):format(value) or nil end

local function table_of(rows)
  local lines = {}
  for i, row in ipairs(rows) do
    if row.failed then
      lines[i] = { row.scenario, row.workload, "failed: " .. row.failed }
    else
      local from = {}
      for _, source in ipairs(render.sorted_keys(row.sources)) do from[#from + 1] = source end
      lines[i] = { row.scenario, row.workload, table.concat(from, "+") .. (row.found and (", found %d"):format(row.found) or ""),
        ms(row.acquire), ms(row.exec), ms(row.release), ms(row.teardown), ms(row.total),
        ("%.2f..%.2f"):format(row.total.p10, row.total.p90), times(row.ratios.acquire_to_bwrap),
        times(row.ratios.first_output_to_bwrap), times(row.ratios.exec_to_spawn) }
    end
  end
  return render.columns({ "SCENARIO", "WORKLOAD", "SOURCE", "ACQUIRE", "EXEC", "RELEASE", "TEARDOWN", "TURN", "P10..P90",
    "ACQ/BWRAP", "FIRST/BWRAP", "EXEC/SPAWN" }, lines)
end

local function show(ctx, options, rows, peers)
  local shown = {}
  for i, peer in ipairs(peers) do
    local figures = summary(peer.seconds)
    shown[i] = { name = peer.name, command = table.concat(peer.argv, " "), missing = peer.missing,
      figures = figures }
  end
  if options.json then
    ctx.out(render.json { unit = "ms", peers = render.list(shown), rows = render.list(rows) })
    return
  end
  for _, peer in ipairs(shown) do
    if peer.figures then
      ctx.out(("peer %-6s %8.2f ms (%.2f..%.2f, %d rounds)  %s\n"):format(peer.name, peer.figures.median, peer.figures.p10,
        peer.figures.p90, peer.figures.rounds, peer.command))
    else
      ctx.out(("peer %-6s %s\n"):format(peer.name, peer.missing or "was not measured"))
    end
  end
  ctx.out("\n" .. table_of(rows) .. "\n")
end

local function pick(list, name, what)
  for _, one in ipairs(list) do
    if one.name == name then return { one } end
  end
  local names = {}
  for i, one in ipairs(list) do names[i] = one.name end
  args.usage_error(("bench: %s; they are: %s"):format(args.unknown(what, name, names), table.concat(names, ", ")))
end

function M.run(ctx, options, words)
  local rounds = options.rounds and math.tointeger(tonumber(options.rounds))
  if options.rounds and (not rounds or rounds < 1 or rounds > 100000) then
    args.usage_error("bench: --rounds wants a whole number from 1 to 100000, not " .. args.quoted(options.rounds))
  end
  local scenarios = words[1] and pick(SCENARIOS, words[1], "scenario") or SCENARIOS
  local workloads = options.workload and {} or WORKLOADS
  for _, name in ipairs(options.workload or {}) do workloads[#workloads + 1] = pick(WORKLOADS, name, "workload")[1] end
  local peers, rows, failed = new_peers(), {}, false
  for _, scenario in ipairs(scenarios) do
    for _, workload in ipairs(workloads) do
      local row = run_one(ctx, options, scenario, workload, peers)
      failed = failed or row.failed ~= nil
      rows[#rows + 1] = row
    end
  end
  compare(rows, peers)
  show(ctx, options, rows, peers)
  return failed and status.UNAVAILABLE or status.OK
end

return M
