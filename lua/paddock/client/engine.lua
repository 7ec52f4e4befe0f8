--- A client of an engine's own exec: commands and files of a container that has a shell, and nothing of paddock's inside.
---
--- What it decides is what the other clients decide: whether a command certainly did not run (an error is raised), certainly ended
--- (an outcome), or may have run (outcome "unknown"). For that, what is started is a short script of ours: its first line on
--- standard error, with a word that nobody can guess, proves that it began; then it becomes the command. An engine has no call that
--- ends an exec and forgets none when its client goes away, so every process carries a mark in its environment, by which it is
--- found and killed from inside. Nothing is ever sent twice.
---
--- Sessions are kept in files in the container, so that they outlive a client: its directory and its variables (with bash, its
--- functions too) are written down when a command ends, and read before the next one.
local common = require "paddock.client.common"
local engines = require "paddock.docker.engine"
local errors = require "paddock.errors"
local io = require "paddock.io"
local streams = require "paddock.docker.stream"

local check_seconds, check_text, invalid = common.check_seconds, common.check_text, common.invalid

local M = {}

local SHORT_LIMIT = 10               -- seconds for sessions and for killing
local DOUBT_LIMIT = 3                -- seconds for killing where the engine may not answer: it is told at once by one that does
local FILE_MAX = (64 << 20) - (64 << 10) -- bytes of a file in one call; core/box.c
local FILE_LIMIT, FILE_RATE = 20, 8 << 20 -- seconds for a file call, and how many bytes have one more second
local COMMAND_MAX = 128 << 10        -- bytes of one argument, in Linux
local CODE_WAIT = 2                  -- seconds for an exec's code to be known after its stream's end
local MARK = "PADDOCK_EXEC"

-- What each script begins with: how often the kernel has killed for memory here, without a process more.
local BEGIN = [[
n=0
for f in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
  if [ -r "$f" ]; then while read -r k v _; do [ "$k" = oom_kill ] && n=$v; done < "$f"; fi
done
word=$1
say() { printf '%s %s\n' "$word" "$1" >&2; }
shell=/bin/sh
[ -x /bin/bash ] && shell=/bin/bash
]]

-- word, cwd, command
local COMMAND = BEGIN .. [[
if [ -n "$2" ] && ! cd -- "$2" 2>/dev/null; then say cwd; exit 125; fi
say "begin $n"
exec "$shell" -c "$3"
]]

-- The same with standard input: what the command leaves unread is read in the end, since an engine may lose what was printed when
-- input meets nobody.
local COMMAND_FED = BEGIN .. [[
refuse() { say "$1"; cat > /dev/null; exit 125; }
if [ -n "$2" ] && ! cd -- "$2" 2>/dev/null; then refuse cwd; fi
say "begin $n"
"$shell" -c "$3"
code=$?
cat > /dev/null
exit $code
]]

-- word, cwd, command, the session's folder, "fed" with standard input. The folder's `live` is there while a command runs that has
-- not written its state.
local SESSION = BEGIN .. [[
if [ ! -d "$4" ]; then say nosession; exit 125; fi
again=
[ -e "$4/live" ] && again=" reset"
true > "$4/live"
if [ -n "$2" ] && ! cd -- "$2" 2>/dev/null; then rm -f "$4/live"; say cwd; exit 125; fi
PADDOCK_CWD=$2 PADDOCK_SESSION=$4 PADDOCK_COMMAND=$3
export PADDOCK_CWD PADDOCK_SESSION PADDOCK_COMMAND
say "begin $n$again"
body='
_pdk_dir=$PADDOCK_SESSION; _pdk_cwd=$PADDOCK_CWD; _pdk_command=$PADDOCK_COMMAND; _pdk_mark=$PADDOCK_EXEC
[ -f "$_pdk_dir/state" ] && . "$_pdk_dir/state" 2>/dev/null
unset PADDOCK_SESSION PADDOCK_CWD PADDOCK_COMMAND
PADDOCK_EXEC=$_pdk_mark; export PADDOCK_EXEC
if [ -n "$_pdk_cwd" ]; then cd -- "$_pdk_cwd"; elif [ -f "$_pdk_dir/cwd" ]; then cd -- "$(cat "$_pdk_dir/cwd")" 2>/dev/null; fi
_pdk_save() {
  trap - EXIT
  { if [ -n "$BASH_VERSION" ]; then declare -p | sed "/^declare [^ ]* _pdk_/d; s/^declare -/declare -g -/"; declare -f
    else set | sed "/^PPID=/d; /^_pdk_/d; /^LINENO=/d"; export -p; fi
  } > "$_pdk_dir/state" 2>/dev/null
  pwd > "$_pdk_dir/cwd"
  rm -f "$_pdk_dir/live"
}
trap "_pdk_save" EXIT
eval "$_pdk_command"
'
if [ "$5" = fed ]; then "$shell" -c "$body"; code=$?; cat > /dev/null; exit $code; fi
exec "$shell" -c "$body"
]]

