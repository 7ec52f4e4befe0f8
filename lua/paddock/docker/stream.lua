--- The frames of an engine's streams: 8 bytes of head (stream, 0, 0, 0, length), then so many bytes. The transport cuts them anywhere.
local M = {}

M.STDOUT, M.STDERR = 1, 2

--- Bytes that somebody else chose, as one line for a message: white space, control characters and what is no ASCII become one space
--- each run. In one pass: what runs in a sandbox must not be able to keep us busy with the shape of its output.
---@param bytes string
---@return string
function M.one_line(bytes)
  return (bytes:gsub("[%s%c\x7f-\xff]+", " "):gsub("^ ", ""):gsub(" $", ""))
end

---@class paddock.FrameReader
---@field damaged boolean   what came was no stream of frames

--- Reads frames from pieces, and hands on what is in them: each(stream, bytes) gets payload in the order of its arrival, also of
--- frames that are not complete yet, so that nothing is kept here but a head that was cut.
---@param each fun(stream: integer, bytes: string)
---@return fun(piece: string) take
---@return paddock.FrameReader
function M.reader(each)
  local self = { damaged = false }
  local head, kind, left = "", nil, 0
  local function take(piece)
    local at = 1
    while at <= #piece and not self.damaged do
      if left > 0 then
        local bytes = piece:sub(at, at + left - 1)
        at, left = at + #bytes, left - #bytes
        each(kind, bytes)
      else
        local need = 8 - #head
        head = head .. piece:sub(at, at + need - 1)
        at = at + need
        if #head == 8 then
          local zeros
          kind, zeros, left = string.unpack(">B I3 I4", head)
          head = ""
          self.damaged = kind > 2 or zeros ~= 0
        end
      end
    end
  end
  return take, self
end

--- A place for one stream's bytes: the first `max` of them.
---@param max integer
function M.keeper(max)
  local self = { parts = {}, size = 0, truncated = false }
  function self.add(bytes)
    local room = max - self.size
    if #bytes > room then
      self.truncated = true
      bytes = bytes:sub(1, room)
    end
    if bytes ~= "" then
      self.parts[#self.parts + 1] = bytes
      self.size = self.size + #bytes
      if #self.parts > 512 then self.parts = { table.concat(self.parts) } end
    end
  end
  function self.text() return table.concat(self.parts) end
  return self
end

return M
