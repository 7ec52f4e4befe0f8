--- One runtime process of the soak (soak.lua): random load until the file `stop` appears or somebody kills it.
---
---     lua5.4 soak_worker.lua FOLDER SLOT SEED
---
--- Everything it does and sees goes to its log, one line each, fields by tabs: a time on the machine's monotonic clock, the
--- same for all processes, a word, and what belongs to it. Lines are written before a call that others must know of, and
--- after each; what a kill cut off is a call that may have happened.
local paddock = require "paddock"

local folder, slot, seed = arg[1], math.tointeger(tonumber(arg[2])), math.tointeger(tonumber(arg[3]))
local plan = dofile(folder .. "/plan.lua")
local log <close> = assert(io.open(("%s/log.%d.%d"):format(folder, slot, seed), "w"))
log:setvbuf "line"
math.randomseed(seed)

local function say(...)
  local words = { ("%.6f"):format(paddock.now()), ... }
  for i, word in ipairs(words) do words[i] = tostring(word):gsub("[\t\n]", " ") end
  log:write(table.concat(words, "\t"), "\n")
end

local function exists(name)
  local file = io.open(folder .. "/" .. name)
  if file then file:close() end
  return file ~= nil
end

local function open()
  for _ = 1, 100 do -- a full disk, or a store that a stopped process keeps locked
    local ok, rt = pcall(paddock.open, dofile(folder .. "/config.lua"))
    if ok then return rt end
    say("open_failed", rt.kind or "internal", rt.reason or "", tostring(rt))
    if exists "stop" then os.exit(0) end
    os.execute "sleep 0.2"
  end
  os.exit(1)
end

local rt = open()
say("open", rt:stats().runtime_id)
for _, name in ipairs { "destroyed", "lost", "renewal_failed", "taken_by_a_peer", "adopted", "clock_gap", "stop_failed",
  "stop_not_begun", "journal_failed", "teardown_refused", "lease_release_failed", "reconcile_failed", "rollback_failed",
  "outcome_unknown" } do
  rt:on(name, function(e)
    say("event", e.event, ("%.6f"):format(e.at), e.sandbox_id or "", e.generation or "", e.reason or "", e.error or "",
      e.message or "")
  end)
end

local held = {} -- boxes: { box, identity }

--- Calls and logs the outcome: what it returned, or nil.
local function try(what, name, id, fn, ...)
  local before = paddock.now()
  local result = table.pack(pcall(fn, ...))
  if result[1] then return before, table.unpack(result, 2, result.n) end
  local err = result[2]
  if type(err) ~= "table" then err = { kind = "internal", message = tostring(err) } end
  say("error", what, name, id, ("%.6f"):format(before), err.kind, err.reason or "", err.stage or "", tostring(err))
  return nil, err
end

--- One command: it remembers its token in the sandbox, and says whose sandbox it is and whether tokens ever went back.
local function exec(one)
  local box, name = one.box, one.name
  local pause = math.random() < 0.15 and math.random(1, 10) / 10 or 0
  local before, r = try("exec", name, box.id, box.exec, box, ([[cd /workspace
    [ -s owner ] || echo %s > owner
    sleep %s; echo %d >> tokens
    LC_ALL=C sort -n -c tokens 2>/dev/null && order=forward || order=back
    echo "$(cat owner) $order $(wc -l < tokens)"]]):format(name, pause, box.token), { timeout = 8 })
  if not before then
    local err = r
    if err.kind == "lost" or err.kind == "closed" then
      one.gone = true
      say("lost_box", name, box.id, box.generation, box.token, one.at, err.reason or "", tostring(err))
    end
    return
  end
  say("exec", name, box.id, box.generation, box.token, ("%.6f"):format(before), r.outcome, r.exit_code, r.stdout:gsub("\n", ""),
    r.stderr)
end

local function acquire()
  local name = plan.mine[slot][math.random(#plan.mine[slot])]
  local id = plan.ids[name]
  say("acquiring", name, id)
  local before, box = try("acquire", name, id, rt.acquire, rt, { user = name, thread = "soak", timeout = 6 })
  if not before then return end
  say("acquired", name, id, box.generation, box.token, ("%.6f"):format(before), box.source)
  local one = { box = box, name = name, at = ("%.6f"):format(before) }
  held[#held + 1] = one
  if math.random() < 0.8 then exec(one) end
end

local function release(i)
  local one = table.remove(held, i)
  say("releasing", one.name, one.box.id, one.box.generation, one.box.token, one.at)
  try("release", one.name, one.box.id, one.box.release, one.box)
end

local function destroy()
  local name = plan.names[math.random(#plan.names)]
  local before, done, reason, way = try("destroy", name, plan.ids[name], rt.destroy, rt, plan.ids[name])
  if before then say("destroy", name, plan.ids[name], ("%.6f"):format(before), done, reason or "", way or "") end
end

local function park()
  local name = plan.names[math.random(#plan.names)]
  if try("park", name, plan.ids[name], rt.park, rt, plan.ids[name]) then say("park", name) end
end

local function step()
  local dice = math.random()
  if dice < 0.3 and #held < 6 then
    acquire()
  elseif dice < 0.75 and #held > 0 then
    exec(held[math.random(#held)])
  elseif dice < 0.88 and #held > 0 then
    release(math.random(#held))
  elseif dice < 0.95 then
    destroy()
  elseif dice < 0.97 then
    park()
  elseif dice < 0.98 then
    if try("reconcile", "", "", rt.reconcile, rt) then say "reconcile" end
  end
  for i = #held, 1, -1 do
    if held[i].gone then release(i) end
  end
  rt:dispatch()
  os.execute(("sleep %.3f"):format(math.random() * 0.02))
end

while not exists "stop" do step() end

if slot % 2 == 1 then -- the others leave everything to those who come after them
  for _ = 1, 5 do
    say "shutting_down"
    if try("shutdown", "", "", rt.shutdown, rt) then
      say "shut_down"
      break
    end
    os.execute "sleep 1"
  end
end
say "bye"
os.exit(0, false)
