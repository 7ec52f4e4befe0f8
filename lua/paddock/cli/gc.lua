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
}

local function ids_of(known)
  local ids = {}
  for _, one in ipairs(known) do ids[one.sandbox_id .. " " .. tostring(one.generation)] = one.sandbox_id end
  return ids
end

function M.run(ctx, options)
  local config = world.config(options)
  local rt = world.open(ctx, options, config)
  local before = ids_of(world.known(config))
  rt:reconcile()
  rt:tick()
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
