--- The docker backend: a sandbox is a container of an engine that speaks the Docker Engine API.
---
--- What is true at every step, whatever dies: a container carries in its labels whose it is and which place on this machine is
--- its own, so that `list` of a later process finds and removes what was left; it is known by its immutable id, which is the
--- sandbox's generation: a name is only how a sandbox id is looked up. Nothing is stopped or removed by name. What has our name
--- and not all of our labels is somebody else's: it is never touched.
local engines = require "paddock.docker.engine"
local errors = require "paddock.errors"
local events = require "paddock.docker.events"
local images = require "paddock.docker.images"
local io = require "paddock.io"
local labels = require "paddock.docker.labels"
local leftovers = require "paddock.docker.leftovers"
local option_rules = require "paddock.docker.options"
local places = require "paddock.docker.places"
local planes = require "paddock.docker.planes"
local spec_of = require "paddock.docker.spec"
local undos = require "paddock.undo"
local view = require "paddock.docker.view"

local M = {}

local LOOK_LIMIT = 10                -- seconds for a question to the engine, at most
local FIND_WAIT = 5                  -- seconds in which a creation whose answer was lost is looked for
local START_TRIES = 10               -- ports that are tried from base_port on; and starts where the engine chose a taken one

---@class paddock.DockerBackend
---@field engine paddock.Engine
---@field options paddock.DockerOptions
---@field places paddock.DockerPlaces
local Backend = {}
Backend.__index = Backend

--- Whose containers these are: runtimes that share their leases share their sandboxes.
local function deployment_of(runtime)
  local what
  if runtime.scope and runtime.scope ~= "" then
    what = "scope\0" .. runtime.scope
  elseif runtime.ownership_url then
    what = "store\0" .. runtime.ownership_url
  else
    what = "state\0" .. (io.proc.self().machine or "") .. "\0" .. (io.fs.realpath(runtime.state_dir) or runtime.state_dir)
  end
  return io.sha256hex(what):sub(1, 32)
end

--- Settles how commands get inside, where the options do not say it: by what the configured image has. It is one plane for the whole
--- runtime, since whether sandboxes enforce tokens themselves is a fact of the runtime.
local function choose_plane(own, engine, known, runtime)
  if own.plane then return end
  local image = runtime.image ~= "" and runtime.image or nil
  local fine, facts = pcall(function() return image and known:look(image) end)
  if not fine then -- another engine might be chosen by whoever reads the message; nothing else can be said of the image
    io.log("debug", "image_unknown", { image = image, message = tostring(facts) })
    facts = nil
  end
  own.plane, own.chosen = planes.choose(image, facts or nil, own, engine.unix ~= nil)
  option_rules.settle(own)
  if runtime.stop_timeout and runtime.ownership_ttl then
    option_rules.check_clock(own, runtime.stop_timeout, runtime.ownership_ttl)
  end
  io.log("info", "plane_chosen", { plane = own.plane, message = own.chosen })
end

--- Makes the backend; the engine must answer.
---@param options paddock.DockerOptions?
---@param runtime table   the facts of the runtime, as the process backend gets them
---@return paddock.DockerBackend
function M.new(options, runtime)
  if type(runtime) ~= "table" or type(runtime.state_dir) ~= "string" then
    errors.raise("invalid_argument", "the docker backend needs a state_dir")
  end
  local own = option_rules.read(options)
  local engine = engines.find(engines.options(own))
  local known = images.new(engine, own)
  choose_plane(own, engine, known, runtime)
  local self = setmetatable({
    name = "docker", engine = engine, options = own, runtime = runtime, store_scope = engine.id,
    capabilities = {
      mounts = engine.unix ~= nil, thread_data_mounts = engine.unix ~= nil, pause = false, snapshot = false, limits = true,
      fenced = own.plane == "guest",
    },
    images = known,
    ports = {},              -- by number: the generation, or `true` while one is being made
    engine_id = engine.id,
  }, Backend)
  self.deployment = deployment_of(runtime)
  self.places = places.open(runtime.state_dir, engine.id, self.deployment)
  self.leftovers = leftovers.new(self)
  self.events = events.new(self)
  self.plane = planes[own.plane].new(self)
  return self
end

