--- Every example runs: the hosts, the configurations, the policies, the engine, the demo; and the README says what is true.
local support = require "tests.support"

local can_sandbox, why_not = support.can_sandbox()

local function needs_sandbox()
  if not can_sandbox then pending(why_not) end
end

--- The output of a program that must succeed.
local function succeed(command)
  local output, status = support.sh(command)
  assert.equal(0, status, command .. " failed:\n" .. output)
  return output
end

local function out()
  return os.getenv("OUT") or "build"
end

local function lua()
  return out() == "build" and "lua5.4" or out() .. "/bin/lua"
end

describe("the hosts in examples", function()
  after_each(support.cleanup)

  it("in C runs 20 agents on threads", function()
    needs_sandbox()
    if out() ~= "build" then pending("the C host is built in mode dev") end
    local text = succeed("build/examples/agents")
    assert.truthy(text:find("20 of 20 agents found their notes again", 1, true), text)
  end)

  it("in C says what is wrong with its arguments", function()
    if out() ~= "build" then pending("the C host is built in mode dev") end
    local _, status = support.sh("build/examples/agents x 0")
    assert.equal(64, status)
    local text
    text, status = support.sh("build/examples/agents /no/such/config.lua")
    assert.equal(1, status)
    assert.truthy(text:find("/no/such/config.lua", 1, true), text)
  end)

  it("in Lua keeps conversations apart", function()
    needs_sandbox()
    local text = succeed(lua() .. " examples/host.lua")
    assert.truthy(text:find("bob    letters  created    no letter here", 1, true), text)
    assert.truthy(text:find("alice  letters  warm       Dear Bob", 1, true), text)
    assert.truthy(text:find("refused: invalid_argument", 1, true), text)
  end)

  it("in C runs a frame loop over an engine that hangs now and then", function()
    if out() ~= "build" then pending("the C host is built in mode dev") end
    local text = succeed("build/examples/frames examples/config/slow.lua 1.5 40")
    assert.truthy(text:find("without paddock +%d+ frames, longest"), text)
    assert.truthy(text:find("with paddock +%d+ frames, longest"), text)
    assert.truthy(text:find("%d+ turns, %d+ time limits, %d+ bytes of output, 0 failures"), text)
    local _, status = support.sh("build/examples/frames x 0")
    assert.equal(64, status)
  end)

  it("in Lua runs a frame loop with a scheduler", function()
    local text = succeed(lua() .. " examples/frames.lua examples/config/slow.lua 1.5 40")
    assert.truthy(text:find("40 agents, %d+ frames at 60 Hz"), text)
    assert.falsy(text:find("an agent failed", 1, true), text)
  end)

  it("include the demo", function()
    needs_sandbox()
    local text = succeed(lua() .. " examples/demo.lua")
    assert.truthy(text:find("All steps did what they should.", 1, true), text)
    assert.truthy(text:find("1960s 320.3 ppm", 1, true), text)
  end)
end)

describe("the configurations in examples", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  for _, name in ipairs { "process", "policies", "workdir", "slow", "docker", "podman", "own-image" } do
    it("are accepted: " .. name, function()
      local options = require("paddock.config").load_file("examples/config/" .. name .. ".lua")
      options.backend = world.backend
      local rt = world:open(options)
      assert.truthy(rt:capabilities())
    end)
  end
end)

