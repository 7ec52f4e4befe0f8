-- The process backend on its own: real bubblewrap, the real guest, and other processes that look at the same records.
-- The core is not in the picture; what it makes of this is tested in acquire_spec and commands_spec.
local core_path = assert(package.searchpath("paddock.core", package.cpath))
package.preload["paddock.io"] = package.preload["paddock.io"] or assert(package.loadlib(core_path, "luaopen_paddock_io"))
local io_ = require "paddock.io"
local errors = require "paddock.errors"
local process = require "paddock.backend.process"
local records = require "paddock.process.record"
local proc = io_.proc

local ROOT = proc.self().uid == 0
-- A sanitizer has to be in the interpreter, in that of other processes too; their leaks are not what is tested here, and
-- looking for them now and then ends a process that is about to exit.
local LUA = "ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 " .. (os.getenv("LUA") or "lua5.4")
local works, why_not = pcall(process.find_bwrap)
if works then works, why_not = pcall(process.find_guest, os.getenv("PADDOCK_GUEST")) end

local function sh(command)
  local pipe = assert(io.popen(command, "r"))
  local text = pipe:read("a")
  local _, _, code = pipe:close()
  return text, code
end

local function temporary() return (sh("mktemp -d /tmp/pdk-process-XXXXXX"):gsub("\n", "")) end

local function write_file(path, text)
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
end

--- An error of paddock that fn raises, of that kind; its message is the second result.
local function raised(kind, fn, ...)
  local done, err = pcall(fn, ...)
  assert.is_false(done, "nothing was raised")
  assert.is_true(errors.is(err), tostring(err))
  assert.equal(kind, err.kind, tostring(err))
  return err, err.message
end

--- Processes that run under the uid of a sandbox id (as root each id has its own).
local function processes_of(id)
  local uid = proc.sandbox_uid(id)
  return (sh(("ps -e -o uid= -o stat= -o args= | awk '$1 == %d && $2 !~ /Z/'"):format(uid)))
end

-- As root each id has a uid of its own: another run of these tests at the same time must not be taken for this one.
local ID = "box-" .. (io_.random(6):gsub(".", function(c) return ("%02x"):format(c:byte()) end))

local function files_in(folder) return (sh(("ls -A %s 2>/dev/null"):format(folder))) end

-- What another process does with the same state directory: a script that reads lines of commands and answers each.
local OTHER = [[
local core_path = assert(package.searchpath("paddock.core", package.cpath))
package.preload["paddock.io"] = assert(package.loadlib(core_path, "luaopen_paddock_io"))
local backend = require("paddock.backend.process").new({}, { state_dir = arg[1], runtime_id = "other", orphan_ttl = 60 })
local records = require "paddock.process.record"
local json = require("paddock.io").json
]]

