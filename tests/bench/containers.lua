--- What paddock adds to a container engine: its own times beside the engine's, and its calls of the engine, counted.
---
---     python3 tests/support/engines.py run lua5.4 tests/bench/containers.lua [--engine docker|podman] [--plane P] [--rounds N] [--pause S]
---
--- Absolute times say more about the machine than about paddock, so each round has four sides:
---   paddock    acquire, exec, release, acquire again, destroy
---   alike      bare calls by curl for a container that is the same in all but name: what paddock sent for its own, with the same
---              program, and served by it before it counts as there
---   plain      bare calls for the least container: the image, a program that sleeps, the same network
---   counted    paddock through a proxy, which times each call of the engine: what is left of the step is paddock's own
--- The sides take turns in every order, so that each follows each of the others, and a pause before each making and each removing
--- keeps what an engine still does after its answer out of the next figure.
---
--- Times are milliseconds: the median, and in brackets where the middle eight tenths lie. `alike` tells what paddock costs,
--- `plain` what a sandbox of paddock's costs, its guest and mounts included, `own` is a step's time outside the engine's calls (the
--- proxy's hops are in it). The first two are differences of an engine's medians, which swing with the machine; the last is not.
package.path = "./?.lua;" .. package.path
local core = require "paddock.core"
local engines = require "tests.support.engines"
local json = require "cjson.safe"
local paddock = require "paddock"

local GUEST_FOLDER, AIO_PORT = "/.paddock", 8080
local LOOK = 0.0005 -- seconds between two looks whether the program of `alike` answers

