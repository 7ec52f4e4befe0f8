--- Which image does this turn need? A turn says what it requires, not which image that is:
---
---     rt:acquire { user = "alice", thread = "t1", requirements = { tools = { "python" } } }
---
--- So an operator can move `python` to a newer image without touching a host: at the next turn the sandbox has another image than is
--- required, and reuse.lua replaces it once nobody holds it.

--- The image that has all of these tools.
local function image_for(tools, config)
  local found
  for _, tool in ipairs(tools) do
    local image = config.images and config.images[tool]
    if image == nil then policy.fail("invalid_argument", "no image has the tool " .. tostring(tool)) end
    if found ~= nil and found ~= image then
      policy.fail("invalid_argument", "no one image has all of the tools that are required")
    end
    found = image
  end
  return found                  -- nil: the option `image`
end

return {
  resolve = function(ctx)
    local request = ctx.request
    for key in pairs(request) do
      if key ~= "tools" and key ~= "env" then policy.fail("invalid_argument", "requirements." .. tostring(key) .. " is unknown") end
    end
    local tools = request.tools or {}
    if type(tools) == "string" then tools = { tools } end -- as `paddock policy explain --need tools=python` has it
    return { image = image_for(tools, ctx.config), env = request.env }
  end,
}
