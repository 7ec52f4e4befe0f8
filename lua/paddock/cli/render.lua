--- Values and tables for people and for programs: columns, Lua values, JSON, durations.
local cjson = require "cjson"
local M = {}

local LIST = { __name = "list" }

--- Marks a table as a JSON array, also when it is empty.
---@generic T: table
---@param t T
---@return T
function M.list(t) return setmetatable(t, LIST) end

--- Text with no byte that could move a terminal's cursor: what comes out of a sandbox or a record is not trusted.
---@param text string
---@return string
function M.plain(text)
  if not utf8.len(text) then text = text:gsub("[\128-\255]", "?") end
  return (text:gsub("[%c\127]", function(c) return ("\\x%02x"):format(c:byte()) end))
end

local function width(text) return utf8.len(text) or #text end

--- Columns, aligned; numbers to the right.
---@param header string[]
---@param rows any[][]   nil and false show as "-"
---@return string
function M.columns(header, rows)
  local cells, widths, numeric = { header }, {}, {}
  for c, title in ipairs(header) do widths[c], numeric[c] = width(title), #rows > 0 end
  for r, row in ipairs(rows) do
    local line = {}
    for c = 1, #header do
      local value = row[c]
      if type(value) ~= "number" and value ~= nil then numeric[c] = false end
      line[c] = M.plain((value == nil or value == false) and "-" or tostring(value))
      widths[c] = math.max(widths[c], width(line[c]))
    end
    cells[r + 1] = line
  end
  local lines = {}
  for r, line in ipairs(cells) do
    local out = {}
    for c, text in ipairs(line) do
      local pad = (" "):rep(widths[c] - width(text))
      out[c] = numeric[c] and pad .. text or text .. pad
    end
    lines[r] = table.concat(out, "  "):gsub("%s+$", "")
  end
  return table.concat(lines, "\n")
end

