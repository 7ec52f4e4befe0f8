--- paddock exec: one command in one sandbox.
local args = require "paddock.cli.args"
local native = require "paddock.cli.native"
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local world = require "paddock.cli.world"

local STDIN_MAX = 64 << 20

local M = {
  name = "exec",
  usage = "exec [OPTIONS] [--] CMD...",
  summary = "Runs a command in a sandbox.",
  stop = true,
  least = 1,
  most = math.huge,
  options = {
    { "--user,-u", "U", "whose sandbox (default: the configuration's user, else $USER, else the login name)" },
    { "--thread,-t", "T", "which of the user's sandboxes (default: \"default\")" },
    { "--config,-c", "F", "a Lua file that returns the options of paddock.open" },
    { "--backend,-b", "B", "process, docker, provisioner, or path/to/engine.lua" },
    { "--timeout", "S", "the command's time limit in seconds; ends it with 124", type = "seconds" },
    { "--env,-e", "K=V", "an environment variable; may be given several times", list = true },
    { "--cwd,-w", "DIR", "where the command starts (default: the sandbox's workspace)" },
    { "--no-stdin,-n", nil, "do not read the standard input" },
    { "--keep", nil, "leave the sandbox running, for the next exec of this user and thread" },
    { "--destroy", nil, "take the sandbox down, also one that was found running" },
    { "--json", nil, "print one JSON document instead of the output" },
    { "--verbose,-v", nil, "log lines (JSON) on stderr" },
  },
  notes = [[
One CMD word is shell text: paddock exec 'ls | wc -l'. Several words are one command and its arguments, each passed
on exactly as it is: paddock exec -- echo "a  b".
The standard input goes to the command when it is not a terminal (at most 64 MiB; it is read to its end first).
Without --keep and --destroy, a sandbox that this call created is destroyed, and one that it found is parked.]],
}

--- A word as a POSIX shell reads it back.
---@param word string
---@return string
function M.shell_quote(word)
  if word:find("^[%w_%-./:@%%+,]+$") then return word end
  return "'" .. word:gsub("'", [['\'']]) .. "'"
end

--- One word is shell text; several are a command and its arguments.
---@param words string[]
---@return string
function M.command_line(words)
  if #words == 1 then return words[1] end
  local quoted = {}
  for i, word in ipairs(words) do quoted[i] = M.shell_quote(word) end
  return table.concat(quoted, " ")
end

local function environment(pairs_given)
  local env = {}
  for _, text in ipairs(pairs_given or {}) do
    local name, value = text:match("^([%a_][%w_]*)=(.*)$")
    if not name then args.usage_error(("exec: --env wants NAME=VALUE, not %s"):format(args.quoted(text))) end
    env[name] = value
  end
  return next(env) and env or nil
end

local function standard_input(options)
  if options.no_stdin or native.isatty(0) then return nil end
  local bytes, why = native.read_all(0, STDIN_MAX)
  if bytes then return bytes end
  if why == "too large" then
    args.usage_error("exec: the standard input is larger than 64 MiB; put it in by parts, or mount a directory")
  end
  status.fail(status.INTERNAL, "cannot read the standard input: " .. why)
end

local function document(box, result, user, thread)
  local doc = {
    sandbox_id = box.id, generation = box.generation, source = box.source, user = user, thread = thread,
    outcome = result.outcome, reason = result.reason, exit_code = result.exit_code, signal = result.signal,
    truncated = result.truncated and true or false, duration = result.duration,
  }
  for _, name in ipairs { "stdout", "stderr" } do
    local text, was_valid = render.utf8(result[name] or "")
    doc[name] = text
    if not was_valid then doc[name .. "_base64"] = render.base64(result[name]) end
  end
  return doc
end

