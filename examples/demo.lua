--- `make demo`: the main job on real data, step by step, with the time of each step.
---
---     . build/env.sh && lua5.4 examples/demo.lua
---
--- Status 0 only when every step did what it says.
local paddock = require "paddock"

local here = arg[0]:match("^(.*)/[^/]*$") or "."
local DATA = here .. "/data/co2-mauna-loa.csv" -- yearly means at Mauna Loa, NOAA; see data/README.md

local function read_file(path)
  local file <close> = assert(io.open(path, "rb"))
  return file:read("a")
end

local function capture(command)
  local pipe <close> = assert(io.popen(command))
  return (pipe:read("a"):gsub("%s+$", ""))
end

--- What the machine itself takes: bubblewrap around /bin/true, the mean of ten, without any paddock.
local BWRAP = [[
i=0; s=$(date +%s%N)
while [ $i -lt 10 ]; do
  bwrap --unshare-all --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 \
    --proc /proc --dev /dev --tmpfs /tmp /bin/true 2>/dev/null || exit 1
  i=$((i + 1))
done
echo $(( ($(date +%s%N) - s) / 10000 ))]]

-- ---- the transcript ------------------------------------------------------------------------------------------

local step_number, failed = 0, 0
local times = {} -- in ms, of what the summary compares

--- Calls fn and keeps its time as `name`.
local function timed(name, fn, ...)
  local started = paddock.now()
  local result = fn(...)
  times[name] = (paddock.now() - started) * 1000
  return result
end

--- Runs one step and prints what it did, with its time.
local function step(title, fn)
  step_number = step_number + 1
  local started = paddock.now()
  local ok, text = pcall(fn)
  local ms = (paddock.now() - started) * 1000
  print(("\n%d. %-58s %9.2f ms"):format(step_number, title, ms))
  if not ok then failed = failed + 1 end
  for line in (ok and text or "FAILED: " .. tostring(text)):gmatch("[^\n]+") do print("     " .. line) end
end

local function expect(condition, message)
  if not condition then error(message, 0) end
end

--- A command that must succeed: its output.
local function must(box, command, opts)
  local r = box:exec(command, opts)
  expect(r.outcome == "completed" and r.exit_code == 0,
    ("`%s` ended as %s, exit code %s: %s"):format(command, r.outcome, tostring(r.exit_code), r.stderr))
  return r.stdout
end

-- ---- the job -------------------------------------------------------------------------------------------------

local ALICE, BOB = { user = "alice", thread = "climate" }, { user = "bob", thread = "climate" }

