--- The soak: three runtime processes, one state directory, real sandboxes, and everything that goes wrong.
---
---     lua5.4 tests/live/soak.lua [--store file|redis] [--seconds N] [--seed N] [--keep]
---
--- Processes are killed with -9 and restarted, stopped beyond their leases and let go on, their wall clocks jump, the disk
--- under the state directory fills up; the command line works on the same sandboxes meanwhile. The load is in
--- soak_worker.lua, the checks of what its logs say in soak_check.lua. At the end nothing may be left: no process, mount,
--- socket, record, control group, quarantine record or lease.
---
--- soak_spec.lua loads this file and runs a short share of it. Both start at the top of the tree.
local check = dofile "tests/live/soak_check.lua"
local core = require "paddock.core"

local M = {}

local TTL, RENEW = 4, 1                   -- seconds
local now = core.now

-- ---- shell ------------------------------------------------------------------------------------------------------------

--- Output and status of a shell command.
local function sh(command, ...)
  local pipe <close> = assert(io.popen("( " .. command:format(...) .. "\n) 2>&1; printf '\\n%d' $?"))
  local output, status = pipe:read("a"):match("^(.*)\n(%d+)$")
  return output, math.tointeger(tonumber(status))
end

local function sleep(seconds) os.execute(("sleep %.3f"):format(seconds)) end

local function write(path, text)
  local file <close> = assert(io.open(path, "wb"))
  assert(file:write(text))
end

local function read(path)
  local file <close> = io.open(path, "rb")
  return file and file:read("a")
end

--- The state of a process as /proc says it ("R", "S", "T", "Z", ...), or nil when it is gone.
local function process_state(pid)
  local stat = read(("/proc/%d/stat"):format(pid))
  return stat and stat:match("^%d+ %b() (%a)")
end

-- ---- the world --------------------------------------------------------------------------------------------------------

---@class soak.World
---@field folder string       logs and configuration
---@field state string        the state directory
---@field slots table[]       { pid, generation of the slot, stopped_until, log }
---@field journal table[]     what this driver did: { at, what, ... }