local function explain_result(ctx, options, result)
  if native.ended_by() then return end -- who interrupted it knows why it ended
  if result.truncated then ctx.warn("the output was longer than what is kept; it is cut") end
  if result.outcome == "hard_timeout" then
    ctx.warn(options.timeout and ("the command ran into its time limit of %g s"):format(options.timeout)
      or "the command ran into its time limit; --timeout sets another one")
  elseif result.outcome == "oom" then
    ctx.warn("the command ran into the sandbox's memory limit")
  elseif result.outcome == "unknown" then
    ctx.warn(("nobody knows whether the command ran (%s); it is not run again"):format(result.reason or "no answer"))
  elseif result.outcome == "cancelled" then
    ctx.warn("the command was ended by a newer owner of this sandbox")
  end
end

--- Parks or destroys; says so when that did not work, since something is left running then.
local function give_back(ctx, rt, box, options)
  native.calm()
  local id, created = box.id, box.source == "created"
  local ok, err = pcall(box.release, box)
  if ok and (options.destroy or (created and not options.keep)) then
    local done
    ok, done = pcall(rt.destroy, rt, id)
    if not ok then
      err = done
    elseif not done and options.destroy then
      ctx.warn(("sandbox %s was not destroyed: somebody else uses it"):format(id))
      return status.DEFERRED
    end
  end
  if ok then return status.OK end
  ctx.warn(("sandbox %s may still run: %s"):format(id, status.line(err)))
  return status.of_error(err)
end

--- An acquire that fails, or is interrupted, may have made a sandbox all the same: what has begun is brought to its end.
local function acquire(ctx, rt, options, thread)
  local made
  rt:on("created", function(record) made = record.sandbox_id end)
  local ok, box = pcall(rt.acquire, rt, { user = options.user, thread = thread })
  if ok then return box end
  native.calm()
  if made and not options.keep then
    local gone, why = pcall(rt.destroy, rt, made)
    if not gone then ctx.warn(("sandbox %s may still run: %s"):format(made, status.line(why))) end
  end
  error(box, 0)
end

local function show(ctx, options, box, result, thread)
  if options.json then
    ctx.out(render.json(document(box, result, options.user, thread)))
  else -- its output was shown as it came
    explain_result(ctx, options, result)
  end
end

local SIGPIPE = 13

--- Where the command's output goes while it runs; nil = nowhere, it is shown at the end. When it can go there no longer, the
--- command is ended, as a pipe whose reader has gone ends one: `paddock exec ... | head`.
local function output_to(ctx, options, failed)
  if options.json then return nil end
  return function(stream, bytes)
    local written, read = pcall(stream == "stdout" and ctx.out or ctx.err, bytes)
    if written and read then return end
    if not written then failed[1] = failed[1] or read end
    native.stop(written and SIGPIPE or nil)
  end
end

function M.run(ctx, options, words)
  if options.keep and options.destroy then args.usage_error("exec: --keep and --destroy exclude each other") end
  local env = environment(options.env)
  local config = world.one_shot(world.config(options), options.timeout)
  options.user = options.user or config.user
  local stdin = standard_input(options)
  local rt = world.open(ctx, options, config)
  local thread = options.thread or "default"
  local id = rt:explain({ user = options.user, thread = thread }).id -- a failing policy: acquire says it better
  local _turn <close> = type(id) == "string" and world.sole_user(config, id, args.quoted(options.user .. "/" .. thread)) or nil
  local box = acquire(ctx, rt, options, thread)
  local failed = {}
  local ok, result = pcall(box.exec, box, M.command_line(words),
    { timeout = options.timeout, env = env, cwd = options.cwd, stdin = stdin, on_output = output_to(ctx, options, failed) })
  if failed[1] then ok, result = false, failed[1] end
  local shown, why = true, nil
  if ok then shown, why = pcall(show, ctx, options, box, result, thread) end
  local left = give_back(ctx, rt, box, options)
  if not ok then error(result, 0) end
  if not shown then error(why, 0) end
  local code = status.of_result(result)
  return code == 0 and left or code
end

return M
