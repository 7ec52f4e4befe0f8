--- paddock quarantine: generations that must never serve again, until they are proven gone.
local args = require "paddock.cli.args"
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local world = require "paddock.cli.world"

local M = {
  name = "quarantine",
  usage = "quarantine ls | show ID | retire ID",
  summary = "Lists what must never serve again, and retires what is proven gone.",
  most = 2,
  options = world.options {
    { "--json", nil, "print one JSON document" },
  },
  notes = [[
A record is written before a dirty sandbox is stopped, and whenever a stop fails; it goes when the absence of what it
names is proven. An ID may be its first characters, at least four.
retire stops what the record names, if it still runs, and removes the record only when that is proven to be gone.
Exit code 75: somebody holds it or is at work on it.]],
}

---@class paddock.cli.Quarantined
---@field sandbox_id string
---@field generation string?   nil = unknown: every generation of the id is fenced
---@field why string
---@field there boolean        whether the backend knows of it
---@field state string?        what is there, as in ps
---@field owner_pid integer?
---@field lease paddock.cli.Lease?

--- The records with what the backend and the ownership store know of each, in a stable order.
---@return paddock.cli.Quarantined[]
local function records(ctx, rt, config)
  local known, out = world.known(config), render.list {}
  local listed = rt:quarantine()
  world.add_facts(ctx, rt, config, known)
  for i, record in ipairs(listed) do
    local one = { sandbox_id = record.sandbox_id, generation = record.generation, why = record.why, there = false }
    for _, there in ipairs(known) do
      local same = record.generation == nil or there.generation == nil or record.generation == there.generation
      if there.sandbox_id == record.sandbox_id and same then
        one.there, one.state, one.owner_pid, one.lease = true, there.state, there.owner_pid, there.lease
      end
    end
    out[i] = one
  end
  table.sort(out, function(a, b)
    if a.sandbox_id ~= b.sandbox_id then return a.sandbox_id < b.sandbox_id end
    return (a.generation or "") < (b.generation or "")
  end)
  return out
end

local function list(ctx, options, found)
  if options.json then
    ctx.out(render.json(found))
    return status.OK
  end
  local rows = {}
  for i, one in ipairs(found) do
    rows[i] = { one.sandbox_id, one.generation or "(any)", one.why, one.there and one.state or "gone",
      one.there and (one.lease or one.owner_pid) and world.whose(one) or nil }
  end
  ctx.out(#rows == 0 and "nothing is quarantined\n"
    or render.columns({ "SANDBOX", "GENERATION", "WHY", "STATE", "OWNER" }, rows) .. "\n")
  return status.OK
end

--- The records of one id.
local function of_id(found, word)
  local ids, out = {}, render.list {}
  for i, one in ipairs(found) do ids[i] = one.sandbox_id end
  local id = world.complete_id(word, ids)
  for _, one in ipairs(found) do
    if one.sandbox_id == id then out[#out + 1] = one end
  end
  return id, out
end

local function show(ctx, options, found, word)
  local id, of = of_id(found, word)
  if #of == 0 then
    ctx.warn(("nothing is quarantined under the id %s"):format(args.quoted(id)))
    return status.USAGE
  end
  if options.json then
    ctx.out(render.json(of))
    return status.OK
  end
  for _, one in ipairs(of) do
    ctx.out(("%s\n  generation  %s\n  why         %s\n  now         %s\n"):format(render.plain(one.sandbox_id),
      one.generation and render.plain(one.generation) or "unknown: nothing under this id may serve", render.plain(one.why),
      not one.there and "gone, as far as the backend knows: `paddock quarantine retire` proves it"
        or one.state == "free" and "still there, nobody's" or ("still there, %s (%s)"):format(one.state, world.whose(one))))
  end
  return status.OK
end

local function retire(ctx, options, found, word, rt)
  local id, of = of_id(found, word)
  local result = { sandbox_id = id, retired = true, records = #of }
  local code = status.OK
  local ok, done, reason, way = pcall(rt.retire, rt, id)
  if not ok then
    result.retired, result.reason, result.message = false, done.kind or "internal", status.line(done)
    code = status.of_error(done)
  elseif not done then
    result.retired, result.reason, code = false, reason, status.DEFERRED
    result.message = ("%s; try again later"):format(of[1] and of[1].there and world.whose(of[1]) .. " uses it or is at work on it"
      or "somebody is at work on it (" .. tostring(way) .. ")")
  end
  if options.json then
    ctx.out(render.json(result))
  elseif not result.retired then
    ctx.warn(("%s stays quarantined: %s"):format(args.quoted(id), result.message))
  else
    ctx.out(render.plain(id) .. (#of == 0 and ": nothing was quarantined\n" or "\n"))
  end
  return code
end

function M.run(ctx, options, operands)
  local verb, word = operands[1], operands[2]
  local verbs = { ls = list, show = show, retire = retire }
  if not verb then args.usage_error("quarantine wants ls, show ID or retire ID") end
  if not verbs[verb] then
    args.usage_error(args.unknown("quarantine command", verb, { "ls", "show", "retire" }) .. "; `paddock quarantine --help` lists them")
  end
  if verb == "ls" and word then
    args.usage_error(("quarantine ls: unexpected argument %s"):format(args.quoted(word)))
  elseif verb ~= "ls" and not word then
    args.usage_error(("quarantine %s wants a sandbox id; `paddock quarantine ls` lists them"):format(verb))
  end
  local config = world.one_shot(world.without_creation(world.config(options)))
  local rt = world.open(ctx, options, config)
  return verbs[verb](ctx, options, records(ctx, rt, config), word, rt)
end

return M
