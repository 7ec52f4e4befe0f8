--- Podman's service of a user that is not root, used by that user: found by XDG_RUNTIME_DIR, looked at by doctor, both ways into a
--- container. Without a network: one would need /dev/net/tun, which is root's on many machines.
local engines = require "tests.support.engines"
local support = require "tests.support"
local sh = support.sh

local known = engines.state().rootless or {}
local why = engines.state().why or type(known.why) == "string" and known.why or not known.socket and "there is no rootless podman" or nil

describe("a rootless podman, for its own user", function()
  local place                        -- a folder of that user's

  --- The program as that user. Its own copy: the tree may lie where only its owner may enter.
  local function paddock(plane, words)
    support.write_file(place .. "/config.lua", ([[return {
      backend = "docker", image = %q, state_dir = %q, data_dir = %q, user = "alice", ready_timeout = 30,
      mounts = { { source = %q, target = "/given" } }, backend_options = { plane = %q, guest = %q },
    }]]):format(engines.image "busybox", place .. "/state", place .. "/data", place .. "/given", plane, place .. "/paddock-guest"))
    return sh(("cd / && setpriv --reuid %d --regid %d --clear-groups env -i PATH=/usr/bin:/bin HOME=%s XDG_RUNTIME_DIR=%s %s/paddock %s")
      :format(known.uid, known.uid, known.home, known.runtime, place, (words:gsub("@", "--config " .. place .. "/config.lua"))))
  end

  setup(function()
    if why then return end
    engines.tell("restart", "rootless")
    place = sh("mktemp -d /tmp/pdk-rootless.XXXXXX"):gsub("%s", "")
    local out, status = sh(("cd \"${OUT:-build}/bin\" && cp paddock paddock-guest %s && cd %s && mkdir -m 700 state data given"
      .. " && echo given > given/file && chmod 600 given/file && chown -R %d:%d ."):format(place, place, known.uid, known.uid))
    assert(status == 0, out)
  end)
  teardown(function()
    if place then sh("rm -rf " .. place) end
    if not why then engines.tell("stop", "rootless") end
  end)

  it("is found by XDG_RUNTIME_DIR, and doctor says what it is and what it lacks", function()
    if why then return pending(why) end
    local out, status = paddock("guest", "doctor @")
    assert.equal(0, status, out)
    assert.matches("Podman [%d.]+, rootless, at unix://" .. known.socket:gsub("%p", "%%%0"), out)
    assert.matches("image there", out, 1, true)
    -- Podman itself says that it keeps limits, whatever its control groups are.
    local _, facts = engines.all "podman"[1]:call("GET", "/info", nil, { socket = known.socket })
    assert.equal(facts.CgroupVersion == "1", out:find("limits are not kept", 1, true) ~= nil)
  end)

  it("is found without a process that stays, or a store of the user's, where the service is another's", function()
    if why then return pending(why) end
    local home = place .. "/home"
    sh(("install -d -m 700 -o %d -g %d %s %s/run"):format(known.uid, known.uid, home, home))
    local out = sh(("cd / && setpriv --reuid %d --regid %d --clear-groups env -i PATH=/usr/bin:/bin HOME=%s XDG_RUNTIME_DIR=%s/run"
      .. " DOCKER_HOST=unix://%s %s/paddock doctor --config %s/config.lua"):format(known.uid, known.uid, home, home, known.socket, place,
      place))
    assert.matches("rootless, at", out)
    assert.equal("", (sh(("grep -lsz '^HOME=%s' /proc/[0-9]*/environ; find %s -type f"):format(home, home))))
  end)

  for _, plane in ipairs { "guest", "exec" } do
    it("makes a sandbox, runs in it over plane " .. plane .. ", and takes it down", function()
      if why then return pending(why) end
      local out, status = paddock(plane, "exec @ -- sh -c 'id -u; cat /given/file; echo made > /workspace/made; exit 3'")
      assert.equal("0\ngiven\n", out)
      assert.equal(3, status)
      -- Root inside is this user outside: what was written is the user's to read.
      assert.equal(("%d made\n"):format(known.uid), sh(("cd %s/data && set -- */made && stat -c %%u $1 | tr '\\n' ' ' && cat $1 && rm -r *")
        :format(place)))
      if plane == "guest" then         -- a sandbox that was left is found again by its label
        out, status = paddock(plane, "exec @ --keep -- true")
        assert.equal(0, status, out)
        assert.matches("free", (paddock(plane, "ps @")))
        out, status = paddock(plane, "destroy @ --all")
        assert.equal(0, status, out)
      end
      local answer, list = engines.all "podman"[1]:call("GET", "/containers/json?all=1", nil, { socket = known.socket })
      assert.same({ 200, {} }, { answer, list })
    end)
  end
end)
