-- policies/hosts.lua, where it is used: inside the sealed environment of a policy.
local support = require "tests.support"

describe("the helper hosts", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  --- What the rules (Lua text) decide about host and port; or nil and the error.
  local function decider(rules)
    local rt = world:open { policies = { requirements = { name = "requirements.lua", source = [[
      local decide = policy.require("hosts").rules(]] .. rules .. [[)
      return { resolve = function(ctx)
        return { labels = { answer = decide { host = ctx.user, port = math.tointeger(tonumber(ctx.thread)) } } } end }]] } } }
    return function(host, port) return rt:explain({ user = host, thread = tostring(port or 443) }).requirements.labels.answer end
  end
  local function refused(rules)
    return support.caught(decider, rules)
  end

  it("allow what is named and deny the rest: a star in deny does not block it [B170]", function()
    local decide = decider '{ allow = { "a.org" }, deny = { "*" } }'
    assert.equal("allow", decide "a.org")
    assert.equal("deny", decide "b.org")
    assert.equal("deny", decide "x.a.org")
  end)

  it("allow all but what is named [B170]", function()
    local decide = decider '{ allow = { "*" }, deny = { "a.org" } }'
    assert.equal("deny", decide "a.org")
    assert.equal("deny", decide "A.ORG.")
    assert.equal("allow", decide "b.org")
  end)

  it("deny everything when there are no lists, unless it says otherwise [B170]", function()
    assert.equal("deny", decider '{}' "a.org")
    assert.equal("deny", decider '{ allow = {}, deny = {} }' "a.org")
    assert.equal("ask", decider '{ otherwise = "ask" }' "a.org")
  end)

  it("take the most exact entry; of two that are alike, deny", function()
    local decide = decider [[{ allow = { "*.org", "x.y.z.org", "10.0.0.1:80", "[::1]:8080", "a.b" },
      deny = { "*.y.z.org", "q.org:22", "*", "a.b" } }]]
    local cases = {
      { "a.org", 443, "allow" }, { "org", 443, "deny" }, { "w.y.z.org", 443, "deny" }, { "x.y.z.org", 443, "allow" },
      { "q.org", 22, "deny" }, { "q.org", 443, "allow" }, { "10.0.0.1", 80, "allow" }, { "10.0.0.1", 81, "deny" },
      { "::1", 8080, "allow" }, { "[::1]", 8080, "allow" }, { "::1", 80, "deny" }, { "a.b", 443, "deny" },
      { "evilorg", 443, "deny" }, { "org.evil", 443, "deny" },
    }
    for _, case in ipairs(cases) do
      assert.equal(case[3], decide(case[1], case[2]), case[1] .. ":" .. case[2])
    end
  end)

  it("refuse what is no host, naming the entry", function()
    for rules, text in pairs {
      ['{ allow = { "a*b" } }'] = "allow[1]", ['{ allow = { "*.*.org" } }'] = "allow[1]", ['{ deny = { "ok", "http://x" } }'] = "deny[2]",
      ['{ deny = { "x:70000" } }'] = "deny[1]", ['{ deny = { 3 } }'] = "deny[1]", ['{ deny = "x" }'] = "deny must be a list",
      ['{ alow = {} }'] = "alow is unknown", ['{ otherwise = "no" }'] = "otherwise must be", ['{ allow = { "" } }'] = "allow[1]",
    } do
      local err = refused(rules)
      assert.equal("policy_error", err.kind)
      assert.matches(text, err.message, 1, true)
    end
  end)

  it("have the checker warn about an allow entry without any effect [B170]", function()
    local folder = support.tmpdir()
    local function check(rules)
      support.write_file(folder .. "/network.lua", 'return { decide = policy.require("hosts").rules ' .. rules .. ' }')
      return support.sh("paddock policy check " .. folder)
    end
    local out, status = check '{ allow = { "a.org", "b.org:443" }, deny = { "a.org", "b.org" } }'
    assert.equal(0, status, out)
    assert.matches("warn .*a%.org in allow has no effect", out)
    assert.is_nil(out:find("b.org:443 in allow", 1, true))     -- a port is more exact
    assert.matches("ok, with 1 warnings", out, 1, true)
    out = check '{ allow = { "a.org" }, deny = { "*" } }'
    assert.matches("ok: all loaded", out, 1, true)
  end)
end)