local function world_of(options)
  local folder = sh("mktemp -d \"${TMPDIR:-/tmp}/soak.XXXXXX\""):gsub("\n", "")
  local w = {
    folder = folder, state = folder .. "/state", slots = {}, journal = {}, options = options, skipped = {},
    count = { kills = 0, stops = 0, long_stops = 0, fills = 0, wall_jumps = 0, commands = 0, store_stops = 0 }, program = {}, problems = {},
  }
  sh("mkdir -m 700 %s", w.state)
  w.root = sh("id -u") == "0\n"
  if w.root and select(2, sh("mount -t tmpfs -o size=3m,mode=700 soak %s", w.state)) == 0 then
    w.mounted = true
  else
    w.skipped[#w.skipped + 1] = "a disk that fills: only root can mount a small one"
  end
  return w
end

local function say(w, what, ...)
  w.journal[#w.journal + 1] = { at = now(), what, ... }
end

local IDENTITIES = 12

--- Who may acquire what: the first six identities belong to one slot each, so that nobody but a fault takes them away.
local function plan_of(w)
  local names, mine = {}, { {}, {}, {} }
  for i = 1, IDENTITIES do
    names[i] = ("user%d"):format(i)
    if i <= 6 then
      table.insert(mine[(i - 1) % 3 + 1], names[i])
    else
      for slot = 1, 3 do table.insert(mine[slot], names[i]) end
    end
  end
  w.names, w.mine, w.ids, w.name_of = names, mine, {}, {}
  local rt = require("paddock").open { state_dir = w.folder .. "/derive", ownership = { type = "memory" }, threads = false,
    log = function() end }
  for _, name in ipairs(names) do
    w.ids[name] = rt:explain({ user = name, thread = "soak" }).id
    w.name_of[w.ids[name]] = name
  end
  rt:shutdown()
  local function list(t)
    local out = {}
    for i, name in ipairs(t) do out[i] = ("%q"):format(name) end
    return "{ " .. table.concat(out, ", ") .. " }"
  end
  local ids = {}
  for name, id in pairs(w.ids) do ids[#ids + 1] = ("[%q] = %q"):format(name, id) end
  write(w.folder .. "/plan.lua", ("return { names = %s, mine = { %s, %s, %s }, ids = { %s } }\n"):format(list(names),
    list(mine[1]), list(mine[2]), list(mine[3]), table.concat(ids, ", ")))
end

local function configure(w)
  local store = w.options.store == "redis" and ('type = "redis", url = "unix://%s/redis.sock"'):format(w.folder) or 'type = "file"'
  write(w.folder .. "/config.lua", ([[return {
  state_dir = %q,
  ownership = { %s, ttl = %d, renew_interval = %d },
  idle_timeout = 2, reap_interval = 1, replicas = 7, health_ttl = 0.5, orphan_ttl = 30,
  ready_timeout = 15, discover_timeout = 3, stop_timeout = 15, command_timeout = 10,
  backend_options = { workspace_size = 1048576, tmp_size = 1048576, shm_size = 1048576 },
}
]]):format(w.state, store, TTL, RENEW))
end

--- Whether this paddock has the store at all: it is opened once.
local function usable(w)
  local ok, rt = pcall(function()
    local config = dofile(w.folder .. "/config.lua")
    config.threads, config.log = false, function() end
    return require("paddock").open(config)
  end)
  if not ok then return false, tostring(rt) end
  local answered, why = pcall(rt.lease, rt, "nothing")
  rt:shutdown()
  return answered, not answered and tostring(why) or nil
end

local function start_redis(w)
  local _, status = sh("command -v redis-server")
  if status ~= 0 then return "no redis-server is installed" end
  local out = sh("redis-server --port 0 --unixsocket %s/redis.sock --save '' --appendonly no --dir %s > %s/redis.log 2>&1 & echo $!",
    w.folder, w.folder, w.folder)
  w.redis = math.tointeger(tonumber(out:match("%d+")))
  for _ = 1, 100 do
    if sh("redis-cli -s %s/redis.sock ping", w.folder):find "PONG" then return nil end
    sleep(0.05)
  end
  return "redis-server does not start: " .. (read(w.folder .. "/redis.log") or ""):sub(-300)
end

-- ---- processes --------------------------------------------------------------------------------------------------------

local seeds = 0

local function start(w, slot)
  seeds = seeds + 1
  local wall = ("%s/wall.%d"):format(w.folder, slot)
  if not read(wall) then write(wall, ("<i8"):pack(0)) end
  local preload = w.preload and ("SOAK_WALL=%s LD_PRELOAD=%s"):format(wall, w.preload) or ""
  local seed = w.options.seed * 1000 + seeds
  -- The shell between us waits for it, so that what ended it is known, and leaves a core where there may be one.
  local name = ("%d.%d"):format(slot, seed)
  sh([[mkdir -p %s/cores; ( cd %s/cores; ulimit -c unlimited 2> /dev/null
    env %s %s %s/soak_worker.lua %s %d %d > %s/err.%s 2>&1 < /dev/null & echo $! > %s/pid.%s
    wait $!; echo $? > %s/status.%s ) > /dev/null 2>&1 &
    while ! [ -s %s/pid.%s ]; do sleep 0.01; done]], w.folder, w.folder, preload, w.lua, w.tests, w.folder,
    slot, seed, w.folder, name, w.folder, name, w.folder, name, w.folder, name)
  local pid = math.tointeger(tonumber(read(("%s/pid.%s"):format(w.folder, name)):match("%d+")))
  w.slots[slot] = { pid = pid, seed = seed, log = ("%s/log.%d.%d"):format(w.folder, slot, seed) }
  say(w, "start", slot, seed, pid)
end

local function kill(w, slot)
  local s = w.slots[slot]
  say(w, "kill", slot, s.seed)
  sh("kill -9 %d", s.pid)
  w.count.kills = w.count.kills + 1
  start(w, slot)
end

local function stop(w, slot)
  local s = w.slots[slot]
  if s.stopped_until then return end
  local seconds = math.random() < 0.6 and TTL * (1.1 + math.random()) or math.random() * 2
  say(w, "stop", slot, s.seed)
  sh("kill -STOP %d", s.pid)
  s.stopped_until = now() + seconds
  w.count.stops = w.count.stops + 1
  if seconds > TTL then w.count.long_stops = w.count.long_stops + 1 end
end

local function go_on(w, slot)
  local s = w.slots[slot]
  sh("kill -CONT %d", s.pid)
  s.stopped_until = nil
  say(w, "cont", slot, s.seed)
end

local function jump(w, slot)
  local seconds = math.random(-40, 40) * 86400 + math.random(0, 86399)
  local file <close> = assert(io.open(("%s/wall.%d"):format(w.folder, slot), "r+b")) -- in place: it is mapped
  file:write(("<i8"):pack(seconds * 1000000000))
  w.count.wall_jumps = w.count.wall_jumps + 1
end

local function fill(w)
  say(w, "fill")
  sh("dd if=/dev/zero of=%s/ballast bs=4k 2> /dev/null", w.state)
  w.full_until = now() + 1 + math.random() * 3
  w.count.fills = w.count.fills + 1
end

local function empty(w)
  sh("rm -f %s/ballast", w.state)
  w.full_until = nil
  say(w, "empty")
end

--- One command of the program, beside the runtimes.
local function command(w, ...)
  local words = table.concat({ ... }, " ")
  local before = now()
  local out, code = sh("timeout 60 paddock %s --config %s/config.lua 2>> %s/cli.err", words, w.folder, w.folder)
  w.count.commands = w.count.commands + 1
  local verb = words:match("^%a+")
  local key = ("%s %d"):format(verb, code)
  w.program[key] = (w.program[key] or 0) + 1
  if verb == "destroy" then say(w, "cli_destroy", before, words:match("destroy (%S+)"), code) end
  return out, code
end

local COMMANDS = { "gc", "ps --json", "ps", "quarantine ls", "destroy", "destroy" }

local function some_command(w)
  local words = COMMANDS[math.random(#COMMANDS)]
  if words == "destroy" then words = "destroy " .. w.ids[w.names[math.random(#w.names)]] end
  command(w, words)
end

--- A process that ended without being told to is a crash.
local function look_after(w, slot)
  local s = w.slots[slot]
  local state = process_state(s.pid)
  if state and state ~= "Z" then return end
  sleep(0.1)
  w.problems[#w.problems + 1] = ("the process of slot %d (seed %d) ended by itself, status %s: %s"):format(slot, s.seed,
    (read(("%s/status.%d.%d"):format(w.folder, slot, s.seed)) or "?"):gsub("\n", ""),
    (read(("%s/err.%d.%d"):format(w.folder, slot, s.seed)) or ""):sub(-400))
  say(w, "kill", slot, s.seed)
  start(w, slot)
end

--- Bad things, each with how often it happens in a minute.
local function trouble(w, until_when)
  local function may(per_minute, dt) return math.random() < per_minute * dt / 60 end
  local last = now()
  while now() < until_when do
    sleep(0.1)
    local dt = now() - last
    last = now()
    for slot = 1, 3 do
      local s = w.slots[slot]
      look_after(w, slot)
      if s.stopped_until and now() > s.stopped_until then go_on(w, slot) end
      if may(5, dt) then kill(w, slot) end
      if may(4, dt) then stop(w, slot) end
      if w.preload and may(6, dt) then jump(w, slot) end
    end
    if w.full_until and now() > w.full_until then empty(w) end
    if w.mounted and not w.full_until and may(4, dt) then fill(w) end
    if w.redis and may(4, dt) then
      say(w, "store_stop")
      sh("kill -STOP %d; sleep %.2f; kill -CONT %d", w.redis, 0.2 + math.random() * 1.5 * TTL, w.redis)
      w.count.store_stops = w.count.store_stops + 1
      say(w, "store_cont")
    end
    if may(20, dt) then some_command(w) end
  end
end

-- ---- the end ----------------------------------------------------------------------------------------------------------

local function let_end(w)
  if w.full_until then empty(w) end
  for slot = 1, 3 do
    if w.slots[slot].stopped_until then go_on(w, slot) end
  end
  write(w.folder .. "/stop", "")
  local deadline = now() + 60
  for slot = 1, 3 do
    local pid = w.slots[slot].pid
    while (process_state(pid) or "Z") ~= "Z" do
      if now() > deadline then
        w.problems[#w.problems + 1] = ("slot %d (seed %d) did not end within 60 s"):format(slot, w.slots[slot].seed)
        sh("kill -9 %d", pid)
        break
      end
      sleep(0.1)
    end
  end
end

--- gc until it finds nothing; what is still there after that is a leak.
local function clean(w)
  sleep(TTL + 0.5)
  for round = 1, 20 do
    local out, code = command(w, "gc")
    local quarantined = command(w, "quarantine ls")
    if code == 0 and out:find(" 0 left\n", 1, true) and quarantined:find "nothing is quarantined" then
      w.rounds = round
      return
    end
    w.last_gc = out .. quarantined
    sleep(1)
  end
  w.problems[#w.problems + 1] = "gc does not come to an end: " .. w.last_gc
end

--- Everything that a sandbox could leave, with where it was found.
local function leaks(w)
  local found = {}
  local function add(what, text)
    for line in text:gmatch("[^\n]+") do found[#found + 1] = what .. ": " .. line end
  end
  -- A guest keeps its record open; nobody else has any business in the state directory any longer.
  add("process", sh("find /proc/[0-9]*/fd -lname '%s/*' 2> /dev/null | sed 's|/fd/.*||' | sort -u | while read -r p; do "
    .. "echo \"$p $(tr '\\0' ' ' < $p/cmdline)\"; done", w.state))
  add("mount", sh("grep -F '%s' /proc/self/mountinfo | grep -v ' %s ' || true", w.folder, w.state))
  add("socket", sh("find %s/sockets -type s", w.state))
  add("record", sh("find %s/sandboxes %s/runtimes -type f", w.state, w.state))
  local generations = {}
  for _, name in ipairs(w.logs) do
    for generation in (read(name:gsub("/log%.", "/err.")) or ""):gmatch('"generation":"(%x+)"') do generations[generation] = true end
  end
  for path in sh("find /sys/fs/cgroup -type d 2> /dev/null"):gmatch("[^\n]+") do
    for part in path:gmatch("%x+") do
      if generations[part] then found[#found + 1] = "cgroup: " .. path end
    end
  end
  local config = dofile(w.folder .. "/config.lua")
  config.threads, config.log = false, function() end
  local rt = require("paddock").open(config)
  for _, name in ipairs(w.names) do
    local lease = rt:lease(w.ids[name])
    if lease then found[#found + 1] = ("lease: %s %s of %s"):format(lease.state, lease.owner, name) end
  end
  rt:shutdown()
  if w.redis then add("lease", sh("redis-cli -s %s/redis.sock --scan --pattern '*:lease:*'", w.folder)) end
  return found
end

local function close(w)
  for _, s in pairs(w.slots) do sh("kill -9 %d", s.pid) end
  if w.redis then sh("kill -9 %d", w.redis) end
  if w.mounted then sh("umount %s || umount -l %s", w.state, w.state) end
  if not w.options.keep then sh("rm -rf %s", w.folder) end
end

-- ---- the whole --------------------------------------------------------------------------------------------------------

---@class soak.Options
---@field store "file"|"redis"?
---@field seconds number?
---@field seed integer?
---@field keep boolean?     leave the logs

--- Runs it: a report { skipped = reason } or { problems = {}, leaks = {}, ... } (soak_check.lua).
---@param options soak.Options
---@return table report
function M.run(options)
  options.store, options.seconds, options.seed = options.store or "file", options.seconds or 60, options.seed or os.time() % 100000
  local output, status = sh("bwrap --unshare-all --ro-bind / / --proc /proc --dev /dev true")
  if status ~= 0 then return { skipped = "bubblewrap cannot make a sandbox here: " .. output:gsub("\n.*", "") } end
  local w = world_of(options)
  local _closing <close> = setmetatable({}, { __close = function() close(w) end })
  local top = sh("pwd"):gsub("\n", "")
  w.tests, w.lua = top .. "/tests/live", os.getenv "LUA" or "lua5.4"
  if w.lua:find("/", 2, true) and w.lua:sub(1, 1) ~= "/" then w.lua = top .. "/" .. w.lua end
  w.sanitized = (os.getenv "MODE" or "dev") ~= "dev"
  math.randomseed(options.seed)
  local why = options.store == "redis" and start_redis(w) or nil
  if why then return { skipped = why } end
  configure(w)
  local can
  can, why = usable(w)
  if not can then return { skipped = why } end
  plan_of(w)
  local preload = w.folder .. "/wallclock.so"
  if w.sanitized then
    w.skipped[#w.skipped + 1] = "wall clocks that jump: a sanitizer wants to be loaded first"
  elseif select(2, sh("${CC:-gcc} -O2 -shared -fPIC %s/wallclock.c -o %s", w.tests, preload)) == 0 then
    w.preload = preload
  else
    w.skipped[#w.skipped + 1] = "wall clocks that jump: no C compiler"
  end
  local begun = now()
  for slot = 1, 3 do start(w, slot) end
  trouble(w, begun + options.seconds)
  let_end(w)
  clean(w)
  w.logs = {}
  for name in sh("ls %s/log.*", w.folder):gmatch("[^\n]+") do w.logs[#w.logs + 1] = name end
  w.leaks = leaks(w)
  w.seconds = now() - begun
  w.ttl, w.renew = TTL, RENEW
  return check.report(w)
end

-- ---- as a program -----------------------------------------------------------------------------------------------------

local function main(words)
  local options, i = {}, 1
  while i <= #words do
    local name = words[i]:match("^%-%-(%a+)$")
    if name == "keep" then
      options.keep = true
    elseif name == "store" or name == "seconds" or name == "seed" then
      i = i + 1
      options[name] = name == "store" and words[i] or math.tointeger(tonumber(words[i]))
    end
    if not name or options[name] == nil then
      io.stderr:write("usage: soak.lua [--store file|redis] [--seconds N] [--seed N] [--keep]\n")
      return 64
    end
    i = i + 1
  end
  local code = 0
  for _, store in ipairs(options.store and { options.store } or { "file", "redis" }) do
    local report = M.run { store = store, seconds = options.seconds, seed = options.seed, keep = options.keep }
    io.stdout:write(check.text(store, report), "\n")
    io.stdout:flush()
    if not report.skipped and #report.problems + #report.leaks > 0 then code = 1 end
  end
  return code
end

if arg and arg[0] and arg[0]:find("soak%.lua$") then os.exit(main(arg)) end
return M
