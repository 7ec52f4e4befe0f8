--- tests/live/docker_rows_suite.lua on podman: a file per engine (tests.support.engines), so that each has a time limit of its own.
local world = setmetatable({ ONLY = "podman" }, { __index = _ENV })
assert(loadfile("tests/live/docker_rows_suite.lua", "t", world))()
