--- Calls of Docker that go wrong, one by one: see containers_faults.lua.
for _, engine in ipairs(require("tests.support.engines").all()) do
  if engine.name == "docker" then require("tests.live.containers_faults")(engine) end
end
