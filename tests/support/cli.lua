--- The paddock command inside the tests' own process, and the real program beside it.
---
--- core/main.c gives the command two modules of its own, `paddock.cli.native` and `paddock.lineedit`; in a plain Lua there
--- are none, so these stand-ins are loaded in their place. Requiring this file is enough.
local support = require "tests.support"

local M = {}

---@type string[]  what was written to descriptors 1 and 2
M.written = { "", "" }

M.native = {
  write = function(fd, text)
    M.written[fd] = M.written[fd] .. text
    return true
  end,
  isatty = function() return true end,
  ended_by = function() return nil end,
  user = function() return "somebody" end,
  calm = function() end,
  watch = function() end,
  repl = function() end,
  on_hangup = function() end,
  facts = function() return { pid = 1, uid = 0 } end,
}

--- Lines that the next `repl` reads.
---@type string[]
M.lines = {}

package.preload["paddock.cli.native"] = function() return M.native end
package.preload["paddock.lineedit"] = function()
  return {
    readline = function()
      local line = table.remove(M.lines, 1)
      if line then return line end
      return nil, "eof"
    end,
    remember = function() end,
    interactive = function() return false end,
  }
end

--- Runs the command in this process: exit code, standard output, standard error.
---@return integer code
---@return string out
---@return string err
function M.run(...)
  M.written = { "", "" }
  local code = require("paddock.cli.main") { ... }
  return code, M.written[1], M.written[2]
end

--- Whether the program was built and found; else the reason, for pending().
---@return boolean
---@return string? reason
function M.have_program()
  local _, status = support.sh("command -v paddock")
  if status == 0 then return true end
  return false, "the program paddock is not built"
end

--- A shell word.
local function quoted(word) return "'" .. word:gsub("'", [['\'']]) .. "'" end

--- Runs the program with these words: exit code, standard output, standard error.
---@param opts { stdin: string?, env: string?, prefix: string? }   stdin: a text (default: nothing); env: "A=1 B=2"
---@param ... string
---@return integer code
---@return string out
---@return string err
function M.program(opts, ...)
  local folder = support.tmpdir()
  local words = {}
  for i = 1, select("#", ...) do words[i] = quoted((select(i, ...))) end
  support.write_file(folder .. "/in", opts.stdin or "")
  local _, code = support.sh(("%s env %s paddock %s < %s/in > %s/out 2> %s/err"):format(opts.prefix or "", opts.env or "",
    table.concat(words, " "), folder, folder, folder))
  return code, support.read_file(folder .. "/out"), support.read_file(folder .. "/err")
end

return M
