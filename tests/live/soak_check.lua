--- What must hold in a soak (soak.lua), checked on the logs of its processes. Times are on the machine's monotonic clock.
---
--- Checked are statements of DESIGN, section 4, as they can be seen from outside:
---   stale     a command that began after its sandbox had been handed out under a larger token does not complete
---   order     in a sandbox, tokens never go back
---   owner     no identity sees another's file
---   held      a sandbox with a holder is not stopped by anybody, and its box does not become `lost`, unless its owner was
---             stopped, killed or could not renew, somebody has taken it over by an acquire, or its own runtime shut down
---   unique    tokens are given out once: no two runtimes ever have the same
---   errors    every error is one that the trouble of that moment explains
local M = {}

local function read_log(w, path)
  local slot, seed = path:match("%.(%d+)%.(%d+)$")
  local log = { slot = math.tointeger(tonumber(slot)), seed = math.tointeger(tonumber(seed)), path = path, begin = math.huge, last = 0 }
  for line in io.lines(path) do
    local fields = {}
    for field in (line .. "\t"):gmatch("([^\t]*)\t") do fields[#fields + 1] = field end
    local at = tonumber(fields[1])
    if at and fields[2] then
      local e = { at = at, what = fields[2], log = log, table.unpack(fields, 3) }
      log.begin, log.last = math.min(log.begin, at), math.max(log.last, at)
      w.lines[#w.lines + 1] = e
    end
  end
  return log
end

local function problem(w, text, ...)
  w.problems[#w.problems + 1] = select("#", ...) > 0 and text:format(...) or text
end

--- Spans in which something was wrong: { from, to, seed = of whom (nil = of all) }.
local function spans_of(w, from_word, to_word)
  local out, open = {}, {}
  for _, e in ipairs(w.journal) do
    local key = e[3] or ""
    if e[1] == from_word and not open[key] then
      open[key] = { from = e.at, to = math.huge, seed = e[3] }
      out[#out + 1] = open[key]
    elseif (e[1] == to_word or e[1] == "kill") and open[key] then
      open[key].to = e.at
      open[key] = nil
    end
  end
  return out
end

local function overlap(span, from, to) return math.max(0, math.min(span.to, to) - math.max(span.from, from)) end

--- Whether one of the spans (of that process, if they are of processes) meets the interval for that long.
local function within(spans, from, to, seed, least)
  for _, span in ipairs(spans) do
    if (span.seed == nil or seed == nil or span.seed == seed) and span.from <= to and span.to >= from
      and overlap(span, from, to) >= (least or 0) then
      return true
    end
  end
  return false
end

-- ---- hand-outs --------------------------------------------------------------------------------------------------------

--- Hand-outs by sandbox and generation, attempts to acquire by identity, renewals that failed by process.
local function collect(w)
  w.given, w.attempts, w.unrenewed, w.tokens = {}, {}, {}, {}
  w.ended_at = {} -- of a process, by seed: nothing of it runs after that
  for _, e in ipairs(w.journal) do
    if e[1] == "kill" then w.ended_at[e[3]] = e.at end
  end
  local open = {}
  for _, e in ipairs(w.lines) do
    local seed = e.log.seed
    if e.what == "acquiring" then
      local a = { from = e.at, to = math.huge, seed = seed, slot = e.log.slot }
      w.attempts[e[1]] = w.attempts[e[1]] or {}
      table.insert(w.attempts[e[1]], a)
      open[seed] = a
    elseif e.what == "acquired" or (e.what == "error" and e[1] == "acquire") then
      if open[seed] then open[seed].to = e.at end
      open[seed] = nil
    end
    if e.what == "acquired" then
      local key, token = e[2] .. "." .. e[3], math.tointeger(tonumber(e[4]))
      w.given[key] = w.given[key] or {}
      table.insert(w.given[key], { at = e.at, token = token, seed = seed })
      local owner = w.tokens[e[2] .. e[4]]
      if owner and owner ~= seed then problem(w, "unique: token %s of %s was given to two processes", e[4], e[1]) end
      w.tokens[e[2] .. e[4]] = seed
    elseif e.what == "event" and e[1] == "renewal_failed" then
      w.unrenewed[seed] = w.unrenewed[seed] or {}
      table.insert(w.unrenewed[seed], tonumber(e[2]))
    end
  end
  for seed, a in pairs(open) do a.to = w.ended_at[seed] or math.huge end
end

local function handovers(w)
  local n = 0
  for _, list in pairs(w.given) do
    table.sort(list, function(a, b) return a.at < b.at end)
    for i = 2, #list do
      if list[i].seed ~= list[i - 1].seed then n = n + 1 end
    end
  end
  return n
end

-- ---- statements -------------------------------------------------------------------------------------------------------

local function check_commands(w)
  for _, e in ipairs(w.lines) do
    if e.what == "exec" then
      local name, key, token = e[1], e[2] .. "." .. e[3], math.tointeger(tonumber(e[4]))
      local began, outcome, code, text = tonumber(e[5]), e[6], e[7], e[8]
      w.outcomes[outcome] = (w.outcomes[outcome] or 0) + 1
      if outcome == "completed" then
        local owner, order = text:match("^(%S+) (%S+) %d+$")
        if code ~= "0" or not owner then
          problem(w, "a command in %s answered %s (%s) %s", key, code, text, e[9])
        else
          if owner ~= name then problem(w, "owner: %s found the file of %s (%s)", name, owner, key) end
          if order ~= "forward" then problem(w, "order: tokens went back in %s, seen by seed %d at %.3f", key, e.log.seed, e.at) end
        end
        for _, g in ipairs(w.given[key] or {}) do
          if g.token > token and g.at < began then
            problem(w, "stale: a command under %d completed in %s, handed out under %d before", token, key, g.token)
          end
        end
      end
    end
  end
end

--- Why a holder may have lost its sandbox between the two times, or nil.
local function excuse(w, name, seed, from, to)
  local renewal = w.ttl - w.renew - 1     -- a pause that is shorter leaves the lease alive
  if within(w.stops, from - w.ttl, to, seed, renewal) then return "its process was stopped" end
  if w.ended_at[seed] and w.ended_at[seed] <= to then return "its process was killed" end
  for _, a in ipairs(w.attempts[name] or {}) do
    -- a runtime learns of a takeover by its next renewal: until then it may hand out what the guest refuses to serve
    if a.seed ~= seed and a.from <= to and a.to >= from - w.renew - 1 then return "taken over" end
  end
  for _, at in ipairs(w.unrenewed[seed] or {}) do
    if at >= from - w.ttl and at <= to + 1 then return "a renewal failed" end
  end
  return nil
end

local function check_held(w)
  local holds = {} -- by sandbox and generation
  for _, e in ipairs(w.lines) do
    if e.what == "lost_box" then
      w.lost = w.lost + 1
      if e[6] == "stale_token" then w.stale = w.stale + 1 end
      local why = excuse(w, e[1], e.log.seed, tonumber(e[5]), e.at)
      w.lost_by[why or "nothing"] = (w.lost_by[why or "nothing"] or 0) + 1
      if not why then problem(w, "held: seed %d lost %s at %.3f for no reason: %s", e.log.seed, e[1], e.at, e[7]) end
    elseif e.what == "acquired" then
      local key = e[2] .. "." .. e[3]
      holds[key] = holds[key] or {}
      holds[key][e.log.seed .. " " .. e[5]] = { from = e.at, to = math.huge, seed = e.log.seed, name = e[1] }
    elseif e.what == "releasing" then
      local hold = (holds[e[2] .. "." .. e[3]] or {})[e.log.seed .. " " .. e[5]]
      if hold then hold.to = e.at end
    elseif e.what == "shutting_down" then
      for _, list in pairs(holds) do
        for _, hold in pairs(list) do
          if hold.seed == e.log.seed then hold.to = math.min(hold.to, e.at) end
        end
      end
    end
  end
  for _, e in ipairs(w.lines) do
    if e.what == "event" and e[1] == "destroyed" then
      w.destroyed = w.destroyed + 1
      local at, reason = tonumber(e[2]), e[5]
      for _, hold in pairs(holds[e[3] .. "." .. e[4]] or {}) do
        if hold.from < at and hold.to > at and reason ~= "shutdown" and not excuse(w, hold.name, hold.seed, hold.from, at) then
          problem(w, "held: %s was destroyed (%s) by seed %d at %.3f while seed %d held it", hold.name, reason, e.log.seed, at,
            hold.seed)
        end
      end
    end
  end
end

-- Kinds of errors and what explains them: true = the load itself.
local EXPECTED = {
  acquire = {
    being_destroyed = true, replacement_deferred = true, lost = true, timeout = true, ownership_unavailable = "store",
    io_error = "disk", backend_error = true, outcome_unknown = true,
  },
  exec = { lost = true, being_destroyed = true, backend_error = true },
  release = {}, park = {},
  destroy = {
    backend_error = true, lost = true, io_error = "disk", timeout = true, ownership_unavailable = "store", being_destroyed = true,
  },
  reconcile = { backend_error = true, io_error = "disk", timeout = true },
  shutdown = { backend_error = true },
}

local function check_errors(w)
  for _, e in ipairs(w.lines) do
    if e.what == "error" then
      local what, from, kind, reason = e[1], tonumber(e[4]), e[5], e[6]
      local key = ("%s: %s%s"):format(what, kind, reason ~= "" and " (" .. reason .. ")" or "")
      w.errors[key] = (w.errors[key] or 0) + 1
      local expected = EXPECTED[what] and EXPECTED[what][kind]
      if expected == "disk" then
        expected = within(w.fills, from - 1, e.at)
      elseif expected == "store" then -- a stopped process keeps the table's lock; a stopped server answers nothing
        expected = within(w.stops, from - 6, e.at) or within(w.store_stops, from - 3, e.at) or within(w.fills, from - 1, e.at)
      end
      if not expected then problem(w, "errors: %s of %s by seed %d at %.3f: %s", key, e[2], e.log.seed, e.at, e[8]) end
    end
  end
end

-- ---- the report -------------------------------------------------------------------------------------------------------

---@param w table   the world after its run
---@return table report
function M.report(w)
  w.lines, w.outcomes, w.errors, w.lost_by = {}, {}, {}, {}
  w.lost, w.stale, w.destroyed = 0, 0, 0
  for _, path in ipairs(w.logs) do read_log(w, path) end
  table.sort(w.lines, function(a, b) return a.at < b.at end)
  w.stops, w.fills = spans_of(w, "stop", "cont"), spans_of(w, "fill", "empty")
  w.store_stops = spans_of(w, "store_stop", "store_cont")
  collect(w)
  check_commands(w)
  check_held(w)
  check_errors(w)
  w.operations = {}
  for _, e in ipairs(w.lines) do
    local what = ({ acquired = "acquire", exec = "exec", releasing = "release", destroy = "destroy", park = "park",
      reconcile = "reconcile" })[e.what]
    if what then w.operations[what] = (w.operations[what] or 0) + 1 end
    if e.what == "open_failed" then
      w.errors["open: " .. e[1]] = (w.errors["open: " .. e[1]] or 0) + 1
    end
  end
  w.handovers = handovers(w)
  return w
end

local function pairs_text(t)
  local keys, out = {}, {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys)
  for i, key in ipairs(keys) do out[i] = ("%s %d"):format(key, t[key]) end
  return #out > 0 and table.concat(out, ", ") or "none"
end

--- The report as a table for people.
---@param store string
---@param report table
---@return string
function M.text(store, report)
  if report.skipped and type(report.skipped) == "string" then return ("soak, %s leases: skipped: %s"):format(store, report.skipped) end
  local count, lines = report.count, {}
  local function row(name, value) lines[#lines + 1] = ("  %-24s %s"):format(name, value) end
  lines[1] = ("soak, %s leases, seed %d: 3 processes, %d identities, %.0f s"):format(store, report.options.seed, #report.names,
    report.seconds)
  row("operations", pairs_text(report.operations))
  row("outcomes of commands", pairs_text(report.outcomes))
  row("kills (-9)", count.kills)
  row("stops", ("%d, %d of them beyond the lease"):format(count.stops, count.long_stops))
  if store == "redis" then row("stops of the store", count.store_stops) end
  row("disk filled", count.fills)
  row("wall clocks set", count.wall_jumps)
  row("commands of the CLI", ("%d (name and status: %s)"):format(count.commands, pairs_text(report.program)))
  row("handovers", report.handovers)
  row("sandboxes destroyed", report.destroyed)
  row("stale commands refused", report.stale)
  row("boxes lost", ("%d (%s)"):format(report.lost, pairs_text(report.lost_by)))
  local keys = {}
  for key in pairs(report.errors) do keys[#keys + 1] = key end
  table.sort(keys)
  for i, key in ipairs(keys) do row(i == 1 and "errors" or "", ("%s  %d"):format(key, report.errors[key])) end
  for _, why in ipairs(report.skipped) do row("skipped", why) end
  row("left after gc", ("%d (quiet after %s rounds)"):format(#report.leaks, report.rounds or "no"))
  for _, leak in ipairs(report.leaks) do lines[#lines + 1] = "  LEAK  " .. leak end
  for i, text in ipairs(report.problems) do
    if i <= 40 then lines[#lines + 1] = "  WRONG " .. text end
  end
  if #report.problems > 40 then lines[#lines + 1] = ("  and %d more"):format(#report.problems - 40) end
  return table.concat(lines, "\n")
end

return M
