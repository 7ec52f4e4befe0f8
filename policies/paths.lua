--- For other policies, by `local paths = policy.require "paths"`: host paths that keep the form of their base, and names
--- that cannot leave a directory. It is built in; a folder of policies finds it without having a copy.
---
--- Why forms: a container engine may run on another machine than paddock, where "C:\data" is the path to mount. Joined with
--- "/", such a path is two things at once, and each engine reads it in its own way.
local M = {}

local RESERVED = '[<>:"|?*]'   -- not in a Windows name; ":" would also begin another drive or a hidden stream

local function show(text)
  return '"' .. text:sub(1, 60):gsub("[^A-Za-z0-9_./\\: -]", "?") .. '"'
end

local function refuse(message)
  policy.fail("invalid_argument", message)
end

local function is_letter_drive(text) return text:find("^[A-Za-z]:") ~= nil end

--- "windows" for a path that begins with a drive letter or with two backslashes (UNC), else "posix".
---@param path string
---@return "windows"|"posix"
function M.form(path)
  if is_letter_drive(path) or path:sub(1, 2) == "\\\\" then return "windows" end
  return "posix"
end

--- The base's root, what follows it, and the separator that it uses. An error in the base is an error of the policy.
local function take_apart(base)
  if type(base) ~= "string" or base:find("[%c]") then error("paths.join: the base is no path", 3) end
  if M.form(base) == "posix" then
    if base:sub(1, 1) ~= "/" then error("paths.join: the base " .. show(base) .. " is not absolute", 3) end
    return "/", base:sub(2), "/", "/"
  end
  if is_letter_drive(base) then
    local separator = base:sub(3, 3)
    if separator ~= "\\" and separator ~= "/" then
      error("paths.join: the base " .. show(base) .. " is not absolute: a separator must follow its drive", 3)
    end
    return base:sub(1, 2) .. separator, base:sub(4), separator, "/\\"
  end
  local root, rest = base:match("^(\\\\[^\\/]+[\\/][^\\/]+)(.*)$")
  if not root then error("paths.join: the base " .. show(base) .. " must be \\\\server\\share and so on", 3) end
  return root:gsub("/", "\\") .. "\\", rest, "\\", "/\\"
end

--- Adds the names that `text` consists of to `names`; `fail` gets what is wrong with one.
local function add_names(names, text, separators, windows, fail)
  for name in text:gmatch("[^" .. separators:gsub("\\", "%%\\") .. "]+") do
    if name == "." or name == ".." then fail("has a part " .. show(name)) end
    if windows and (name:find(RESERVED) or name:find("[. ]$")) then
      fail("has a part that Windows does not take as it is: " .. show(name))
    end
    names[#names + 1] = name
  end
end

--- Joins parts to a base and keeps the base's form throughout: `join("C:\\data", "users", "u")` is `C:\data\users\u`,
--- `join("/data", "users/u")` is `/data/users/u`, `join("\\\\nas\\share", "u")` is `\\nas\share\u`. A drive letter's base
--- keeps the separator that it has behind its drive.
---
--- The result is always at or below the base: a part that is absolute, empty, or has "." or ".." in it is refused as
--- invalid_argument. A part may hold several names, separated by "/" (or by "\" in the Windows form).
---@param base string absolute
---@param ... string
---@return string
function M.join(base, ...)
  local root, rest, separator, separators = take_apart(base)
  local windows, names = M.form(base) == "windows", {}
  add_names(names, rest, separators, windows, function(why) error("paths.join: the base " .. show(base) .. " " .. why, 4) end)
  for i = 1, select("#", ...) do
    local part = (select(i, ...))
    if type(part) ~= "string" then refuse(("part %d of a path is no text, but a %s"):format(i, type(part))) end
    if part == "" or part:find("[%c]") then refuse(("part %d of a path is empty, or has control characters"):format(i)) end
    if separators:find(part:sub(1, 1), 1, true) or (windows and is_letter_drive(part)) then
      refuse(("part %d of a path, %s, is absolute"):format(i, show(part)))
    end
    add_names(names, part, separators, windows, function(why) refuse(("part %d of a path, %s, %s"):format(i, show(part), why)) end)
  end
  return root .. table.concat(names, separator)
end

--- Gives back a name that is one harmless part of a path, A-Z, a-z, 0-9, "_" and "-" only; any other is refused as
--- invalid_argument, with nothing made.
---@param name string       for example ctx.identity.thread
---@param what? string      what the message calls it, such as "thread"
---@param most? integer     how many characters it may have; 64 when nil
---@return string name
function M.safe_component(name, what, most)
  most = most or 64
  if type(name) ~= "string" or #name > most or not name:find("^[A-Za-z0-9_-]+$") then
    refuse(("%s %s cannot name a folder: it must be 1 to %d characters of A-Z, a-z, 0-9, _ and -"):format(what or "the name",
      type(name) == "string" and show(name) or "(a " .. type(name) .. ")", most))
  end
  return name
end

return M
