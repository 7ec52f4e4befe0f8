--- Builds the core with one fault at a time (tests/sim/mutants) and looks for a schedule that shows it.
---
--- One in a Lua file is built into the program as the file is.
---
--- From the Makefile: CC, CFLAGS, LINK, SIM_B, EMBEDDED, JOBS, BUDGET. Arguments: parts of names; none = all.
local directory = os.getenv "SIM_B"
local jobs, budget = os.getenv "JOBS" or "2", os.getenv "BUDGET" or "100000"

local function read(name)
  local file <close> = assert(io.open(name, "rb"))
  return file:read "a"
end

local function write(name, text)
  local file <close> = assert(io.open(name, "wb"))
  file:write(text)
end

local function fail(...)
  io.stderr:write("mutants: ", string.format(...), "\n")
  os.exit(1)
end

--- The mutants, in order: { name, file, old, new }.
local function parse(text)
  local all, current = {}, nil
  for line in (text .. "\n"):gmatch "(.-)\n" do
    local mark, rest = line:sub(1, 1), line:sub(2)
    if line == "" then
      current = nil
    elseif mark == "#" then
      current = { name = rest:match "^%s*(.*)$", old = {}, new = {} }
    elseif mark == "@" and current then
      current.file = rest:match "^%s*(.*)$"
      all[#all + 1] = current
    elseif mark == "-" and current then
      current.old[#current.old + 1] = rest
    elseif mark == "+" and current then
      current.new[#current.new + 1] = rest
    else
      fail("cannot read the line %q", line)
    end
  end
  for _, m in ipairs(all) do
    m.old, m.new = table.concat(m.old, "\n") .. "\n", table.concat(m.new, "\n") .. "\n"
  end
  return all
end

--- The text with the mutant in it; the lines must be there, once.
local function apply(m)
  local text = "\n" .. read(m.file)
  local first, last = text:find("\n" .. m.old, 1, true)
  if not first then return nil, "its lines are not in " .. m.file .. " any more" end
  if text:find("\n" .. m.old, last, true) then return nil, "its lines are in " .. m.file .. " more than once" end
  return text:sub(2, first) .. m.new .. text:sub(last + 1)
end

local function run(command)
  local pipe <close> = assert(io.popen(command .. " 2>&1"))
  local output = pipe:read "a"
  return output, pipe:close() == true
end

local function objects(replaced, by)
  local list = {}
  for name in run("ls " .. directory .. "/core/*.o " .. directory .. "/tests/sim/*.o " .. directory .. "/embedded.o"):gmatch "%S+" do
    list[#list + 1] = name == replaced and by or name
  end
  return table.concat(list, " ")
end

local function wanted(m)
  for i = 1, #arg do
    if m.name:find(arg[i], 1, true) then return true end
  end
  return #arg == 0
end

--- The C source in which the mutated Lua file stands for the one that it comes from, made beside it.
local function embedded(m, text)
  local source = directory .. "/mutant/embedded.c"
  local copy = directory .. "/mutant/" .. m.file:match "[^/]+$"
  local all = read(os.getenv "EMBEDDED")
  local name = m.file:gsub("[-.]", "%%%0")
  local changed, places = all:gsub('incbin \\"' .. name .. '\\"', function() return 'incbin \\"' .. copy .. '\\"' end)
  local sized, sizes = changed:gsub('(%{ "' .. name .. '", pdk_file_%d+, )%d+', "%1" .. #text)
  if places ~= 1 or sizes ~= 1 then fail("%s: %s is not built in as expected", m.name, m.file) end
  write(copy, text)
  write(source, sized)
  return source
end

--- Builds it and runs schedules until one fails. How many it took, what it said; or nil and why not.
local function hunt(m, text)
  local script, source = m.file:find "%.lua$" ~= nil, directory .. "/mutant/" .. m.file:match "[^/]+$"
  if script then source = embedded(m, text) else write(source, text) end
  local object, program = source:gsub("%.c$", ".o"), directory .. "/mutant/sim"
  local output, ok = run(("%s %s -Wno-error -w -c %s -o %s"):format(os.getenv "CC", os.getenv "CFLAGS", source, object))
  if not ok then return nil, "it does not compile: " .. output end
  output, ok = run(("%s -no-pie -pthread -o %s %s %s"):format(os.getenv "CC", program,
    objects(directory .. "/" .. (script and "embedded.o" or m.file:gsub("%.c$", ".o")), object), os.getenv "LINK"))
  if not ok then return nil, "it does not link: " .. output end
  output = run(("%s -q -n %s -j %s"):format(program, budget, jobs))
  local seed, what = output:match "FAIL  seed (%d+): ([^\n]*)"
  if seed then return tonumber(seed), what end
  if output:find "0 failed" then return nil, "no schedule found it" end
  return nil, output
end

assert(os.execute("mkdir -p " .. directory .. "/mutant"))
local all, missed, count = parse(read "tests/sim/mutants"), 0, 0
for _, m in ipairs(all) do -- all of them first: a stale one must not wait for its turn
  local text, why = apply(m)
  if not text then fail("%s: %s", m.name, why) end
  m.text = text
end
for _, m in ipairs(all) do
  if wanted(m) then
    count = count + 1
    local seed, what = hunt(m, m.text)
    if not seed then missed = missed + 1 end
    print(("%-66s %8s  %s"):format(m.name, seed or "MISSED", what))
    io.stdout:flush()
  end
end
print(("%d passed, %d failed, 0 skipped"):format(count - missed, missed))
os.exit(missed == 0)
