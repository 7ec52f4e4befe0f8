-- policies/paths.lua, where it is used: inside the sealed environment of a policy.
local support = require "tests.support"

describe("the helper paths", function()
  local world
  before_each(function() world = support.world() end)
  after_each(function() world:assert_quiet() end)

  --- Runs `expression`, which may use `paths` and `user`, in a policy: its answer, or the error that it raised.
  local function inside(expression, user)
    local rt = world:open { policies = { requirements = { name = "requirements.lua", source = [[
      local paths = policy.require "paths"
      return { resolve = function(ctx) local user = ctx.user return { labels = { answer = ]] .. expression .. [[ } } end }]] } } }
    local answer = rt:explain { user = user or "u", thread = "t" }.requirements
    rt:shutdown()
    if answer.error then return nil, answer end
    return answer.labels.answer
  end
  local function joined(...)
    local args = {}
    for i, arg in ipairs { ... } do args[i] = ("%q"):format(arg) end
    return inside("paths.join(" .. table.concat(args, ", ") .. ")")
  end

  it("joins to a base in POSIX form", function()
    assert.equal("/data/users/u", joined("/data", "users", "u"))
    assert.equal("/data/users/u", joined("/data/", "users/u"))
    assert.equal("/data/a/b", joined("//data//a", "b/"))
    assert.equal("/x", joined("/", "x"))
    assert.equal("/", joined("/"))
    assert.equal("/data/a\\b", joined("/data", "a\\b"))
    assert.equal("posix", inside("paths.form('/data')"))
  end)

  it("keeps the drive letter and the backslashes of a Windows base throughout [D13]", function()
    assert.equal([[C:\Users\demo\data\threads\t\user-data\workspace]],
      joined([[C:\Users\demo\data]], "threads", "t", "user-data/workspace"))
    assert.equal([[C:\Users\demo\x]], joined([[C:\Users/demo\]], "x"))
    assert.equal([[c:\x]], joined([[c:\]], "x"))
    assert.equal("D:/data/users/u", joined("D:/data", "users", "u"))
    assert.equal("D:/data/users/u", joined("D:/data", [[users\u]]))
    assert.equal("windows", inside([[paths.form("C:\\x")]]))
  end)

  it("keeps a UNC base, whose root is server and share [D13]", function()
    assert.equal([[\\nas\share\users\u]], joined([[\\nas\share]], "users/u"))
    assert.equal([[\\nas\share\a\u]], joined([[\\nas/share/a/]], "u"))
    assert.equal([[\\?\C:\long\u]], joined([[\\?\C:\long]], "u"))
    assert.equal("windows", inside([[paths.form("\\\\nas\\share")]]))
  end)

  it("never leads out of the base: such parts are invalid_argument [D3]", function()
    for _, case in ipairs {
      { "/data", ".." }, { "/data", "a/../../b" }, { "/data", "." }, { "/data", "" }, { "/data", "/etc" }, { "/data", "a\nb" },
      { "/data", "a\0b" }, { [[C:\data]], ".." }, { [[C:\data]], [[a\..\b]] }, { [[C:\data]], "a/../b" }, { [[C:\data]], [[\x]] },
      { [[C:\data]], "D:x" }, { [[C:\data]], "/x" }, { [[C:\data]], "a:stream" }, { [[C:\data]], ".. " }, { [[C:\data]], "x." },
      { [[\\nas\share]], ".." }, { [[\\nas\share]], [[\\other\share]] },
    } do
      local answer, err = joined(table.unpack(case))
      assert.is_nil(answer, tostring(answer))
      assert.equal("invalid_argument", err.error, case[1] .. " + " .. case[2])
      assert.matches("part 1 of a path", err.message, 1, true)
    end
    assert.equal("invalid_argument", select(2, inside("paths.join('/data', nil)")).error)
    assert.equal("invalid_argument", select(2, inside("paths.join('/data', 5)")).error)
  end)

  it("says that a base is wrong as an error of the policy, with file and line", function()
    for _, base in ipairs { "data", "", "C:", "C:data", [[\\nas]], [[\\]], "/a/../b", [[C:\a\..\b]], "/a\nb" } do
      local answer, err = joined(base, "x")
      assert.is_nil(answer, tostring(answer))
      assert.equal("policy_error", err.error, base)
      assert.matches("requirements.lua:", err.message, 1, true)
    end
  end)

  it("takes as a component only what cannot leave a directory [D3]", function()
    for _, name in ipairs { "t1", "A_b-9", ("x"):rep(64) } do
      assert.equal(name, (inside("paths.safe_component(user, 'thread')", name)))
    end
    assert.equal(("x"):rep(200), (inside("paths.safe_component(user, 'user', 255)", ("x"):rep(200))))
    for _, name in ipairs { "../escape", "..", ".", "a/b", "a\\b", "a b", "a\n", "a\0", "-\xff", "é", ("x"):rep(65), "a." } do
      local answer, err = inside("paths.safe_component(user, 'the thread id')", name)
      assert.is_nil(answer)
      assert.equal("invalid_argument", err.error, name)
      assert.matches("^.*the thread id", err.message)
      assert.is_nil(err.message:find("[%c\x80-\xff]"), "what is refused is shown without its control characters")
    end
    assert.equal("invalid_argument", select(2, inside("paths.safe_component(nil)")).error)
  end)

  it("is found from a folder that has no copy, and one beside the policies comes first", function()
    local dir = support.tmpdir()
    support.write_file(dir .. "/mounts.lua", [[
      local paths = policy.require "paths"
      return { compose = function() return { { source = paths.join("/srv", "skills"), target = "/skills" } } end }]])
    local rt = world:open { policies = dir }
    assert.equal("/srv/skills", rt:explain({ user = "u", thread = "t" }).mounts[1].source)
    support.write_file(dir .. "/paths.lua", "return { join = function() return '/mine' end }")
    rt:reload()
    assert.equal("/mine", rt:explain({ user = "u", thread = "t" }).mounts[1].source)
    support.write_file(dir .. "/mounts.lua", "local x = policy.require 'nothing' return {}")
    local err = support.caught(rt.reload, rt)
    assert.equal("policy_error", err.kind)
    assert.matches("there is no file 'nothing.lua' beside this one, and none is built in", err.message, 1, true)
  end)
end)