local SHELL = [[awk -F, 'NR > 1 { d = int($1 / 10) * 10; s[d] += $2; n[d]++ }
  END { for (d in s) printf "%ds %.1f ppm\n", d, s[d] / n[d] }' co2.csv | sort | tee decades.txt]]

local PYTHON = [[
import csv
rows = [(int(r["Year"]), float(r["Mean"])) for r in csv.DictReader(open("co2.csv"))]
rise = max((b[1] - a[1], b[0]) for a, b in zip(rows, rows[1:]))
mx = sum(y for y, _ in rows) / len(rows)
my = sum(m for _, m in rows) / len(rows)
slope = sum((y - mx) * (m - my) for y, m in rows) / sum((y - mx) ** 2 for y, _ in rows)
print(f"{len(rows)} years, {slope:.2f} ppm a year on average, steepest in {rise[1]}: +{rise[0]:.2f} ppm")
]]

print("paddock " .. paddock.version .. " on " .. capture("uname -sr"))
local bwrap_us = tonumber(capture(BWRAP))
if bwrap_us then
  print(("for comparison: bwrap ... /bin/true takes %.2f ms here (mean of 10)"):format(bwrap_us / 1000))
else
  print("bwrap cannot make a sandbox here; `paddock doctor` says what to do")
end

local state = capture("mktemp -d")
local rt, box
step("open a runtime (process backend, default policies)", function()
  rt = paddock.open { backend = "process", state_dir = state, threads = true, log = function() end }
  return "state in " .. state
end)
if not rt then os.exit(1) end

step("acquire a sandbox for alice, thread climate", function()
  box = timed("first acquire", rt.acquire, rt, ALICE)
  expect(box.source == "created", "it should have been created, not " .. box.source)
  return ("sandbox %s\ngeneration %s, %s"):format(box.id, tostring(box.generation), box.source)
end)
if not box then os.exit(1) end
local id, generation = box.id, box.generation

step("run its first command", function()
  local command = "echo \"hello from pid $$, user $(id -u), host $(hostname), $(ls /proc | grep -c '^[0-9]') processes\""
  return timed("its first command", must, box, command)
end)

step("put a real data file in", function()
  local bytes = read_file(DATA)
  box:write("/workspace/co2.csv", bytes)
  expect(box:read("/workspace/co2.csv") == bytes, "what was read back differs")
  return ("%d bytes to /workspace/co2.csv, and read back the same"):format(#bytes)
end)

step("a shell pipeline: means by decade", function()
  return must(box, SHELL)
end)

step("a Python script on the same file", function()
  if box:exec("python3 -c 'import csv'").exit_code ~= 0 then return "there is no python3 here: left out" end
  box:write("/workspace/trend.py", PYTHON)
  return must(box, "python3 trend.py")
end)

step("what a sandbox must not do", function()
  local out = {}
  for _, attempt in ipairs {
    { "write to the host's files", "touch /usr/x" },
    { "reach the network", "exec 3<>/dev/tcp/192.0.2.1/80", "bash" },
    { "see the host's processes", "[ $(ls /proc | grep -c '^[0-9]') -gt 20 ]" },
    { "outlive its time limit", "(setsid sleep 61 &) ; sleep 60" },
  } do
    local command = attempt[3] and ("%s -c '%s'"):format(attempt[3], attempt[2]) or attempt[2]
    local r = box:exec(command, { timeout = 0.5 })
    expect(r.exit_code ~= 0, "it could " .. attempt[1])
    out[#out + 1] = ("%-28s %s, exit code %d"):format(attempt[1], r.outcome, r.exit_code)
  end
  return table.concat(out, "\n")
end)

step("release: the sandbox is parked, warm", function()
  box:release()
  expect(rt:inspect(id).state == "warm", "its state is " .. tostring(rt:inspect(id).state))
  return "state warm, still running, no holder"
end)

step("acquire for alice again", function()
  box = timed("warm acquire", rt.acquire, rt, ALICE)
  expect(box.source == "warm", "it should have been reclaimed, not " .. box.source)
  expect(box.id == id and box.generation == generation, "it is another sandbox")
  return "the same sandbox and generation, reclaimed warm"
end)

step("her files are still there", function()
  return (must(box, "ls; head -n 2 decades.txt"):gsub("\n", "  "))
end)

step("acquire for bob: he sees none of it", function()
  local other <close> = timed("second cold acquire", rt.acquire, rt, BOB)
  timed("its first command ", must, other, "true")
  expect(other.id ~= id and other.generation ~= generation, "bob was given alice's sandbox")
  local r = other:exec("cat /workspace/co2.csv")
  expect(r.exit_code ~= 0, "bob can read alice's file")
  local found = must(other, "find / /workspace /tmp /dev -xdev -name 'co2.csv' 2>/dev/null | wc -l"):gsub("%s", "")
  expect(found == "0", "the file is somewhere in bob's sandbox")
  return ("sandbox %s\nhis /workspace is empty: %s"):format(other.id, r.stderr)
end)

step("the same short command, 20 times over", function()
  local all = {}
  for i = 1, 20 do
    timed("run `true` (median of 20)", must, box, "true")
    all[i] = times["run `true` (median of 20)"]
  end
  table.sort(all)
  times["run `true` (median of 20)"] = (all[10] + all[11]) / 2
  return ("median %.2f ms, the fastest %.2f, the slowest %.2f"):format((all[10] + all[11]) / 2, all[1], all[20])
end)

step("tear alice's sandbox down", function()
  box:release()
  local gone, why
  timed("teardown", function() gone, why = rt:destroy(id) end)
  expect(gone, "it is still there: " .. tostring(why))
  return "stopped, and confirmed absent"
end)

step("shut the runtime down (and bob's sandbox with it)", function()
  rt:shutdown()
  return "nothing is left"
end)

os.execute("rm -rf '" .. state .. "'")
if bwrap_us then
  print(("\n%-30s %9s   %s"):format("", "ms", "times bwrap ... /bin/true"))
  print(("%-30s %9.2f"):format("bwrap ... /bin/true", bwrap_us / 1000))
  for _, name in ipairs { "first acquire", "its first command", "second cold acquire", "its first command ", "warm acquire",
    "run `true` (median of 20)", "teardown" } do
    if times[name] then print(("%-30s %9.2f   %5.2f"):format(name, times[name], times[name] * 1000 / bwrap_us)) end
  end
end
print(failed == 0 and "\nAll steps did what they should." or ("\n%d steps failed."):format(failed))
os.exit(failed == 0 and 0 or 1)