local function quantile(values, q)
  local at = 1 + (#values - 1) * q
  local low = math.floor(at)
  return values[low] + ((values[low + 1] or values[low]) - values[low]) * (at - low)
end

--- Median and spread of a list of seconds, as milliseconds.
local function summary(list)
  table.sort(list)
  return quantile(list, 0.5) * 1e3, ("%6.1f (%.1f to %.1f)"):format(quantile(list, 0.5) * 1e3, quantile(list, 0.1) * 1e3,
    quantile(list, 0.9) * 1e3)
end

local function sh(command)
  local pipe <close> = assert(io.popen(command))
  return pipe:read("a")
end

local function folder()
  return (sh 'mktemp -d "${TMPDIR:-/tmp}/bench.XXXXXX"':gsub("\n", ""))
end

-- ---- the engine alone -------------------------------------------------------------------------------------------------

--- Requests by one curl, one after the other over one connection, as a client would: the seconds that each took (of curl's own
--- count, without its start), and the answers decoded.
---@param calls { [1]: string, [2]: string, [3]: table? }[]   method, path, body
local function timed(engine, calls)
  local words = {}
  for _, call in ipairs(calls) do
    local one = ("-sS -w '\\n@@ %%{time_total} %%{http_code}\\n' --max-time 60 --unix-socket %s -X %s 'http://engine%s'")
      :format(engine.socket, call[1], call[2])
    if call[3] then one = one .. " -H 'Content-Type: application/json' -d '" .. json.encode(call[3]):gsub("'", "'\\''") .. "'" end
    words[#words + 1] = one
  end
  local raw = sh("curl " .. table.concat(words, " --next "))
  local all, answers, i = 0, {}, 0
  for body, seconds, status in raw:gmatch("(.-)\n@@ ([%d.]+) (%d+)\n") do
    i = i + 1
    assert(tonumber(status) < 400, calls[i][1] .. " " .. calls[i][2] .. ": " .. body)
    all = all + tonumber(seconds)
    answers[i] = json.decode(body) or false
  end
  assert(i == #calls, "curl ended early: " .. raw)
  return all, table.unpack(answers)
end

--- Without empty tables: whether they were lists is not known any more.
local function without_empty(from)
  local out = {}
  for key, value in pairs(from) do
    if type(value) ~= "table" or next(value) ~= nil then out[key] = value end
  end
  return out
end

--- What paddock sent, as a container of nobody's: `place` takes the place of the folder that went with the sandbox.
local function alike_body(sent, place)
  local body = without_empty(sent)
  body.HostConfig = without_empty(sent.HostConfig)
  if body.Entrypoint then body.Cmd = json.empty_array end -- an engine would add the image's
  body.Labels = {}
  for name, value in pairs(sent.Labels) do body.Labels[name:gsub("^paddock", "bench")] = value end
  local mounts = {}
  for i, mount in ipairs(body.HostConfig.Mounts or {}) do
    mounts[i] = without_empty(mount)
    if mount.Target == GUEST_FOLDER then mounts[i].Source = place .. "/guest" end
    if mount.Type == "volume" then mounts[i].Source = nil end -- one without a name
  end
  if #mounts > 0 then body.HostConfig.Mounts = mounts end
  return body
end

local function plain_body(sent)
  return { Image = sent.Image, Entrypoint = { "sleep" }, Cmd = { "600" }, HostConfig = { NetworkMode = sent.HostConfig.NetworkMode } }
end

--- What the guest of `alike` reads at its start.
local function lay_settings(place, sent)
  os.execute(("rm -rf '%s/guest' && mkdir -m 777 '%s/guest'"):format(place, place))
  local file <close> = assert(io.open(place .. "/guest/settings", "w"))
  for _, line in ipairs { "generation=b", "secret=bench", "listen=" .. GUEST_FOLDER .. "/socket", "orphan_ttl=3600",
    "workspace=" .. sent.workspace, "home=" .. sent.workspace } do
    file:write(line, "\0")
  end
end

--- Whether something is there under that name; a socket cannot be opened, and says so.
local function exists(path)
  local file, _, code = io.open(path)
  if file then file:close() end
  return file ~= nil or code == 6 -- ENXIO
end

--- Seconds until the program of `alike` serves.
local function answered(engine, options, id, place)
  local started = core.now()
  local there
  if options.plane == "guest" then
    there = function() return exists(place .. "/guest/socket") end
  elseif options.plane == "aio" then
    local _, state = timed(engine, { { "GET", "/containers/" .. id .. "/json" } })
    local _, bound = next(state.NetworkSettings.Ports)
    local _, joined = next(state.NetworkSettings.Networks)
    local port = type(bound) == "table" and bound[1].HostPort
    local url = port and "http://127.0.0.1:" .. port or ("http://%s:%s"):format(joined.IPAddress, AIO_PORT)
    there = function() return os.execute("curl -s --noproxy '*' -m 2 -o /dev/null " .. url .. "/v1/sandbox") end
    started = core.now()
  else
    return 0
  end
  while not there() do
    assert(core.now() - started < 20, "the program of the container that is alike does not answer")
    paddock.sleep(LOOK)
  end
  return core.now() - started
end

local made = 0
local function bare_round(side, engine, options, times)
  made = made + 1
  local body, cold, network = side.body, 0, nil
  local name = ("%s-%d"):format(options.prefix, made)
  if side.lay then side.lay() end
  paddock.sleep(options.pause)
  if side.network then -- of its own, where paddock's has one
    cold, network = timed(engine, { { "POST", "/networks/create", side.network } })
    body.HostConfig.NetworkMode = network.Id
  end
  local seconds, answers = timed(engine, { { "POST", "/containers/create?name=" .. name, body },
    { "POST", "/containers/" .. name .. "/start" } })
  cold = cold + seconds
  local at = "/containers/" .. answers.Id
  if side.serves then cold = cold + answered(engine, options, answers.Id, side.place) end
  local exec, new = timed(engine, { { "POST", at .. "/exec", { AttachStdout = true, AttachStderr = true, Cmd = { "sh", "-c", "true" } } } })
  exec = exec + timed(engine, { { "POST", "/exec/" .. new.Id .. "/start", { Detach = false, Tty = false } },
    { "GET", "/exec/" .. new.Id .. "/json" } })
  paddock.sleep(options.pause)
  local calls = { { "DELETE", at .. "?force=true&v=true" } }
  if network then calls[2] = { "DELETE", "/networks/" .. network.Id } end
  local removed = timed(engine, calls)
  table.insert(times.cold, cold)
  table.insert(times.exec, exec)
  table.insert(times.teardown, removed)
end

-- ---- paddock ------------------------------------------------------------------------------------------------------------

--- One life. `step(name, seconds)` hears of each part of it.
local function paddock_round(rt, who, options, step)
  local function take(name, fn)
    local started = core.now()
    local result = fn()
    step(name, core.now() - started)
    return result
  end
  paddock.sleep(options.pause)
  local box = take("cold", function() return rt:acquire(who) end)
  take("exec", function() assert(box:exec("true").exit_code == 0) end)
  local id = box.id
  take("release", function() box:release() end)
  box = take("warm", function() return rt:acquire(who) end)
  assert(box.source == "warm")
  box:release()
  paddock.sleep(options.pause)
  step(nil)
  take("teardown", function() assert(rt:destroy(id)) end)
end

local function open(options, socket, state)
  return paddock.open { backend = "docker", state_dir = state, log = function() end,
    image = engines.image(options.plane == "aio" and "aio" or "busybox"), stop_timeout = options.plane == "guest" and 60 or 10,
    backend_options = { host = "unix://" .. socket, prefix = options.prefix, plane = options.plane, pull = "never" } }
end

--- A life through the proxy: for each step, its calls of the engine, and its seconds outside of them.
local function counted_round(rt, proxy, who, options)
  local steps, before = {}, proxy:count()
  paddock_round(rt, who, options, function(name, seconds)
    local calls = proxy:calls()
    local one = { own = seconds, calls = {} }
    for i = before + 1, #calls do
      if calls[i].path ~= "/events" then
        one.calls[#one.calls + 1] = calls[i]
        if name then one.own = one.own - calls[i].seconds end
      end
    end
    if name then steps[name] = one end
    before = #calls
  end)
  return steps
end

--- The calls as words, and what made the container and its network.
local function told(steps, options)
  local texts, sent, network = {}, nil, nil
  for name, one in pairs(steps) do
    local words = {}
    for i, call in ipairs(one.calls) do
      words[i] = call.method .. " " .. call.path:gsub("%x%x%x%x%x%x%x%x%x%x%x+", "ID"):gsub(options.prefix .. "%-ID", "NAME")
      if call.method == "POST" and call.path == "/containers/create" then sent = call.body end
      if call.method == "POST" and call.path == "/networks/create" then network = call.body end
    end
    texts[name] = ("%d%s"):format(#words, #words > 0 and ": " .. table.concat(words, ", ") or "")
  end
  return texts, sent, network
end

-- ---- together -------------------------------------------------------------------------------------------------------------

local STEPS = { "cold", "exec", "release", "warm", "teardown" }

local function no_times()
  local out = {}
  for _, step in ipairs(STEPS) do out[step] = {} end
  return out
end

local function sides_of(options, engine, state, place)
  local proxy = engine:proxy()
  local direct, watched = open(options, engine.socket, state), open(options, proxy.socket, state .. "/counted")
  local who = 0
  local function identity()
    who = who + 1
    return { user = options.prefix, thread = "t" .. who }
  end
  local first, sent, network = told(counted_round(watched, proxy, identity(), options), options)
  local texts = told(counted_round(watched, proxy, identity(), options), options)
  if network then
    network = { Name = network.Name .. "-bare", Driver = network.Driver, Internal = network.Internal, Options = network.Options }
  end
  local function bare(side)
    side.network = network
    return function(times) bare_round(side, engine, options, times) end
  end
  local sides = {
    paddock = function(times)
      paddock_round(direct, identity(), options, function(name, seconds) if name then table.insert(times[name], seconds) end end)
    end,
    alike = bare { body = alike_body(sent, place), place = place, serves = true,
      lay = options.plane == "guest" and function() lay_settings(place, { workspace = "/workspace" }) end or nil },
    plain = bare { body = plain_body(sent) },
    counted = function(times)
      for name, one in pairs(counted_round(watched, proxy, identity(), options)) do table.insert(times[name], one.own) end
    end,
  }
  local function close()
    direct:shutdown()
    watched:shutdown()
    proxy:close()
  end
  return sides, first, texts, close
end

-- Each one follows each of the others once in four rounds.
local ORDERS = { { "paddock", "alike", "counted", "plain" }, { "alike", "plain", "paddock", "counted" },
  { "plain", "counted", "alike", "paddock" }, { "counted", "paddock", "plain", "alike" } }

local function share(mine, its)
  return ("%+.1f ms, %+.0f %%"):format(mine - its, (mine - its) / its * 100)
end

local function measure(options, engine)
  local state, place = folder(), folder()
  options.prefix = "pdkbench" .. tostring({}):match("0x(%x+)"):sub(-6)
  os.execute(("mkdir -m 700 '%s/counted'"):format(state))
  local sides, first, texts, close = sides_of(options, engine, state, place)
  local times = {}
  for i = 0, options.rounds do
    if i <= 1 then -- what round 0 took is forgotten
      for name in pairs(sides) do times[name] = no_times() end
    end
    for _, name in ipairs(ORDERS[i % #ORDERS + 1]) do sides[name](times[name]) end
  end
  close()
  os.execute(("rm -rf '%s' '%s'"):format(state, place))
  print(("%s %s, plane %s, %d rounds"):format(engine.name, engine.version, options.plane, options.rounds))
  local row = "  %-9s %-25s %-25s %-25s %-18s %-18s %s"
  print((row):format("", "paddock", "alike", "plain", "more than alike", "more than plain", "own"))
  for _, step in ipairs(STEPS) do
    local mine, text = summary(times.paddock[step])
    local texts_of, shares = {}, {}
    for _, peer in ipairs { "alike", "plain" } do
      if #times[peer][step] > 0 then
        local its, its_text = summary(times[peer][step])
        texts_of[peer], shares[peer] = its_text, share(mine, its)
      end
    end
    local _, own = summary(times.counted[step])
    print((row):format(step, text, texts_of.alike or "", texts_of.plain or "", shares.alike or "", shares.plain or "", own))
  end
  print "  calls of the engine, once the image is known"
  for _, step in ipairs(STEPS) do print(("  %-9s %s"):format(step, texts[step])) end
  print("  of the first acquire: " .. first.cold)
end

local options, i = { plane = "guest", rounds = 20, pause = 0.1 }, 1
while arg[i] do
  local name = assert(arg[i]:match("^%-%-(%w+)$"), "unknown: " .. arg[i])
  options[name] = math.tointeger(tonumber(arg[i + 1])) or tonumber(arg[i + 1]) or arg[i + 1]
  i = i + 2
end
for _, engine in ipairs(engines.all()) do
  if options.engine == nil or options.engine == engine.name then
    if engine.why then
      print(engine.name .. ": " .. engine.why)
    else
      measure(options, engine)
    end
  end
end
