--- What busted prints under tests/run: the same lines as the C harness prints (tests/c/test.h).
return function(options)
  local busted = require "busted"
  local handler = require "busted.outputHandlers.base"()
  local failed = 0

  local function text_of(message)
    if type(message) == "string" then return message end
    if type(message) == "table" and getmetatable(message) and getmetatable(message).__tostring then
      return tostring(message)
    end
    return message == nil and "(no message)" or require("pl.pretty").write(message)
  end

  local function show_failure(t)
    failed = failed + 1
    local trace = t.trace or {}
    io.write("FAIL  ", t.name, " (", tostring(trace.short_src), ":", tostring(trace.currentline), ")\n")
    io.write("  ", (text_of(t.message):gsub("\n", "\n  ")), "\n")
    if options.verbose and trace.traceback then io.write("  ", (trace.traceback:gsub("\n", "\n  ")), "\n") end
  end

  --- What a slow one took: where a suite's time goes.
  local function took(element)
    return element.duration and element.duration >= 1 and (" (%.1f s)"):format(element.duration) or ""
  end

  function handler.testEnd(element, _, status)
    if status == "success" then
      io.write("ok    ", handler.getFullName(element), took(element), "\n")
    elseif status == "pending" then
      local t = handler.pendings[#handler.pendings]
      io.write("skip  ", t.name, ": ", t.message and text_of(t.message) or "no reason given", "\n")
    elseif status == "failure" then
      show_failure(handler.failures[#handler.failures])
    else
      show_failure(handler.errors[#handler.errors])
    end
    io.flush()
    return nil, true
  end

  -- What goes wrong outside of a test: a file that does not load, a hook that fails.
  function handler.error(element)
    if element.descriptor ~= "it" then
      show_failure(handler.errors[#handler.errors])
      io.flush()
    end
    return nil, true
  end

  function handler.suiteEnd()
    io.write(string.format("%d passed, %d failed, %d skipped\n", handler.successesCount, failed, handler.pendingsCount))
    io.flush()
    return nil, true
  end

  busted.subscribe({ "suite", "end" }, handler.suiteEnd)
  busted.subscribe({ "test", "end" }, handler.testEnd, { predicate = handler.cancelOnPending })
  busted.subscribe({ "error" }, handler.error)
  busted.subscribe({ "failure" }, handler.error)
  return handler
end
