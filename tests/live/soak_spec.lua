--- A short share of `make soak`: the same processes, faults and checks for some seconds.
local check = dofile "tests/live/soak_check.lua"
local soak = dofile "tests/live/soak.lua"

describe("three runtime processes on real sandboxes, killed, stopped and short of disk", function()
  for seed, store in ipairs { "file", "redis" } do
    local seconds = store == "file" and 7 or 4
    it(("lose nothing, and leave nothing behind: %s leases [O1, O5, P1]"):format(store), function()
      local report = soak.run { store = store, seconds = seconds, seed = seed }
      if report.skipped and type(report.skipped) == "string" then
        pending(report.skipped)
        return
      end
      local text = check.text(store, report)
      assert.same({}, report.problems, text)
      assert.same({}, report.leaks, text)
      assert.is_true((report.operations.exec or 0) > 10, text) -- it did work
    end)
  end
end)
