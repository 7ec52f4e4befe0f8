--- paddock policy: check a set, explain what it would decide, make running runtimes load it again.
local args = require "paddock.cli.args"
local native = require "paddock.cli.native"
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local world = require "paddock.cli.world"

local M = {
  name = "policy",
  usage = "policy check [DIR] | explain --user U --thread T | reload",
  summary = "Checks policies, explains what they decide, has running runtimes load them again.",
  least = 1,
  most = 2,
  options = {
    { "--user,-u", "U", "explain: whose sandbox" },
    { "--thread,-t", "T", "explain: which of the user's sandboxes" },
    { "--need,-n", "K=V", "explain: a requirement of the request, such as lark_cli=true; may be given several times", list = true },
    { "--source,-s", "S", "explain: judge a sandbox that is active, warm, discovered or created (default: warm)" },
    { "--attest,-a", "K=V", "explain: what that sandbox says of itself, such as capacity=4; may be given several times", list = true },
    { "--can", "K=V", "explain: what the deployment says that it can do; may be given several times", list = true },
    { "--holders", "N", "explain: how many hold that sandbox" },
    { "--config,-c", "F", "a Lua file that returns the options of paddock.open" },
    { "--json", nil, "print one JSON document" },
  },
  notes = [[
check    loads every file and asks each function about an invented identity and sandbox. DIR: that folder, else the
         configuration's.
explain  asks the policies about an identity and prints what they answer, step by step; no sandbox is touched. With --source,
         --attest, --can or --holders it is about a sandbox that you describe. V: true, false, a number or a text.
reload   sends HUP to every runtime that is recorded in the state directory; one whose new policies are
         wrong keeps the old ones and says so in its log.]],
}

