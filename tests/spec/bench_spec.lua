--- paddock bench: it measures what it says, answers in JSON too, and leaves nothing. No figure is judged here.
local support = require "tests.support"
local cli = require "tests.support.cli"
local cjson = require "cjson"

describe("paddock bench", function()
  after_each(support.cleanup)

  local function bench(...)
    if not cli.have_program() then pending("the program paddock is not built") end
    local can, why = support.can_sandbox()
    if not can then pending(why) end
    local dir = support.tmpdir()
    local code, out, err = cli.program({ env = "TMPDIR=" .. dir }, "bench", ...)
    local names, _ = support.sh("ls " .. dir)
    assert.equal("", names, "it left files")
    return code, out, err
  end

  it("measures every scenario, and says where each sandbox came from", function()
    local code, out, err = bench("--json", "-w", "state_reuse", "-n", "2")
    assert.equal(0, code, err)
    local doc = cjson.decode(out)
    local from = {}
    for _, row in ipairs(doc.rows) do
      from[row.scenario] = next(row.sources)
      assert.is_nil(next(row.sources, (next(row.sources))), row.scenario)
      assert.equal(2, row.rounds)
      assert.equal(row.scenario == "warm_same_thread" and 2 or 0, row.found, row.scenario)
      assert.truthy(row.acquire.median > 0 and row.exec.median > 0 and row.total.p10 <= row.total.p90)
    end
    assert.same({ warm_same_thread = "warm", cold_unique_thread = "created", warm_miss_many_threads = "created",
      idle_timeout = "created", replica_pressure = "created" }, from)
  end)

  it("puts the peers beside it, as ratios of the same run", function()
    local code, out = bench("cold_unique_thread", "--json", "-w", "noop", "-n", "1")
    assert.equal(0, code)
    local doc = cjson.decode(out)
    local bwrap = doc.peers[2]
    assert.equal("bwrap", bwrap.name)
    assert.equal(1, bwrap.figures.rounds)
    local row = doc.rows[1]
    assert.near(row.acquire.median / bwrap.figures.median, row.ratios.acquire_to_bwrap, 1e-6)
    assert.near(row.exec.median / doc.peers[1].figures.median, row.ratios.exec_to_spawn, 1e-6)
  end)

  it("prints a table", function()
    local code, out = bench("warm_same_thread", "-w", "noop", "-n", "1")
    assert.equal(0, code)
    assert.matches("peer bwrap", out)
    assert.matches("warm_same_thread +noop +warm +[%d.]+ +[%d.]+", out)
  end)

  it("refuses scenarios, workloads and rounds that are none", function()
    for _, words in ipairs { { "cold" }, { "-w", "nope" }, { "-n", "0" }, { "-n", "x" } } do
      local code, _, err = cli.run("bench", table.unpack(words))
      assert.equal(64, code)
      assert.matches("^paddock: bench: ", err)
    end
  end)
end)
