--- What the commands share: reading the configuration, opening a runtime, looking at what other processes left.
local args = require "paddock.cli.args"
local native = require "paddock.cli.native"
local status = require "paddock.cli.status"

local M = {}

local errors = require "paddock.errors"

--- The configuration file's options with those of the command line over them.
---@param options { config: string?, backend: string?, verbose: boolean? }
---@return table
function M.config(options)
  local config = {}
  if options.config then
    local ok, loaded = pcall(require("paddock.config").load_file, options.config)
    if not ok then status.fail(status.CONFIG, status.line(loaded)) end
    config = loaded
  end
  if options.backend then config.backend = options.backend end
  if config.user == nil then
    local user = os.getenv("USER")
    config.user = user and user ~= "" and user or native.user()
  end
  return config
end

--- A configuration with every default filled in; mistakes in it exit with 78.
---@param config table
---@return table
function M.normalized(config)
  local settings = require "paddock.config"
  local plain
  local ok, normal = pcall(function()
    plain = settings.split(config)
    return settings.normalize(plain)
  end)
  if ok then return normal end
  status.fail(errors.is(normal, "unsupported") and status.UNAVAILABLE or status.CONFIG, status.line(normal))
end

--- What a backend's file returns.
local function load_backend(path)
  local chunk, why = loadfile(path, "t")
  local ok, module
  if chunk then
    ok, module = pcall(chunk)
    why = module
  end
  if ok and type(module) == "table" then return module end
  status.fail(status.CONFIG, ("the backend %s cannot be used: %s"):format(args.quoted(path),
    ok and "its file must return a table" or status.line(errors.is(why) and why or { message = tostring(why) })))
end

--- The engine in a file, made with these options, to look at.
---@param path string
---@param options table   the option `backend_options`
---@param normal table?   all options
---@return table
function M.load_engine(path, options, normal)
  local module = load_backend(path)
  return module.new and module.new(options, normal) or module
end

--- A backend to look at, without a runtime around it: looking must not claim, renew or reap anything.
local function backend_of(config)
  if type(config.backend) == "table" then return config.backend end
  local normal = M.normalized(config)
  local backend
  if normal.backend:find("/", 1, true) or normal.backend:find("%.lua$") then
    backend = M.load_engine(normal.backend, normal.backend_options, normal)
  else
    local module = require("paddock.backend." .. normal.backend) -- one that `normalize` knows is there
    backend = module.new and module.new(normal.backend_options, normal) or module
  end
  if type(backend.list) == "function" then return backend end
  status.fail(status.UNAVAILABLE, ("the backend %s cannot list its sandboxes"):format(args.quoted(normal.backend)))
end

--- Whether that process still runs. One that was killed may wait for its parent to notice, for as long as that likes.
local function runs(pid, start)
  local now, state = require("paddock.io").proc.start_of(pid)
  return now == start and state ~= "Z" and state ~= "X"
end

--- Whether the process that a record names still runs.
local function owner_lives(owner)
  if type(owner) ~= "table" or math.type(owner.pid) ~= "integer" or owner.pid <= 0 then return false end
  return runs(owner.pid, owner.start)
end

--- For how long nobody has spoken to a sandbox whose guest can be asked.
local function idle_of(info)
  if type(info.unix) ~= "string" then return info.idle_seconds end
  local ok, said = pcall(function()
    return require("paddock.client.guest").new({ url = info.url, unix = info.unix }):state(1)
  end)
  return ok and type(said) == "table" and tonumber(said.idle_seconds) or nil
end

