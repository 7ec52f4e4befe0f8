--- paddock destroy: takes sandboxes down and waits for the proof that they are gone.
local args = require "paddock.cli.args"
local render = require "paddock.cli.render"
local status = require "paddock.cli.status"
local world = require "paddock.cli.world"

local M = {
  name = "destroy",
  usage = "destroy ID... | --all",
  summary = "Takes sandboxes down; 0 only when all are confirmed absent.",
  most = math.huge,
  options = world.options {
    { "--all", nil, "every sandbox in the state directory" },
    { "--json", nil, "print one JSON document" },
  },
  notes = "An ID may be its first characters, at least four. Exit code 75: somebody holds it or is at work on it.",
}

local REPLACED = "another generation has taken its place meanwhile"
-- What stands in the way, as the core says it.
local IN_THE_WAY = {
  holders = "%s uses it", peer = "%s has its lease", used = "%s took it into use meanwhile",
  taken = "%s took it over meanwhile", reserved = "%s is taking it down",
  busy = "somebody is making it, or taking it down",
}

--- One sandbox: { sandbox_id, destroyed, reason, message, lease, quarantined } and the exit code.
---@param one paddock.cli.Known?   what is known of it
local function destroy(rt, id, one)
  local result = { sandbox_id = id, destroyed = false, reason = "deferred", lease = one and one.lease,
    quarantined = one and one.quarantined }
  local whose = one and world.whose(one) or "another process"
  if one and one.held then -- seen from outside: no step of a teardown is begun for it
    result.message = whose .. " uses it; try again later"
    return result, status.DEFERRED
  end
  local ok, done, reason, way = pcall(rt.destroy, rt, id)
  if not ok then
    local err = done
    result.reason, result.message = type(err) == "table" and err.kind or "internal", status.line(err)
    return result, status.of_error(err)
  end
  if done then return { sandbox_id = id, destroyed = true }, status.OK end
  result.reason = reason or "deferred"
  local text = IN_THE_WAY[way]
  result.message = reason == "replaced" and REPLACED or (text and text:format(whose) or way or "somebody is at work on it")
    .. "; try again later"
  return result, status.DEFERRED
end

function M.run(ctx, options, operands)
  if options.all and #operands > 0 then args.usage_error("destroy: give ids or --all, not both") end
  if not options.all and #operands == 0 then args.usage_error("destroy wants sandbox ids or --all; `paddock ps` lists them") end
  local config = world.one_shot(world.without_creation(world.config(options)))
  local rt = world.open(ctx, options, config)
  local known, by_id = {}, {}
  local found = world.known(config)
  world.add_facts(ctx, rt, config, found)
  for i, one in ipairs(found) do known[i], by_id[one.sandbox_id] = one.sandbox_id, one end
  local ids = options.all and known or operands
  local results, code = render.list {}, status.OK
  for i, word in ipairs(ids) do
    local id = options.all and word or world.complete_id(word, known)
    local result, its_code = destroy(rt, id, by_id[id])
    results[i] = result
    if its_code ~= status.OK and (code == status.OK or code == status.DEFERRED) then code = its_code end
    if not options.json then
      if result.destroyed then
        if not by_id[id] then ctx.warn(id .. " is not in the list of sandboxes; it is absent") end
        ctx.out(render.plain(result.sandbox_id) .. "\n")
      else
        ctx.warn(("%s was not destroyed: %s"):format(result.sandbox_id, result.message))
      end
    end
  end
  if options.json then ctx.out(render.json(results)) end
  return code
end

return M
