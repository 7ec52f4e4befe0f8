--- Which sandbox belongs to a user and a thread? The ids of deer-flow, so that its sandboxes and paddock's are the same ones.
local default_root = "/mnt/skills"

return {
  -- 16 hexadecimal characters, 64 bits: two pairs may meet, and the runtime then refuses the second (identity_collision).
  derive = function(ctx)
    local options = ctx.requirements and ctx.requirements.options
    local root = options and options.skills_container_path or default_root
    local key = ctx.user .. ":" .. ctx.thread
    if key:find("\0", 1, true) then policy.fail("invalid_argument", "a user or thread must not contain a NUL byte") end
    -- The tags are kept apart by NUL bytes, which no name has: what one of them gives, no thread's name can give.
    if options and options.skills_projection then
      key = table.concat({ "agent-skills-v2", ctx.user, ctx.thread, root }, "\0")
    elseif root ~= default_root then
      key = table.concat({ "skills-root-v1", ctx.user, ctx.thread, root }, "\0")
    end
    return policy.sha256hex(key):sub(1, 16)
  end,
}
