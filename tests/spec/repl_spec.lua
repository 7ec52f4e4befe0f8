--- paddock repl: reading, completing and showing; then the program with a pretended backend, by a pipe and on a terminal.
local support = require "tests.support"
local cli = require "tests.support.cli"
local repl = require "paddock.cli.repl"
local sims = require "paddock.sim"

describe("what is typed", function()
  local env = setmetatable({}, { __index = _G })

  it("is an expression where it can be one, with or without =", function()
    for _, text in ipairs { "1 + 1", "= 1 + 1", "  =1+1", "1 +\n1", "(function() return 2 end)()" } do
      local chunk, is_expression = repl.compile(text, env)
      assert.is_true(is_expression)
      assert.equal(2, chunk())
    end
  end)

  it("is a statement otherwise", function()
    local chunk, is_expression = repl.compile("x = 5", env)
    assert.is_false(is_expression)
    chunk()
    assert.equal(5, env.x)
    assert.is_nil(_G.x)
  end)

  it("is continued on the next line while it is incomplete", function()
    for _, text in ipairs { "for i = 1, 2 do", "f(1,", "x = {", "[[long", "function f()", "x =", "if a then", "= 1 +" } do
      local chunk, more = repl.compile(text, env)
      assert.is_nil(chunk, text)
      assert.is_true(more, text)
    end
  end)

  it("is refused with Lua's own words where it is wrong", function()
    for _, text in ipairs { "x = = 3", ")", "for", "\27Lua" } do
      local chunk, why = repl.compile(text, env)
      if why == true then why = "continued" end
      assert.is_nil(chunk)
      assert.equal("string", type(why))
    end
  end)
end)

describe("completion", function()
  local env = {
    acquire = print, advance = print, box = setmetatable({ id = "x" }, { __index = { exec = print, release = print } }),
    rt = { tick = print, list = print, inner = { deep = { value = 1 } } },
  }

  local function names(text)
    local _, found = repl.candidates(env, text)
    return table.concat(found, " ")
  end

  it("knows what stands at the prompt, fields and methods", function()
    assert.matches("^acquire advance ", names "x = a")
    assert.equal("exec", names "box:e")
    assert.equal("exec generation holder id release source token", names "box.")
    assert.equal("value", names "print(rt.inner.deep.v")
    assert.equal("string", names "x = strin")
  end)

  it("completes the words that begin with a colon", function()
    assert.equal(":help", names ":h")
    assert.equal(":events :help :quit", table.concat((function()
      local _, found = repl.candidates(env, ":")
      table.sort(found)
      return found
    end)(), " "))
  end)

  it("takes help, quit and exit without the colon, too", function()
    local code, out = cli.program({ stdin = "help\nhelp = 3\nhelp\nexit\nnot run(\n" }, "repl", "--sim")
    assert.equal(0, code)
    assert.matches("^acquire%(user, thread%).*\n3\n", out)
  end)

  it("inserts what is common, then shows what there is", function()
    assert.equal("uire", (repl.complete(env, "acq")))
    local insert, list = repl.complete(env, "box.")
    assert.is_nil(insert)
    assert.equal("exec  generation  holder  id  release  source  token", list)
    assert.is_nil((repl.complete(env, "nothing_like_it")))
    assert.is_nil((repl.complete(env, "no.such.thing.a")))
  end)

  it("never raises, whatever is typed", function()
    env.bad = setmetatable({}, { __index = function() error("no") end })
    for _, text in ipairs { "bad.x.y", "....", "a:b:c:d.", "'\"", "\0\255", ("a."):rep(5000), "1.5.", "bad." } do
      assert.has_no.errors(function() repl.complete(env, text) end)
    end
  end)
end)

