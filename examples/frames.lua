--- A Lua host that may never wait: many agents in one frame loop, each of them straight code in a task of a scheduler.
---
---     . build/env.sh && lua5.4 examples/frames.lua [CONFIG.lua [SECONDS [AGENTS]]]
---
--- The engine takes 300 ms to make a sandbox and hangs now and then (examples/engine/slow.lua). A call inside a task yields until
--- it is over; scheduler:step(), once a frame, goes on with those whose calls have ended, and waits for nothing.
local paddock = require "paddock"

local seconds, agents = tonumber(arg[2]) or 5, math.tointeger(tonumber(arg[3])) or 500
local FRAME = 1 / 60

local rt = paddock.open(arg[1] or "examples/config/slow.lua")
local scheduler = paddock.scheduler()
local turns, limits, bytes = 0, 0, 0

--- One turn. `box` is given back when the function is left, however that happens; that yields, too.
local function turn(agent)
  local box <close> = rt:acquire { thread = "agent-" .. agent, timeout = 2 }
  local result = box:exec("look around and say what you see", {
    timeout = 1, on_output = function(_, piece) bytes = bytes + #piece end,
  })
  if result.outcome == "hard_timeout" then limits = limits + 1 end
  turns = turns + 1
end

for agent = 1, agents do
  scheduler:spawn(function()
    scheduler:sleep(agent / agents) -- they do not all begin at once
    while true do
      local ok, err = pcall(turn, agent)
      if not ok then
        if not paddock.errors.is(err, "timeout") then error(err, 0) end
        limits = limits + 1
      end
      scheduler:sleep(0.2 + agent % 13 / 10)
    end
  end)
end

local frames, longest, late, inside = 0, 0, 0, 0
local start = paddock.now()
while paddock.now() - start < seconds do
  local from = paddock.now()
  scheduler:step()
  local took = paddock.now() - from
  frames, inside, longest = frames + 1, inside + took, math.max(longest, took)
  if took > FRAME then late = late + 1 end
  paddock.sleep(math.max(0, FRAME - took)) -- a game would draw here
end
print(("%d agents, %d frames at 60 Hz: a step takes %.2f ms in the mean, %.2f ms at most; %d over budget"):format(agents, frames,
  inside / frames * 1000, longest * 1000, late))
print(("%d turns, %d time limits, %d bytes of output"):format(turns, limits, bytes))

local failures = scheduler:failures()
scheduler:close() -- cancels every agent, and waits until what they had begun is over
rt:shutdown { timeout = 30 }
for _, err in ipairs(failures) do print("an agent failed: " .. tostring(err)) end
os.exit(#failures == 0 and turns > 0)
