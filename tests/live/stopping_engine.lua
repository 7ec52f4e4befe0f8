--- The process backend, in a process that stops itself (SIGSTOP, or the option `signal`) at one step: before or after one function
--- of the backend or of its clients, once, when the file `armed` is there. For stopped_spec.lua and owners_spec.lua.
local inner_module = require "paddock.backend.process"

local M = {}

local function exists(path)
  local file = io.open(path)
  if file then file:close() end
  return file ~= nil
end

function M.new(options, runtime)
  local folder, step = options.folder, options.step
  local inner, done = inner_module.new({}, runtime), false

  local function at(name)
    if done or name ~= step or not exists(folder .. "/armed") then return end
    done = true
    assert(io.open(folder .. "/stopped", "w")):close()
    os.execute(("kill -%s %d"):format(options.signal or "STOP", runtime.pid))
  end

  local function wrap(object, names, prefix)
    local out = {}
    for _, name in ipairs(names) do
      if object[name] then
        out[name] = function(_, ...)
          at("before " .. prefix .. name)
          local results = table.pack(object[name](object, ...))
          at("after " .. prefix .. name)
          return table.unpack(results, 1, results.n)
        end
      end
    end
    return out
  end

  local backend = wrap(inner, { "create", "destroy", "inspect", "discover", "alive", "ready", "list", "finish", "close" }, "")
  backend.name, backend.capabilities = inner.name, inner.capabilities
  function backend.connect(_, ...)
    at "before connect"
    local client = wrap(inner:connect(...), { "exec", "open_session", "close_session", "read", "write", "list", "fence",
      "doom", "close" }, "client.")
    at "after connect"
    return client
  end
  return backend
end

return M