describe("the engine in examples", function()
  after_each(support.cleanup)

  it("runs commands, keeps files, and leaves nothing", function()
    needs_sandbox()
    local root = support.tmpdir()
    local rt = require("paddock").open {
      backend = "examples/engine/workdir.lua", backend_options = { root = root }, state_dir = support.tmpdir(),
      log = function() end,
    }
    local box = rt:acquire { user = "alice", thread = "t1" }
    assert.equal("created", box.source)
    local r = box:exec("echo $GREETING > a.txt; cat a.txt; echo oops >&2; exit 3", { env = { GREETING = "hello" } })
    assert.same({ "completed", 3, "hello\n", "oops\n" }, { r.outcome, r.exit_code, r.stdout, r.stderr })
    box:write("/workspace/b.bin", "\0\1\255")
    assert.equal("\0\1\255", box:read("/workspace/b.bin"))
    assert.has_error(function() box:read("/workspace/none") end)
    assert.equal("a.txt", box:list("/workspace")[1].name)
    box:exec("ln -s /etc/passwd /workspace/link")
    assert.is_false((pcall(box.read, box, "/workspace/link"))) -- there is no /etc in there
    assert.equal("hard_timeout", box:exec("sleep 60", { timeout = 0.3 }).outcome)
    assert.equal("signalled", box:exec("kill -9 $$").outcome)
    local id = box.id
    box:release()
    local again = rt:acquire { user = "alice", thread = "t1" }
    assert.same({ id, "warm", "hello\n" }, { again.id, again.source, again:exec("cat a.txt").stdout })
    local other <close> = rt:acquire { user = "bob", thread = "t1" }
    assert.equal("", other:exec("ls").stdout)
    again:release()
    other:release()
    assert.is_true((rt:destroy(id)))
    rt:shutdown()
    assert.equal("", succeed("ls -A " .. root))
  end)

  it("refuses to start without its folder", function()
    local err = support.caught(require("paddock").open, {
      backend = "examples/engine/workdir.lua", state_dir = support.tmpdir(), log = function() end,
    })
    assert.equal("invalid_argument", err.kind)
    assert.truthy(err.message:find("workdir", 1, true), tostring(err))
  end)
end)

