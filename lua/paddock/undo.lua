--- What a creation has made so far: taken back, last first, when the scope is left, unless it is kept.
---
---     local undo <close> = undos.new()
---     undo:add(function() ... end)
---     ...
---     undo:keep()
---
--- Also when it is the operation's own limit that ended the work: each step has a limit of its own.
local io = require "paddock.io"

local M = {}

M.LIMIT = 5 -- seconds for one step

---@class paddock.Undo
local Undo = {}
Undo.__index = Undo

---@param fn fun()  what it raises is dropped: what called for the undoing is the error that counts
function Undo:add(fn) self[#self + 1] = fn end

function Undo:keep() self.kept = true end

function Undo:__close()
  for i = self.kept and 0 or #self, 1, -1 do pcall(io.shield, M.LIMIT, self[i]) end
end

---@return paddock.Undo
function M.new() return setmetatable({}, Undo) end

return M
