--- A Lua host: two users, three conversations, one of them refused what it must not do.
---
---     . build/env.sh && lua5.4 examples/host.lua [CONFIG.lua]
local paddock = require "paddock"

local options = { backend = "process", limits = { memory = 512 << 20, pids = 64 } }
if arg[1] then options = require("paddock.config").load_file(arg[1]) end
options.log = "off" -- or "info", "warn", ...: JSON lines on stderr; or a function that takes each record

local rt = paddock.open(options)

-- Every change of state is an event; here they are only counted.
local seen = {}
rt:on("*", function(record) seen[record.event] = (seen[record.event] or 0) + 1 end)

--- One turn of a conversation. `box` is released at the end of the function, also when something raises.
local function turn(user, thread, command)
  local box <close> = rt:acquire { user = user, thread = thread, timeout = 60 }
  local result = box:exec(command, { timeout = 20 })
  print(("%-6s %-8s %-10s %s"):format(user, thread, box.source, (tostring(result.stdout):gsub("\n", " "))))
  return result
end

turn("alice", "letters", "echo 'Dear Bob' > letter.txt; wc -w < letter.txt")
turn("alice", "taxes", "ls | wc -l") -- another conversation of the same user: another sandbox
turn("bob", "letters", "cat letter.txt 2>/dev/null || echo 'no letter here'")
turn("alice", "letters", "cat letter.txt") -- the sandbox of the first turn, with its file

-- A command's failure is a result; an error is raised only when it did not run. Errors are tables: kind, message, ...
local ok, err = pcall(rt.acquire, rt, { user = ("x"):rep(1 << 20), thread = "t" })
print("refused: " .. (ok and "nothing" or err.kind))

for _, record in ipairs(rt:list()) do
  print(("%s of %s is %s"):format(record.id:sub(1, 8), record.identity.user, record.state))
end
rt:shutdown() -- events are delivered whenever the host is inside a paddock call: these were the last
local names = {}
for name in pairs(seen) do names[#names + 1] = name end
table.sort(names)
print("events: " .. table.concat(names, " "))
