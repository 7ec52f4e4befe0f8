--- What would disturb other suites: ends and restarts of engines. This suite has engines of its own (see tests/run).
local engines = require "tests.support.engines"
local support = require "tests.support"

for _, engine in ipairs(engines.all()) do
  describe(engine.name, function()
    it("keeps its containers over a restart, also a violent one", function()
      if engine.why then
        pending(engine.why)
        return
      end
      local _, made = engine:call("POST", "/containers/create", { Image = engines.image "busybox", Cmd = { "sleep", "600" } })
      finally(function() engine:call("DELETE", "/containers/" .. made.Id .. "?force=true&v=true") end)
      assert.equal(204, (engine:call("POST", "/containers/" .. made.Id .. "/start")))
      local _, before = engine:call("GET", "/containers/" .. made.Id .. "/json")
      for _, signal in ipairs { "KILL", "TERM" } do
        engines.tell("restart", engine.name, signal)
        local _, after = engine:call("GET", "/containers/" .. made.Id .. "/json")
        assert.is_true(after.State.Running)
        assert.equal(before.State.Pid, after.State.Pid)
      end
    end)

    it("leaves no network link of a container that ended, nor of its network", function()
      if engine.why then
        pending(engine.why)
        return
      end
      local function links() return (support.sh("tail -n +3 /proc/net/dev | cut -d: -f1 | sort")) end
      local before = links()
      assert.equal(201, (engine:call("POST", "/networks/create", { Name = "pdk-links", Driver = "bridge" })))
      local _, made = engine:call("POST", "/containers/create", { Image = engines.image "busybox", Cmd = { "sleep", "600" },
        HostConfig = { NetworkMode = "pdk-links" } })
      assert.equal(204, (engine:call("POST", "/containers/" .. made.Id .. "/start")))
      assert.not_equal(before, links())
      engine:call("POST", "/containers/" .. made.Id .. "/kill?signal=KILL") -- podman's clean-up takes the links away, not the service
      engine:call("DELETE", "/containers/" .. made.Id .. "?force=true&v=true")
      engine:call("DELETE", "/networks/pdk-links")
      support.eventually(function() return links() == before end, 20)
      assert.equal(before, links())
    end)

    it("does not answer while it is stopped or frozen", function()
      if engine.why then
        pending(engine.why)
        return
      end
      engines.tell("stop", engine.name, "KILL")
      assert.equal(0, (engine:call("GET", "/_ping")))
      engines.tell("start", engine.name)
      engines.tell("freeze", engine.name)
      assert.equal(0, (engine:call("GET", "/_ping", nil, { timeout = 0.3 })))
      engines.tell("thaw", engine.name)
      assert.equal(200, (engine:call("GET", "/_ping")))
    end)
  end)
end

describe("a set of engines", function()
  local folder
  local folders = {}                 -- of all that were started
  local function control(words)
    return support.sh(("PDK_ENGINES=%s python3 tests/support/engines.py %s"):format(folder, words))
  end
  --- What a set may leave on the host: processes that name its folder or have their home in it, mounts, control groups, the folder.
  local function remains()
    return (support.sh(([[
      pgrep -af %s/ | grep -v 'sh -c\|pgrep'
      grep -lsz '^HOME=%s/' /proc/[0-9]*/environ
      grep -F %s /proc/self/mountinfo
      find /sys/fs/cgroup -maxdepth 2 -name %s
      ls -d %s 2> /dev/null
    ]]):format(folder, folder, folder, folder:match("[^/]+$"), folder)))
  end
  --- A process on the host, outside the set's namespaces, as podman leaves one when it is called by hand as the set's user: its id.
  local function pause(home)
    return (support.sh(("HOME=%s/rootless/home setsid sleep 300 > /dev/null 2>&1 & echo $!"):format(home)):match("%d+"))
  end
  --- Starts one, with a container running on each engine.
  local function busy(owner)
    folder = support.sh("mktemp -du /tmp/pdk-engines.XXXXXX"):gsub("\n", "")
    folders[#folders + 1] = folder
    control("start " .. owner)
    for _, engine in ipairs(engines.all()) do
      local socket = { socket = folder .. "/" .. engine.name .. ".sock" }
      local _, made = engine:call("POST", "/containers/create", { Image = engines.image "busybox", Cmd = { "sleep", "600" } }, socket)
      assert.equal(204, (engine:call("POST", "/containers/" .. made.Id .. "/start", nil, socket)))
    end
    assert.truthy(remains():find("containerd", 1, true))
    local paused = "/" .. pause(folder) .. "/environ"
    assert.truthy(support.eventually(function() return remains():find(paused, 1, true) end, 20))
  end
  local function able()
    for _, engine in ipairs(engines.all()) do
      if engine.why then
        pending(engine.why)
        return false
      end
    end
    return true
  end

  after_each(function()
    for i, one in ipairs(folders) do
      folder, folders[i] = one, nil
      control "stop"
    end
  end)

  it("ends on demand, and leaves nothing", function()
    if not able() then return end
    -- Places that engines use wherever their root is told to be, and this network.
    local function places()
      return (support.sh("ls -dl --time-style=full-iso /etc/docker/key.json /run/docker /run/containerd /var/lib/containers " ..
        "/dev/shm/libpod_lock /run/netns /etc/cni/net.d 2> /dev/null; ls /sys/class/net"))
    end
    local before = places()
    busy(0)
    assert.equal(before, places())
    control "stop"
    assert.equal("", remains())
  end)

  it("ends with its owner, however that ends, and leaves nothing", function()
    if not able() then return end
    local owner = support.sh("setsid sleep 300 > /dev/null 2>&1 & echo $!"):match("%d+")
    busy(owner)
    support.sh("kill -KILL " .. owner)
    local left
    for _ = 1, 100 do
      left = remains()
      if left == "" then break end
      os.execute("sleep 0.1")
    end
    assert.equal("", left)
  end)

  it("whose keeper is killed ends too, and the next one sweeps up", function()
    if not able() then return end
    busy(0)
    local stale = folder
    support.sh("kill -KILL $(cat " .. folder .. "/keeper)")
    local gone = folder .. "gone"        -- a set whose folder is no more
    pause(gone)
    busy(0)
    for _, former in ipairs { stale, gone } do
      folder = former
      assert.equal("", remains())
    end
  end)
end)