--- Seconds as "0.4s", "12s", "3m05s", "2h10m" or "5d".
---@param seconds number?
---@return string?
function M.duration(seconds)
  if not seconds then return nil end
  if seconds ~= seconds or seconds < 0 then return "?" end
  if seconds < 10 and seconds % 1 ~= 0 then return ("%.1fs"):format(seconds) end
  if seconds < 60 then return ("%.0fs"):format(seconds) end
  if seconds < 3600 then return ("%dm%02ds"):format(seconds // 60, seconds % 60 // 1) end
  if seconds < 2 * 86400 then return ("%dh%02dm"):format(seconds // 3600, seconds % 3600 // 60) end
  return ("%dd"):format(math.min(seconds // 86400, 99999))
end

--- Bytes as "512 MiB".
---@param bytes number
---@return string
function M.bytes(bytes)
  for _, unit in ipairs { "B", "KiB", "MiB", "GiB" } do
    if bytes < 1024 then return ("%.4g %s"):format(bytes, unit) end
    bytes = bytes / 1024
  end
  return ("%.4g TiB"):format(bytes)
end

local RANK = { number = 1, string = 2, boolean = 3 }

--- The keys of a table in a stable order: numbers, texts, the rest.
---@param t table
---@return any[]
function M.sorted_keys(t)
  local keys = {}
  for key in next, t do keys[#keys + 1] = key end
  table.sort(keys, function(a, b)
    local ra, rb = RANK[type(a)] or 4, RANK[type(b)] or 4
    if ra ~= rb then return ra < rb end
    if ra <= 2 then return a < b end
    return tostring(a) < tostring(b)
  end)
  return keys
end

local KEYWORDS = {}
for word in ([[and break do else elseif end false for function goto if in local nil not or repeat return then true
  until while]]):gmatch("%a+") do KEYWORDS[word] = true end

local ESCAPES = { ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ['"'] = '\\"', ["\\"] = "\\\\" }

local function quote(text)
  local valid = utf8.len(text)
  return '"' .. text:gsub(valid and '[%c\127"\\]' or '[%c\127-\255"\\]', function(c)
    return ESCAPES[c] or ("\\x%02x"):format(c:byte())
  end) .. '"'
end

local function key_text(key)
  if type(key) == "string" then
    return key:match("^[%a_][%w_]*$") and not KEYWORDS[key] and key or "[" .. quote(key) .. "]"
  end
  return "[" .. (type(key) == "number" and tostring(key) or M.plain(tostring(key))) .. "]"
end

local function is_scalar(v) return type(v) ~= "table" or (getmetatable(v) or {}).__tostring ~= nil end

local show

--- The pieces of a table: list elements first, then pairs by key.
local function pieces(t, indent, seen, budget)
  local out, n = {}, 0
  for i, value in ipairs(t) do
    n = i
    if #out >= budget then break end
    out[#out + 1] = show(value, indent, seen, budget)
  end
  for _, key in ipairs(M.sorted_keys(t)) do
    if not (math.type(key) == "integer" and key >= 1 and key <= n) then
      if #out >= budget then
        out[#out + 1] = "..."
        break
      end
      out[#out + 1] = key_text(key) .. " = " .. show(t[key], indent, seen, budget)
    end
  end
  return out
end

function show(value, indent, seen, budget)
  if type(value) == "string" then
    if #value > 4000 then return quote(value:sub(1, 4000)) .. (" ... (%d bytes)"):format(#value) end
    return quote(value)
  end
  if type(value) ~= "table" or is_scalar(value) then return M.plain(tostring(value)) end
  if seen[value] then return "{ (shown above) }" end
  if #indent > 40 then return "{ ... }" end
  seen[value] = true
  local inner = indent .. "  "
  local out = pieces(value, inner, seen, budget)
  seen[value] = nil
  if #out == 0 then return "{}" end
  local line = table.concat(out, ", ")
  if #line + #indent <= 96 and not line:find("\n", 1, true) then return "{ " .. line .. " }" end
  return "{\n" .. inner .. table.concat(out, ",\n" .. inner) .. "\n" .. indent .. "}"
end

--- A value as an operator reads it: keys sorted, texts quoted, cycles cut, long tables shortened.
---@param value any
---@return string
function M.value(value) return show(value, "", {}, 200) end

local encode

local function encode_table(t, indent)
  local inner = indent .. "  "
  local out = {}
  if getmetatable(t) == LIST or #t > 0 then
    for i, value in ipairs(t) do out[i] = encode(value, inner) end
    if #out == 0 then return "[]" end
    return "[\n" .. inner .. table.concat(out, ",\n" .. inner) .. "\n" .. indent .. "]"
  end
  for _, key in ipairs(M.sorted_keys(t)) do
    out[#out + 1] = encode(tostring(key), inner) .. ": " .. encode(t[key], inner)
  end
  if #out == 0 then return "{}" end
  return "{\n" .. inner .. table.concat(out, ",\n" .. inner) .. "\n" .. indent .. "}"
end

function encode(value, indent)
  local kind = type(value)
  if kind == "table" then return encode_table(value, indent) end
  if kind == "string" then return cjson.encode((M.utf8(value))) end
  if kind == "number" then
    if value ~= value or value == math.huge or value == -math.huge then return "null" end
    return math.type(value) == "integer" and tostring(value) or cjson.encode(value)
  end
  if kind == "boolean" then return tostring(value) end
  if value == nil or value == cjson.null then return "null" end
  return cjson.encode(tostring(value))
end

--- One JSON document with sorted keys and a newline at its end. Bytes that are no UTF-8 become U+FFFD.
---@param value any
---@return string
function M.json(value) return encode(value, "") .. "\n" end

--- The text as valid UTF-8, and whether it was that already.
---@param text string
---@return string text
---@return boolean was_valid
function M.utf8(text)
  if utf8.len(text) then return text, true end
  local out, at = {}, 1
  while at <= #text do
    local _, bad = utf8.len(text, at)
    if not bad then
      out[#out + 1] = text:sub(at)
      break
    end
    out[#out + 1] = text:sub(at, bad - 1) .. "\u{FFFD}"
    at = bad + 1
  end
  return table.concat(out), false
end

local DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

--- Base64 of any bytes.
---@param bytes string
---@return string
function M.base64(bytes)
  local out = {}
  for i = 1, #bytes, 3 do
    local a, b, c = bytes:byte(i, i + 2)
    local n = a << 16 | (b or 0) << 8 | (c or 0)
    local digits = {}
    for k = 0, 3 do
      local d = n >> (18 - 6 * k) & 63
      digits[k + 1] = DIGITS:sub(d + 1, d + 1)
    end
    if not b then digits[3] = "=" end
    if not c then digits[4] = "=" end
    out[#out + 1] = table.concat(digits)
  end
  return table.concat(out)
end

return M
