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
used it for longer than the option idle_timeout. What somebody holds or keeps warm is left alone.]],
}

local function ids_of(known)
  local ids = {}
  for _, one in ipairs(known) do ids[one.sandbox_id .. " " .. tostring(one.generation)] = one.sandbox_id end
  return ids
end

function M.run(ctx, options)
  local config = world.one_shot(world.config(options))
  local rt = world.open(ctx, options, config)
  local known = world.known(config)
  local before = ids_of(known)
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
  local after = ids_of(world.known(config))
  local gone, kept = render.list {}, 0
  for key, id in pairs(before) do
    if not after[key] then gone[#gone + 1] = id end
  end
  for _ in pairs(after) do kept = kept + 1 end
  table.sort(gone)
  if options.json then
    ctx.out(render.json { gone = gone, kept = kept })
  else
    for _, id in ipairs(gone) do ctx.out(render.plain(id) .. "\n") end
    ctx.out(("%d taken down, %d left\n"):format(#gone, kept))
  end
  return status.OK
end

return M
