--- A short share of `make soak-containers`: the same cycles and checks, twenty of them on each engine. The census counts all that
--- is in the engines' namespaces: these are engines of its own.
local engines = require "tests.support.engines"
local soak = dofile "tests/live/containers_soak.lua"

describe("cycles of real containers", function()
  for _, engine in ipairs(engines.all()) do
    it(("leave nothing behind on %s"):format(engine.name), function()
      if engine.why then
        pending(engine.why)
        return
      end
      local report = soak.run { engine = engine, cycles = 20, workers = 2 }
      assert.same({}, report.problems, soak.text(report))
      assert.equal(20, report.cycles)
    end)
  end
end)
