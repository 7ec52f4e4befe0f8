--- Command-line arguments: a command describes its options as a table, and gets a table back.
--- Why a table: the parser, the help text and the spelling advice all come from the same description.
local M = {}

---@class paddock.cli.Option
---@field [1] string      names, longest first: "--timeout" or "--env,-e"
---@field [2] string?     what the value is called in the help; nil = a flag
---@field [3] string      one line of help
---@field key string?     the key in the result; default: the first name, "-" as "_"
---@field list boolean?   may be given several times: the value is a list
---@field type string?    "seconds": a finite number of more than 0

---@class paddock.cli.Command
---@field name string
---@field usage string
---@field summary string
---@field options paddock.cli.Option[]
---@field notes string?       printed below the options
---@field least integer?      operands: at least (0)
---@field most integer?       operands: at most (0)
---@field stop boolean?       options end at the first operand (its words belong to another program)
---@field run fun(ctx: table, options: table, operands: string[]): integer

--- A usage error: main.lua prints it and exits with 64.
---@param message string
function M.usage_error(message)
  error(setmetatable({ usage = message }, { __tostring = function(e) return e.usage end }), 0)
end

--- How many edits turn `a` into `b`; two letters swapped are one edit, since that is how fingers slip.
local function distance(a, b)
  local before, row = nil, {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local next_row = { [0] = i }
    for j = 1, #b do
      local cost = a:byte(i) == b:byte(j) and 0 or 1
      local least = math.min(row[j] + 1, next_row[j - 1] + 1, row[j - 1] + cost)
      if before and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        least = math.min(least, before[j - 2] + 1)
      end
      next_row[j] = least
    end
    before, row = row, next_row
  end
  return row[#b]
end

--- The name that was probably meant, or nil.
---@param word string
---@param names string[]
---@return string?
function M.nearest(word, names)
  local best, least = nil, math.huge
  word = word:sub(1, 64)
  for _, name in ipairs(names) do
    local d = distance(word, name)
    if #word >= 2 and name:sub(1, #word) == word then d = math.min(d, 1) end
    if d < least then best, least = name, d end
  end
  if best and least <= math.max(1, #best // 3) then return best end
end

--- A word of the user's, safe to show in one line.
---@param word string
---@return string
function M.quoted(word)
  if #word > 60 then word = word:sub(1, 57) .. "..." end
  return "'" .. word:gsub("[%c\127]", function(c) return ("\\x%02x"):format(c:byte()) end) .. "'"
end

local function advice(word, names)
  local near = M.nearest(word, names)
  return near and ("; did you mean %s?"):format(near) or ""
end

--- "unknown thing 'wrod'; did you mean word?"
---@param what string
---@param word string
---@param names string[]
---@return string
function M.unknown(what, word, names)
  return ("unknown %s %s%s"):format(what, M.quoted(word), advice(word, names))
end

local function index(command)
  local by_name, names = {}, {}
  for _, option in ipairs(command.options) do
    for name in option[1]:gmatch("[^,]+") do
      by_name[name] = option
      names[#names + 1] = name
    end
  end
  return by_name, names
end

local function key_of(option)
  return option.key or (option[1]:match("^%-%-([^,]+)"):gsub("%-", "_"))
end

local function convert(option, name, value)
  if option.type == "seconds" then
    local number = value:match("^%d+%.?%d*$") and tonumber(value)
    if not number or number <= 0 or number > 1e9 then
      M.usage_error(("%s wants a number of seconds, more than 0, not %s"):format(name, M.quoted(value)))
    end
    return number
  end
  if value == "" and not option.list then
    M.usage_error(("%s wants %s, not an empty text"):format(name, option[2]))
  end
  return value
end

local function store(result, option, value)
  local key = key_of(option)
  if option.list then
    result[key] = result[key] or {}
    table.insert(result[key], value)
  else
    result[key] = value
  end
end

local function check_operands(command, operands)
  local least, most = command.least or 0, command.most or 0
  if #operands < least then
    M.usage_error(("%s: something is missing; usage: paddock %s"):format(command.name, command.usage))
  elseif #operands > most then
    M.usage_error(("%s: unexpected argument %s; usage: paddock %s"):format(command.name,
      M.quoted(operands[most + 1]), command.usage))
  end
end

--- Parses the words behind the command's name. Raises a usage error.
---@param command paddock.cli.Command
---@param words string[]
---@return table options   by key; flags are true
---@return string[] operands
function M.parse(command, words)
  local by_name, names = index(command)
  local options, operands, i = {}, {}, 1
  while i <= #words do
    local word = words[i]
    if word == "--" or (command.stop and word:sub(1, 1) ~= "-") then
      table.move(words, word == "--" and i + 1 or i, #words, #operands + 1, operands)
      break
    elseif word:sub(1, 1) ~= "-" or word == "-" then
      operands[#operands + 1] = word
    elseif word == "--help" or word == "-h" then
      options.help = true
      return options, operands
    else
      local name, value = word, nil
      if word:sub(1, 2) == "--" and word:find("=", 1, true) then name, value = word:match("^(.-)=(.*)$") end
      local option = by_name[name]
      if not option then
        M.usage_error(("%s: %s; `paddock %s --help` lists them"):format(command.name, M.unknown("option", name, names), command.name))
      end
      if not option[2] then
        if value then M.usage_error(("%s takes no value"):format(name)) end
        options[key_of(option)] = true
      else
        if not value then
          i = i + 1
          value = words[i] or M.usage_error(("%s wants %s behind it"):format(name, option[2]))
        end
        store(options, option, convert(option, name, value))
      end
    end
    i = i + 1
  end
  check_operands(command, operands)
  return options, operands
end

--- The text of `paddock COMMAND --help`.
---@param command paddock.cli.Command
---@return string
function M.help(command)
  local lines = { "usage: paddock " .. command.usage, "", command.summary, "" }
  for _, option in ipairs(command.options) do
    local names = option[1]:gsub(",", ", ") .. (option[2] and " " .. option[2] or "")
    lines[#lines + 1] = ("  %-24s %s"):format(names, option[3])
  end
  lines[#lines + 1] = ("  %-24s %s"):format("--help, -h", "this text")
  if command.notes then lines[#lines + 1] = "\n" .. command.notes end
  return table.concat(lines, "\n") .. "\n"
end

return M
