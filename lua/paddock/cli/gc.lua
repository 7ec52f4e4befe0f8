--- paddock gc: looks for what nobody owns, and takes down what is due, now.
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local world = require "paddock.cli.world"

local M = {
  name = "gc",
  usage = "gc",
  summary = "Reconciles and reaps now: takes down what nobody owns and what has idled too long.",
  options = world.options {
    { "--json", nil, "print one JSON document" },
  },
  notes = [[
What an interrupted creation or teardown left is removed; a sandbox that no process owns is taken down once nobody has
used it for longer than the option idle_timeout. What somebody holds, keeps warm or has a lease on is left alone, and why
is said. Quarantine records are retired once what they name is proven gone.]],
}

local function ids_of(known)
  local ids = {}
  for _, one in ipairs(known) do ids[one.sandbox_id .. " " .. tostring(one.generation)] = one.sandbox_id end
  return ids
end

--- Records whose generation may be gone: each is retired once that is proven. What is in use meanwhile is left: the ids, and what
--- stood in the way.
---@return table<string, string>
local function retire(ctx, rt)
  local seen, left = {}, {}
  for _, record in ipairs(rt:quarantine()) do
    local id = record.sandbox_id
    if not seen[id] then
      seen[id] = true
      local ok, done, reason, way = pcall(rt.retire, rt, id)
      if not ok then
        ctx.warn(("%s stays quarantined: %s"):format(render.plain(id), status.line(done)))
      elseif not done then
        left[id] = way or reason
      end
    end
  end
  return left
end

--- Of what is left the report says why, but not of what the backend does not list.
local function warn_of_unlisted(ctx, left, after)
  for _, one in ipairs(after) do left[one.sandbox_id] = nil end
  for id, way in pairs(left) do
    ctx.warn(("%s stays quarantined: somebody is at work on it (%s); try again later"):format(render.plain(id), way))
  end
end

--- Why it was left, for a person.
local function reason(one)
  if one.held then return "held by " .. world.whose(one) end
  if one.state == "ending" then return "being taken down by " .. world.whose(one) end
  if one.lease then return "leased by " .. world.whose(one) end
  if one.owner_pid then return "kept by " .. world.whose(one) end
  return "not idle for long enough"
end

local function report(ctx, options, before, after)
  local gone, left, still = render.list {}, render.list {}, ids_of(after)
  for key, id in pairs(before) do
    if not still[key] then gone[#gone + 1] = id end
  end
  table.sort(gone)
  for i, one in ipairs(after) do
    left[i] = { sandbox_id = one.sandbox_id, generation = one.generation, state = one.state, owner_pid = one.owner_pid,
      lease = one.lease, quarantined = one.quarantined, reason = reason(one) }
  end
  if options.json then
    ctx.out(render.json { gone = gone, kept = #left, left = left })
    return
  end
  for _, id in ipairs(gone) do ctx.out(render.plain(id) .. "\n") end
  for _, one in ipairs(left) do
    ctx.out(("left: %s (%s%s)\n"):format(render.plain(one.sandbox_id), render.plain(one.reason),
      one.quarantined and "; quarantined: " .. render.plain(one.quarantined) or ""))
  end
  ctx.out(("%d taken down, %d left\n"):format(#gone, #left))
end

function M.run(ctx, options)
  local config = world.one_shot(world.without_creation(world.config(options)))
  local rt = world.open(ctx, options, config)
  local known = world.known(config)
  rt:reconcile()
  rt:tick()
  -- A runtime counts idleness from when it adopted a sandbox, that is, from now; the sandbox itself knows better.
  local limit = world.normalized(config).idle_timeout
  for _, one in ipairs(known) do
    if one.state == "free" and limit > 0 and (one.idle_seconds or 0) > limit then
      local ok, why = pcall(rt.destroy, rt, one.sandbox_id)
      if not ok then ctx.warn(("%s was not taken down: %s"):format(one.sandbox_id, status.line(why))) end
    end
  end
  local left = retire(ctx, rt)
  local after = world.known(config)
  warn_of_unlisted(ctx, left, after)
  world.add_facts(ctx, rt, config, after)
  report(ctx, options, ids_of(known), after)
  return status.OK
end

return M