describe("process backend", function()
  local dir, backend, made
  local function new(runtime, options)
    local with = { state_dir = dir .. "/state", runtime_id = "spec", orphan_ttl = 60, ready_timeout = 20, stop_timeout = 10,
                   guest_path = os.getenv("PADDOCK_GUEST") }
    for key, value in pairs(runtime or {}) do with[key] = value end
    return process.new(options, with)
  end
  local function create(spec)
    spec = spec or {}
    spec.sandbox_id = spec.sandbox_id or ID
    spec.identity = spec.identity or { user = "alice", thread = "t1" }
    local info = backend:create(spec)
    made[#made + 1] = info
    return info
  end
  local function connect(info, token)
    local client = backend:connect(info, { token = token or "1" })
    client:fence(token or "1")
    return client
  end
  local function run(info, command, more)
    local client = connect(info)
    local req = { plane = "bash", command = command, timeout = 20 }
    for key, value in pairs(more or {}) do req[key] = value end
    local result = client:exec(req)
    client:close()
    return result
  end
  local function remove(info)
    backend:destroy(info)
    backend:finish(info.sandbox_id, info)
  end
  --- Starts another process with `script`; it can use backend, records, json.
  local function other(script, wrapper)
    write_file(dir .. "/other.lua", OTHER .. ("local ID = %q\n"):format(ID) .. script)
    return assert(io.popen(("%s env " .. LUA .. " %s/other.lua %s/state 2>&1"):format(wrapper or "", dir, dir), "r"))
  end

  before_each(function()
    dir, made = temporary(), {}
    backend = new()
  end)
  after_each(function()
    for _, info in ipairs(made) do pcall(remove, info) end
    -- Nothing is left: no record, no socket, no process of that uid.
    local left = files_in(dir .. "/state/sandboxes") .. files_in(dir .. "/state/sockets")
    for _, info in ipairs(made) do
      if ROOT then left = left .. processes_of(info.sandbox_id) end
    end
    sh("rm -rf " .. dir)
    assert.equal("", left)
  end)

  describe("options", function()
    it("are checked: an unknown one is refused by name", function()
      local _, message = raised("invalid_argument", process.new, { imagse = "/x" }, { state_dir = dir })
      assert.is_truthy(message:find("backend_options.imagse", 1, true))
      raised("invalid_argument", process.new, { tmp_size = -1 }, { state_dir = dir })
      raised("invalid_argument", process.new, { tmp_size = 0 / 0 }, { state_dir = dir })
      raised("invalid_argument", process.new, { bwrap = "bwrap" }, { state_dir = dir })
    end)

    it("say what to install when there is no bubblewrap", function()
      local _, message = raised("backend_error", process.find_bwrap, "/nowhere/bwrap")
      assert.is_truthy(message:find("install", 1, true))
    end)

    it("refuse a setuid bubblewrap", function()
      write_file(dir .. "/bwrap", "#!/bin/sh\n")
      sh(("chmod 4755 %s/bwrap"):format(dir))
      local err = raised("backend_error", process.find_bwrap, dir .. "/bwrap")
      assert.equal("setuid_bwrap", err.reason)
    end)

    it("explain what to set when namespaces are not allowed, and leave nothing", function()
      write_file(dir .. "/bwrap", "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
      sh(("chmod 755 %s %s/bwrap"):format(dir, dir))
      local other_place = "/var/tmp/" .. ID          -- as root the child sees its own /tmp
      if ROOT then
        sh(("mkdir -p %s && cp %s/bwrap %s/bwrap && chmod -R 755 %s"):format(other_place, dir, other_place, other_place))
      end
      backend = new(nil, { bwrap = ROOT and other_place .. "/bwrap" or dir .. "/bwrap" })
      if not works then return pending(tostring(why_not)) end
      local err, message = raised("backend_error", create)
      sh("rm -rf " .. other_place)
      assert.equal("no_namespaces", err.reason)
      assert.is_truthy(message:find("max_user_namespaces", 1, true))
    end)
  end)

  if not works then
    it("runs sandboxes", function() pending(tostring(why_not)) end)
    return
  end

  describe("a sandbox", function()
    it("answers when it is made, and says what holds it", function()
      local info = create { labels = { a = "b" } }
      assert.equal(ID, info.sandbox_id)
      assert.is_truthy(info.generation:find("^%x+$"))
      assert.equal("0", info.token)
      assert.same({ user = "alice", thread = "t1" }, info.identity)
      assert.equal("none", info.attestation.network)
      assert.is_true(backend:ready(info, 1))
      assert.is_true(backend:alive(info))
      assert.equal(info.generation, backend:inspect(ID).generation)
      assert.equal(info.generation, backend:discover(ID).generation)
      assert.equal(info.generation, backend:list()[1].generation)
    end)

    it("runs commands as an unprivileged user without rights, in namespaces of its own", function()
      local info = create()
      local r = run(info, "id -u; id -un; grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; hostname; pwd")
      assert.equal("completed", r.outcome)
      assert.equal("1000\nagent\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\npaddock\n/workspace\n",
        r.stdout)
      assert.equal("lo\n", run(info, "ls /sys/class/net 2>/dev/null || tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '").stdout)
      assert.is_true(tonumber(run(info, "ls -d /proc/[0-9]* | wc -l").stdout) < 10)
    end)

    it("sees nothing of the host but its programs, and changes nothing of it", function()
      local info = create()
      local r = run(info, [[
        for f in /etc/shadow /root /home /etc/machine-id /etc/hostname /sys/firmware /boot /var/lib; do test -e $f && echo "sees $f"; done
        for f in / /usr /etc /dev /proc/sys/kernel /.paddock /proc/[a-z]*/; do
          chmod 755 $f 2>/dev/null
          touch $f/x 2>/dev/null && echo "writes $f"
        done
        cat /proc/1/environ /proc/1/cmdline 2>/dev/null | tr '\0' ' '
        unshare -U true 2>/dev/null && echo "makes namespaces"; mount -t tmpfs x /tmp 2>/dev/null && echo mounts
        head -c1 /proc/kcore 2>/dev/null | wc -c; echo x > /tmp/a && echo x > /dev/shm/a && echo x > /workspace/a && echo fine]])
      assert.equal("/.paddock/guest 0\nfine\n", r.stdout)
    end)

    it("has the given environment and nothing of the host's", function()
      local info = create { env = { FOO = "bar baz", EMPTY = "" } }
      local names = run(info, "env | sed 's/=.*//' | sort | tr '\\n' ' '").stdout
      assert.equal("EMPTY FOO HOME LANG PATH PWD SHLVL TERM USER _ ", names)
      assert.equal("bar baz", run(info, "printf %s \"$FOO\"").stdout)
    end)

    it("bounds what its temporary folders take", function()
      backend = new(nil, { tmp_size = 1 << 20, shm_size = 1 << 20, workspace_size = 1 << 20 })
      local info = create()
      for _, folder in ipairs { "/tmp", "/dev/shm", "/workspace" } do
        local r = run(info, ("head -c 2000000 /dev/zero > %s/big 2>/dev/null; stat -c %%s %s/big"):format(folder, folder))
        assert.equal(1 << 20, tonumber(r.stdout), folder)
      end
    end)

    it("shows neither paths of the host nor values in the process list [B213]", function()
      sh("mkdir -p " .. dir .. "/canary-path")
      sh("chmod 755 " .. dir)
      write_file(dir .. "/poll.sh", ("while [ ! -e %s/stop ]; do cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' "
        .. "| grep -a -o 'canar[y]-[a-z]*'; done"):format(dir))
      local poll = assert(io.popen("sh " .. dir .. "/poll.sh", "r"))
      local info = create { env = { SECRET = "canary-value" }, mounts = { { source = dir .. "/canary-path", target = "/mnt/c" } } }
      for _ = 1, 5 do run(info, "true", { env = { OTHER = "canary-exec" }, stdin = "canary-stdin" }) end
      write_file(dir .. "/stop", "")
      local seen = poll:read("a")
      poll:close()
      assert.equal("", seen)
    end)

    it("cannot change the program that it was started from [B219]", function()
      local info = create()
      local r = run(info, "for f in /.paddock/guest /proc/1/exe; do (echo x > $f) 2>/dev/null && echo changed; done; echo kept")
      assert.equal("kept\n", r.stdout)
    end)

    it("has the libraries and interpreters of the host", function()
      local info = create()
      local r = run(info, [[echo 3 1 2 | tr ' ' '\n' | sort | awk '{s+=$1} END {print s}'
        test ! -x /usr/bin/python3 || /usr/bin/python3 -c 'import json, threading; print(1)' || echo bad]])
      assert.is_truthy(r.stdout:find("^6\n"))
      assert.is_nil(r.stdout:find("bad"))
    end)

    it("threads, pipes and file calls work under the filter, again and again [B099]", function()
      local info = create()
      local r = run(info, [[for i in $(seq 60); do ls -la /usr/lib > /tmp/x & done; wait
        for i in $(seq 200); do stat /usr/bin/env | cat > /dev/null || exit 1; done; echo ok]])
      assert.equal("ok\n", r.stdout)
    end)
  end)

  describe("mounts", function()
    it("are made from sources that the sandbox's user could not reach itself [B016]", function()
      local closed = dir .. "/closed"
      sh(("mkdir -p %s/inner && echo data > %s/inner/f && chmod 755 %s/inner && chmod 700 %s"):format(closed, closed, closed, closed))
      local info = create { mounts = {
        { source = dir .. "/closed/inner", target = "/mnt/in", read_only = true },
        { source = dir .. "/closed/inner/f", target = "/data/file", read_only = true },
      } }
      local r = run(info, "cat /mnt/in/f /data/file; touch /mnt/in/x 2>&1")
      assert.equal("data\ndata\ntouch: cannot touch '/mnt/in/x': Read-only file system\n", r.stdout)
    end)

    it("that can be written are", function()
      sh(("mkdir %s/open && chmod 777 %s/open"):format(dir, dir))
      local info = create { mounts = { { source = dir .. "/open", target = "/mnt/rw", read_only = false } } }
      run(info, "echo hello > /mnt/rw/f")
      assert.equal("hello\n", sh("cat " .. dir .. "/open/f"))
      local client = connect(info)
      client:write("/mnt/rw/g", "bytes\0\255")
      assert.equal("bytes\0\255", client:read("/mnt/rw/g"))
      client:close()
    end)

    it("whose source is missing are an error that names it, and leave nothing", function()
      local _, message = raised("backend_error", create, { mounts = { { source = dir .. "/none", target = "/mnt/x" } } })
      assert.is_truthy(message:find(dir .. "/none", 1, true))
    end)

    it("over what is the sandbox's own, or by crooked paths, are refused", function()
      for _, target in ipairs { "/", "/proc", "/proc/x", "/sys", "/dev/null", "/.paddock/x", "/tmp", "x", "/a/../b", "/a\nb", "//a", "" } do
        raised("invalid_argument", create, { mounts = { { source = dir, target = target } } })
      end
    end)

    it("outside the roots are refused, also through a link that came late", function()
      sh(("mkdir -p %s/root %s/outside && ln -s %s/outside %s/root/link"):format(dir, dir, dir, dir))
      backend = new { mount_roots = { dir .. "/root" } }
      raised("invalid_argument", create, { mounts = { { source = dir .. "/root/link", target = "/mnt/x" } } })
      create { mounts = { { source = dir .. "/root", target = "/mnt/x" } } }
    end)
  end)

  describe("what it does not have", function()
    it("is refused: other networks, images without a folder of images", function()
      local err, message = raised("unsupported", create, { network = "host" })
      assert.is_nil(err.reason)
      assert.is_truthy(message:find('"host"', 1, true))
      raised("unsupported", create, { image = "debian" })
      raised("invalid_argument", create, { sandbox_id = "../x" })
    end)

    it("an image is a folder of root file systems", function()
      local busybox = sh("command -v busybox"):gsub("\n", "")
      if busybox == "" or sh("ldd " .. busybox .. " 2>&1"):find("=>", 1, true) then return pending("no static busybox here") end
      local small = dir .. "/images/small"
      sh(("mkdir -p %s/bin %s/etc && cp %s %s/bin/sh && chmod -R 755 %s/images"):format(small, small, busybox, small, dir))
      backend = new(nil, { images = dir .. "/images" })
      raised("invalid_argument", create, { image = "../small" })
      local info = create { image = "small" }
      assert.equal("small", info.attestation.image)
      local r = run(info, "echo /*; echo hi > /workspace/x; read y < /workspace/x; echo $y")
      assert.equal("/bin /dev /etc /proc /run /tmp /workspace\nhi\n", r.stdout)
    end)
  end)

  describe("limits", function()
    it("say which mechanism holds, and hold", function()
      local info = create { limits = { memory = 64 << 20, pids = 20, cpus = 0.5 } }
      local hold = info.attestation.limits
      assert.not_equal("none", hold.memory)
      assert.not_equal("none", hold.pids)
      local r = run(info, [[sh -c 'i=0; while [ $i -lt 40 ]; do sleep 5 & i=$((i+1)); done' 2>/dev/null
        set -- /proc/[0-9]*; echo $#]])
      assert.is_true((tonumber(r.stdout) or 1000) <= 22, r.stdout)
      backend:destroy(info)
      info = create { limits = { memory = 64 << 20 } }
      r = run(info, "head -c 200000000 /dev/zero | tail -c 199999999 > /dev/null; echo ${PIPESTATUS[1]}")
      assert.is_true(r.outcome == "oom" or r.stdout ~= "0\n", r.outcome .. r.stdout)
      local group = ("/sys/fs/cgroup/memory/paddock/%s"):format(info.generation)
      local there = hold.memory ~= "cgroup1" or proc.access(group)
      assert.is_true(there)
      remove(info)
      assert.is_false(proc.access(group))
    end)
  end)

  describe("ending", function()
    it("takes everything that ran inside, also what left its session", function()
      local info = create()
      run(info, "setsid sleep 300 & (setsid sh -c 'sleep 301 &' &); sleep 0.2")
      if ROOT then assert.is_truthy(processes_of(ID):find("sleep 301", 1, true)) end
      backend:destroy(info)
      assert.is_false(backend:alive(info))
      assert.is_nil(backend:inspect(ID, info))
      assert.is_nil(backend:discover(ID))
      if ROOT then assert.equal("", processes_of(ID)) end
      backend:finish(ID, info)
      backend:finish(ID, info)               -- a second time changes nothing
      assert.is_true(backend:destroy(info))     -- nor does this
      assert.same({}, backend:list())
    end)

    it("is exact: another generation of the same id is left alone", function()
      local first = create()
      local second = create()
      assert.not_equal(first.generation, second.generation)
      remove(first)
      assert.is_true(backend:alive(second))
      assert.equal(second.generation, backend:discover(ID).generation)
    end)

    it("does not clean up what still lives", function()
      local info = create()
      raised("backend_error", function() backend:finish(ID, info) end)
      assert.is_true(backend:alive(info))
    end)

    it("is seen when the guest dies by itself, and list tidies up once its owner is gone", function()
      local info = create()
      local record = backend.grips[info.generation].data
      sh("kill -9 " .. math.tointeger(record.pid))
      local deadline = io_.now() + 5
      repeat
        io_.sleep(0.01)
        local answered, lives = pcall(function() return backend:alive(info) end)
      until (answered and not lives) or io_.now() > deadline
      assert.is_false(backend:alive(info))
      assert.same({}, backend:list())
      assert.not_equal("", files_in(dir .. "/state/sandboxes"))   -- ours: teardown's last steps are ours too
      backend:disown(info)
      assert.same({}, backend:list())
      assert.equal("", files_in(dir .. "/state/sandboxes"))
    end)

    it("keeps the workspace where data_dir is set, for the next generation", function()
      backend = new { data_dir = dir .. "/data" }
      local info = create()
      assert.equal("data_dir", info.attestation.workspace)
      run(info, "echo kept > /workspace/f")
      remove(info)
      assert.equal("kept\n", run(create(), "cat /workspace/f").stdout)
    end)
  end)

  describe("another process", function()
    it("finds a sandbox by its record and uses it", function()
      local info = create()
      backend:disown(info)
      local out = other([[
        local found = backend:discover(ID)
        local client = backend:connect(found, { token = "5" })
        client:fence("5")
        print(found.generation, client:exec { plane = "bash", command = "echo from afar" }.stdout)
        client:close()]]):read("a")
      assert.equal(info.generation .. "\tfrom afar\n\n", out)
      local err = raised("lost", run, info, "true")               -- its token was smaller
      assert.equal("stale_token", err.reason)
      assert.equal("5", backend:inspect(ID).token)
    end)

    it("keeps a sandbox that it holds, and gives it up when it ends", function()
      local info = create()
      backend:disown(info)
      local pipe = other([[
        local client = backend:connect(backend:discover(ID), { token = "1" })
        print("held by", require("paddock.io").proc.self().pid)
        io.stdout:flush()
        while not io.open(arg[1] .. "/../go") do require("paddock.io").sleep(0.01) end
        os.exit(0, false)]])
      local pid = pipe:read("l"):match("%d+")
      assert.is_true(backend:inspect(ID).held)
      local err, message = raised("replacement_deferred", function() backend:destroy(info) end)
      assert.equal("holders", err.reason)
      assert.is_truthy(message:find(pid, 1, true))
      assert.is_true(backend:alive(info))
      write_file(dir .. "/go", "")
      pipe:close()
      assert.is_true(backend:destroy(info))
      assert.is_false(backend:alive(info))
    end)

    it("may end one that is owned but not held; then nobody else can begin to hold it", function()
      local info = create()
      local out = other([[
        local info = backend:inspect(ID)
        print(info.owner.runtime_id, backend:destroy(info), backend:alive(info))
        backend:finish(ID, info)]]):read("a")
      assert.equal("spec\ttrue\tfalse\n", out)
      assert.is_false(backend:alive(info))
      local err = raised("backend_error", run, info, "true")
      assert.equal("connect", err.reason)
    end)

    it("that is killed before its record was named leaves nothing: the guest ends, list removes the rest", function()
      local out = other([[
        local store = getmetatable(backend:_store()).__index
        function store:publish(record)
          print("generation", record.generation)
          io.stdout:flush()
          os.execute("kill -9 " .. require("paddock.io").proc.self().pid)
        end
        backend:create { sandbox_id = ID .. "-cut", identity = { user = "u" }, limits = { pids = 50 } }]]):read("a")
      local generation = out:match("generation%s+(%x+)")
      assert.is_truthy(generation, out)
      assert.is_truthy(files_in(dir .. "/state/sandboxes"):find(generation, 1, true))
      local deadline = io_.now() + 5
      repeat
        io_.sleep(0.01)
        assert.same({}, backend:list())
      until files_in(dir .. "/state/sandboxes") == "" or io_.now() > deadline
      assert.equal("", files_in(dir .. "/state/sandboxes") .. files_in(dir .. "/state/sockets"))
      if ROOT then assert.equal("", processes_of(ID .. "-cut")) end
      assert.is_false(proc.access("/sys/fs/cgroup/pids/paddock/" .. generation))
    end)

    it("that is killed after its record was named, but before its guest was told, leaves nothing either", function()
      other([[
        local store = getmetatable(backend:_store()).__index
        local publish = store.publish
        function store:publish(...)
          publish(self, ...)
          os.execute("kill -9 " .. require("paddock.io").proc.self().pid)
        end
        backend:create { sandbox_id = ID .. "-cut", identity = { user = "u" } }]]):read("a")
      local deadline = io_.now() + 5
      repeat
        io_.sleep(0.01)
        backend:list()
      until files_in(dir .. "/state/sandboxes") == "" or io_.now() > deadline
      assert.equal("", files_in(dir .. "/state/sandboxes") .. files_in(dir .. "/state/sockets"))
    end)

    it("that ends lets its sandbox go on: it is found and taken over", function()
      local pipe = other([[print(backend:create { sandbox_id = ID, identity = { user = "u", thread = "t" } }.generation)]])
      local out = pipe:read "l"
      pipe:close() -- waits for its end: as long as it lives, it is the owner
      local info = backend:discover(ID)
      made[#made + 1] = info
      assert.equal(out, info.generation)
      assert.equal("spec", info.owner.runtime_id)
      assert.equal("hi\n", run(info, "echo hi").stdout)
    end)

    it("works for a user who is not root", function()
      if not ROOT then return pending("this is not root: all other tests here show it") end
      local nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups"
      if select(2, sh(nobody .. " test -r " .. core_path)) ~= 0 then return pending("this tree cannot be read by other users") end
      sh(("chmod 755 %s && mkdir %s/state && chown -R 65534 %s/state"):format(dir, dir, dir))
      local out = other([[
        local info = backend:create { sandbox_id = ID, identity = { user = "u" }, limits = { pids = 30, memory = 1 << 28 },
          mounts = { { source = arg[1], target = "/mnt/state", read_only = true } } }
        local client = backend:connect(info, { token = "1" })
        client:fence("1")
        print(client:exec { plane = "bash", command = "id -u; ls /mnt/state" }.stdout, json.encode(info.attestation.limits))
        client:close()
        backend:destroy(info)
        backend:finish(ID, info)]], nobody):read("a")
      assert.equal('1000\nsandboxes\nsockets\n\t{"cpus":"none","memory":"rlimit","pids":"rlimit"}\n', out)
    end)
  end)

  describe("a record", function()
    --- A record of a sandbox that ended, changed by `edit`.
    local function leave_record(edit)
      local info = create()
      local record = backend.grips[info.generation].data
      backend:disown(info)
      sh("kill -9 " .. math.tointeger(record.pid))
      io_.sleep(0.1)
      local name = ("%s/state/sandboxes/%s.%s.json"):format(dir, ID, info.generation)
      edit(record)
      write_file(name, io_.json.encode(record))
      return info, name
    end

    it("whose pid was given to another process is no reason to signal that, nor to think it alive", function()
      local mine = proc.self()
      local info = leave_record(function(record) record.pid, record.start = mine.pid, mine.start - 1 end)
      assert.is_false(backend:alive(info))
      assert.is_true(backend:destroy(info))
      assert.is_nil(backend:discover(ID))
    end)

    it("of an earlier boot is absent, of another pid namespace unknown", function()
      local info = leave_record(function(record) record.boot = "another" end)
      assert.is_false(backend:alive(info))
      backend:finish(ID, info)
      local name
      info, name = leave_record(function(record) record.pid_ns = 1 end)
      local err, message = raised("backend_error", function() backend:alive(info) end)
      assert.equal("unknown_place", err.reason)
      assert.is_truthy(message:find(name, 1, true))
      raised("backend_error", function() backend:finish(ID, info) end)
      assert.equal(info.generation, backend:list()[1].generation)   -- shown, and kept
      os.remove(name)
      os.remove(("%s/state/sockets/%s"):format(dir, info.generation))
      info, name = leave_record(function(record) record.boot, record.machine = "another", "elsewhere" end)
      raised("backend_error", function() backend:alive(info) end)
      os.remove(name)
      os.remove(("%s/state/sockets/%s"):format(dir, info.generation))
    end)

    it("that is garbage is absent once its lock is free, and tidied up", function()
      local _, name = leave_record(function() end)
      write_file(name, "{ not json")
      assert.is_nil(backend:discover(ID))
      assert.same({}, backend:list())
      assert.equal("", files_in(dir .. "/state/sandboxes"))
    end)
  end)

  describe("the state directory", function()
    it("may have a path that is longer than a socket's may be", function()
      local long = dir .. "/" .. ("d"):rep(100) .. "/" .. ("e"):rep(100)
      backend = new { state_dir = long }
      local info = create()
      assert.equal("hi\n", run(info, "echo hi").stdout)
      remove(info)
      assert.equal("", files_in(long .. "/sandboxes") .. files_in(long .. "/sockets"))
    end)

    it("that cannot be made is an io_error that names it", function()
      write_file(dir .. "/file", "")
      backend = new { state_dir = dir .. "/file/state" }
      local _, message = raised("io_error", create)
      assert.is_truthy(message:find(dir .. "/file/state", 1, true))
    end)

    it("that is full gives an io_error, and nothing half-made", function()
      if not ROOT then return pending("needs root to mount a small file system") end
      sh(("mkdir %s/state"):format(dir))
      for inodes, what in pairs { [2] = "create the directory", [3] = "create the record", [4] = "make the socket" } do
        local out = other([[
          local done, err = pcall(backend.create, backend, { sandbox_id = ID .. "-full", identity = { user = "u" } })
          print(done, err.kind, err.reason, err.message)
          os.execute("ls -A " .. arg[1] .. "/sandboxes " .. arg[1] .. "/sockets | grep -v : | wc -w")]],
          ("unshare -m sh -c 'mount -t tmpfs -o nr_inodes=%d none %s/state && exec \"$@\"' --"):format(inodes, dir)):read("a")
        assert.is_truthy(out:find("false\tio_error\tENOSPC\tcannot " .. what .. " " .. dir .. "/state/s", 1, true), out)
        assert.is_truthy(out:find("\n0\n", 1, true), out)
        assert.equal("", processes_of(ID .. "-full"))
      end
    end)
  end)

  describe("a client", function()
    it("gets outcomes, exit codes, signals, both streams and raw bytes", function()
      local info = create()
      local r = run(info, "echo out; echo err >&2; exit 3")
      assert.same({ "completed", 3, "out\n", "err\n" }, { r.outcome, r.exit_code, r.stdout, r.stderr })
      r = run(info, "kill -TERM $$")
      assert.same({ "signalled", 143, 15 }, { r.outcome, r.exit_code, r.signal })
      r = run(info, "sleep 60", { timeout = 0.3 })
      assert.same({ "hard_timeout", 124 }, { r.outcome, r.exit_code })
      local bytes = string.pack("BBBB", 0, 255, 10, 128)
      assert.equal(bytes, run(info, "cat", { stdin = bytes }).stdout)
      assert.equal("/tmp\n", run(info, "pwd", { cwd = "/tmp" }).stdout)
    end)

    it("bounds output and says so", function()
      local info = create()
      local r = run(info, "head -c 5000000 /dev/zero")
      assert.is_true(r.truncated)
      assert.equal(1 << 20, #r.stdout)
    end)

    it("raises for what certainly did not run", function()
      local info = create()
      assert.equal("invalid_cwd", raised("invalid_argument", run, info, "true", { cwd = "/nowhere" }).reason)
      raised("invalid_argument", run, info, "true", { env = { ["A-B"] = "x" } })
      raised("invalid_argument", run, info, "a\0b")
      raised("invalid_argument", run, info, "true", { timeout = 0 / 0 })
      local client = connect(info)
      assert.equal("not_found", raised("io_error", client.read, client, "/workspace/none").reason)
      client:write("/workspace/a", "1")
      assert.equal("already_exists", raised("io_error", client.write, client, "/workspace/a", "2", { no_overwrite = true }).reason)
      assert.equal("1", client:read("/workspace/a"))
      assert.equal("a", client:list("/workspace")[1].name)
      client:close()
      raised("closed", client.exec, client, { plane = "bash", command = "true" })
    end)

    it("says unknown when the answer is lost after sending, and refuses when nobody listens", function()
      local info = create()
      local pid = math.tointeger(backend.grips[info.generation].data.pid)
      os.execute(("(sleep 0.3; kill -9 %d) &"):format(pid))
      local r = run(info, "sleep 20")
      assert.same({ "unknown", "response" }, { r.outcome, r.reason })
      backend:destroy(info)                       -- only waits: until then its socket may still take a connection
      assert.equal("connect", raised("backend_error", run, info, "true").reason)
    end)

    it("keeps a shell session's state, on the shell plane", function()
      local info = create()
      local client = connect(info)
      client:open_session("shell", "s1")
      client:exec { plane = "shell", session = "s1", command = "cd /tmp; X=5", timeout = 10 }
      assert.equal("/tmp 5\n", client:exec({ plane = "shell", session = "s1", command = "echo $PWD $X", timeout = 10 }).stdout)
      assert.is_true((client:close_session("shell", "s1")))
      local gone = { plane = "shell", session = "s1", command = "true" }
      assert.equal("no_session", raised("backend_error", client.exec, client, gone).reason)
      client:close()
    end)

    it("is refused after a doom, and a doom after somebody's fence", function()
      local info = create()
      local client = connect(info, "10")
      local judge = backend:connect(info, { token = "11", own = false })
      assert.equal("token_mismatch", raised("lost", judge.doom, judge, "9", "11").reason)
      assert.equal("completed", client:exec({ plane = "bash", command = "true" }).outcome)
      judge:doom("10", "11")
      assert.equal("doomed", raised("lost", client.exec, client, { plane = "bash", command = "true" }).reason)
      assert.is_true(backend:inspect(ID, info).doomed)
      assert.is_true(backend:discover(ID).doomed) -- told, so that it is ended before another one is made
      client:close()
    end)
  end)

  it("makes several at once from several processes in one state directory", function()
    local pipes = {}
    for i = 1, 3 do
      write_file(dir .. "/n" .. i .. ".lua", OTHER .. ([[
        local info = backend:create { sandbox_id = "many%d", identity = { user = "u" } }
        print(info.sandbox_id, #backend:list() > 0)
        backend:destroy(info)
        backend:finish(info.sandbox_id, info)]]):format(i))
      pipes[i] = assert(io.popen((LUA .. " %s/n%d.lua %s/state 2>&1"):format(dir, i, dir), "r"))
    end
    for i, pipe in ipairs(pipes) do
      assert.equal(("many%d\ttrue\n"):format(i), pipe:read("a"))
      pipe:close()
    end
  end)

  it("keeps the records' bytes apart: alive, held, owned", function()
    local info = create()
    local fd <close> = assert(proc.open(("%s/state/sandboxes/%s.%s.json"):format(dir, ID, info.generation), "w"))
    assert.is_true(fd:locked("w", records.ALIVE))
    assert.is_false(fd:locked("w", records.HELD))
    assert.is_true(fd:locked("w", records.OWNED))
    local client = connect(info)
    assert.is_true(fd:locked("w", records.HELD))
    assert.is_false(fd:locked("r", records.HELD))
    client:close()
    assert.is_false(fd:locked("w", records.HELD))
    backend:disown(info)
    assert.is_false(fd:locked("w", records.OWNED))
    assert.is_true(fd:locked("w", records.ALIVE))
  end)
end)