--- A runtime that asks the policies and can reach nothing: policies are the same whatever the backend is.
local function policy_runtime(ctx, config)
  config.network = world.normalized(config).network -- whose default is the backend's
  config.backend = require("paddock.sim").new().backend
  config.clock, config.threads, config.backend_options = "manual", false, nil
  config.ownership, config.journal = { type = "memory" }, "memory"
  local warnings = {}
  config.log = function(record)
    if record.level == "warn" or record.level == "error" then warnings[#warnings + 1] = record end
  end
  return world.open(ctx, {}, config), warnings
end

local function warning_lines(rt, warnings)
  rt:dispatch()
  local out = {}
  for i, record in ipairs(warnings) do
    local parts = {}
    for _, key in ipairs(render.sorted_keys(record)) do
      if key ~= "level" and key ~= "ts" and key ~= "time" and key ~= "event" then
        parts[#parts + 1] = ("%s=%s"):format(key, tostring(record[key]))
      end
    end
    out[i] = ("%s %s"):format(tostring(record.event), table.concat(parts, " "))
  end
  return out
end

--- Asks everything once about an identity; nil and the error when a policy fails.
---@param trial boolean?   also the functions that have nothing to decide now, about an invented sandbox
---@param more table?       requirements, candidate
local function ask(rt, user, thread, trial, more)
  local request = { user = user, thread = thread, trial = trial }
  for key, value in pairs(more or {}) do request[key] = value end
  local ok, answer = pcall(rt.explain, rt, request)
  if ok then return answer end
  return nil, answer
end

--- The answers of single policies that failed: explain puts { error, message } in their place.
local function failures_of(answer)
  local out = {}
  for _, key in ipairs(render.sorted_keys(answer)) do
    local value = answer[key]
    if type(value) == "table" and type(value.error) == "string" then
      out[#out + 1] = { kind = value.error, message = value.message or value.error }
    end
  end
  return out
end

local function files_of(answer)
  local files = {}
  for i, file in ipairs(answer.policies or {}) do
    local functions = {}
    for key, value in pairs(file.functions or {}) do
      functions[#functions + 1] = type(key) == "string" and key or type(value) == "table" and value.name or tostring(value)
    end
    table.sort(functions)
    files[i] = { name = file.name, path = file.path or "built in", functions = functions }
  end
  return files
end

--- Loads the policies of a configuration and asks each once. Raises what is wrong.
---@param config table
---@return table[] files
---@return string[] warnings
function M.load(config)
  local rt, warnings = policy_runtime({ warn = function() end }, config)
  local answer, why = ask(rt, "check", "check", true)
  local noted = warning_lines(rt, warnings)
  if not answer then error(why, 0) end
  local failed = failures_of(answer)[1]
  if failed then error(failed, 0) end
  return files_of(answer), noted
end

function M.check(ctx, options, dir)
  local config = world.config(options)
  if dir then config.policies = dir end
  local files, noted = M.load(config)
  if options.json then
    for _, file in ipairs(files) do render.list(file.functions) end
    ctx.out(render.json { ok = true, files = render.list(files), warnings = render.list(noted) })
    return status.OK
  end
  local rows = {}
  for i, file in ipairs(files) do rows[i] = { file.name, file.path, table.concat(file.functions, ", ") } end
  ctx.out(render.columns({ "POLICY", "FILE", "FUNCTIONS" }, rows) .. "\n")
  for _, line in ipairs(noted) do ctx.out("warn  " .. render.plain(line) .. "\n") end
  ctx.out(#noted == 0 and "ok: all loaded, and asked once\n" or ("ok, with %d warnings\n"):format(#noted))
  return status.OK
end

--- "K=V" words as a table; nil when there are none.
local function facts(option, words)
  if not words then return nil end
  local out = {}
  for _, word in ipairs(words) do
    local key, value = word:match("^([^=]+)=(.*)$")
    if not key then args.usage_error(("%s wants NAME=VALUE, not %s"):format(option, args.quoted(word))) end
    if value == "true" or value == "false" then
      value = value == "true"
    else
      value = math.tointeger(tonumber(value)) or tonumber(value) or value
    end
    out[key] = value
  end
  return out
end

--- The sandbox that is described on the command line, or nil.
local function described(options)
  if not (options.source or options.attest or options.can or options.holders) then return nil end
  local holders = options.holders and math.tointeger(tonumber(options.holders))
  if options.holders and not holders then args.usage_error("--holders wants a number, not " .. args.quoted(options.holders)) end
  return {
    source = options.source, holders = holders, attestation = facts("--attest", options.attest),
    capability = facts("--can", options.can),
  }
end

--- The steps of the decision, one line each.
local function path_lines(path)
  local lines = {}
  for i, one in ipairs(path) do
    lines[i] = ("  %d  %-12s %s%s"):format(i, one.step, one.answer, one.because and "  (" .. render.plain(one.because) .. ")" or "")
  end
  return lines
end

function M.explain(ctx, options)
  if not options.user or not options.thread then args.usage_error("policy explain wants --user U and --thread T") end
  local more = { requirements = facts("--need", options.need), candidate = described(options) }
  local rt = policy_runtime(ctx, world.config(options))
  local answer, why = ask(rt, options.user, options.thread, nil, more)
  if not answer then error(why, 0) end
  local failed = failures_of(answer)[1]
  if options.json then
    ctx.out(render.json(answer))
    return failed and status.of_error(failed) or status.OK
  end
  if failed then error(failed, 0) end
  local lines = { ("%s/%s"):format(render.plain(options.user), render.plain(options.thread)) }
  local function say(key, value)
    if value == nil then return end
    if type(value) ~= "string" then value = render.value(value) end
    lines[#lines + 1] = ("  %-13s %s"):format(key, (value:gsub("\n", "\n" .. (" "):rep(16))))
  end
  say("sandbox id", answer.id)
  if not answer.path then say("now", answer.now and render.plain(answer.now)) end
  say("decision", answer.decision and answer.decision .. (answer.code and " (" .. answer.code .. ")" or ""))
  say("because", answer.message and render.plain(answer.message))
  say("requirements", answer.requirements or {})
  say("mounts", answer.mounts or {})
  if answer.path then
    lines[#lines + 1] = "  the path"
    for _, line in ipairs(path_lines(answer.path)) do lines[#lines + 1] = line end
  end
  for _, file in ipairs(files_of(answer)) do say(file.name, file.path) end
  ctx.out(table.concat(lines, "\n") .. "\n")
  return status.OK
end

function M.reload(ctx, options)
  local told, failed = render.list {}, render.list {}
  for _, runtime in ipairs(world.runtimes(world.normalized(world.config(options)).state_dir)) do
    local ok, why
    if runtime.signals then
      ok, why = native.hangup(runtime.pid, runtime.start_time)
    else
      why = "its host has not asked for signals (option signals), and HUP would end it"
    end
    table.insert(ok and told or failed, ok and runtime.pid or { pid = runtime.pid, reason = why })
  end
  if options.json then
    ctx.out(render.json { told = told, failed = failed })
  else
    ctx.out(#told == 0 and "no runtime is recorded as running\n"
      or ("told %d runtime%s: pid %s\n"):format(#told, #told == 1 and "" or "s", table.concat(told, ", ")))
    for _, one in ipairs(failed) do ctx.warn(("runtime %d was not told: %s"):format(one.pid, one.reason)) end
  end
  return #failed == 0 and status.OK or status.DEFERRED
end

function M.run(ctx, options, operands)
  local verbs = { check = M.check, explain = M.explain, reload = M.reload }
  local verb = verbs[operands[1]]
    or args.usage_error(args.unknown("policy command", operands[1], { "check", "explain", "reload" })
      .. "; `paddock policy --help` lists them")
  if operands[2] and operands[1] ~= "check" then
    args.usage_error(("policy %s: unexpected argument %s"):format(operands[1], args.quoted(operands[2])))
  end
  return verb(ctx, options, operands[2])
end

return M
