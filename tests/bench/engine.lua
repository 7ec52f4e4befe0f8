--- The engine of the measurements: nothing is behind it. Every call answers at once, but for `create`, which takes
--- `backend_options.create` seconds (0 = no time), so that what is measured is paddock. It says
--- that it has guests, since without one each teardown writes a journal record to the disk.
local io = require "paddock.io"

local client = { exec = function() return { outcome = "completed", exit_code = 0, stdout = "", stderr = "" } end,
  open_session = function() end, close_session = function() end, close = function() end,
  fence = function() return true end, doom = function() return true end }

return {
  new = function(options)
    local delay, made, there = options.create or 0, 0, {}
    local M = { name = "bench", capabilities = { fenced = true } }
    --- A bit for each of them, so that the engine's own memory is not what is measured.
    local function word_and_bit(n) return n >> 5, 1 << (n & 31) end
    local function number(info) return tonumber(info.generation:sub(2)) end
    local function is_there(n)
      local word, bit = word_and_bit(n)
      return (there[word] or 0) & bit ~= 0
    end
    local function note(n, on)
      local word, bit = word_and_bit(n)
      local now = there[word] or 0
      now = on and now | bit or now & ~bit
      there[word] = now ~= 0 and now or nil
    end
    function M.create(_, spec)
      if delay > 0 then io.sleep(delay) end
      made = made + 1
      note(made, true)
      return { sandbox_id = spec.sandbox_id, generation = ("g%d"):format(made), url = "bench://" .. spec.sandbox_id }
    end
    function M.destroy(_, info) note(number(info), false) end
    function M.inspect(_, _, info) return info and is_there(number(info)) and info or nil end
    function M.discover() return nil end
    function M.alive() return true end
    function M.ready() return true end
    function M.list() return {} end
    function M.finish() end
    function M.connect() return client end
    return M
  end,
}
