--- The paddock command: finds the command, parses its options, runs it, maps what happened to an exit code.
--- core/main.c calls what this file returns with the words of the command line.
local args = require "paddock.cli.args"
local native = require "paddock.cli.native"
local status = require "paddock.cli.status"

local NAMES = { "exec", "repl", "ps", "destroy", "gc", "quarantine", "policy", "doctor", "bench", "version" }

local VERSION = {
  name = "version", usage = "version", summary = "Prints the version.", options = {},
  run = function(ctx)
    ctx.out("paddock " .. require("paddock").version .. "\n")
    return status.OK
  end,
}

local function command_named(name)
  if name == "version" then return VERSION end
  for _, known in ipairs(NAMES) do
    if known == name then return require("paddock.cli." .. name) end
  end
end

local function overview()
  local lines = { "usage: paddock COMMAND [OPTIONS]", "" }
  for _, name in ipairs(NAMES) do
    lines[#lines + 1] = ("  %-10s %s"):format(name, command_named(name).summary:match("^[^\n]*"))
  end
  lines[#lines + 1] = "  help       This text; `paddock COMMAND --help` tells more."
  lines[#lines + 1] = "\nExit codes: 0 done; for exec the command's own, 124 at its time limit, 128+n for signal n, 70 when nobody"
  lines[#lines + 1] = "knows whether it ran; 64 usage; 69 backend unavailable; 70 internal; 75 not now, try again; 78 configuration"
  lines[#lines + 1] = "or policy error."
  return table.concat(lines, "\n") .. "\n"
end

local function write(fd, text)
  local ok, why = native.write(fd, text)
  if not ok and fd == 1 and why ~= "Broken pipe" then
    status.fail(status.INTERNAL, "cannot write to the standard output: " .. why)
  end
  return ok or why ~= "Broken pipe"
end

---@class paddock.cli.Context
local ctx = {
  --- false = nobody reads it any more; raises when it cannot be written for another reason.
  out = function(text) return write(1, text) end,
  --- As out, but never raises.
  err = function(text) return write(2, text) end,
  --- One line on stderr, as every message of paddock looks.
  warn = function(text) write(2, "paddock: " .. status.line({ message = text }) .. "\n") end,
}

local function unknown_command(name)
  local names = table.move(NAMES, 1, #NAMES, 1, {})
  names[#names + 1] = "help"
  args.usage_error(args.unknown("command", name, names) .. "; `paddock help` lists them")
end

local function help(name)
  if not name then
    ctx.out(overview())
  else
    ctx.out(args.help(command_named(name) or unknown_command(name)))
  end
  return status.OK
end

local function dispatch(words)
  local name = words[1]
  if not name then
    ctx.err(overview())
    return status.USAGE
  elseif name == "help" or name == "--help" or name == "-h" then
    return help(words[2])
  elseif name == "--version" or name == "-V" then
    name = "version"
  end
  local command = command_named(name) or unknown_command(name)
  local options, operands = args.parse(command, table.move(words, 2, #words, 1, {}))
  if options.help then return help(name) end
  return command.run(ctx, options, operands)
end

---@param words string[]
---@return integer exit_code
return function(words)
  local ok, code = xpcall(dispatch, function(err)
    -- a bug's place is worth having; an operator's mistake needs no trace
    if type(err) == "string" and os.getenv("PADDOCK_TRACE") then return debug.traceback(err, 2) end
    return err
  end, words)
  if not ok then
    local err = code
    code = status.of_error(err)
    pcall(ctx.err, "paddock: " .. status.line(err) .. "\n")
  end
  local world = package.loaded["paddock.cli.world"] -- a command that opened no runtime may have no use for it
  if world then world.leave() end
  local signal = native.ended_by()
  return signal and 128 + signal or code
end