-- word, mark, "is" or "not": kills what carries the mark, or all marked ones that do not begin with it, and what descends from those.
-- Says "ended" when nothing of it is left, "none" when there was nothing.
-- Only what a shell has built in: where processes are at their limit there is none to spare.
local KILL = [[
word=$1 mark=$2 how=$3 round=0
while [ $round -lt 200 ]; do
  round=$((round + 1)) found=" "
  for d in /proc/[0-9]*; do
    p=${d#/proc/}
    if [ "$p" = 1 ] || [ "$p" = $$ ]; then continue; fi
    has=
    while IFS= read -r line || [ -n "$line" ]; do
      case $line in *PADDOCK_EXEC="$mark"*) [ $how = is ] && has=1;; *PADDOCK_EXEC=*) [ $how = not ] && has=1;; esac
      [ -n "$has" ] && break
      line=
    done 2>/dev/null < "$d/environ"
    if [ -z "$has" ]; then
      stat=
      { IFS= read -r stat < "$d/stat"; } 2>/dev/null
      stat=${stat##*) }
      case $stat in Z*|X*) continue;; esac
      parent=${stat#* }
      parent=${parent%% *}
      case $found in *" $parent "*) has=1;; esac
    fi
    [ -n "$has" ] && found="$found$p "
  done
  if [ "$found" = " " ]; then
    if [ $round = 1 ]; then printf '%s none\n' "$word" >&2; else printf '%s ended\n' "$word" >&2; fi
    exit 0
  fi
  for p in $found; do kill -STOP "$p" 2>/dev/null; done
  for p in $found; do kill -KILL "$p" 2>/dev/null; done
done
printf '%s left\n' "$word" >&2
]]

