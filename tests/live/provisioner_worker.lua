-- One runtime among several on one provisioner, for provisioner_shared_spec: acquires, executes, cancels, destroys and releases at random
-- until its time is over, shuts down, and prints what it met, one "COUNT WHAT" a line.
--
--     lua5.4 tests/live/provisioner_worker.lua URL STATE_DIR SEED SECONDS
local paddock = require "paddock"

local url, state_dir, seed, seconds = arg[1], arg[2], tonumber(arg[3]), tonumber(arg[4])
math.randomseed(seed)
local rt = paddock.open {
  backend = "provisioner",
  backend_options = { url = url, create_timeout = 1, read_timeout = 1, delete_timeout = 1, gone_timeout = 2 },
  state_dir = state_dir, ownership = { type = "file", ttl = 15, renew_interval = 2 }, stop_timeout = 5, orphan_ttl = 60,
  ready_interval = 0.05, ready_timeout = 3, health_ttl = 0, reap_interval = 1, idle_timeout = 3, replicas = 6, log = "off",
}

local met = {}
local function note(what, err)
  if err then what = ("%s %s %s"):format(what, tostring(err.kind), tostring(err.reason)) end
  met[what] = (met[what] or 0) + 1
end

local function turn()
  local op = rt:acquire_async { user = "u" .. math.random(6), thread = "t", timeout = 8 }
  if math.random() < 0.15 then op:cancel() end
  local ok, done, box = pcall(op.wait, op, 20)
  if not ok then return note("acquire", done) end
  note("acquired " .. box.source)
  local fine, result = pcall(box.exec, box, "echo hi", { timeout = 5 })
  if fine then note("exec " .. result.outcome) else note("exec", result) end
  box:release()
end

local function destroy_one()
  local all = rt:list()
  if #all == 0 then return end
  local ok, gone = pcall(rt.destroy, rt, all[math.random(#all)].id)
  if ok then note("destroyed " .. tostring(gone)) else note("destroy", gone) end
end

local began = paddock.now()
while paddock.now() - began < seconds do
  if math.random() < 0.8 then turn() else destroy_one() end
end
local ok, err
for _ = 1, 40 do
  ok, err = pcall(rt.shutdown, rt)
  if ok then break end
  note("shutdown", err)
  os.execute("sleep 0.3")
end
note(ok and "ended" or "not ended")
for what, count in pairs(met) do print(count, what) end
