--- The share of the seeded schedules that every test run takes (see tests/sim/sim.h; `make sim` runs many more), and that a seed
--- stands for one schedule, step by step.
local SIM = "build/sim/sim"
local COUNT = 3000

local function run(arguments)
  local pipe <close> = assert(io.popen(SIM .. " " .. arguments .. " 2>&1"))
  local output = pipe:read "a"
  return output, pipe:close() == true
end

--- What two runs of the same seed must share: all of it.
local function traces_of(seed)
  return (run("-s " .. seed)), (run("-s " .. seed))
end

if os.getenv "MODE" == "dev" or os.getenv "MODE" == nil then -- fibers and a malloc of its own leave a sanitizer nothing to see
  describe("the seeded schedules", function()
    it("keep what must hold under every interleaving, crash and lost answer [E17, M12, M13, M14, M15, O4, O5, O6, O10]", function()
      local output, ok = run("-j 2 -n " .. COUNT)
      assert.is_true(ok, output)
    end)

    it("are the same each time, whatever ran before", function()
      for _, seed in ipairs { 1, 3, 94, 1234 } do
        local first, second = traces_of(seed)
        assert.equal(first, second)
        assert.is_true(#first > 1000)
      end
      local digest = run "-f 90 -n 40 -j 1 -d"
      local alone = run "-f 100 -n 1 -j 1 -d"
      assert.is_truthy(digest:find(alone:match "seed 100: %x+", 1, true), alone)
    end)
  end)
end
