--- paddock ps: the sandboxes in the state directory, whoever made them.
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local world = require "paddock.cli.world"

local M = {
  name = "ps",
  usage = "ps [--json]",
  summary = "Lists sandboxes: states, owners, leases, idle time.",
  options = {
    { "--config,-c", "F", "a Lua file that returns the options of paddock.open" },
    { "--backend,-b", "B", "process, docker, provisioner, or path/to/engine.lua" },
    { "--json", nil, "print one JSON document" },
  },
  notes = [[
STATE  held: somebody works in it; parked: a running process keeps it warm; free: nobody owns it, the next exec or
       acquire of its identity finds it; ending: it is being taken down.
OWNER  the process that owns it.
LEASE  own: its runtime is responsible for it; del: a runtime has begun to take it down. Behind it the process, or the
       runtime's id where that runs elsewhere. A lease outlives a crashed runtime until its ttl is over.
WHY    quarantined: it must not serve again, and why.]],
}

local function lease_text(lease)
  return lease and ("%s %s"):format(lease.state, lease.owner_pid or lease.owner) or nil
end

local function identity_text(one)
  if not one.user then return nil end
  return ("%s/%s"):format(one.user, one.thread or "-")
end

function M.run(ctx, options)
  local config = world.one_shot(world.config(options))
  local known = world.known(config)
  local opened, rt = pcall(world.open, ctx, options, config)
  if opened then
    world.add_facts(ctx, rt, config, known)
  else -- policies that do not load, for one, are no reason not to look
    ctx.warn("leases and quarantine are not shown: " .. status.line(rt))
  end
  if options.json then
    ctx.out(render.json(render.list(known)))
    return status.OK
  end
  local rows = {}
  for i, one in ipairs(known) do
    rows[i] = { one.sandbox_id, one.state, one.owner_pid and tostring(one.owner_pid) or nil, identity_text(one),
      render.duration(one.idle_seconds), render.duration(one.age_seconds), lease_text(one.lease),
      one.quarantined and "quarantined: " .. one.quarantined, one.generation }
  end
  ctx.out(#rows == 0 and "no sandboxes\n"
    or render.columns({ "SANDBOX", "STATE", "OWNER", "IDENTITY", "IDLE", "AGE", "LEASE", "WHY", "GENERATION" }, rows) .. "\n")
  return status.OK
end

return M