-- ---- small things ---------------------------------------------------------------------------------------------

function Backend:container_name(id)
  return self.options.prefix .. "-" .. id
end

local function generation_of(info, what)
  local generation = type(info) == "table" and info.generation
  if not view.is_id(generation) or type(info.sandbox_id) ~= "string" then
    errors.raise("invalid_argument", what .. ": info must carry sandbox_id and generation")
  end
  return generation
end

--- A container by id or name: its state, or nil when the engine says that exactly this one is not there. Raises when nobody knows.
---@param key string
---@param limit number?
---@return paddock.ContainerState?
function Backend:look(key, limit)
  local what = "look at the container " .. key
  local response, fault = self.engine:call({
    method = "GET", path = "/containers/" .. engines.percent(key) .. "/json",
    limit = self.engine:within(math.min(limit or LOOK_LIMIT, LOOK_LIMIT)),
  }, what, key)
  if not response then
    if fault.meaning == "absent" then
      if #key == 64 then self.gone = key end
      return nil
    end
    engines.refuse(what, fault)
  end
  local state = view.inspected(response.data, self.options.aio_port)
  if not state then errors.raise("backend_error", what .. ": the engine's answer cannot be read", { reason = "protocol" }) end
  if state.id ~= key and (view.is_id(key) or state.name ~= key) then
    errors.raise("backend_error", what .. ": the engine answers about another one", { reason = "protocol" })
  end
  if state.running and self:whose(state) == "ours" then
    self.events:saw_running(state.id, state.labels[self.options.label_prefix .. "sandbox_id"])
  end
  return state
end

function Backend:whose(state)
  return labels.whose(self.options.label_prefix, state.labels, self.deployment)
end

--- Whether a container is the sandbox of that id: ours, and under the one name that it may have.
function Backend:is_sandbox(state, id)
  return self:whose(state) == "ours" and state.labels[self.options.label_prefix .. "sandbox_id"] == id
    and state.name == self:container_name(id)
end

--- The info of a container that is ours.
---@param state paddock.ContainerState
---@param said table?   what its guest says
function Backend:info_of(state, said)
  local info = view.info(state, self.options.label_prefix)
  self.plane:describe(info, state)
  if said then
    info.token = said.token and tostring(said.token) or nil
    info.doomed = info.doomed or said.doomed == true or nil
  end
  return info
end

-- ---- creating -------------------------------------------------------------------------------------------------

