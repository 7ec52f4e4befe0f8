--- What paddock adds to a container engine: its own times beside the engine's, and its calls of the engine, counted.
---
---     python3 tests/support/engines.py run lua5.4 tests/bench/containers.lua [--engine docker|podman] [--plane P] [--rounds N]
---
--- A round of paddock (acquire, exec, release, acquire again, destroy) and a round of bare calls (create, start, exec, remove, by
--- curl, which times each call itself) take turns, since absolute times say more about the machine than about paddock. The bare
--- container is made from what paddock sent for its own, but for its program, which sleeps. Times are milliseconds: the
--- median, and in brackets where the middle eight tenths lie. paddock's own share: its median less the bare one's.
package.path = "./?.lua;" .. package.path
local core = require "paddock.core"
local engines = require "tests.support.engines"
local json = require "cjson.safe"
local paddock = require "paddock"

local function quantile(values, q)
  local at = 1 + (#values - 1) * q
  local low = math.floor(at)
  return values[low] + ((values[low + 1] or values[low]) - values[low]) * (at - low)
end

--- Median and spread of a list of seconds, as milliseconds.
local function summary(list)
  table.sort(list)
  return quantile(list, 0.5) * 1e3, ("%7.1f (%.1f to %.1f)"):format(quantile(list, 0.5) * 1e3, quantile(list, 0.1) * 1e3,
    quantile(list, 0.9) * 1e3)
end

local function folder()
  local pipe <close> = assert(io.popen 'mktemp -d "${TMPDIR:-/tmp}/bench.XXXXXX"')
  return pipe:read("l")
end

-- ---- the engine alone -------------------------------------------------------------------------------------------------

--- A request by curl: its own time in seconds, status, and the answer decoded.
local function timed(engine, method, path, body)
  local command = ("curl -sS -w '\\n%%{time_total} %%{http_code}' --max-time 60 --unix-socket %s -X %s 'http://engine%s'")
    :format(engine.socket, method, path)
  if body then command = command .. " -H 'Content-Type: application/json' -d '" .. json.encode(body):gsub("'", "'\\''") .. "'" end
  local pipe <close> = assert(io.popen(command))
  local raw, seconds, status = pipe:read("a"):match("^(.*)\n([%d.]+) (%d+)$")
  assert(tonumber(status) < 400, method .. " " .. path .. ": " .. raw)
  return tonumber(seconds), json.decode(raw)
end

--- Without empty tables: whether they were lists is not known any more.
local function without_empty(from)
  local out = {}
  for key, value in pairs(from) do
    if type(value) ~= "table" or next(value) ~= nil then out[key] = value end
  end
  return out
end

local function bare_body(sent, place)
  local body = without_empty(sent)
  body.HostConfig = without_empty(body.HostConfig)
  body.Labels, body.Entrypoint, body.Cmd = nil, { "sleep" }, { "600" }
  for _, mount in ipairs(body.HostConfig.Mounts or {}) do
    local file <close> = io.open(mount.Source)
    if mount.Type == "bind" and not file then mount.Source = place end
  end
  return body
end

local function bare_round(engine, body, network, times)
  local apart = 0 -- a network of its own, where paddock's has one
  if network then
    local seconds, made = timed(engine, "POST", "/networks/create", network)
    apart, body.HostConfig.NetworkMode = seconds, made.Id
  end
  local create, made = timed(engine, "POST", "/containers/create", body)
  local at = "/containers/" .. made.Id
  local start = timed(engine, "POST", at .. "/start")
  local exec, new = timed(engine, "POST", at .. "/exec", { AttachStdout = true, AttachStderr = true, Cmd = { "sh", "-c", "true" } })
  exec = exec + timed(engine, "POST", "/exec/" .. new.Id .. "/start", { Detach = false, Tty = false })
  exec = exec + timed(engine, "GET", "/exec/" .. new.Id .. "/json")
  local remove = timed(engine, "DELETE", at .. "?force=true&v=true")
  if network then remove = remove + timed(engine, "DELETE", "/networks/" .. body.HostConfig.NetworkMode) end
  table.insert(times.cold, apart + create + start)
  table.insert(times.exec, exec)
  table.insert(times.teardown, remove)
end

-- ---- paddock ------------------------------------------------------------------------------------------------------------

local function paddock_round(rt, who, times, step)
  local function take(name, fn)
    local started = core.now()
    local result = fn()
    if times then table.insert(times[name], core.now() - started) end
    if step then step(name) end
    return result
  end
  local box = take("cold", function() return rt:acquire(who) end)
  take("exec", function() assert(box:exec("true").exit_code == 0) end)
  local id = box.id
  take("release", function() box:release() end)
  box = take("warm", function() return rt:acquire(who) end)
  assert(box.source == "warm")
  box:release()
  if step then step(nil) end
  take("teardown", function() assert(rt:destroy(id)) end)
end

local function open(options, socket, state, prefix)
  return paddock.open { backend = "docker", state_dir = state, log = function() end,
    image = engines.image(options.plane == "aio" and "aio" or "busybox"), stop_timeout = options.plane == "guest" and 60 or 10,
    backend_options = { host = "unix://" .. socket, prefix = prefix, plane = options.plane, pull = "never" } }
end

--- The calls of the engine in each step of one life, and what was sent to make the container.
local function counted(options, engine, state, prefix)
  local proxy <close> = engine:proxy()
  local rt = open(options, proxy.socket, state, prefix)
  local counts, sent, network, names = {}, nil, nil, {}
  local before = proxy:count()
  paddock_round(rt, { user = prefix, thread = "counted" }, nil, function(name)
    local calls = proxy:calls()
    if name then counts[name] = #calls - before end
    for i = before + 1, #calls do
      local call = calls[i]
      local text = call.method .. " " .. call.path:gsub("%x%x%x%x%x%x%x%x%x%x%x+", "ID"):gsub(prefix .. "%-ID", "NAME")
      if name then names[name] = (names[name] and names[name] .. ", " or "") .. text end
      if call.method == "POST" and call.path == "/containers/create" then sent = call.body end
      if call.method == "POST" and call.path == "/networks/create" then network = call.body end
    end
    before = #calls
  end)
  rt:shutdown()
  return counts, names, sent, network
end

local function measure(options, engine)
  local state, place, prefix = folder(), folder(), "pdkbench" .. tostring({}):match("0x(%x+)"):sub(-6)
  local counts, names, sent, network = counted(options, engine, state, prefix)
  local body = bare_body(sent, place)
  if network then
    network = { Name = network.Name .. "-bare", Driver = network.Driver, Internal = network.Internal, Options = network.Options }
  end
  local rt = open(options, engine.socket, state, prefix)
  local ours = { cold = {}, exec = {}, release = {}, warm = {}, teardown = {} }
  local bare = { cold = {}, exec = {}, teardown = {} }
  for i = 0, options.rounds do -- the first of each is not counted
    if i == 1 then
      ours = { cold = {}, exec = {}, release = {}, warm = {}, teardown = {} }
      bare = { cold = {}, exec = {}, teardown = {} }
    end
    paddock_round(rt, { user = prefix, thread = "t" .. i }, ours)
    bare_round(engine, body, network, bare)
  end
  rt:shutdown()
  os.execute(("rm -rf '%s' '%s'"):format(state, place))
  print(("%s %s, plane %s, %d rounds"):format(engine.name, engine.version, options.plane, options.rounds))
  print(("  %-10s %-28s %-28s %-18s %s"):format("", "paddock", "the engine alone", "paddock's share", "calls of the engine"))
  for _, step in ipairs { "cold", "exec", "release", "warm", "teardown" } do
    local mine, text = summary(ours[step])
    local its, its_text
    if bare[step] then its, its_text = summary(bare[step]) end
    local share = its and ("%+.1f ms, %+.0f %%"):format(mine - its, (mine - its) / its * 100) or ""
    print(("  %-10s %-28s %-28s %-18s %d%s"):format(step, text, its_text or "", share, counts[step] or 0,
      names[step] and ": " .. names[step] or ""))
  end
end

local options, i = { plane = "guest", rounds = 20 }, 1
while arg[i] do
  local name = assert(arg[i]:match("^%-%-(%w+)$"), "unknown: " .. arg[i])
  options[name] = math.tointeger(tonumber(arg[i + 1])) or arg[i + 1]
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