-- word, path, size, "new" or ""
local WRITE = BEGIN .. [[
refuse() { say "$1"; cat > /dev/null; exit 125; }
if [ -d "$2" ]; then refuse is_directory; fi
dir=${2%/*}
[ -n "$dir" ] || dir=/
if [ ! -e "$dir" ]; then refuse not_found; fi
if [ ! -d "$dir" ]; then refuse not_a_directory; fi
if [ -e "$2" ] && [ ! -f "$2" ]; then refuse not_a_file; fi
if [ "$4" = new ] && { [ -e "$2" ] || [ -L "$2" ]; }; then refuse already_exists; fi
temp="$dir/.paddock-$word"
trap 'rm -f -- "$temp"' EXIT
if ! why=$( { true > "$temp"; } 2>&1 ); then
  case $why in *[Rr]ead-only*) refuse read_only;; *[Ss]pace*) refuse no_space;; *) refuse permission_denied;; esac
fi
say "begin $n"
if ! head -c "$3" > "$temp" 2>/dev/null; then refuse no_space; fi
have=$(wc -c < "$temp")
if [ "$((have))" -ne "$3" ]; then refuse short; fi
if [ "$4" = new ]; then
  if ! ln -- "$temp" "$2" 2>/dev/null; then refuse already_exists; fi
else
  if [ -f "$2" ]; then mode=$(stat -c %a -- "$2" 2>/dev/null) && chmod "$mode" "$temp" 2>/dev/null; fi
  if ! mv -f -- "$temp" "$2" 2>/dev/null; then refuse io_error; fi
fi
say done
]]

-- word, path, max
local READ = BEGIN .. [[
if [ -d "$2" ]; then say is_directory; exit 125; fi
if [ ! -e "$2" ]; then say not_found; exit 125; fi
if [ ! -f "$2" ]; then say not_a_file; exit 125; fi
if [ ! -r "$2" ]; then say permission_denied; exit 125; fi
size=$(wc -c < "$2")
if [ "$((size))" -gt "$3" ]; then say too_large; exit 125; fi
say "begin $n"
cat -- "$2" 2>/dev/null || { say io_error; exit 125; }
say done
]]

-- word, path
local LIST = BEGIN .. [[
if [ ! -e "$2" ]; then say not_found; exit 125; fi
if [ ! -d "$2" ]; then say not_a_directory; exit 125; fi
if ! [ -r "$2" ] || ! cd -- "$2" 2>/dev/null; then say permission_denied; exit 125; fi
say "begin $n"
set --
for one in * .[!.]* ..?*; do
  if [ -e "$one" ] || [ -L "$one" ]; then set -- "$@" "./$one"; fi
done
if [ $# -gt 0 ]; then
  printf '%s\0' "$@" | xargs -0 stat -c '%f %s %Y' -- || { say changed; exit 125; }
  printf '%s\0' "$@"
fi
say done
]]

-- the input's size, then what follows `sh -c`. Over TLS our side of the stream cannot be ended alone: so the input of any script ends
-- here, where its size is known.
local MEASURED = 'head -c "$1" | { shift; exec /bin/sh -c "$@"; }'

-- word, the session's folder
local OPEN = BEGIN .. [[
umask 077
mkdir -p -- "$2" 2>/dev/null || { say no_space; exit 125; }
say done
]]
local CLOSE = BEGIN .. [[
rm -rf -- "$2"
say done
]]

---@class paddock.EngineClientOptions
---@field engine paddock.Engine
---@field container string             the id
---@field sandbox_id string
---@field command_timeout number?
---@field max_output integer?
---@field home string                  where commands run that name no directory
---@field user string?
---@field owner string                 a word of this runtime's: what carries another one's was left by a former owner
---@field shared table                 of all clients of this container in this process: its busy sessions

---@class paddock.EngineClient
local Client = {}
Client.__index = Client

---@param opts paddock.EngineClientOptions
---@return paddock.EngineClient
function M.new(opts)
  return setmetatable({
    engine = opts.engine, container = opts.container, sandbox_id = opts.sandbox_id, home = opts.home, user = opts.user,
    owner = opts.owner, shared = opts.shared, closed = false, max_output = opts.max_output or 1 << 20,
    command_timeout = check_seconds(opts.command_timeout or 600, "command_timeout"),
  }, Client)
end

-- ---- one exec -------------------------------------------------------------------------------------------------

--- Makes the exec: its id, or it raises why it certainly will not run.
function Client:_prepare(argv, env, stdin, what, limit)
  if self.closed then errors.raise("closed", "this client was closed") end
  local response, err = self.engine:send {
    method = "POST", path = "/containers/" .. self.container .. "/exec", limit = self.engine:within(limit or SHORT_LIMIT),
    json = { AttachStdin = stdin, AttachStdout = true, AttachStderr = true, Tty = false, Cmd = argv, Env = io.json.array(env),
             User = self.user },
  }
  if not response then engines.unreachable(self.engine, what, err) end
  if response.status >= 400 then
    local fault = engines.fault(response, self.container, env)
    if fault.meaning == "absent" then
      errors.raise("lost", ("%s: the container of sandbox %s is gone"):format(what, self.sandbox_id), { reason = "gone" })
    end
    engines.refuse(what, fault)
  end
  local id = type(response.data) == "table" and response.data.Id
  if type(id) ~= "string" or not id:find("^%x+$") then
    errors.raise("backend_error", what .. ": the engine's answer cannot be read", { reason = "protocol" })
  end
  return id
end

--- The exit code of an exec whose stream has ended; nil when it stays unknown.
function Client:_code(id)
  local deadline = io.now() + CODE_WAIT
  repeat
    local response = self.engine:send { method = "GET", path = "/exec/" .. id .. "/json", limit = self.engine:within(SHORT_LIMIT) }
    local data = response and response.status == 200 and response.data
    if type(data) == "table" and data.Running == false and math.type(data.ExitCode) == "integer" then return data.ExitCode end
    io.sleep(0.02)
  until io.now() >= deadline
  return nil
end

---@class paddock.EngineRun
---@field begun boolean          the script has begun its work
---@field words string[]         what it said of itself, after its word
---@field code integer?
---@field out table              keepers
---@field err table
---@field failure table?         of the transport
---@field text string            what came without a script's word: the engine's own words

--- Takes the lines with our word out of standard error.
local function sift(run, word)
  local rest = ""
  local plain = run.err.add
  local function line(text)
    local said = text:sub(1, #word + 1) == word .. " " and text:sub(#word + 2):gsub("\n$", "")
    if said then
      run.words[#run.words + 1] = said
      run.begun = run.begun or said:find("^begin") ~= nil
    else
      plain(text)
    end
  end
  return function(bytes)
    if run.sifted then return plain(bytes) end
    rest = rest .. bytes
    while true do
      local stop = rest:find("\n", 1, true)
      if not stop then break end
      line(rest:sub(1, stop))
      rest = rest:sub(stop + 1)
      if run.begun and run.only_begin then -- from here on it is the command's, whatever it says
        run.sifted = true
        plain(rest)
        rest = ""
        return
      end
    end
    if #rest > 4096 then
      plain(rest)
      rest = ""
    end
  end, function()
    if rest ~= "" then line(rest) end
    rest = ""
  end
end

--- Runs a script to its end. `opts`: stdin, limit, make_limit (of the exec's creation), max (bytes kept per stream), env, only_begin
--- (what follows the first word is a command's own), no_code (its exit code is not asked for).
---@return paddock.EngineRun
function Client:_run(script, args, opts, what)
  local word = io.hex(io.random(12))
  local argv = { "/bin/sh", "-c", script, "paddock", word, table.unpack(args) }
  if self.engine.tls and opts.stdin then
    argv = { "/bin/sh", "-c", MEASURED, "paddock", tostring(#opts.stdin), table.unpack(argv, 3) }
  end
  local id = self:_prepare(argv, opts.env or {}, opts.stdin ~= nil, what, opts.make_limit)
  local max = opts.max or 1 << 20
  local run = {
    begun = false, words = {}, out = streams.keeper(max), err = streams.keeper(opts.err_max or max), only_begin = opts.only_begin,
  }
  local to_err, flush = sift(run, word)
  local take, reader = streams.reader(function(stream, bytes)
    if stream == streams.STDERR then to_err(bytes) else run.out.add(bytes) end
  end)
  local request = {
    method = "POST", url = self.engine.url .. "/v" .. self.engine.version .. "/exec/" .. id .. "/start", unix = self.engine.unix,
    headers = { ["Content-Type"] = "application/json" }, body = '{"Detach":false,"Tty":false}', input = opts.stdin or "",
    timeout = opts.limit, connect_timeout = math.min(opts.limit, 5), on_body = take,
  }
  for name, value in pairs(self.engine.tls or {}) do request[name] = value end
  local response, err = io.http(request)
  flush()
  if not response then
    run.failure = err
  elseif response.status >= 400 then
    run.refused = engines.fault { status = response.status, body = response.body, headers = {} }
  elseif reader.damaged then
    run.failure = { kind = "backend_error", reason = "protocol", message = "the stream of the exec is damaged", failure = "ambiguous" }
  elseif not opts.no_code then
    run.code = self:_code(id)
  end
  return run
end

--- The first thing that a script has said of itself that is no "begin".
local function verdict(run)
  for _, said in ipairs(run.words) do
    if not said:find("^begin") then return said end
  end
  return nil
end

--- Raises why a script certainly did nothing; returns when it may have.
function Client:_not_run(run, what)
  if run.begun then return end
  if run.failure then
    if run.failure.failure == "not_sent" then engines.unreachable(self.engine, what, run.failure) end
    return
  end
  if run.refused then engines.refuse(what, run.refused) end
  if run.words[1] then return end
  if run.code == nil then return end
  local text = streams.one_line(run.out.text() .. " " .. run.err.text()):sub(1, 300)
  if text:find("temporarily unavailable", 1, true) or text:find("read init-p", 1, true) or text:find("fork", 1, true) then
    errors.raise("backend_error", ("%s: no further process can start in sandbox %s: its process limit is reached (%s)"):format(what,
      self.sandbox_id, text), { reason = "process_limit" })
  end
  errors.raise("backend_error", ("%s: the engine cannot start a shell in sandbox %s: %s"):format(what, self.sandbox_id,
    text ~= "" and text or "exit code " .. run.code), { reason = run.code == 127 and "no_shell" or "exec" })
end

--- Kills what carries a mark ("is"), or what carries another one's ("not"), whatever limit the operation has. "ended": nothing of it
--- is left; "none": there was nothing; nil: something is left, or nobody knows.
---@param seconds number
---@return "ended"|"none"|nil
function Client:_kill(mark, how, seconds)
  local opts = { limit = seconds, make_limit = DOUBT_LIMIT, max = 4096, no_code = true }
  local fine, run = pcall(io.shield, seconds, self._run, self, KILL, { mark, how }, opts, "kill a command")
  local said = fine and run.words[#run.words]
  return (said == "ended" or said == "none") and said or nil
end

--- Kills a command that is not known to have begun. The engine may start it yet: only one that was found will certainly not run.
---@return boolean ended
function Client:_kill_late(mark)
  local deadline = io.now() + DOUBT_LIMIT
  repeat
    local said = self:_kill(mark, "is", math.max(deadline - io.now(), 0.1))
    if said ~= "none" then return said == "ended" end
    pcall(io.shield, 1, io.sleep, 0.1)
  until io.now() >= deadline
  return false
end

--- Ends what a former owner left running. Nothing in the container refuses that owner, so this is done when ours begins.
---@return boolean done
function Client:drive_out()
  return self:_kill(self.owner .. ".", "not", SHORT_LIMIT) ~= nil
end

-- ---- commands -------------------------------------------------------------------------------------------------

local function session_folder(id)
  return "/tmp/.paddock/" .. io.sha256hex(id):sub(1, 32)
end

--- Environment of a command: its home, its mark, and what was asked for.
function Client:_env(mark, more)
  local env = { MARK .. "=" .. mark, "HOME=" .. self.home }
  for name, value in pairs(more or {}) do env[#env + 1] = name .. "=" .. value end
  return env
end

--- One command at a time in a session: the next one waits for its turn.
function Client:_turn(session, seconds)
  local busy, deadline = self.shared, io.now() + seconds
  while busy[session] do
    if io.now() >= deadline then
      errors.raise("backend_error", "the session is busy with another command", { reason = "busy" })
    end
    io.sleep(0.005)
  end
  busy[session] = true
  return setmetatable({}, { __close = function() busy[session] = nil end })
end

--- How often the kernel has killed for memory, as a script sees it now; nil when it cannot be asked.
function Client:_oom_kills()
  local fine, run = pcall(self._run, self, BEGIN .. 'say "begin $n"\n', {}, { limit = SHORT_LIMIT, max = 4096 }, "look at the memory")
  return fine and tonumber((run.words[1] or ""):match("^begin (%d+)"))
end

---@return paddock.ExecResult
function Client:_result(run, req, started)
  local result = {
    outcome = "unknown", reason = "response", stdout = run.out.text(), stderr = run.err.text(), duration = io.now() - started,
    truncated = run.out.truncated or run.err.truncated, session_reset = (run.words[1] or ""):find(" reset$") ~= nil,
  }
  if run.failure or run.code == nil then
    result.detail = run.failure and tostring(run.failure.message) or "its exit code never came"
    return result
  end
  result.outcome, result.reason, result.exit_code = "completed", nil, run.code
  if run.code > 128 and run.code <= 128 + 64 then
    result.outcome, result.signal = "signalled", run.code - 128
    local before = tonumber((run.words[1] or ""):match("^begin (%d+)"))
    local now = result.signal == 9 and before and self:_oom_kills()
    if now and now > before then result.outcome = "oom" end
  end
  if req.plane == "shell" and req.session and result.outcome ~= "completed" then result.session_reset = true end
  return result
end

--- Its limit is over, or its stream is lost: it is ended from inside. What cannot be ended stays unknown.
function Client:_cut_off(result, mark, run, timed_out)
  local ended
  if run.begun then
    ended = self:_kill(mark, "is", SHORT_LIMIT) ~= nil
  else
    ended = self:_kill_late(mark)
  end
  if timed_out and ended then
    result.outcome, result.reason, result.exit_code, result.detail = "hard_timeout", nil, 124, nil
  elseif not ended then
    result.detail = (result.detail or "its limit is over")
      .. (run.begun and "; its processes could not be ended" or "; the engine did not start it yet, and may still")
  end
  return result
end

--- Runs a command and waits for its end. Raises only when it certainly did not run.
---@param req paddock.ExecRequest
---@return paddock.ExecResult
function Client:exec(req)
  if type(req) ~= "table" or (req.plane ~= "shell" and req.plane ~= "bash") then invalid('plane must be "shell" or "bash"') end
  local limit = check_seconds(req.timeout or self.command_timeout, "timeout")
  local command = check_text(req.command, "command")
  if #command >= COMMAND_MAX then
    errors.raise("invalid_argument", ("exec: the command has %d bytes, and fewer than %d are taken: write it to a file, and run that")
      :format(#command, COMMAND_MAX), { reason = "too_large" })
  end
  local cwd = req.cwd ~= nil and check_text(req.cwd, "cwd") or nil
  if cwd and cwd:sub(1, 1) ~= "/" then
    errors.raise("invalid_argument", "exec: cwd must be absolute", { reason = "invalid_cwd" })
  end
  if req.env ~= nil then common.check_env(req.env, check_text) end
  if req.stdin ~= nil and type(req.stdin) ~= "string" then invalid("stdin must be a string") end
  local session = req.plane == "shell" and req.session and session_folder(check_text(req.session, "session")) or nil
  local _turn <close> = session and self:_turn(session, limit) or nil
  return self:_exec(req, command, cwd, session, limit)
end

function Client:_exec(req, command, cwd, session, limit)
  local mark = self.owner .. "." .. io.hex(io.random(8))
  local script, args = req.stdin and COMMAND_FED or COMMAND, { cwd or self.home, command }
  if session then script, args = SESSION, { cwd or "", command, session, req.stdin and "fed" or "" } end
  local stdin = req.stdin
  local started = io.now()
  local run = self:_run(script, args, {
    stdin = stdin, limit = limit, max = self.max_output, env = self:_env(mark, req.env), only_begin = true,
  }, "exec")
  local said = verdict(run)
  if said == "cwd" then
    errors.raise("invalid_argument", ("exec: cannot change to the working directory %s"):format(cwd or self.home),
      { reason = "invalid_cwd" })
  elseif said == "nosession" then
    errors.raise("backend_error", "exec: there is no such session", { reason = "no_session" })
  end
  self:_not_run(run, "exec")
  local result = self:_result(run, req, started)
  if not run.failure then return result end
  local timed_out = run.failure.reason == "read_timeout" and io.now() - started >= limit - 0.01
  if timed_out and session then result.session_reset = true end
  return self:_cut_off(result, mark, run, timed_out)
end

-- ---- sessions -------------------------------------------------------------------------------------------------

local function check_plane(plane)
  if plane ~= "shell" and plane ~= "bash" then invalid('plane must be "shell" or "bash"') end
  return plane
end

--- Makes a shell session. On the bash plane there is nothing to make.
---@param plane "shell"|"bash"
---@param id string
---@return string id
function Client:open_session(plane, id)
  check_text(id, "session")
  if check_plane(plane) == "bash" then return id end
  local run = self:_run(OPEN, { session_folder(id) }, { limit = SHORT_LIMIT, max = 4096 }, "session creation")
  self:_not_run(run, "session creation")
  local said = verdict(run)
  if said == "done" then return id end
  if said then errors.raise("backend_error", "session creation: " .. said, { reason = said }) end
  errors.raise("outcome_unknown", "whether session " .. id .. " was made is unknown", { reason = "session_creation" })
end

--- Ends a shell session, at best effort.
---@return boolean done
---@return string? message
function Client:close_session(plane, id)
  check_text(id, "session")
  if check_plane(plane) == "bash" then return true end
  local fine, run = pcall(self._run, self, CLOSE, { session_folder(id) }, { limit = SHORT_LIMIT, max = 4096 }, "session clean-up")
  if fine and verdict(run) == "done" then return true end
  return false, fine and "no answer" or tostring(run)
end

-- ---- files ----------------------------------------------------------------------------------------------------

local MESSAGES = {
  not_found = "there is no such file or folder", is_directory = "it is a folder", not_a_directory = "it is no folder",
  not_a_file = "it is no ordinary file", permission_denied = "permission denied", read_only = "the file system is read-only",
  no_space = "no space left", already_exists = "it is there already", short = "not all of it arrived", changed = "it changed meanwhile",
}

local function file_limit(bytes) return FILE_LIMIT + bytes / FILE_RATE end

--- Runs a file's script; raises what it says, or that nobody knows. `changes`: whether that matters.
function Client:_file(script, args, opts, what, changes)
  opts.err_max = 4096
  local run = self:_run(script, args, opts, what)
  local said = verdict(run)
  if said == "too_large" then
    errors.raise("invalid_argument", ("%s: the file has more bytes than one call takes (%d): read it by parts, or mount its directory")
      :format(what, FILE_MAX), { reason = "too_large" })
  elseif said and said ~= "done" then
    errors.raise("io_error", ("%s: %s"):format(what, MESSAGES[said] or said), { reason = said })
  end
  self:_not_run(run, what)
  if said == "done" and not run.failure then return run end
  local why = run.failure and tostring(run.failure.message) or "its end never came"
  errors.raise(changes and "outcome_unknown" or "backend_error", what .. ": " .. why, { reason = changes and "response" or "protocol" })
end

local function check_path(path)
  return common.check_absolute(check_text(path, "path"))
end

--- The bytes of a file.
---@param path string
---@return string
function Client:read(path)
  check_path(path)
  local opts = { limit = file_limit(FILE_MAX), max = FILE_MAX + 1 }
  return self:_file(READ, { path, tostring(FILE_MAX) }, opts, "read " .. path, false).out.text()
end

--- Writes a file, all of it or nothing.
---@param path string
---@param bytes string
---@param opts? { no_overwrite: boolean? }
---@return boolean
function Client:write(path, bytes, opts)
  check_path(path)
  if type(bytes) ~= "string" then invalid("bytes must be a string") end
  self:_file(WRITE, { path, tostring(#bytes), opts and opts.no_overwrite and "new" or "" },
    { stdin = bytes, limit = file_limit(#bytes), max = 4096 }, "write " .. path, true)
  return true
end

--- The entries of a directory: { name, path, is_directory, is_link, size, modified_time, mode }.
---@param path string
---@return table[]
function Client:list(path)
  check_path(path)
  local what = "list " .. path
  local text = self:_file(LIST, { path }, { limit = file_limit(0), max = 16 << 20 }, what, false).out.text()
  local facts, out = {}, {}
  local base = path:gsub("/+$", "")
  local at = 1
  while true do -- the facts come first, a line each; the names after them, each with a NUL
    local mode, size, time, stop = text:match("^(%x+) (%d+) (%-?%d+)\n()", at)
    if not mode then break end
    facts[#facts + 1] = { tonumber(mode, 16), math.tointeger(tonumber(size)), tonumber(time) }
    at = stop
  end
  for name in text:sub(at):gmatch("%./([^\0]*)\0") do
    local fact = facts[#out + 1]
    if not fact then break end
    local kind = fact[1] & 0xf000
    out[#out + 1] = {
      name = name, path = base .. "/" .. name, is_directory = kind == 0x4000, is_link = kind == 0xa000, size = fact[2],
      modified_time = fact[3], mode = ("%04o"):format(fact[1] & 4095),
    }
  end
  if #out ~= #facts then errors.raise("backend_error", what .. ": the answer cannot be read", { reason = "protocol" }) end
  table.sort(out, function(a, b) return a.name < b.name end)
  return out
end

--- Ends this client; the sandbox goes on.
function Client:close()
  self.closed = true
end

return M
