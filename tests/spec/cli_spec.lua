--- The paddock command: its arguments, what it prints, its exit codes; then the program itself, end to end.
local support = require "tests.support"

local cli = require "tests.support.cli"
local args = require "paddock.cli.args"
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local exec = require "paddock.cli.exec"
local errors = require "paddock.errors"
local run = cli.run

describe("command-line arguments", function()
  local command = {
    name = "try", usage = "try [OPTIONS] [--] WORD...", summary = "Tries.", stop = true, most = math.huge,
    options = {
      { "--time,-t", "S", "seconds", type = "seconds" }, { "--env,-e", "K=V", "several", list = true },
      { "--all", nil, "a flag" }, { "--name", "N", "a text" },
    },
  }
  local function refused(...)
    local err = support.caught(args.parse, command, { ... })
    assert.equal(status.USAGE, status.of_error(err))
    return tostring(err)
  end

  it("come in long, short and joined forms, and end at the first operand", function()
    local options, operands = args.parse(command, { "-t", "1.5", "--env=A=1", "-e", "B=", "--all", "ls", "--name", "-x" })
    assert.same({ time = 1.5, env = { "A=1", "B=" }, all = true }, options)
    assert.same({ "ls", "--name", "-x" }, operands)
  end)

  it("keep everything behind -- as it is", function()
    local options, operands = args.parse(command, { "--all", "--", "--all", "--", "" })
    assert.same({ all = true }, options)
    assert.same({ "--all", "--", "" }, operands)
  end)

  it("are refused in one line that names the option, and the one that was meant", function()
    assert.equal("try: unknown option '--tiem'; did you mean --time?; `paddock try --help` lists them", refused("--tiem", "3"))
    assert.equal("try: unknown option '--zzzzzzz'; `paddock try --help` lists them", refused("--zzzzzzz"))
    assert.equal("--name wants N behind it", refused("--name"))
    assert.equal("--name wants N, not an empty text", refused("--name="))
    assert.equal("--all takes no value", refused("--all=yes"))
  end)

  it("are refused where a number is none, negative, zero, huge or hexadecimal", function()
    for _, text in ipairs { "x", "-1", "0", "nan", "inf", "1e400", "0x10", "1e3", "", " 1", "99999999999" } do
      assert.matches("--time wants", refused("--time", text))
    end
  end)

  it("are shown without control characters and cut when they are long", function()
    local text = refused("--\27[2J" .. ("x"):rep(10000))
    assert.is_nil(text:find("[%c]"))
    assert.is_true(#text < 150)
  end)
end)

describe("shell text of exec", function()
  it("is one word as it stands, and several words quoted one by one", function()
    assert.equal("ls | wc -l", exec.command_line { "ls | wc -l" })
    assert.equal("echo 'a  b' 'it'\\''s' '$HOME' ''", exec.command_line { "echo", "a  b", "it's", "$HOME", "" })
  end)

  it("comes back from a real shell exactly as it was given", function()
    local words = { "printf", "<%s>", "", " ", "a\nb", "'", '"', "\\", "$x", "`ls`", "*", "~", "-n", "é", "A=1", "!" }
    local pipe <close> = io.popen(exec.command_line(words))
    assert.equal("<>< ><a\nb><'><\"><\\><$x><`ls`><*><~><-n><é><A=1><!>", pipe:read("a"))
  end)
end)

describe("exit codes", function()
  it("tell a command's own status from limits, signals and unknown outcomes", function()
    for _, row in ipairs {
      { { outcome = "completed", exit_code = 0 }, 0 }, { { outcome = "completed", exit_code = 3 }, 3 },
      { { outcome = "hard_timeout", exit_code = 124 }, 124 }, { { outcome = "signalled", signal = 15 }, 143 },
      { { outcome = "oom" }, 137 }, { { outcome = "cancelled" }, 137 }, { { outcome = "unknown", exit_code = -1 }, 70 },
    } do
      assert.equal(row[2], status.of_result(row[1]))
    end
  end)

  it("exist for every kind of error", function()
    for _, kind in ipairs(errors.kinds) do
      local code = status.of_error(errors.new(kind, "x"))
      assert.is_true(code == 64 or code == 69 or code == 70 or code == 75 or code == 78, kind)
    end
    assert.equal(75, status.of_error(errors.new("replacement_deferred", "x")))
    assert.equal(78, status.of_error(errors.new("policy_error", "x")))
    assert.equal(69, status.of_error(errors.new("backend_error", "x")))
    assert.equal(70, status.of_error("a bug"))
  end)

  it("go with one line, whatever the error holds", function()
    local cause = errors.new("io_error", "no space\nleft")
    assert.equal("not made: no space; left", status.line(errors.new("backend_error", "not made", { cause = cause })))
    local long = "the engine at that address says: " .. ("a word "):rep(20) -- a message that its bounds have cut goes on in its cause
    local cut = errors.new("backend_error", ("not made: " .. long):sub(1, 100), { cause = errors.new("backend_error", long .. "END") })
    assert.equal("not made: " .. long .. "END", status.line(cut))
    assert.equal("internal error: a?b", status.line("a\27b"))
  end)
end)

describe("the command", function()
  it("without a name prints what there is to stderr and exits with 64", function()
    local code, out, err = run()
    assert.equal(64, code)
    assert.equal("", out)
    for _, name in ipairs { "exec", "repl", "ps", "destroy", "gc", "quarantine", "policy", "doctor", "version" } do
      assert.matches("\n  " .. name .. " ", err)
    end
  end)

  it("has help for itself and for each command", function()
    assert.equal(0, (run("help")))
    for _, name in ipairs { "exec", "repl", "ps", "destroy", "gc", "quarantine", "policy", "doctor", "version" } do
      local code, out = run(name, "--help")
      assert.equal(0, code)
      assert.matches("^usage: paddock " .. name, out)
      assert.same({ run("help", name) }, { run(name, "--help") })
    end
  end)

  it("names the nearest command", function()
    local code, out, err = run("exce", "ls")
    assert.same({ 64, "" }, { code, out })
    assert.equal("paddock: unknown command 'exce'; did you mean exec?; `paddock help` lists them\n", err)
  end)

  it("refuses wrong usage of each command with 64, one line and no output", function()
    for _, words in ipairs {
      { "exec" }, { "exec", "--" }, { "exec", "--keep", "--destroy", "ls" }, { "exec", "-e", "A", "ls" },
      { "exec", "-e", "1A=x", "ls" }, { "exec", "--timeout", "nan", "ls" }, { "destroy" }, { "destroy", "--all", "x" },
      { "ps", "x" }, { "gc", "x" }, { "policy" }, { "policy", "chekc" }, { "policy", "reload", "x" },
      { "policy", "explain" }, { "quarantine", "lst" }, { "doctor", "x" }, { "version", "x" }, { "help", "nothing" }, { "repl", "--sym" },
    } do
      local code, out, err = run(table.unpack(words))
      local shown = table.concat(words, " ")
      assert.equal(64, code, shown)
      assert.equal("", out, shown)
      assert.matches("^paddock: [^\n]+\n$", err, shown)
      if err:find("unknown", 1, true) then assert.matches("; `paddock [%a -]+` lists them\n$", err, shown) end -- what to do
    end
  end)

  it("exits with 78 and one line for a configuration that is missing or wrong", function()
    local folder = support.tmpdir()
    support.write_file(folder .. "/a.lua", "return {")
    support.write_file(folder .. "/b.lua", "return { idle_timeuot = 3 }")
    support.write_file(folder .. "/c.lua", "return 7")
    support.write_file(folder .. "/d.lua", "\27Lua")
    for _, name in ipairs { "a", "b", "c", "d", "missing" } do
      local code, out, err = run("exec", "--config", ("%s/%s.lua"):format(folder, name), "true")
      assert.equal(78, code, name)
      assert.equal("", out)
      assert.matches("^paddock: [^\n]+\n$", err)
    end
    local _, _, err = run("exec", "--config", folder .. "/b.lua", "true")
    assert.matches("idle_timeout", err)
    support.cleanup()
  end)
end)

describe("rendering", function()
  it("aligns columns, numbers to the right, and keeps control characters out", function()
    assert.equal("NAME     N\na        1\nbé\\x1b  22", render.columns({ "NAME", "N" }, { { "a", 1 }, { "bé\27", 22 } }))
    assert.equal("A  B\n-  x", render.columns({ "A", "B" }, { { nil, "x" } }))
  end)

  it("shows values with sorted keys, quoted texts and cut cycles", function()
    assert.equal('{ 1, "two", a = true, b = { c = 1.5 }, ["x y"] = 0 }',
      render.value { 1, "two", b = { c = 1.5 }, a = true, ["x y"] = 0 })
    assert.equal('"a\\n\\x00\\xff"', render.value "a\n\0\255")
    local t = {}
    t.t = t
    assert.equal("{ t = { (shown above) } }", render.value(t))
    local long = {}
    for i = 1, 10000 do long[i] = i end
    assert.is_true(#render.value(long) < 2000)
  end)

  it("writes JSON with sorted keys, lists that may be empty, and valid UTF-8", function()
    local cjson = require "cjson"
    assert.equal("[]\n", render.json(render.list {}))
    assert.equal("{}\n", render.json {})
    local text = render.json { b = { 1, 2.5, "x\"\n" }, a = render.list {}, bytes = "ok\255\254!", nan = 0 / 0 }
    assert.is_true(text:find('"a"') < text:find('"b"'))
    local back = cjson.decode(text)
    assert.same({ 1, 2.5, "x\"\n" }, back.b)
    assert.equal("ok\u{FFFD}\u{FFFD}!", back.bytes)
    assert.equal(cjson.null, back.nan)
  end)

  it("encodes any bytes as base64", function()
    for bytes, text in pairs { [""] = "", f = "Zg==", fo = "Zm8=", foo = "Zm9v", ["\0\255\254"] = "AP/+" } do
      assert.equal(text, render.base64(bytes))
    end
  end)

  it("says durations and sizes as people do", function()
    for seconds, text in pairs { [0] = "0s", [0.4] = "0.4s", [12] = "12s", [185] = "3m05s", [7800] = "2h10m", [432000] = "5d" } do
      assert.equal(text, render.duration(seconds))
    end
    assert.equal("1.5 KiB", render.bytes(1536))
  end)
end)

--- The program on real sandboxes. Each test has a state directory of its own and leaves no sandbox behind.
describe("the program", function()
  local have, why = cli.have_program()
  if have then have, why = support.can_sandbox() end
  local folder

  --- `paddock` with these words in this test's state directory.
  local function paddock(...) return cli.program({ env = "USER=ann XDG_STATE_HOME=" .. folder }, ...) end

  --- A test that needs real sandboxes.
  local function it_runs(name, fn)
    it(name, function()
      if not have then
        pending(why)
        return
      end
      folder = support.tmpdir()
      fn()
      local code, out = paddock("destroy", "--all")
      assert.equal(0, code, out)
      local _, listed = paddock("ps")
      assert.equal("no sandboxes\n", listed)
    end)
  end
  local function json_of(...)
    local code, out, err = paddock(...)
    assert.equal("", err)
    return require("cjson").decode(out), code
  end
  local function ids()
    local found = {}
    for i, one in ipairs((json_of("ps", "--json"))) do found[i] = one.sandbox_id end
    return found
  end

  after_each(support.cleanup)

  it_runs("exec passes output, errors and status on, and leaves nothing behind", function()
    for _, row in ipairs {
      { { "echo hi; echo no >&2; exit 3" }, 3, "hi\n", "no\n" }, { { "--", "echo", "a  b", "$HOME" }, 0, "a  b $HOME\n", "" },
      { { "-e", "A=1 2", "-e", "B=", "echo \"$A|$B|${XDG_STATE_HOME-unset}\"" }, 0, "1 2||unset\n", "" },
      { { "printf '\\000\\377\\n'" }, 0, "\0\255\n", "" }, { { "kill -TERM $$" }, 143, "", "" },
    } do
      local code, out, err = paddock("exec", table.unpack(row[1]))
      assert.same({ row[2], row[3], row[4] }, { code, out, err }, table.concat(row[1], " "))
    end
    assert.same({}, ids())
  end)

  it_runs("exec ends a command at its time limit with 124, and says so", function()
    local code, out, err = paddock("exec", "--timeout", "0.3", "echo start; sleep 60")
    assert.equal(124, code)
    assert.equal("start\n", out)
    assert.equal("paddock: the command ran into its time limit of 0.3 s\n", err)
  end)

  it_runs("exec ends a command whose output can go nowhere any more, and leaves nothing behind", function()
    local line = "{ XDG_STATE_HOME=%s paddock exec --timeout 20 %s < /dev/null; echo $? > %s/status; } %s"
    for _, row in ipairs {
      { "yes", "| head -n 1", "y\n", 141 }, { "'yes no >&2'", "2>&1 > /dev/null | head -n 1", "no\n", 141 }, -- as SIGPIPE
      { "yes", "> /dev/full", "paddock: cannot write to the standard output: No space left on device\n", 70 },
    } do
      local text = support.sh(line:format(folder, row[1], folder, row[2]))
      local file <close> = assert(io.open(folder .. "/status"))
      assert.same({ row[3], row[4] }, { text, file:read("n") }, row[1] .. row[2])
    end
    assert.same({}, ids())
  end)

  it_runs("exec hands its standard input to the command, byte for byte", function()
    local bytes = ("\0\1\255line\n"):rep(20000)
    local code, out = cli.program({ stdin = bytes, env = "XDG_STATE_HOME=" .. folder }, "exec", "wc -c; true")
    assert.same({ 0, #bytes .. "\n" }, { code, out })
    assert.equal("0\n", (select(2, cli.program({ stdin = "x", env = "XDG_STATE_HOME=" .. folder }, "exec", "-n", "wc -c"))))
    -- a closed one is an empty one
    assert.equal("0\n\n0", (support.sh(("XDG_STATE_HOME=%s paddock exec 'wc -c' <&-; echo; printf $?"):format(folder))))
  end)

  it_runs("exec --json prints one document, with raw bytes beside the text where they are no UTF-8", function()
    local doc, code = json_of("exec", "--json", "-t", "t 1", "printf 'a\\377'; exit 4")
    assert.same({ 4, 4, "completed", "created", "ann", "t 1" },
      { code, doc.exit_code, doc.outcome, doc.source, doc.user, doc.thread })
    assert.same({ "a\u{FFFD}", "Yf8=", "" }, { doc.stdout, doc.stdout_base64, doc.stderr })
  end)

  it_runs("exec --keep leaves a sandbox that the next exec of the identity finds, with its files [F1]", function()
    local first = json_of("exec", "--json", "--keep", "echo mine > /workspace/note")
    local listed = json_of("ps", "--json")
    assert.equal(1, #listed)
    assert.same({ first.sandbox_id, "free", "ann", "default" },
      { listed[1].sandbox_id, listed[1].state, listed[1].user, listed[1].thread })
    local second = json_of("exec", "--json", "cat /workspace/note")
    assert.same({ "discovered", "mine\n", first.generation }, { second.source, second.stdout, second.generation })
    local other = json_of("exec", "--json", "-u", "bob", "cat /workspace/note")
    assert.equal(1, other.exit_code)
    assert.same({ first.sandbox_id }, ids()) -- what was found is parked, what was created is gone
    assert.equal(0, (paddock("exec", "--destroy", "true")))
    assert.same({}, ids())
  end)

  it_runs("destroy takes ids and their beginnings, and knows what was never there", function()
    local id = json_of("exec", "--json", "--keep", "true").sandbox_id
    local code, out = paddock("destroy", id:sub(1, 8))
    assert.same({ 0, id .. "\n" }, { code, out })
    local err
    code, out, err = paddock("destroy", "0123456789abcdef0123456789abcdef")
    assert.same({ 0, "0123456789abcdef0123456789abcdef\n" }, { code, out })
    assert.matches("is not in the list of sandboxes; it is absent\n$", err)
    id = json_of("exec", "--json", "--keep", "true").sandbox_id
    code, out, err = paddock("destroy", id:sub(1, 3)) -- a slip is no success
    assert.same({ 64, "" }, { code, out })
    assert.matches("at least four", err)
    assert.equal(0, (paddock("destroy", "--all")))
    assert.equal(64, (paddock("destroy", "NO/../ID")))
  end)

  it_runs("destroy refuses what another process holds, with 75, and stops nothing", function()
    support.sh(("XDG_STATE_HOME=%s USER=ann paddock exec 'sleep 3; echo done' > %s/out 2> %s/err < /dev/null & echo $! > %s/pid")
      :format(folder, folder, folder, folder))
    assert.is_true(support.eventually(function() return #ids() == 1 end))
    assert.is_true(support.eventually(function()
      local first = json_of("ps", "--json")[1]
      return first ~= nil and first.state == "held"
    end))
    local code, out, err = paddock("destroy", "--all")
    assert.equal(75, code)
    assert.equal("", out)
    assert.matches("^paddock: %x+ was not destroyed: process %d+ uses it[^\n]+\n$", err)
    local kept = json_of("gc", "--json")
    assert.same({ {}, 1, "held" }, { kept.gone, kept.kept, kept.left[1].state })
    assert.matches("^held by process %d+$", kept.left[1].reason)
    assert.matches("^own$", json_of("ps", "--json")[1].lease.state)
    assert.equal(75, (paddock("exec", "true"))) -- one identity, one owner
    assert.is_true(support.eventually(function() return #ids() == 0 end, 10))
    assert.equal("done\n", support.read_file(folder .. "/out"))
  end)

  it_runs("exec that is interrupted ends its command, takes its sandbox down and exits with 128 + n", function()
    for name, code in pairs { INT = 130, TERM = 143 } do
      local out = support.sh(([[export XDG_STATE_HOME=%s # a shell's background jobs ignore INT otherwise
        env --default-signal=INT,TERM paddock exec -n "sleep 60" & pid=$!
        for i in $(seq 50); do paddock ps | grep -q held && break; sleep 0.1; done
        kill -%s $pid; wait $pid; echo code $?]]):format(folder, name))
      assert.matches("code " .. code .. "\n$", out)
      assert.same({}, ids())
    end
  end)

  it_runs("exec shows the output as it comes, both streams, byte for byte", function()
    local script = ([[export XDG_STATE_HOME=%s
      env --default-signal=INT,TERM paddock exec -n 'printf "a\0\377b"; printf "c\0d" >&2; sleep 60' > %s/out 2> %s/err & pid=$!
      for i in $(seq 100); do [ -s %s/out ] && [ -s %s/err ] && break; sleep 0.1; done
      kill -0 $pid && cp %s/out %s/seen-out && cp %s/err %s/seen-err
      kill -INT $pid; wait $pid; echo code $?]]):gsub("%%s", folder)
    assert.matches("code 130\n$", (support.sh(script)))
    assert.equal("a\0\255b", support.read_file(folder .. "/seen-out")) -- while the command was running
    assert.equal("c\0d", support.read_file(folder .. "/seen-err"))
    assert.equal("a\0\255b", support.read_file(folder .. "/out"))
    local code, out, err = paddock("exec", "for i in 1 2 3; do echo $i; echo e$i >&2; done; exit 4")
    assert.same({ 4, "1\n2\n3\n", "e1\ne2\ne3\n" }, { code, out, err })
    local doc = json_of("exec", "--json", "echo out; echo err >&2")
    assert.same({ "out\n", "err\n" }, { doc.stdout, doc.stderr })
  end)

  it_runs("exec whose output nobody reads any more still takes its sandbox down", function()
    local out = support.sh(("XDG_STATE_HOME=%s paddock exec -n 'yes | head -n 200000' 2> %s/err | head -n 1"):format(folder, folder))
    assert.equal("y\n", out)
    assert.is_true(support.eventually(function() return #ids() == 0 end))
  end)

  it_runs("exec that is interrupted once while its sandbox is made takes it down, and twice exits at once [B181]", function()
    support.sh("mkdir " .. folder .. "/things")
    support.write_file(folder .. "/engine.lua", ([[
      local io = require "paddock.io"
      local function path(id) return "%s/things/" .. id end
      local function info(id) return io.fs.exists(path(id)) and { sandbox_id = id, generation = "g1" } or nil end
      local client = { exec = function() return { outcome = "completed", exit_code = 0, stdout = "", stderr = "" } end,
        open_session = function() end, close_session = function() end }
      return { name = "commits first", capabilities = { fenced = false },
        create = function(_, spec) -- it is there before the answer
          io.fs.write_atomic(path(spec.sandbox_id), "")
          io.sleep(4)
          return info(spec.sandbox_id)
        end,
        destroy = function(_, i) io.fs.unlink(path(i.sandbox_id)) end,
        inspect = function(_, id) return info(id) end, discover = function(_, id) return info(id) end,
        alive = function() return true end, ready = function() return true end, connect = function() return client end }
    ]]):format(folder))
    local script = [[export XDG_STATE_HOME=FOLDER USER=ann
      env --default-signal=INT,TERM paddock exec -n --backend FOLDER/engine.lua true & pid=$!
      for i in $(seq 100); do [ "$(ls FOLDER/things)" ] && break; sleep 0.05; done
      kill -INT $pid; SECOND wait $pid; echo code $?; echo left $(ls FOLDER/things | wc -l)]]
    script = script:gsub("FOLDER", folder)
    local first = support.sh((script:gsub("SECOND", "")))
    assert.matches("code 130\nleft 0\n$", first)
    local start = os.time()
    local second = support.sh((script:gsub("SECOND", "sleep 0.2; kill -INT $pid;")))
    assert.matches("code 130\nleft 1\n$", second)
    assert.is_true(os.time() - start < 4, "it waited")
    -- What is left carries the name by which the next one finds it.
    local code = paddock("exec", "--destroy", "--backend", folder .. "/engine.lua", "true")
    assert.equal(0, code)
    assert.equal("", (support.sh("ls " .. folder .. "/things")))
  end)

  it_runs("gc takes down what nobody owns once its time is over, and leaves what is held", function()
    support.write_file(folder .. "/config.lua", "return { idle_timeout = 1 }")
    local config = folder .. "/config.lua"
    local id = json_of("exec", "--json", "--keep", "true").sandbox_id
    assert.equal("not idle for long enough", json_of("gc", "--json", "--config", config).left[1].reason)
    assert.is_true(support.eventually(function() return json_of("ps", "--json")[1].idle_seconds > 1 end))
    assert.same({ gone = { id }, kept = 0, left = {} }, (json_of("gc", "--json", "--config", config)))
  end)

  it_runs("exits with 69 and what to install when there is no bubblewrap", function()
    local code, out, err = cli.program({ env = ("XDG_STATE_HOME=%s PATH=%s"):format(folder, folder .. "/bin"),
      prefix = ("mkdir -p %s/bin; ln -sf $(command -v paddock) %s/bin/;"):format(folder, folder) }, "exec", "true")
    assert.same({ 69, "" }, { code, out })
    assert.matches("^paddock: [^\n]*bubblewrap[^\n]*install[^\n]*\n$", err)
  end)

  it_runs("exits with one line for a state directory that cannot be", function()
    support.write_file(folder .. "/file", "")
    local code, out, err = cli.program({ env = "XDG_STATE_HOME=" .. folder .. "/file" }, "exec", "true")
    assert.is_true(code == 78 or code == 70 or code == 69)
    assert.equal("", out)
    assert.matches("^paddock: [^\n]+\n$", err)
  end)
end)

describe("the program's policy commands", function()
  local have, why = cli.have_program()
  local folder
  before_each(function() folder = support.tmpdir() end)
  after_each(support.cleanup)
  local function paddock(...) return cli.program({ env = "USER=ann XDG_STATE_HOME=" .. folder }, ...) end

  it("check the built-in set and a folder's, and name file and line of what is wrong [C4]", function()
    if not have then pending(why) return end
    local code, out = paddock("policy", "check")
    assert.equal(0, code)
    for _, name in ipairs { "identity", "requirements", "mounts", "reuse", "network" } do assert.matches(name, out) end
    for _, text in ipairs { "return {\n  derive = function(ctx) return nil end }", "return {\n  derive = function(ctx)\n",
      "return { derive = function() while true do end end }", "return 7", "error('x')" } do
      support.write_file(folder .. "/identity.lua", text)
      local err
      code, out, err = paddock("policy", "check", folder)
      assert.same({ 78, "" }, { code, out }, text)
      assert.matches("^paddock: [^\n]*identity.lua[^\n]*\n$", err)
    end
    support.write_file(folder .. "/identity.lua", "return { derive = function(ctx) return 'fixed-' .. #ctx.user end }")
    assert.equal(0, (paddock("policy", "check", folder)))
    assert.equal(78, (paddock("policy", "check", folder .. "/missing")))
  end)

  it("explain an identity", function()
    if not have then pending(why) return end
    local code, out = paddock("policy", "explain", "--user", "alice", "--thread", "t1", "--json")
    assert.equal(0, code)
    assert.matches("^%x+$", require("cjson").decode(out).id)
    assert.matches("sandbox id +%x+", (select(2, paddock("policy", "explain", "-u", "alice", "-t", "t1"))))
  end)

  it("reload reaches the runtimes of the state directory", function()
    if not have then pending(why) return end
    assert.matches("no runtime", (select(2, paddock("policy", "reload"))))
    support.write_file(folder .. "/identity.lua", "return { derive = function(ctx) return 'before' end }")
    support.write_file(folder .. "/config.lua", ("return { policies = %q }"):format(folder))
    local out = support.sh(([[cd %s; export XDG_STATE_HOME=%s; mkfifo in
      paddock repl --sim --config config.lua < in > out 2>&1 & exec 9> in
      echo 'explain("a", "b").id' >&9
      for i in $(seq 50); do grep -q before out && break; sleep 0.1; done
      sed -i s/before/after/ identity.lua; paddock policy reload; sleep 0.3
      echo 'explain("a", "b").id' >&9; exec 9>&-; wait $!; cat out]]):format(folder, folder))
    assert.matches("told 1 runtime: pid %d+\n", out)
    assert.matches('"before"\n.*"after"\n', out)
  end)
end)
