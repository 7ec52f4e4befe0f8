--- Commands: outcomes, what they leave fenced, sessions and scopes (rows J, the core's part).
local support = require "tests.support"

local ALICE = { user = "alice", thread = "t1" }

local function lost_answer() support.raise("outcome_unknown", "the answer was lost to a read timeout", "response") end

describe("a command", function()
  local world, rt, box
  before_each(function()
    world = support.world()
    rt = world:open()
    box = rt:acquire(ALICE)
  end)
  after_each(function() world:assert_quiet() end)

  --- What the container was asked to run, as "session:command".
  local function sent()
    local list = {}
    for _, req in ipairs(world:container(box.id).commands) do
      list[#list + 1] = (req.session and "session" or "default") .. ":" .. req.command
    end
    return table.concat(list, " ")
  end

  it("without scope and environment goes to the default shell, without a session [J1]", function()
    assert.equal("hi\n", box:exec("echo hi").stdout)
    local req = world:container(box.id).commands[1]
    assert.is_nil(req.session)
    assert.equal("shell", req.plane)
    assert.equal(600, req.timeout)
    assert.equal(0, world:count "client.open_session")
  end)

  it("takes its time limit exactly, the configured one by default [B4, B6]", function()
    local other = world:open { command_timeout = 42.5 }
    local b = other:acquire { user = "bob", thread = "t" }
    b:exec("true")
    b:exec("true", { timeout = 0.25 })
    local c = world:container(b.id).commands
    assert.equal(42.5, c[1].timeout)
    assert.equal(0.25, c[2].timeout)
  end)

  it("refuses a time limit that is none; nothing is started [B5]", function()
    for _, bad in ipairs { 0 / 0, math.huge, -math.huge, 0, -1, "5", {} } do
      local err = support.caught(box.exec, box, "true", { timeout = bad })
      assert.equal("invalid_argument", err.kind)
      assert.matches("timeout", err.message)
    end
    assert.equal(0, world:count "client.exec")
  end)

  it("refuses bad arguments by name; nothing is started [J12]", function()
    local bad = {
      env = { ["A-B"] = "x" }, cwd = "relative", stdin = 5, scope = "", session = ("s"):rep(300), unknown = 1,
    }
    for key, value in pairs(bad) do
      local err = support.caught(box.exec, box, "true", { [key] = value })
      assert.equal("invalid_argument", err.kind, key)
      assert.matches(key == "env" and "A-B" or key, err.message, 1, true)
    end
    assert.equal("invalid_argument", support.caught(box.exec, box, "").kind)
    assert.equal("invalid_argument", support.caught(box.exec, box, "a\0b").kind)
    assert.equal("invalid_argument", support.caught(box.exec, box, "true", { env = { A = "a\0b" } }).kind)
    assert.equal("invalid_argument", support.caught(box.exec, box, "true", { scope = "a", session = "b" }).kind)
    assert.equal(0, world:count "client.exec")
  end)

  it("that an engine answers in a wrong way says what is wrong, for whoever writes it", function()
    local said = {}
    rt:on("outcome_unknown", function(record) said[#said + 1] = record.message end)
    for _, answer in ipairs { { what = 1 }, { outcome = "done" }, { outcome = "completed" } } do
      world.on["client.exec"] = function() return answer end
      assert.equal("unknown", box:exec("true").outcome)
      rt:dispatch()
    end
    assert.matches("answered the outcome nil$", said[1])
    assert.matches("answered the outcome done$", said[2])
    assert.matches("`completed` without an exit_code$", said[3])
  end)

  for name, arrange in pairs {
    ["whose answer is lost [J1]"] = function() world.on["client.exec"] = function(next, ...) next(...) lost_answer() end end,
    ["that went silent [J2]"] = function()
      world.commands["sleep 1"] = nil
      world:container(box.id).session_result = true
      world.on["client.exec"] = function(next, ...)
        next(...)
        return { outcome = "unknown", reason = "response", stdout = "partial" }
      end
    end,
    ["whose client fails in an unforeseen way [J12]"] = function()
      world.on["client.exec"] = function(next, ...) next(...) error("boom", 0) end
    end,
    ["that is answered by something else [J12]"] = function()
      world.on["client.exec"] = function(next, ...) next(...) return { what = 1 } end
    end,
  } do
    it(name .. " is unknown, said so, sent once, and its shell is never entered again [J4, J6]", function()
      arrange()
      local r = box:exec("echo once")
      assert.equal("unknown", r.outcome)
      assert.equal("response", r.reason)
      assert.matches("unknown", tostring(r))
      assert.equal(1, world:count "client.exec")
      world.on["client.exec"] = nil
      assert.equal("two\n", box:exec("echo two").stdout)
      assert.equal("default:echo once session:echo two", sent())
      box:release()
      box = rt:acquire(ALICE)
      assert.equal("warm", box.source)
      assert.equal("three\n", box:exec("echo three").stdout)
      assert.equal("default:echo once session:echo two session:echo three", sent())
      assert.equal(0, world:count "destroy")
    end)
  end

  for name, result in pairs {
    ["hard_timeout with 124"] = { outcome = "hard_timeout", exit_code = 124 },
    ["completed with 0"] = { outcome = "completed", exit_code = 0 },
  } do
    it(name .. " is definite: the sandbox stays clean, and the default shell is used again [J3, J5]", function()
      world.on["client.exec"] = function(next, ...)
        local r = next(...)
        for k, v in pairs(result) do r[k] = v end
        return r
      end
      local r = box:exec("echo x")
      assert.equal(result.outcome, r.outcome)
      assert.equal(result.exit_code, r.exit_code)
      if result.exit_code == 124 then assert.matches("\nExit Code: 124$", tostring(r)) end
      local first = #world.clients
      box:release()
      local again = rt:acquire(ALICE)
      assert.equal(box.id, again.id)
      assert.equal(first + 1, #world.clients)
      box = again
      box:exec("echo y")
      assert.equal("default:echo x default:echo y", sent())
      assert.equal(0, world:count "destroy")
    end)
  end

  it("is not sent when its session's creation is lost; the sandbox then wants recycling [J7, K1]", function()
    world.on["client.exec"] = function(next, ...) next(...) lost_answer() end
    box:exec("echo once")
    world.on["client.exec"] = nil
    world.on["client.open_session"] = function() support.raise("outcome_unknown", "read timeout", "session_creation") end
    local r = box:exec("echo two")
    assert.equal("unknown", r.outcome)
    assert.equal("session_creation", r.reason)
    assert.matches("session_creation", tostring(r))
    assert.equal("default:echo once", sent())
    assert.equal(1, world:count "client.close_session") -- best effort; the fence stays
    local err = support.caught(box.exec, box, "echo three")
    assert.equal("quarantined", err.kind)
    assert.equal("default:echo once", sent())
    assert.is_true(rt:inspect(box.id).dirty)
    -- the last release recycles it, never through the warm pool [L7, L8]
    local state
    world.on.destroy = function(next, ...)
      state = rt:inspect(box.id).state
      return next(...)
    end
    box:release()
    assert.equal("active", state)
    assert.is_nil(rt:inspect(box.id))
    assert.equal(1, world:count "destroy")
    assert.equal("created", rt:acquire(ALICE).source)
  end)

  it("leaves no fence when a session was definitely not made [J9]", function()
    for _, err in ipairs {
      { kind = "backend_error", reason = "connect", message = "refused" },
      { kind = "backend_error", reason = "http_400", message = "session limit reached" },
    } do
      world:fail("client.open_session", 1, err)
      local got = support.caught(box.exec, box, "echo x", { scope = "s" })
      assert.equal("backend_error", got.kind)
      assert.is_false(rt:inspect(box.id).dirty)
    end
    assert.equal("x\n", box:exec("echo x", { scope = "s" }).stdout)
    assert.equal(0, world:count "client.close_session")
  end)

  it("keeps the planes apart: a lost creation on one leaves the other usable [J9]", function()
    world.on["client.open_session"] = function(next, this, plane, id)
      if plane == "bash" then lost_answer() end
      return next(this, plane, id)
    end
    assert.equal("session_creation", box:exec("echo x", { env = { A = "1" } }).reason)
    assert.equal("quarantined", support.caught(box.exec, box, "echo x", { env = { A = "1" } }).kind)
    assert.equal("y\n", box:exec("echo y", { scope = "s" }).stdout)
    local planes = rt:inspect(box.id).planes
    assert.is_true(planes.bash.ambiguous)
    assert.is_false(planes.shell.ambiguous)
  end)

  it("finds a creation in flight pending, not ambiguous [J8]", function()
    local seen
    world.on["client.open_session"] = function(next, ...)
      seen = rt:inspect(box.id)
      return next(...)
    end
    box:exec("echo x", { scope = "s" })
    assert.equal(1, seen.planes.shell.pending)
    assert.is_false(seen.planes.shell.ambiguous)
    assert.is_false(seen.dirty)
    assert.equal(0, rt:inspect(box.id).planes.shell.pending)
  end)

  it("in a scope shares one session with the scope's next command [J10]", function()
    box:exec("echo a", { scope = "build" })
    box:exec("echo b", { scope = "build" })
    box:exec("echo c", { scope = "test" })
    local c = world:container(box.id).commands
    assert.equal(c[1].session, c[2].session)
    assert.not_equal(c[1].session, c[3].session)
    assert.equal(2, world:count "client.open_session")
  end)

  it("gets a fresh session when an idle one was evicted, and says that its state is lost [B094, B096]", function()
    box:exec("echo a", { scope = "build" })
    world:container(box.id).sessions = {}
    local r = box:exec("echo b", { scope = "build" })
    assert.equal("b\n", r.stdout)
    assert.is_true(r.session_reset)
    assert.matches("reset", tostring(r))
  end)

  it("with its own environment runs in a session of its own, closed after it [J12]", function()
    box:exec("echo x", { env = { TOKEN = "s3cret" } })
    local req = world:container(box.id).commands[1]
    assert.equal("bash", req.plane)
    assert.equal("s3cret", req.env.TOKEN)
    assert.equal("echo x", req.command) -- values never travel in the text
    assert.equal(1, world:count "client.open_session")
    assert.equal(1, world:count "client.close_session")
    assert.same({}, world:container(box.id).sessions)
  end)

  it("is lost once a newer owner has the sandbox; nothing runs [B052, B045]", function()
    world:container(box.id).token = box.token + 1
    local err = support.caught(box.exec, box, "echo x")
    assert.equal("lost", err.kind)
    assert.equal("", sent())
    world:container(box.id).token = box.token
  end)

  it("is refused after release [B204]", function()
    box:release()
    assert.equal("closed", support.caught(box.exec, box, "echo x").kind)
  end)

  it("is lost when its sandbox has died, and the next acquire gets another at once [B054, B143]", function()
    local other = world:open { health_ttl = 5 }
    local b = other:acquire { user = "bob", thread = "t" }
    world:kill(b.id)
    local err = support.caught(b.exec, b, "echo x")
    assert.equal("lost", err.kind)
    assert.equal("gone", err.reason)
    b:release()
    local again = other:acquire { user = "bob", thread = "t" }
    assert.equal("created", again.source)
    assert.equal("x\n", again:exec("echo x").stdout)
  end)

  it("whose definite failure is an error, not an unknown outcome [J9]", function()
    world:fail("client.exec", 1, { kind = "backend_error", reason = "connect", message = "refused" })
    assert.equal("backend_error", support.caught(box.exec, box, "echo x").kind)
    assert.equal("x\n", box:exec("echo x").stdout)
    assert.equal("default:echo x", sent())
  end)
end)

describe("files", function()
  local world, rt, box
  before_each(function()
    world = support.world()
    rt = world:open()
    box = rt:acquire(ALICE)
  end)
  after_each(function() world:assert_quiet() end)

  it("keep their bytes [J12]", function()
    local bytes = "\0\xff\xc0\xaf\xed\xa0\x80 text\n"
    box:write("/workspace/x", bytes)
    assert.equal(bytes, box:read("/workspace/x"))
    assert.equal("x", box:list("/workspace")[1].name)
  end)

  it("need an absolute path; their errors name the path [J12]", function()
    for _, path in ipairs { "", "x", "./x", "/a\0b", ("/x"):rep(3000) } do
      assert.equal("invalid_argument", support.caught(box.read, box, path).kind)
      assert.equal("invalid_argument", support.caught(box.write, box, path, "x").kind)
    end
    local err = support.caught(box.read, box, "/workspace/none")
    assert.equal("not_found", err.reason)
    assert.equal(box.id, err.sandbox_id)
  end)

  it("of an active sandbox may be read many times over one connection [B204]", function()
    box:write("/workspace/x", "1")
    for _ = 1, 200 do box:read("/workspace/x") end
    assert.equal(1, #world.clients)
  end)
end)

describe("session creation while others come and go", function()
  it("neither recycles nor records anything; the sandbox is parked in the end [L5, J10]", function()
    local world = support.world()
    local rt = world:open { journal = world.journal }
    local run = rt:acquire { user = "alice", thread = "t1", holder = "run" }
    local upload
    world.on["client.open_session"] = function(next, ...)
      world.on["client.open_session"] = nil
      -- while the creation hangs, another turn comes and goes (its calls do not block)
      rt:retain(run.id, { holder = "upload" })
      upload = rt:binding "upload"
      return next(...)
    end
    assert.equal("x\n", run:exec("echo x", { scope = "s" }).stdout)
    assert.equal(run.id, upload)
    rt:release "upload"
    assert.equal("active", world:state_of(run.id))
    assert.equal("y\n", run:exec("echo y", { scope = "s" }).stdout)
    run:release()
    assert.equal("warm", world:state_of(run.id))
    assert.equal(0, world:count "destroy")
    assert.same({}, world.records)
    world:assert_quiet()
  end)
end)