function Backend:_check_spec(spec)
  if type(spec) ~= "table" or type(spec.sandbox_id) ~= "string" or not spec.sandbox_id:find("^[a-z0-9-]+$")
    or #spec.sandbox_id > 63 then
    errors.raise("invalid_argument", "sandbox_id must be 1 to 63 characters of a-z, 0-9 and -")
  end
  local image = spec.image or self.runtime.image
  if type(image) ~= "string" or image == "" or #image > 1024 or image:find("[%c%s]") then
    errors.raise("invalid_argument", "the docker backend needs an image: set the option `image`, or let policies/requirements.lua "
      .. "answer one", { reason = "image" })
  end
  if image:find("..", 1, true) then -- no reference has that; in a URL's path it would lead to something that is no image
    errors.raise("invalid_argument", ("the image %q is no reference of an image"):format(image), { reason = "image" })
  end
  local network = spec.network or "none"
  if type(network) ~= "string" or not network:find("^[%w][%w_.-]*$") or #network > 255 then
    errors.raise("invalid_argument", ("network %q: it is \"none\", \"open\", or the name of a network of the engine")
      :format(tostring(network):sub(1, 60)))
  elseif network:lower() == "host" then
    errors.raise("invalid_argument", 'network "host": that is the machine\'s own network, and no sandbox; it is "none", "open", or the '
      .. "name of a network of the engine")
  end
  for _, mount in ipairs(spec.mounts or {}) do
    for _, own in ipairs { spec_of.GUEST, spec_of.FOLDER } do
      if (mount.target .. "/"):sub(1, #own + 1) == own .. "/" then
        errors.raise("invalid_argument", ("mounts: nothing can be mounted on %s: %s is the guest's own"):format(mount.target, own))
      end
    end
  end
  for name in pairs(spec.labels or {}) do
    if type(name) ~= "string" or name:sub(1, #self.options.label_prefix) == self.options.label_prefix then
      errors.raise("invalid_argument", ("the label %q: labels that begin with %s are paddock's own")
        :format(tostring(name), self.options.label_prefix))
    end
  end
  return image, network
end

--- data_dir/ID as a mount of the workspace.
function Backend:_data_mount(id)
  if not self.runtime.data_dir then return nil end
  local path = self.runtime.data_dir .. "/" .. id
  local made, err = io.fs.mkdir(path, 448) -- 0700
  if not made then errors.raise("io_error", "cannot make the workspace: " .. tostring(err.message), { reason = err.reason }) end
  local uid, gid = (self.options.user or ""):match("^(%d+):?(%d*)$")
  if uid and io.proc.self().uid == 0 then
    uid, gid = math.tointeger(tonumber(uid)), math.tointeger(tonumber(gid))
    local done, why = io.fs.chown(path, uid, gid or uid)
    if not done then errors.raise("io_error", "cannot give the workspace away: " .. tostring(why.message), { reason = why.reason }) end
  end
  return { source = path, target = self.options.workdir, read_only = false }
end

--- Whether it is a root that runs in there.
local function is_root(options, facts)
  local user = options.user or (type(facts.Config) == "table" and facts.Config.User) or ""
  return user == "" or user:find("^0%f[:\0]") ~= nil or user:find("^root%f[:\0]") ~= nil
end

--- Sends a creation, once. An answer that is lost is looked for: the engine may have acted.
---@return string id
---@return table? fault
function Backend:_create_container(name, body, instance)
  local response, err = self.engine:send {
    method = "POST", path = "/containers/create", query = { name = name }, json = body,
  }
  local what = "create the container " .. name
  if response and response.status < 400 then
    local id = type(response.data) == "table" and response.data.Id
    if view.is_id(id) then return id end
    id = io.shield(FIND_WAIT + 1, self._find_lost, self, instance) -- it acted, whatever it says
    if id then return id end
    errors.raise("backend_error", what .. ": the engine's answer cannot be read", { reason = "protocol" })
  elseif response then
    local fault = engines.fault(response, name, body.Env)
    -- An engine that failed in the midst of it may have made it: that one would have the name, and be nobody's.
    if response.status >= 500 and fault.meaning == "other" then io.shield(undos.LIMIT, self._scrap_lost, self, instance) end
    return nil, fault
  elseif err.failure == "not_sent" then
    engines.unreachable(self.engine, what, err)
  end
  local found = io.shield(FIND_WAIT + 1, self._find_lost, self, instance)
  if found and err.kind == "backend_error" then return found end
  if found then io.shield(undos.LIMIT, self._scrap, self, found) end -- the operation's time is over
  engines.unreachable(self.engine, what, err)
end

--- The id of a container whose creation was not answered. Its own label finds it, and its name says that there can be one only.
--- The engine may be at it still.
function Backend:_find_lost(instance)
  local deadline = io.now() + FIND_WAIT
  repeat
    local fine, found = pcall(self._by_instance, self, instance)
    if fine and found then return found.id end
    io.sleep(0.1)
  until io.now() >= deadline
  return nil
end

--- The container with that label, in whatever state.
function Backend:_by_instance(instance)
  return self:_all({ self.options.label_prefix .. "instance=" .. instance })[1]
end

--- Removes a container that never was a sandbox, by its id. What fails is left to `list` of a later pass, which finds it by label.
function Backend:_scrap(id)
  local response, err = self.engine:send {
    method = "DELETE", path = "/containers/" .. id, query = { force = true, v = true }, limit = self.engine:within(LOOK_LIMIT),
  }
  if not response or (response.status >= 400 and engines.fault(response, id).meaning ~= "absent") then
    io.log("warn", "container_left", { container = id, message = response and engines.words(response) or tostring(err.message) })
    return false
  end
  return true
end

--- Removes what a creation made that failed, if it made anything.
function Backend:_scrap_lost(instance)
  local fine, found = pcall(self._by_instance, self, instance)
  if fine and found then self:_scrap(found.id) end
end

--- What to do about a name that is taken: the sandbox that has it, when it is ours and alive; or nil, when what had it was dead
--- and is gone; or it raises why not.
function Backend:_name_taken(id)
  local name = self:container_name(id)
  local state = self:look(name)
  if not state then return nil end
  local whose = self:whose(state)
  if whose ~= "ours" or not self:is_sandbox(state, id) then
    errors.raise("backend_error", ("the container %s is in the way of sandbox %s: %s; rename or remove it, or set another "
      .. "backend_options.prefix"):format(name, id, whose == "none" and "it is not paddock's"
      or "it belongs to another deployment of paddock, or its labels are not complete"), { reason = "name_taken", sandbox_id = id })
  end
  if state.running then
    local info = self:discover(id)
    if info then return info end
    local plane = state.labels[self.options.label_prefix .. "plane"]
    if plane ~= self.options.plane then
      errors.raise("backend_error", ("the container %s was made for the plane %q, and this runtime's is %q: set backend_options.plane")
        :format(name, plane, self.options.plane), { reason = "name_taken", sandbox_id = id })
    end
    local said, why = self.plane:ask(self:info_of(state), nil, nil, state)
    errors.raise("backend_error", ("the container %s runs, and %s; try again, or end it: paddock destroy %s"):format(name,
      said and "has not answered in time" or ("can be neither used nor replaced, since it does not answer (%s)"):format(tostring(why)), id),
      { reason = "name_taken", sandbox_id = id })
  end
  if state.status == "created" and os.time() - state.created_at < self.options.engine_timeout then
    errors.raise("backend_error", ("the container %s is just being made by another process; try again"):format(name),
      { reason = "name_taken", sandbox_id = id })
  end
  -- Never started, or ended: it serves nobody, and its id says that it is no other one.
  self:_scrap(state.id)
  local info = view.info(state, self.options.label_prefix)
  self.plane:forget(info)
  if pcall(self.leftovers.finish, self.leftovers, info) then pcall(self.places.remove, self.places, info.instance) end
  return nil
end

--- Starts it, or raises what the engine says, with the container's own last words.
---@return table? fault   a port that is taken: the caller may try another
function Backend:_start(id, what)
  local response, err = self.engine:send { method = "POST", path = "/containers/" .. id .. "/start", body = "" }
  if not response then
    -- An answer that was lost is no failure: what runs has been started.
    local fine, state = pcall(self.look, self, id)
    if fine and state and state.running then return nil end
    engines.unreachable(self.engine, what, err)
  end
  if response.status < 400 then return nil end
  local fault = engines.fault(response, id)
  if fault.meaning == "port_taken" then return fault end
  engines.refuse(what, fault)
end

--- The plan of a container, as far as it does not depend on the port.
function Backend:_plan(spec, image, network)
  local facts = self.images:ensure(image)
  local mounts = { table.unpack(spec.mounts or {}) }
  local data = self:_data_mount(spec.sandbox_id)
  if data then table.insert(mounts, 1, data) end
  local plan = {
    image = image, options = self.options, mounts = mounts, env = spec.env or {}, limits = spec.limits or {}, network = network,
    sandbox_id = spec.sandbox_id, podman = self.engine.podman,
  }
  if self.options.chosen and self.options.plane == "aio" and image ~= self.runtime.image
    and planes.choose(image, facts, self.options, self.engine.unix ~= nil) ~= "aio" then
    errors.raise("invalid_argument", ("the image %s has no all-in-one server, and the configured one has: set backend_options.plane to "
      .. "\"guest\" or \"exec\", which work in both"):format(image), { reason = "image" })
  end
  local root = is_root(self.options, facts)
  plan.image_env = type(facts.Config) == "table" and type(facts.Config.Env) == "table" and facts.Config.Env or {}
  plan.cap_add = self.options.cap_add or (root and option_rules.ROOT_CAPABILITIES) or {}
  -- Another user than root cannot write where the engine makes a folder.
  local kind = self.options.workspace or ((self.options.read_only_root or not root) and "tmpfs" or "layer")
  plan.tmpfs_workspace, plan.wants_volume = kind == "tmpfs", kind == "volume"
  return plan
end

function Backend:_labels(plan, spec, instance)
  -- The image's own capacity, too: a list does not show an environment, and is to attest what an inspection does.
  local sessions = (spec.env or {}).MAX_SHELL_SESSIONS or view.capacity(plan.image_env)
  return labels.of(self.options.label_prefix, {
    sandbox_id = spec.sandbox_id, instance = instance, deployment = self.deployment, plane = self.options.plane,
    network = plan.network, image = plan.image, networks = plan.helper and { plan.helper } or {}, volume = plan.volume,
    identity = spec.identity, limits = spec.limits, labels = spec.labels,
    env = { MAX_SHELL_SESSIONS = sessions and tostring(sessions) },
  })
end

--- Makes the container, and starts it. Returns its id, or the info of one that had the name.
function Backend:_make(spec, plan, instance, undo)
  local name = self:container_name(spec.sandbox_id)
  local again = { image = true, name = true }
  for attempt = 1, START_TRIES do
    plan.port = self.plane:port(plan, attempt)
    local id, fault = self:_create_container(name, spec_of.body(plan), instance)
    if id then
      undo:add(function() self:_scrap(id) end)
      fault = self:_start(id, "start the container " .. name)
      if not fault then return id end
      if not self:_scrap(id) then engines.refuse("start the container " .. name, fault) end
      self.plane:port_failed(plan)
    elseif fault.meaning == "no_image" and again.image then
      again.image = false
      self.images:forget(plan.image)
      self.images:ensure(plan.image)
    elseif fault.meaning == "name_taken" and again.name then
      again.name = false
      local found = self:_name_taken(spec.sandbox_id)
      if found then return nil, found end
    elseif fault.meaning == "port_taken" then
      self.plane:port_failed(plan)
    else
      engines.refuse("create the container " .. name, fault)
    end
    if attempt == START_TRIES then engines.refuse("start the container " .. name, fault) end
  end
end

--- The state of a container that has just been started. What was sent says all of it, but for the port and address of one that is
--- reached over the network: only then is the engine asked. One that has ended meanwhile is found by whoever waits for its answer.
---@return paddock.ContainerState
function Backend:_started(id, plan)
  if self.options.plane == "aio" then
    local state = self:look(id)
    if state then return state end
    errors.raise("backend_error", ("the container of sandbox %s was removed while it started"):format(plan.sandbox_id),
      { reason = "start" })
  end
  self.events:saw_running(id, plan.sandbox_id)
  return {
    id = id, name = self:container_name(plan.sandbox_id), status = "running", running = true, paused = false, oom = false,
    created_at = os.time(), labels = plan.labels, env = plan.image_env, image = plan.image,
  }
end

--- Notes on this machine what a creation is about to make, so that whoever comes after a crash knows it and may take it away. Unless
--- it is kept, all of it goes; what cannot go now, a later `list` takes.
---@param settings? fun(secret: string, instance: string): string   the guest's
---@return paddock.DockerPlace
function Backend:begin_place(spec, plan, undo, settings)
  local place = self.places:begin(spec.sandbox_id, settings, function(instance)
    local own = self.options.prefix .. "-" .. instance -- known before they are made: an answer that is lost may have made them
    return { name = self:container_name(spec.sandbox_id), networks = plan.wants_network and { own } or nil,
             volume = plan.wants_volume and own or nil }
  end)
  plan.place = place
  undo:add(function()
    self.places:settle(place)
    self.leftovers:finish(place.data)
    self.places:remove(place.instance)
  end)
  return place
end

--- The container is there, and names in its labels what was made for it: nothing is left to note.
function Backend:drop_place(plan)
  if not plan.place then return end
  self.places:settle(plan.place)
  pcall(self.places.remove, self.places, plan.place.instance) -- it goes with the container else
end

--- Makes a sandbox. It runs when it is returned; `ready` waits for its answer.
---@param spec table
---@return table info
function Backend:create(spec)
  local image, network = self:_check_spec(spec)
  local undo <close> = undos.new()
  local plan = self:_plan(spec, image, network)
  local instance = self.plane:begin(spec, plan, undo)
  if plan.wants_volume then
    plan.volume = plan.place.data.volume
    self.leftovers:make_volume(plan.volume, instance)
  end
  plan.labels = self:_labels(plan, spec, instance)
  self.plane:prepare(plan, undo)
  local id, found = self:_make(spec, plan, instance, undo)
  if found then return found end
  local state = self:_started(id, plan)
  self.plane:made(plan, state)
  undo:keep()
  return self:info_of(state)
end

-- ---- looking --------------------------------------------------------------------------------------------------

--- All containers with these labels, running or not. One question.
---@param wanted string[]
---@return paddock.ContainerState[]
function Backend:_all(wanted)
  local what = "list the containers"
  local response, fault = self.engine:call({
    method = "GET", path = "/containers/json", query = { all = true, filters = { label = io.json.array(wanted) } },
    limit = self.engine:within(LOOK_LIMIT),
  }, what)
  if not response then engines.refuse(what, fault) end
  if type(response.data) ~= "table" then
    errors.raise("backend_error", what .. ": the engine's answer cannot be read", { reason = "protocol" })
  end
  local out = {}
  for _, item in ipairs(response.data) do out[#out + 1] = view.listed(item, self.options.aio_port) end
  return out
end

--- What is there now: a statement about info's generation when it is given.
---@param id string
---@param info table?
---@return table?
function Backend:inspect(id, info)
  if info and info.generation then
    local generation = generation_of(info, "inspect")
    if info.engine and info.engine ~= self.engine_id then
      errors.raise("backend_error", ("sandbox %s lives in another engine than %s: nothing can be said about it here")
        :format(id, self.engine.address), { reason = "another_engine", sandbox_id = id })
    end
    local state = self:look(generation)
    return state and self:info_of(state) or nil
  end
  local state = self:look(self:container_name(id))
  if not state or not self:is_sandbox(state, id) then return nil end
  return self:info_of(state, (self.plane:ask(self:info_of(state), nil, nil, state)))
end

--- A healthy sandbox of that id, made by whichever process; nil when there is none that can be verified.
---@param id string
---@return table?
function Backend:discover(id)
  local state = self:look(self:container_name(id), self.runtime.discover_timeout)
  if not state or not self:is_sandbox(state, id) or not state.running then return nil end
  local info = self:info_of(state)
  local said = self.plane:ask(info, self.runtime.discover_timeout or 5, nil, state)
  if not said then return nil end
  return self:info_of(state, said)
end

--- Whether that generation lives and answers.
---@param info table
---@param opts { token: string? }?
---@return boolean
function Backend:alive(info, opts)
  local generation = generation_of(info, "alive")
  if self.events:state(generation) == "dead" then return false end
  local known = self.plane:ask(info, nil, opts and opts.token)
  if known then return true end
  local state = self:look(generation)
  if not state or not state.running then return false end
  if state.paused then
    errors.raise("backend_error", ("sandbox %s is paused"):format(info.sandbox_id), { reason = "paused" })
  end
  return self.plane:doubt(info, state)
end

--- Whether it answers within that many seconds.
---@param info table
---@param seconds number
---@return boolean
function Backend:ready(info, seconds)
  local generation = generation_of(info, "ready")
  return self.plane:ready(info, seconds, function()
    local state = self:look(generation)
    if state and state.running then return end
    local last = state and self:_last_words(state) or "it was removed"
    errors.raise("backend_error", ("sandbox %s ended before it was ready: %s"):format(info.sandbox_id, last), { reason = "start" })
  end)
end

--- Why a container ended: its state, and the end of what it printed.
function Backend:_last_words(state)
  local text = state.error or (state.oom and "out of memory") or ("exit code " .. tostring(state.exit_code))
  local response = self.engine:send {
    method = "GET", path = "/containers/" .. state.id .. "/logs", query = { stdout = true, stderr = true, tail = 5 },
    limit = self.engine:within(5),
    max_body = 1 << 20,
  }
  local words = response and response.status == 200 and planes.plain_text(response.body) or ""
  return words ~= "" and text .. ": " .. words or text
end

--- Whether a place whose container was not among the listed ones is what a creation left that crashed; then all that it made goes.
--- Asked about by name, too: a list that lacks one by whatever mistake must not take a live sandbox's secret away.
---@param record table
function Backend:_is_left(record)
  local state = record.name and self:look(record.name)
  if state and state.labels[self.options.label_prefix .. "instance"] == record.instance then return false end
  self.leftovers:finish(record)
  return true
end

--- All sandboxes of this deployment in this engine. What was left of others on this machine is removed on the way.
---@return table[]
function Backend:list()
  local prefix, found, known = self.options.label_prefix, {}, {}
  local before = self.places:instances()
  for _, state in ipairs(self:_all { prefix .. "role=sandbox", prefix .. "deployment=" .. self.deployment }) do
    if self:whose(state) == "ours" then
      local facts = labels.read(prefix, state.labels)
      known[facts.instance] = true
      if state.name == self:container_name(facts.sandbox_id) then
        local info = self:info_of(state)
        found[#found + 1] = state.running and self:info_of(state, (self.plane:ask(info, nil, nil, state))) or info
      end
    end
  end
  self.places:sweep(before, known, function(record) return self:_is_left(record) end)
  if self.options.plane == "aio" or self.options.workspace == "volume" then self.leftovers:sweep(known) end
  return found
end

-- ---- ending ---------------------------------------------------------------------------------------------------

--- Ends that generation and removes it. It answers when the engine says that it is gone.
---@param info table
---@param opts { timeout: number? }?
---@return boolean
function Backend:destroy(info, opts)
  local generation = generation_of(info, "destroy")
  local deadline = io.now() + (opts and opts.timeout or self.runtime.stop_timeout or 120)
  local what = "remove the container of sandbox " .. info.sandbox_id
  local function left() return math.max(0.05, deadline - io.now()) end
  if info.engine and info.engine ~= self.engine_id then
    errors.raise("backend_error", what .. ": it lives in another engine than " .. self.engine.address, { reason = "another_engine" })
  end
  local expected <close> = self.events:expect(generation) -- the end of a polite stop, too: else the stream would end for that news
  if self.options.stop_grace > 0 then -- politely first; whatever comes of it, the removal below decides, in half of the time at least
    self.engine:send { method = "POST", path = "/containers/" .. generation .. "/stop", body = "",
                       query = { t = math.ceil(self.options.stop_grace) }, limit = math.min(left() / 2, self.options.stop_grace + 10) }
  end
  local pause = 0.02
  while true do
    local response, err = self.engine:send {
      method = "DELETE", path = "/containers/" .. generation, query = { force = true, v = true }, limit = left(),
    }
    if not response then engines.unreachable(self.engine, what, err) end
    if response.status < 400 then
      expected.done = true
      return true
    end
    local fault = engines.fault(response, generation)
    if fault.meaning == "absent" then return true end
    local state = self:look(generation, left())
    if not state then return true end
    if state.paused then
      self.engine:send { method = "POST", path = "/containers/" .. generation .. "/unpause", body = "", limit = left() }
    elseif fault.meaning ~= "busy" and fault.meaning ~= "state" then
      engines.refuse(what, fault)
    end
    if io.now() >= deadline then
      errors.raise("backend_error", ("%s: it is still there after its limit: %s"):format(what, fault.message), { reason = "stop_timeout" })
    end
    io.sleep(pause)
    pause = math.min(pause * 2, 1)
  end
end

--- Removes what an absent generation left outside itself: its place here, its network and volume.
---@param id string
---@param info table
function Backend:finish(id, info)
  if not (type(info) == "table" and info.generation) then return end
  local generation = generation_of(info, "finish")
  -- Its id is never another's: what the engine has called absent just now need not be asked about again.
  if self.gone ~= generation and self:look(generation) then
    errors.raise("backend_error", ("sandbox %s is not gone yet"):format(id), { reason = "alive", sandbox_id = id })
  end
  self.leftovers:finish(info)
  self.plane:finish(info)
  if type(info.instance) == "string" then self.places:remove(info.instance) end
  self.events:forget(generation)
end

--- Waits for deaths, for at most that many seconds: the runtime's own thread sits here.
---@param seconds number
---@return table[]
function Backend:watch(seconds)
  return self.events:watch(seconds)
end

-- ---- speaking to it -------------------------------------------------------------------------------------------

--- A client of that generation.
---@param info table
---@param opts { token: integer|string, command_timeout: number?, own: boolean? }
function Backend:connect(info, opts)
  generation_of(info, "connect")
  return self.plane:connect(info, opts or {})
end

function Backend:close()
  self.plane:close()
end

return M
