--- What a turn leaves in its sandbox, and what is left of a sandbox when processes of it, or around it, are killed.
local agent = require "tests.live.agent"
local sandboxes = require "tests.live.sandboxes"
local support = require "tests.support"
local sh = support.sh

local ALICE, BOB = { user = "alice", thread = "t1" }, { user = "bob", thread = "t1" }

describe("a process sandbox", function()
  if not sandboxes.works then
    it("keeps its user's leftovers to itself [B053, B186, B189]", function() pending(sandboxes.why_not) end)
    return
  end
  local world
  before_each(function() world = sandboxes.new() end)
  after_each(function() world:close() end)

  local function out(box, command)
    local r = box:exec(command, { timeout = 20 })
    return r.outcome == "completed" and r.stdout or r.outcome
  end

  it("shows the next user nothing of the last one's: files, memory, processes, shell, environment [B053]", function()
    local rt = world:open()
    local marker = "leftover-" .. os.time()
    local alice = rt:acquire(ALICE)
    alice:exec(([[
      for where in /workspace /tmp /dev/shm ~; do echo secret > $where/%s; done
      mkdir -p ~/bin; printf '#!/bin/sh\necho hijacked\n' > ~/bin/ls; chmod +x ~/bin/ls
      echo 'export PATH=~/bin:$PATH SECRET=%s' >> ~/.profile; echo 'export SECRET=%s' >> ~/.bashrc
      (exec -a %s sleep 300) >/dev/null 2>&1 &
      echo '* * * * * touch /tmp/cron' > /tmp/crontab; crontab /tmp/crontab 2>/dev/null; true]]):format(marker, marker, marker, marker))
    alice:exec("export SECRET=" .. marker .. "; cd /tmp", { scope = "s" })
    alice:release()
    local bob = rt:acquire(BOB)
    assert.are_not.equal(alice.id, bob.id)
    assert.equal("", out(bob, ("find / /tmp /dev/shm /workspace -xdev -name '*%s*' 2>/dev/null; find /tmp /dev/shm -mindepth 1")
      :format(marker)))
    assert.equal("0\n", out(bob, ("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '[l]%s'"):format(marker:sub(2))))
    assert.equal("unset\n", out(bob, "echo ${SECRET:-unset}"))
    assert.equal("unset /workspace\n", bob:exec("echo ${SECRET:-unset} $PWD", { scope = "s", timeout = 20 }).stdout)
    assert.is_nil(out(bob, "ls /"):find("hijacked", 1, true))
    bob:release()
    local again = rt:acquire(ALICE) -- it is hers, all of it
    assert.equal("secret\n", out(again, "cat /tmp/" .. marker))
    again:release()
  end)

  it("whose commands ignore every signal that can be ignored is destroyed all the same, within a bound [B186]", function()
    local rt = world:open()
    local box = rt:acquire(ALICE)
    box:exec("trap '' TERM INT HUP QUIT USR1 USR2; (setsid sh -c \"trap '' TERM INT HUP QUIT; while :; do sleep 0.1; done\" &) ; sleep 0.1",
      { timeout = 20 })
    local begun = os.time()
    box:release()
    assert.is_true(rt:destroy(box.id))
    assert.is_true(os.time() - begun < 30)
    assert.equal("", (sh("ls " .. world.state .. "/sandboxes"):gsub("%s", "")))
  end)

  it("that is busy with such a command is replaced by a new one at once, when a policy wants it [B186]", function()
    local policies = { reuse = { source = [[return { decide = function(ctx)
      if ctx.requirements.require.fresh and ctx.source ~= "created" then return "replace", "fresh" end
      return "reuse" end }]] },
      requirements = { source = [[return { resolve = function(ctx)
        return { require = { fresh = ctx.request and ctx.request.fresh or nil } } end }]] } }
    local rt = world:open { policies = policies }
    local box = rt:acquire(ALICE)
    box:exec("(setsid sh -c \"trap '' TERM INT HUP QUIT; while :; do :; done\" >/dev/null 2>&1 &)", { timeout = 20 })
    box:release()
    local begun = os.time()
    local fresh = rt:acquire { user = "alice", thread = "t1", requirements = { fresh = true } }
    assert.equal("created", fresh.source)
    assert.are_not.equal(box.generation, fresh.generation)
    assert.is_true(os.time() - begun < 30)
    assert.equal("1", (sh("ls " .. world.state .. "/sandboxes/*.json | wc -l"):gsub("%s", "")))
    fresh:release()
  end)

  it("is destroyed while such a command is under way: its caller is told, nothing is left [B186]", function()
    local a = agent.start { state_dir = world.state, log = "off" }
    a:call "box = rt:acquire { user = 'alice', thread = 't1' } return box.id"
    a:ask [[
      local op = box:exec_async("trap '' TERM INT HUP QUIT; while :; do sleep 0.1; done", { timeout = 300 })
      os.execute "sleep 0.3"
      rt:shutdown()
      local ok, done, result = pcall(op.wait, op, 20)
      return ok and done and result.outcome or ok and "pending" or done.kind]]
    local told = a:answer(60)
    assert.truthy(("unknown cancelled signalled lost closed"):find(told, 1, true), told)
    assert.equal("", (sh("ls " .. world.state .. "/sandboxes"):gsub("%s", "")))
    a:finish()
  end)

  --- The host's pids of a guest and of its ancestors up to this process.
  local function around(id)
    local guest = sandboxes.guest_of(world.state, id)
    local parent = math.tointeger(tonumber(sh(("awk '/^PPid/ { print $2 }' /proc/%d/status"):format(guest)):match "%d+"))
    return guest, parent
  end

  it("whose guest was killed is not handed out as if it lived: one command says so, the next acquire has another [B189, B054]", function()
    local rt = world:open { health_ttl = 0 }
    local box = rt:acquire(ALICE)
    local guest = around(box.id)
    sh("kill -9 " .. guest)
    local ok, err = pcall(box.exec, box, "true")
    assert.is_true(not ok and err.kind == "lost" or ok and err.outcome == "unknown", tostring(err))
    local again = rt:acquire(ALICE)
    assert.equal("created", again.source)
    assert.equal("completed", again:exec("true").outcome)
    again:release()
  end)

  it("whose outer process was killed lives on or is replaced, and is destroyed either way [B189]", function()
    local rt = world:open { health_ttl = 0 }
    local box = rt:acquire(ALICE)
    local guest, outer = around(box.id)
    local name = sh(("cat /proc/%d/comm"):format(outer)):gsub("%s", "")
    if name:find "bwrap" then sh("kill -9 " .. outer) end
    local again = rt:acquire(ALICE)
    assert.equal("completed", again:exec("true").outcome)
    again:release()
    box:release()
    assert.is_true(rt:destroy(again.id))
    assert.is_true(support.eventually(function() return sh("ls /proc/" .. guest):find "cannot" ~= nil end, 10))
  end)

  it("whose shell was killed says so: the next command of the scope has a new one [B189]", function()
    local rt = world:open()
    local box = rt:acquire(ALICE)
    box:exec("export A=1", { scope = "s", timeout = 20 })
    local r = box:exec("kill -9 $$", { scope = "s", timeout = 20 })
    assert.are_not.equal("hard_timeout", r.outcome)
    r = box:exec("echo ${A:-gone}", { scope = "s", timeout = 20 })
    assert.equal("gone\n", r.stdout)
    assert.is_true(r.session_reset)
    assert.equal("completed", box:exec("true").outcome)
    box:release()
  end)
end)
