-- What a sandbox cannot reach, what it cannot change, and what a runtime does not show: the security cases that need the
-- whole composition.
local support = require "tests.support"
local cli = require "tests.support.cli"

local ALICE = { user = "alice", thread = "t1" }
local CANARY = "canary-7f3e9a"
local works, why_not = support.can_sandbox()

--- Everything in a value, as one text.
local function flat(value, out)
  out = out or {}
  if type(value) == "table" then
    for k, v in pairs(value) do
      flat(k, out)
      flat(v, out)
    end
  else
    out[#out + 1] = tostring(value)
  end
  return table.concat(out, "\n")
end

describe("environment values", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  it("are in no view, no event, no log record and no error of a runtime; their names may be [B215, B212]", function()
    local seen = {}
    local rt = world:open {
      environment = { TOKEN = CANARY .. "-configured" }, log = function(record) seen[#seen + 1] = record end,
      policies = { requirements = { name = "requirements.lua", source = ([[return { resolve = function(ctx)
        return { env = { POLICY_TOKEN = %q, ASKED = ctx.request.env and ctx.request.env.ASKED } } end }]]):format(CANARY .. "-policy") } },
    }
    rt:on("*", function(record) seen[#seen + 1] = record end)
    local request = { user = "alice", thread = "t1", requirements = { env = { ASKED = CANARY .. "-request" } } }
    local box = rt:acquire(request)
    assert.equal(CANARY .. "-policy", world:container(box.id).spec.env.POLICY_TOKEN) -- they did arrive
    assert.equal(CANARY .. "-configured", world:container(box.id).spec.env.TOKEN)
    box:exec("echo x", { env = { COMMAND_TOKEN = CANARY .. "-command" } })
    world:fail("client.exec", 1, { kind = "backend_error", message = "the engine is down" })
    seen[#seen + 1] = tostring(box:exec("echo y", { env = { COMMAND_TOKEN = CANARY .. "-command" } })) -- unknown: fenced now
    world:fail("create", 1, "no space left")
    seen[#seen + 1] = flat(support.caught(rt.acquire, rt, { user = "bob", thread = "t", requirements = request.requirements }))
    local explained = rt:explain(request)
    assert.same({ ASKED = "(hidden)", POLICY_TOKEN = "(hidden)", TOKEN = "(hidden)" }, explained.requirements.env)
    box:release()
    rt:reload()
    rt:dispatch()
    local views = { rt:list(), rt:inspect(box.id), rt:inspect(ALICE), rt:stats(), rt:capabilities(), explained, seen, tostring(box) }
    assert.equal(8, #views)
    for _, view in ipairs(views) do
      assert.is_nil(flat(view):find(CANARY, 1, true))
    end
    assert.is_true(#seen > 4)
  end)

  it("that are wrong are refused without being shown [B212]", function()
    local err = support.caught(world.open, world, { environment = { TOKEN = CANARY .. "\0" } })
    assert.equal("invalid_argument", err.kind)
    assert.matches("environment.TOKEN", err.message, 1, true)
    assert.is_nil(flat(err):find(CANARY, 1, true))
    local rt = world:open()
    local box = rt:acquire(ALICE)
    err = support.caught(box.exec, box, "echo x", { env = { TOKEN = CANARY .. "\0" } })
    assert.equal("invalid_argument", err.kind)
    assert.is_nil(flat(err):find(CANARY, 1, true))
  end)

  it("are shown neither by ps --json nor by policy explain, nor written to the state directory [B215]", function()
    local have, why = cli.have_program()
    if not (have and works) then return pending(why or why_not) end
    local dir = support.tmpdir()
    support.write_file(dir .. "/config.lua", ("return { state_dir = %q, environment = { TOKEN = %q } }"):format(dir .. "/state", CANARY))
    local _, out, err = cli.program({}, "exec", "--config", dir .. "/config.lua", "--user", "alice", "--keep", "--", "sh", "-c",
      "printf %s \"$TOKEN\"")
    assert.equal(CANARY, out, err)
    for _, words in ipairs { { "ps", "--json" }, { "ps" }, { "policy", "explain", "--user", "alice", "--thread", "t1", "--json" },
                             { "policy", "explain", "--user", "alice", "--thread", "t1" }, { "doctor", "--json" } } do
      table.insert(words, "--config")
      table.insert(words, dir .. "/config.lua")
      local _, text, errors = cli.program({}, table.unpack(words))
      assert.is_true(#text > 10, errors)
      assert.is_nil((text .. errors):find(CANARY, 1, true), words[1])
    end
    assert.equal("", (support.sh(("grep -rl %s %s/state"):format(CANARY, dir))))
    assert.equal(0, (cli.program({}, "destroy", "--all", "--config", dir .. "/config.lua")))
  end)
end)

describe("a process sandbox", function()
  if not works then
    it("is closed", function() pending(why_not) end)
    return
  end

  local rt
  local function open(opts)
    local options = { backend = "process", clock = "monotonic" }
    for k, v in pairs(opts or {}) do options[k] = v end
    rt = support.open(options)
    return rt:acquire(ALICE)
  end
  after_each(function()
    if rt then rt:shutdown() end
    rt = nil
    support.cleanup()
  end)

  --- A program on the host that listens on loopback (TCP and UDP) and in the abstract namespace, and notes what it gets.
  local LISTENER = [[
import os, select, socket, sys
tcp = socket.socket(); tcp.bind(("127.0.0.1", 0)); tcp.listen()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("127.0.0.1", tcp.getsockname()[1]))
local = socket.socket(socket.AF_UNIX); local.bind("\0pdk-%d" % os.getpid()); local.listen()
print(tcp.getsockname()[1], os.getpid(), flush=True)
while True:
    ready, _, _ = select.select([tcp, udp, local, 0], [], [])
    if 0 in ready: break
    print("got something", flush=True); os._exit(1)
print("got nothing")
]]
  local PROBE = [[
import socket, sys
port, pid = int(sys.argv[1]), sys.argv[2]
def no(name, fn):
    try: r = fn()
    except OSError: return
    print(name, "got through:", r)
def tcp(host, port):
    s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET); s.settimeout(1); s.connect((host, port)); return "connected"
def udp(host, port, wait=True):
    s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(0.5)
    s.sendto(b"\x12\x34\x01\0\0\1\0\0\0\0\0\0\6secret\7example\0\0\1\0\1", (host, port))
    return s.recv(10)
def abstract():
    s = socket.socket(socket.AF_UNIX); s.connect("\0pdk-" + pid); return "connected"
for name in ("secret.example", "localhost.localdomain.example", "dns.google"):
    no("resolver", lambda: socket.getaddrinfo(name, 80))
for host in ("1.1.1.1", "8.8.8.8", "192.0.2.1", "169.254.169.254", "2606:4700:4700::1111"):
    no("tcp " + host, lambda: tcp(host, 443)); no("udp " + host, lambda: udp(host, 53))
no("loopback tcp", lambda: tcp("127.0.0.1", port)); no("loopback udp", lambda: udp("127.0.0.1", port))
no("abstract", abstract)
no("packet", lambda: socket.socket(17, socket.SOCK_RAW)); no("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
no("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
no("broadcast", lambda: udp("255.255.255.255", 53))
print("done")
]]

  it("sends nothing out: not by the resolver, UDP, TCP, raw sockets, nor to what listens on the host [B211]", function()
    if select(2, support.sh("test -x /usr/bin/python3")) ~= 0 then return pending("no python3 here: install python3-minimal") end
    local dir = support.tmpdir()
    support.write_file(dir .. "/listen.py", LISTENER)
    support.sh(("mkfifo %s/in"):format(dir))
    local listener = assert(io.popen(("/usr/bin/python3 %s/listen.py < %s/in"):format(dir, dir), "r"))
    local stdin = assert(io.open(dir .. "/in", "w"))
    local port, pid = listener:read("l"):match("^(%d+) (%d+)$")
    local box = open()
    box:write("/workspace/probe.py", PROBE)
    local r = box:exec(("/usr/bin/python3 /workspace/probe.py %s %s"):format(port, pid), { timeout = 60 })
    assert.equal("done\n", r.stdout, r.stderr)
    -- The same by what agents use, and by a resolver that they bring themselves.
    r = box:exec(([[getent hosts secret.example && echo resolved
      (echo x > /dev/tcp/127.0.0.1/%s) 2>/dev/null && echo tcp
      (echo x > /dev/tcp/1.1.1.1/443) 2>/dev/null && echo far
      (echo x > /dev/udp/1.1.1.1/53) 2>/dev/null && echo udp
      command -v curl >/dev/null && curl -s -m 2 "https://1.1.1.1/dns-query?name=secret.example" && echo doh
      (echo nameserver 1.1.1.1 > /etc/resolv.conf) 2>/dev/null && echo resolv.conf
      true]]):format(port), { timeout = 60 })
    assert.equal("", r.stdout)
    stdin:close()
    assert.equal("got nothing", listener:read("l"))
    listener:close()
  end)

  it("cannot overwrite the guest, by none of the names that it has for it [B219]", function()
    local box = open()
    local guest = (support.sh("readlink -f \"$(command -v paddock-guest)\"")):gsub("\n", "")
    local before = support.read_file(guest)
    local r = box:exec([[
      for f in /proc/1/exe /proc/self/exe /.paddock/guest /proc/1/root/.paddock/guest /proc/1/fd/* /proc/1/map_files/*; do
        (printf X >> $f) 2>/dev/null && echo "wrote $f"
        (: > $f) 2>/dev/null && echo "cut $f"
      done
      rm -f /.paddock/guest 2>/dev/null; mv /bin/true /.paddock/guest 2>/dev/null; ln -sf /bin/true /.paddock/guest 2>/dev/null
      chmod 777 /.paddock/guest 2>/dev/null && echo chmod
      mount --bind /bin/true /.paddock/guest 2>/dev/null && echo mounted
      cat /proc/1/maps >/dev/null 2>&1 && echo maps
      (exec 3<> /proc/1/mem) 2>/dev/null && echo mem
      kill -9 1 2>/dev/null; echo done]], { timeout = 20 })
    -- /proc/self/exe is the shell's own program, of the host's /usr: read-only as well.
    assert.equal("done\n", r.stdout)
    assert.is_true(before == support.read_file(guest))
    assert.equal("alive\n", box:exec("echo alive").stdout)
  end)

  it("that fills its memory says oom, where a memory cgroup holds it, and the next command runs [B203]", function()
    local box = open { limits = { memory = 64 << 20 } }
    local how = rt:inspect(box.id).info.attestation.limits.memory
    local r = box:exec("head -c 200000000 /dev/zero | tail -c 199999999 > /dev/null; exit ${PIPESTATUS[1]}", { timeout = 60 })
    if how:find("cgroup", 1, true) then
      assert.equal("oom", r.outcome)
      assert.matches("[oom]", tostring(r), 1, true)
      assert.equal(137, r.exit_code)
    else -- an rlimit: programs are told by malloc, nothing is killed, and there is no evidence to go by
      assert.not_equal(0, r.exit_code)
    end
    r = box:exec("echo fine", { timeout = 20 })
    assert.same({ "completed", "fine\n" }, { r.outcome, r.stdout })
  end)
end)