--- The runtimes of a state directory that run.
---@param state_dir string
---@return { id: string, pid: integer, start_time: integer, signals: boolean }[]
function M.runtimes(state_dir)
  local cjson, proc = require "cjson", require("paddock.io").proc
  local folder = state_dir .. "/runtimes"
  local directory <close> = proc.open(folder, "rd")
  local out = {}
  for _, name in ipairs(directory and proc.names(directory) or {}) do
    if name:find("%.json$") then
      local file <close> = io.open(folder .. "/" .. name, "rb")
      local parsed, record = pcall(cjson.decode, file and file:read(65536) or "")
      local pid = parsed and type(record) == "table" and math.tointeger(record.pid) or 0
      local start = pid > 0 and math.tointeger(record.start_time)
      if start and runs(pid, start) then -- else it has ended, and left its record
        out[#out + 1] = { id = tostring(record.runtime), pid = pid, start_time = start, signals = record.signals == true }
      end
    end
  end
  return out
end

---@class paddock.cli.Lease
---@field state "own"|"del"     del: it is being taken down
---@field owner string          a runtime's id
---@field owner_pid integer?    where it runs on this machine, in this state directory
---@field token string          decimal

---@class paddock.cli.Known
---@field sandbox_id string
---@field generation string?
---@field state "held"|"parked"|"free"|"ending"
---@field owner_pid integer?    nil when nobody owns it
---@field lease paddock.cli.Lease?   from add_facts
---@field quarantined string?   why it must not serve again; from add_facts
---@field held boolean?
---@field user string?
---@field thread string?
---@field age_seconds number?
---@field idle_seconds number?  where the backend knows
---@field created_at number?

--- All sandboxes that the backend knows, whoever made them, by id.
---@param config table
---@return paddock.cli.Known[]
function M.known(config)
  local backend = backend_of(config)
  local looked, infos = pcall(backend.list, backend)
  if not looked then -- a state directory that cannot be used is said in the same way by everything that needs it
    if errors.is(infos, "io_error") then status.fail(status.CONFIG, status.line(infos)) end
    error(infos, 0)
  end
  local out, now = {}, os.time()
  for i, info in ipairs(infos) do
    local who = type(info.identity) == "table" and info.identity or {}
    local owned = owner_lives(info.owner)
    out[i] = {
      sandbox_id = info.sandbox_id, generation = info.generation, held = info.held,
      state = info.doomed and "ending" or info.held and "held" or owned and "parked" or "free",
      owner_pid = owned and info.owner.pid or nil, user = who.user, thread = who.thread,
      created_at = info.created_at, age_seconds = info.created_at and math.max(0, now - info.created_at) or nil,
      idle_seconds = idle_of(info),
    }
  end
  table.sort(out, function(a, b)
    if a.sandbox_id ~= b.sandbox_id then return a.sandbox_id < b.sandbox_id end
    return tostring(a.generation) < tostring(b.generation)
  end)
  return out
end

--- Adds what the ownership store and the journal know. A store that does not answer leaves its part out, with a warning.
---@param ctx table
---@param rt table   a runtime
---@param config table
---@param known paddock.cli.Known[]
function M.add_facts(ctx, rt, config, known)
  local pids, why = {}, nil
  for _, runtime in ipairs(M.runtimes(M.normalized(config).state_dir)) do pids[runtime.id] = runtime.pid end
  for _, one in ipairs(known) do
    local ok, lease = pcall(rt.lease, rt, one.sandbox_id)
    if not ok then
      why = lease
    elseif lease and not lease.ours then -- what a command claims for itself ends with it
      one.lease = { state = lease.state, owner = lease.owner, owner_pid = pids[lease.owner], token = ("%d"):format(lease.token) }
      if lease.state == "del" then one.state = "ending" end
    end
  end
  if why then ctx.warn("who has the leases is not known: " .. status.line(why)) end
  local ok, records = pcall(rt.quarantine, rt)
  if not ok then
    ctx.warn("what is quarantined is not known: " .. status.line(records))
    return
  end
  for _, one in ipairs(known) do
    for _, record in ipairs(records) do
      local same = record.generation == nil or one.generation == nil or record.generation == one.generation
      if record.sandbox_id == one.sandbox_id and same then one.quarantined = record.why end
    end
  end
end

--- Who is in the way of a teardown, for a person.
---@param one paddock.cli.Known
---@return string
function M.whose(one)
  local pid = one.lease and one.lease.owner_pid or one.owner_pid
  if pid then return ("process %d"):format(pid) end
  return one.lease and "runtime " .. one.lease.owner or "another process"
end

--- The options without those that only a new sandbox needs: what they name may be gone by now, and that must not keep an
--- operator from taking sandboxes down.
---@param config table
---@return table
function M.without_creation(config)
  local out = {}
  for k, v in pairs(config) do out[k] = v end
  if type(config.backend_options) == "table" then
    out.backend_options = {}
    for k, v in pairs(config.backend_options) do
      if k ~= "rootfs" and k ~= "images" then out.backend_options[k] = v end
    end
  end
  out.mounts, out.image, out.limits = nil, nil, nil
  return out
end

--- Options of a runtime that lives for one command: no background threads, since their first pass would adopt every free
--- sandbox of the state directory, and whoever wants one of them meanwhile would be refused. Nobody renews then, so a lease
--- must last as long as the command may take; should this process be killed, others may end its sandbox after that.
---@param config table
---@param command_timeout? number   seconds, of the command that it will run
---@return table config
function M.one_shot(config, command_timeout)
  local normal = M.normalized(config)
  if config.threads ~= nil or normal.ownership.type == "table" then return config end
  local longest = normal.ready_timeout + normal.stop_timeout + math.max(normal.command_timeout, command_timeout or 0) + 60
  config.threads = false
  config.ownership = {
    type = normal.ownership.type, url = normal.ownership.url, renew_interval = normal.ownership.renew_interval,
    ttl = math.max(normal.ownership.ttl, longest),
  }
  return config
end

local opened -- the runtime of this process's command

--- The last thing that a command does: gives back the leases of what it leaves behind, so that nobody has to wait until
--- they run out. Stops nothing.
function M.leave()
  if not opened then return end
  native.calm() -- after an interrupt it may wait for the store all the same
  pcall(opened.reset, opened) -- a closed one has given everything back
end

--- Opens the runtime of a command. Mistakes in the configuration exit with 78, a backend that cannot work with 69.
---@param ctx table
---@param options table
---@param config table?
---@return table runtime
function M.open(ctx, options, config)
  config = config or M.config(options)
  if type(config.log) ~= "function" then -- a level is for hosts: what goes wrong is said by the command itself
    config.log = options.verbose and "info" or "off"
  end
  config.signals = true -- core/main.c handles them; the runtime's record then says that HUP reloads, and does not kill
  local ok, rt = pcall(require("paddock").open, config)
  if not ok then
    local err = rt
    if errors.is(err, "invalid_argument") or errors.is(err, "io_error") then
      status.fail(status.CONFIG, status.line(err))
    end
    error(err, 0)
  end
  opened = rt
  native.on_hangup(function()
    local reloaded, why = pcall(rt.reload, rt)
    if not reloaded then ctx.warn("the policies stay as they were: " .. status.line(why)) end
  end)
  return rt
end

local function in_use(id, whose, by)
  status.fail(status.DEFERRED, ("sandbox %s of %s is in use by %s: try again later, or give another --thread")
    :format(id, whose, by))
end

--- Makes sure that nobody else works in that sandbox, as long as the answer is not closed; otherwise exits with 75.
--- Why: an acquire takes a sandbox over, whoever has it, and the newer owner's fence ends the commands of the older one.
--- That is right for a user who moves from one host to another, and wrong for two shells that happen to run `exec`.
---@param config table
---@param id string
---@param whose string   for the message
---@return userdata? turn
function M.sole_user(config, id, whose)
  local normal = M.normalized(config)
  if normal.backend ~= "process" then return nil end -- others do not say whether a sandbox is held
  local turn, why = require("paddock.io").proc.open(normal.state_dir .. "/execs", "wc", 384) -- 0600
  if not turn then
    status.fail(status.CONFIG, ("the state directory %s cannot be used: %s"):format(normal.state_dir, why))
  end
  local at = 0
  for i = 1, #id do at = (at * 31 + id:byte(i)) & 0x0fffffffffffffff end
  if not turn:lock("w", at) then in_use(id, whose, "another paddock exec") end
  local info = backend_of(config):inspect(id)
  if info and info.held then
    in_use(id, whose, info.owner and info.owner.pid and ("process %d"):format(info.owner.pid) or "another process")
  end
  return turn
end

--- The options that every command with a runtime takes.
M.OPTIONS = {
  { "--config,-c", "F", "a Lua file that returns the options of paddock.open" },
  { "--backend,-b", "B", "process, docker, provisioner, or path/to/engine.lua" },
  { "--verbose,-v", nil, "log lines (JSON) on stderr" },
}

--- A command's own options and the common ones.
---@param own table[]
---@return table[]
function M.options(own)
  return table.move(M.OPTIONS, 1, #M.OPTIONS, #own + 1, own)
end

--- The id that was written in full or in part, among those that are known.
---@param word string
---@param ids string[]
---@return string
function M.complete_id(word, ids)
  local found
  for _, id in ipairs(ids) do
    if id == word then return id end
    if id:sub(1, #word) == word then
      if #word < 4 then args.usage_error(("an id may be its first characters, at least four, not %s"):format(args.quoted(word))) end
      if found then args.usage_error(("%s is the beginning of several sandbox ids"):format(args.quoted(word))) end
      found = id
    end
  end
  return found or word
end

return M
