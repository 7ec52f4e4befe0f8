--- What does this turn need of its sandbox? What is left nil here is taken from the runtime's own options.
local may_ask = { "image", "env", "limits", "network", "labels", "require", "options" }   -- fields of a request

return {
  pure = true,   -- what these answer depends on ctx alone: an answer is kept for as long as ctx is the same
  resolve = function(ctx)
    local answer, known = {}, {}
    for _, key in ipairs(may_ask) do
      answer[key] = ctx.request[key]
      known[key] = true
    end
    for key in pairs(ctx.request) do
      if not known[key] then
        policy.fail("invalid_argument", "requirements." .. tostring(key) .. " is unknown ("
          .. table.concat(may_ask, ", ") .. ")")
      end
    end
    return answer
  end,
}