describe("the policies in examples", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  local function open(more, opts)
    opts = opts or {}
    opts.policies, opts.policy_options = "examples/policies", more or {}
    return world:open(opts)
  end

  --- The image that a user's new sandbox is made of.
  local function image_of(rt, user)
    local box <close> = rt:acquire { user = user, thread = "t" }
    return world:container(box.id).spec.image
  end

  it("give a user the same image at every turn, and a share of the users the one on trial", function()
    local on_trial, kept = 0, {}
    local rt = open({ stable = "tools-1", canary = "tools-2", canary_percent = 30 }, { replicas = 1000 })
    for i = 1, 100 do
      local user = "user-" .. i
      kept[user] = image_of(rt, user)
      if kept[user] == "tools-2" then on_trial = on_trial + 1 end
    end
    assert.truthy(on_trial > 15 and on_trial < 45, on_trial .. " of 100 users are on trial")
    local second = open({ stable = "tools-1", canary = "tools-2", canary_percent = 30 })
    for i = 1, 100, 10 do
      assert.equal(kept["user-" .. i], second:explain({ user = "user-" .. i, thread = "other" }).requirements.image)
    end
  end)

  it("replace a warm sandbox whose image is no longer the user's, and defer while it is held", function()
    local rt = open { stable = "tools-1" }
    -- The engine reports what each container is made of.
    world.on.create = function(next, backend, spec)
      local c = world:container(next(backend, spec).generation)
      c.attestation.image = spec.image
      return world:info(c)
    end
    local box = rt:acquire { user = "alice", thread = "t" }
    local id, generation = box.id, box.generation
    box:release()
    box = rt:acquire { user = "alice", thread = "t" }
    assert.equal(generation, box.generation)

    -- The image changes while the sandbox is held.
    rt:shutdown()
    world.containers[generation].running = true
    rt = open { stable = "tools-2" }
    box = rt:acquire { user = "alice", thread = "t" }
    assert.equal(id, box.id)
    assert.not_equal(generation, box.generation)
    assert.equal("tools-2", world:container(box.generation).spec.image)
    assert.equal(false, world.containers[generation].running)
  end)

  it("keep idle sandboxes for a shorter time at night", function()
    local rt = open({}, { idle_timeout = 600 })
    local id
    do
      local box <close> = rt:acquire { user = "alice", thread = "t" }
      id = box.id
    end
    -- To three at night on a Wednesday: the wall clock moves apart from the runtime's own.
    local date = os.date("*t")
    local night = os.time { year = date.year, month = date.month, day = date.day + (4 - date.wday) % 7, hour = 3 }
    rt:advance(0, night - os.time())
    rt:reload() -- asks again how long idle ones are kept
    rt:advance(119)
    rt:tick()
    assert.equal("warm", world:state_of(id, rt))
    rt:advance(2)
    rt:tick()
    assert.is_nil(world:state_of(id, rt))
    assert.equal(1, world:count("destroy", id))
  end)

  it("mount skills read-only, everybody's and the user's own, and nobody else's", function()
    local root = support.tmpdir()
    succeed(("mkdir -p %s/public %s/users/alice %s/users/bob"):format(root, root, root))
    local rt = open({ skills_root = root }, { mount_roots = { root } })
    local function mounts_of(user)
      local box <close> = rt:acquire { user = user, thread = "t" }
      local found = {}
      for _, mount in ipairs(world:container(box.id).spec.mounts) do
        assert.is_true(mount.read_only)
        found[#found + 1] = mount.source:sub(#root + 1) .. " -> " .. mount.target
      end
      table.sort(found)
      return found
    end
    assert.same({ "/public -> /mnt/skills/public", "/users/alice -> /mnt/skills/own" }, mounts_of("alice"))
    assert.same({ "/public -> /mnt/skills/public" }, mounts_of("../bob"))
    assert.same({ "/public -> /mnt/skills/public" }, mounts_of("carol"))
  end)
end)

describe("the README of the policies", function()
  after_each(support.cleanup)

  it("shows policies that load, and a configuration that is accepted", function()
    local text, shown = support.read_file("policies/README.md"), 0
    for code in text:gmatch("```lua\n(.-)```") do
      local name = code:find("idle_timeout = function", 1, true) and "reuse" or code:find("compose = function", 1, true) and "mounts"
        or code:find("decide = hosts", 1, true) and "network"
      if name then
        local dir = support.tmpdir()
        support.write_file(("%s/%s.lua"):format(dir, name), code)
        support.write_file(dir .. "/config.lua", ([[return { policies = %q, policy_options = { threads = "/srv/threads" },
          mount_roots = { "/srv/threads" }, state_dir = "%s/state" }]]):format(dir, dir))
        local told = succeed((". %s/env.sh && paddock policy check --config %s/config.lua 2>&1"):format(out(), dir))
        assert.truthy(told:find("ok: all loaded", 1, true), told)
        shown = shown + 1
      elseif code:find("provisioner_url", 1, true) then
        local config = require "paddock.config"
        assert.equal("provisioner", config.normalize((config.split(config.load_text(code, "deerflow.lua")))).backend)
        shown = shown + 1
      end
    end
    assert.equal(4, shown)
  end)
end)

describe("the README", function()
  local text = support.read_file("README.md")

  it("has a row for each option of paddock.open, with its default", function()
    local config = require "paddock.config"
    local defaults = config.normalize {}
    for _, name in ipairs(config.names()) do
      local default = text:match("\n| `" .. name .. "` | ([^|]*) |")
      assert.truthy(default, "the README does not have the option " .. name)
      if type(defaults[name]) == "number" then
        assert.equal(tostring(math.tointeger(defaults[name])), default, "the default of " .. name)
      end
    end
  end)

  it("shows code that runs", function()
    needs_sandbox()
    local code = text:match("```lua\n(local paddock = .-)```")
    local file = support.tmpdir() .. "/readme.lua"
    support.write_file(file, code)
    local output = succeed(lua() .. " " .. file)
    assert.truthy(output:find("completed\t0\tHELLO\n", 1, true), output)
    local policy = text:match("```lua\n(%-%- my%-policies/reuse.lua.-)```")
    assert.equal("table", type(assert(load(policy))()))
    support.cleanup()
  end)

  it("shows a whole C program, and how to compile it", function()
    local code = text:match("```c\n(.-)```")
    local command = text:match("\n    (cc host%.c [^\n]-) && %./host")
    local dir = support.tmpdir()
    support.write_file(dir .. "/host.c", code)
    succeed(("cc -std=c11 -Wall -Wextra -Werror -Icore -fsyntax-only %s/host.c"):format(dir))
    if out() == "build" and can_sandbox then -- else there is no such library to link with
      succeed((". build/env.sh && cd %s && %s"):format(dir, command))
      local run = (". build/env.sh && PADDOCK_LOG=%%s %s/host 2>&1"):format(dir)
      assert.equal("completed: hi\n", succeed(run:format(""))) -- and not a word on stderr
      local told = succeed(run:format("info"))
      assert.truthy(told:find('"event":"created"', 1, true) and told:find("completed: hi\n", 1, true), told)
      local refused, status = support.sh(run:format("loud"))
      assert.equal(0, status)
      assert.truthy(refused:find("invalid_argument: the environment variable PADDOCK_LOG must be one of off", 1, true), refused)
    end
    support.cleanup()
  end)

  it("says how to use what was installed elsewhere", function()
    if out() ~= "build" then pending("the mode dev is what is installed") end
    needs_sandbox()
    local dir = support.tmpdir()
    local prefix = dir .. "/opt"
    local sourced = text:match("`%. /opt/paddock(/[^`]+)` in each shell")
    local told = succeed("env -u MAKEFLAGS -u MAKELEVEL make -s -o build install PREFIX=" .. prefix .. " 2>&1")
    assert.truthy(told:find(". " .. prefix .. sourced, 1, true), told) -- `make install` says it as well
    support.write_file(dir .. "/host.c", text:match("```c\n(.-)```"))
    support.write_file(dir .. "/host.lua", text:match("```lua\n(local paddock = .-)```"))
    support.write_file(dir .. "/run", (". %s%s; cd %s; %s && ./host && lua5.4 host.lua && paddock exec -- echo from $(which paddock)\n")
      :format(prefix, sourced, dir, text:match("\n    (cc host%.c [^\n]-) && %./host")))
    told = succeed(("env -i PATH=/usr/bin:/bin USER=ann XDG_STATE_HOME=%s sh %s/run < /dev/null 2>&1"):format(dir, dir))
    assert.equal("completed: hi\ncompleted\t0\tHELLO\n\nfrom " .. prefix .. "/bin/paddock\n", told)
    support.cleanup()
  end)

  it("shows a configuration file that is accepted", function()
    local config = require "paddock.config"
    local options = config.load_text(text:match("```lua\n(%-%- my%-config%.lua.-)```"), "my-config.lua")
    assert.equal(600, config.normalize((config.split(options))).idle_timeout)
  end)

  --- A block of code that begins so.
  local function block(language, beginning)
    local at = assert(text:find("```" .. language .. "\n" .. beginning, 1, true), "the README has no block " .. beginning)
    return (text:match("```%a+\n(.-)```", at))
  end

  --- A folder with the files that the tutorial makes, and a command in it with an empty state.
  local function tutorial()
    local dir = support.tmpdir()
    succeed("mkdir " .. dir .. "/my-policies")
    local config = block("lua", "-- my-config.lua")
    support.write_file(dir .. "/my-config.lua", (config:gsub("return {", "return { policies = \"my-policies\",", 1)))
    support.write_file(dir .. "/my-policies/reuse.lua", block("lua", "-- my-policies/reuse.lua"))
    support.write_file(dir .. "/docker.lua", block("lua", "-- docker.lua"))
    return dir, function(command)
      return support.sh((". %s/env.sh && cd %s && export XDG_STATE_HOME=%s && %s 2>&1"):format(out(), dir, dir, command))
    end
  end

  --- The lines that show a command and begin so, without their remarks.
  local function commands(beginning)
    local found = {}
    for line in text:gmatch("\n    (paddock [^\n]+)") do
      if line:sub(1, #beginning) == beginning then found[#found + 1] = (line:gsub("%s%s+# .*$", "")) end
    end
    assert.is_true(#found > 0, beginning .. " is not in the README")
    return found
  end

  it("has its first screen within 25 lines, and no link that leads nowhere", function()
    local lines = 0
    for _ in text:sub(1, text:find("\n## ", 1, true)):gmatch("\n") do lines = lines + 1 end
    assert.is_true(lines <= 26, lines .. " lines stand before the first heading")
    for _, file in ipairs { "README.md", "examples/README.md", "policies/README.md" } do
      local body, anchors = support.read_file(file), {}
      for heading in ("\n" .. body):gmatch("\n#+ ([^\n]+)") do
        anchors["#" .. heading:lower():gsub("[^%w%- ]", ""):gsub(" ", "-")] = true
      end
      for target in body:gmatch("%]%(([^)%s]+)%)") do
        if target:sub(1, 1) == "#" then
          assert.is_true(anchors[target], file .. " links to " .. target)
        elseif not target:find("^https?:") then
          local path = (file:match(".*/") or "") .. target:gsub("#.*", "")
          assert.equal(0, select(2, support.sh("test -e " .. path)), file .. " links to " .. target)
        end
      end
    end
  end)

  it("lists commands and options that there are", function()
    local _, run = tutorial()
    local synopsis = text:match("## The command line\n\n(.-)\n\n")
    for line in synopsis:gmatch("[^\n]+") do
      local name = line:match("^    paddock (%l+)")
      local help, status = run("paddock " .. name .. " --help")
      assert.equal(0, status, help)
      for option in line:gmatch("%-%-?%l[%l%-]*") do
        assert.truthy(help:find("  " .. option .. "[, ]") or help:find(", " .. option .. " ", 1, true) or help:find(option, 1, true),
          name .. " has no option " .. option)
      end
    end
    support.cleanup()
  end)

  it("can be followed: configuration, policies, the pretended prompt", function()
    local _, run = tutorial()
    if can_sandbox then
      local environment = run("AGENT_TOKEN=t0ken " .. commands("paddock exec --config my-config.lua")[1])
      assert.truthy(environment:find("TOKEN=t0ken", 1, true), environment)
    end
    for _, command in ipairs(commands "paddock policy check my-policies") do
      local told, status = run(command)
      assert.equal(0, status, told)
      assert.truthy(told:find("reuse +my%-policies/reuse.lua +decide, idle_timeout"), told)
    end
    for _, command in ipairs(commands "paddock policy explain") do
      local told, status = run(command)
      assert.equal(0, status, told)
      assert.truthy(told:find("reuse +my%-policies/reuse.lua"), told)
    end
    local typed = {}
    for line in text:match("(Try them without any engine.-)\n\n"):gmatch("`([^`]+)`") do typed[#typed + 1] = line end
    local repl = table.remove(typed, 1)
    local told, status = run(("printf '%%s\\n' '%s' | %s"):format(table.concat(typed, "' '"), repl))
    assert.equal(0, status, told)
    assert.truthy(told:find("destroyed %x+ at=[%d.]+ generation=g1 reason=idle\n.*no sandboxes\n"), told)
    for _, command in ipairs(commands "paddock doctor --config docker.lua") do
      told = run("DOCKER_HOST=unix:///no/such.sock " .. command)
      assert.truthy(told:find("\nfail +engine +[^\n]*/no/such.sock"), told)
    end
    support.cleanup()
  end)

  it("shows operations and a scheduler in Lua that run as printed", function()
    needs_sandbox()
    local dir = support.tmpdir()
    local function run(code)
      local file = dir .. "/host.lua"
      support.write_file(file, ([[
        local paddock = require "paddock"
        local rt = paddock.open { backend = "process", state_dir = "%s/state" }
        local playing, frames, shown = true, 0, {}
        local function draw()
          frames = frames + 1
          os.execute "sleep 0.01"
          if frames > 100 then playing = false end
        end
        local function show(stream, bytes) shown[#shown + 1] = stream .. " " .. #bytes end
        %s
        rt:shutdown()
        print(frames .. " frames")]]):format(dir, code))
      return succeed(lua() .. " " .. file)
    end
    local told = run("local box = rt:acquire { user = 'alice' }\n" .. block("lua", "local op = box:exec_async")
      .. "print(result.outcome, shown[1])")
    assert.truthy(told:find("completed\tstderr %d+\n"), told) -- there is no Makefile
    told = run((block("lua", "local scheduler = paddock.scheduler()"):gsub("500", "3")) .. "print(#shown)")
    assert.truthy(told:find("^2\n2\n2\n3\n101 frames\n"), told)
    support.cleanup()
  end)

  it("shows a frame loop in C that runs as printed", function()
    if out() ~= "build" then pending("there is no such library to link with") end
    needs_sandbox()
    local callback, loop = block("c", "static void on_box"):match("^(.-\n}\n)(.*)$")
    local dir = support.tmpdir()
    support.write_file(dir .. "/loop.c", ([[
      #include <paddock.h>
      #include <stdio.h>
      #include <time.h>
      struct agent { pdk_box *box; };
      static int playing = 1, frames;
      static void report(struct agent *a, pdk_error *e) { (void)a; printf("%%s\n", e->message); pdk_error_clear(e); }
      static void draw(void)
      {
          nanosleep(&(struct timespec){ .tv_nsec = 10000000 }, NULL);
          if (++frames == 100) playing = 0;
      }
      %s
      int main(void)
      {
          pdk_error err = PDK_NO_ERROR;
          pdk_runtime *rt = pdk_open(NULL, &err);
          struct agent agent = { 0 }, *a = &agent;
          %s
          printf("%%s after %%d frames\n", op != NULL && agent.box != NULL ? "a box" : "none", frames);
          pdk_box_free(agent.box);
          pdk_shutdown(rt, NULL);
          pdk_free(rt);
          return 0;
      }]]):format(callback, loop))
    local told = succeed((". build/env.sh && cd %s && cc -std=gnu11 -Wall -Wextra -Werror loop.c -o loop "
      .. "$(pkg-config --cflags --libs paddock) && XDG_STATE_HOME=%s ./loop"):format(dir, dir))
    assert.equal("a box after 100 frames\n", told)
    support.cleanup()
  end)

  it("shows an implementation of the default instance that runs as printed", function()
    local file = support.tmpdir() .. "/default.lua"
    support.write_file(file, 'local paddock = require "paddock"\n' .. block("lua", "paddock.set_default(paddock.implement {")
      .. 'print(box.id, box:exec("hi").stdout)\n')
    assert.equal("sandbox-of-t1\thi\n", succeed(lua() .. " " .. file))
    support.cleanup()
  end)

  it("names every event that is no failure, what every kind of error means, and the commands' own options", function()
    local events = text:match("\n(Events are .-)\n\n")
    local source = support.sh("cat core/*.c")
    local count = 0
    for level, event in source:gmatch('pdk_emit%([^,]*, PDK_(%u+), "([%w_]+)"') do
      if level == "INFO" or event == "teardown" or event == "lost" then
        count = count + 1
        assert.truthy(events:find("`" .. event .. "`", 1, true), event .. " is not in the README")
      end
    end
    assert.is_true(count >= 12, "the core's events are no longer found: " .. count)
    for name in support.read_file("core/paddock.h"):gmatch("\n    X%(%u[%u_]*, ([%w_]+)%)%s*[\\\n]") do
      error(name .. " is a kind without a comment in core/paddock.h, which the README refers to")
    end
    local usage = text:match("\n    (paddock exec %[[^\n]*)")
    for _, option in ipairs { "--user U", "--thread T", "--config F", "--backend B", "--timeout S", "-e K=V", "--keep|--destroy" } do
      assert.truthy(usage:find(option, 1, true), option)
    end
  end)

  it("names every function that an engine and a client may have", function()
    local own = text:match("\n### An engine of your own\n(.-)\n### ")
    local source, count = support.read_file("core/engine.c") .. support.read_file("core/runtime.c"), 0
    for name in source:gmatch('pdk_iface_has%([^,]*, "([%w_]+)"') do
      count = count + 1
      assert.truthy(own:find("`" .. name .. "(self", 1, true), name .. " is not in the README")
    end
    assert.is_true(count > 3, "the core's questions are no longer found: " .. count)
    for _, name in ipairs { "create", "destroy", "inspect", "discover", "alive", "ready", "list", "finish", "connect", "probe", "watch",
      "exec", "open_session", "close_session", "read", "write", "fence", "doom", "close" } do
      assert.truthy(own:find("`" .. name .. "(self", 1, true), name .. " is not in the README")
    end
  end)

  it("names every kind of error and every function of a runtime and a box", function()
    for _, kind in ipairs(require("paddock").errors.kinds) do
      assert.truthy(text:find("`" .. kind .. "`", 1, true), kind .. " is not in the README")
    end
    local types = support.read_file("lua/paddock/init.lua")
    for class, called in pairs { Runtime = "rt:", Box = "box:" } do
      for name in types:match("%-%-%-@class paddock%." .. class .. "\n(.-)\n\n"):gmatch("@field ([%w_]+) fun%(") do
        assert.truthy(text:find("`" .. called .. name .. "[%( ][^`]*`"), called .. name .. " is not in the README")
      end
    end
  end)
end)