describe("the pretended backend", function()
  local sim, backend, info
  before_each(function()
    sim = sims.new()
    backend = sim.backend
    info = backend:create { sandbox_id = "abcdef", image = "one:1" }
  end)

  it("makes, finds and removes sandboxes by generation", function()
    assert.same({ "g1", "one:1" }, { info.generation, info.attestation.image })
    assert.is_true(backend:alive(info))
    sim.replace("abc")
    assert.is_nil(backend:inspect("abcdef", info))
    assert.equal("g2", backend:discover("abcdef").generation)
    backend:destroy(info) -- the old generation: nothing to stop
    assert.equal(1, #backend:list())
    backend:destroy(backend:inspect("abcdef"))
    assert.is_nil(backend:inspect("abcdef"))
  end)

  it("fails as often as it was told to", function()
    sim.fail("create", 2, "no room", "capacity_exhausted")
    for _ = 1, 2 do
      local err = support.caught(backend.create, backend, { sandbox_id = "b" })
      assert.same({ "capacity_exhausted", "no room" }, { err.kind, err.message })
    end
    assert.equal("b", backend:create({ sandbox_id = "b" }).sandbox_id)
    assert.matches("no operation \"creat\"", support.caught(sim.fail, "creat"))
  end)

  it("accepts stops that do nothing, dies, gets sick and is cured", function()
    sim.stick("abc")
    backend:destroy(info)
    assert.is_true(backend:alive(info))
    sim.sicken(info.sandbox_id)
    assert.is_false(backend:alive(info))
    assert.is_nil(backend:discover("abcdef"))
    sim.cure("abc")
    assert.is_true(backend:alive(info))
    sim.kill("abc")
    assert.is_nil(backend:inspect("abcdef", info))
    assert.equal("gone", sim.show()[1].condition)
  end)

  it("keeps tokens as a guest does: the larger one wins, and a doomed sandbox answers nobody", function()
    local old, new = backend:connect(info, { token = "5" }), backend:connect(info, { token = "6" })
    old:fence("5")
    new:fence("6")
    assert.equal("lost", support.caught(old.exec, old, { command = "true" }).kind)
    assert.equal("lost", support.caught(old.doom, old, "5", "7").kind)
    assert.is_true(new:doom("6", "7"))
    assert.equal("lost", support.caught(new.exec, new, { command = "true" }).kind)
  end)

  it("answers commands and keeps files", function()
    local client = backend:connect(info, { token = 1 })
    assert.equal("hi there\n", client:exec({ command = "echo hi there" }).stdout)
    assert.equal(3, client:exec({ command = "exit 3" }).exit_code)
    client:write("/workspace/a", "data")
    assert.equal("data", client:read("/workspace/a"))
    assert.equal("data", client:exec({ command = "cat /workspace/a" }).stdout)
    assert.equal("a", client:list("/workspace")[1].name)
    sim.script("^make", { outcome = "unknown", reason = "response" })
    assert.equal("unknown", client:exec({ command = "make all" }).outcome)
  end)
end)

describe("the program's prompt", function()
  local have, why = cli.have_program()
  after_each(support.cleanup)

  --- Types these lines into `repl --sim`.
  local function typed(lines)
    local folder = support.tmpdir()
    return cli.program({ stdin = table.concat(lines, "\n") .. "\n", env = "XDG_STATE_HOME=" .. folder }, "repl", "--sim")
  end

  it("shows what the policies decide as simulated hours pass [E1] [N1]", function()
    if not have then pending(why) return end
    local code, out, err = typed {
      'box = acquire("alice", "t1")', "= box.source", 'box:exec("echo hi")', "release(box)", 'acquire("alice", "t1").source',
      'release(_G and rt:list()[1].id or "")', "advance(599)", "tick()", "#rt:list()", "advance(2)", "tick()",
      "#rt:list()", "sim.show()",
    }
    assert.equal("", err)
    assert.equal(0, code)
    local answers = {}
    for line in out:gmatch("[^\n]+") do
      if not line:find("^%*") then answers[#answers + 1] = line end
    end
    assert.same({ '"created"', "  | hi" }, { answers[1], answers[2] })
    assert.matches("^exit code 0", answers[3])
    assert.same({ '"warm"', "1", "0", "{}" }, { table.unpack(answers, 4) })
    assert.matches("\n%* [%w_]+ %x+", out)
  end)

  it("lets faults be ordered, and says errors in one line with their kind", function()
    if not have then pending(why) return end
    local code, out, err = typed { 'sim.fail("create", 1, "no room")', 'acquire("a", "b")', 'acquire("a", "b").source', "error('x')",
      "x = = 1", ":nope" }
    assert.equal(0, code)
    assert.matches('"created"\n', out)
    local lines = {}
    for line in err:gmatch("[^\n]+") do lines[#lines + 1] = line end
    assert.equal(4, #lines)
    assert.matches("^paddock: backend_error: .*no room", lines[1])
    assert.equal("paddock: x", lines[2])
  end)

  it("continues incomplete lines, and says when the input ends inside one", function()
    if not have then pending(why) return end
    local _, out, err = typed { "for i = 1, 3 do", "  print(i * i)", "end", ":help", "x = {" }
    assert.matches("^1\n4\n9\n", out)
    assert.matches("acquire%(user, thread%)", out)
    assert.equal("paddock: the input ends in the middle of a statement\n", err)
  end)

  it("submits operations, whose callbacks run before the next prompt, and runs a scheduler", function()
    if not have then pending(why) return end
    local _, out, err = typed { "op = rt:acquire_async { user = 'a', thread = 't' }", "op", "op:poll()", "op:wait()", "op",
      "_, box = op:poll()", "o = box:exec_async('echo hi', { on_output = print }, function(x) print('told of', x) end) tick()",
      "s = paddock.scheduler()",
      "t = s:spawn(function() local b <close> = rt:acquire { user = 'b', thread = 't' } return b:exec('echo straight').stdout end)",
      "s:run()", "t:wait()" }
    assert.equal("", err)
    assert.matches("^paddock operation %(acquire, under way%)\n", out)
    assert.matches("paddock operation %(acquire, done%)\n", out)
    assert.matches("stdout\thi\n\ntold of\tpaddock operation %(exec, done%)\n", out)
    assert.matches('"straight\\n"\n', out)
  end)

  it("edits lines on a terminal: completion, history, Ctrl-C, Ctrl-D", function()
    if not have then pending(why) return end
    if select(2, support.sh("python3 -c 'import pty'")) ~= 0 then pending("python3 is not there to open a terminal") return end
    local folder = support.tmpdir()
    support.write_file(folder .. "/drive.py", [[
import os, pty, select, sys, time
state = sys.argv[1]
pid, fd = pty.fork()
if pid == 0:
    os.environ["XDG_STATE_HOME"] = state
    os.environ["TERM"] = "xterm"
    os.execvp("paddock", ["paddock", "repl", "--sim"])
seen = b""
def until(text, limit=10):
    global seen
    end = time.time() + limit
    while text not in seen:
        left = end - time.time()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            sys.exit("not seen: %r in %r" % (text, seen))
        seen += os.read(fd, 4096)
    at = seen.index(text) + len(text)
    got, seen = seen[:at], seen[at:]
    return got
def send(text):
    time.sleep(0.2)  # the prompt is seen a moment before the editor has the terminal, which then forgets what was typed ahead
    os.write(fd, text)
until(b"paddock> ")
send(b"adv\t(1)\n")                  # completes to advance
until(b"ance(1)"); until(b"paddock> ")
send(b"x = 40 +\n"); until(b">> ")
send(b"2\n"); until(b"paddock> ")
send(b"this is given up\x03"); until(b"paddock> ")
send(b"'x is ' .. x\n"); until(b'"x is 42"'); until(b"paddock> ")
send(b"while true do end\n"); time.sleep(0.5); send(b"\x03"); until(b"interrupted"); until(b"paddock> ")
send(b"\x1b[A\x1b[A\n"); until(b'"x is 42"'); until(b"paddock> ")
send(b"sim.\t"); until(b"attest"); until(b"paddock> sim."); send(b"\x03"); until(b"paddock> ")
for _ in range(20):
    send(b"\x04")
    try:
        while select.select([fd], [], [], 0.5)[0]:
            if not os.read(fd, 4096): raise OSError
    except OSError: break
_, status = os.waitpid(pid, 0)
print("code", os.waitstatus_to_exitcode(status))
]])
    local out = support.sh(("timeout 60 python3 %s/drive.py %s"):format(folder, folder))
    assert.equal("code 0\n", out)
    assert.matches("x = 40 %+\n2\n", support.read_file(folder .. "/paddock/history"))
    assert.equal("600\n", (support.sh("stat -c %a " .. folder .. "/paddock/history")))
  end)

  it("ends on TERM, with 143, after taking down what it made", function()
    if not have then pending(why) return end
    local folder = support.tmpdir()
    local out = support.sh(([[export XDG_STATE_HOME=%s; mkfifo %s/in; paddock repl --sim < %s/in > %s/out & exec 9> %s/in
      echo 'acquire("a", "b").source' >&9
      for i in 1 2 3 4 5 6 7 8 9 10; do grep -q created %s/out && break; sleep 0.2; done
      kill -TERM $!; wait $!; echo code $?]]):format(folder, folder, folder, folder, folder, folder))
    assert.matches("code 143\n$", out)
  end)
end)
