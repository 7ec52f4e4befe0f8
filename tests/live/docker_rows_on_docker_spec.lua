--- tests/live/docker_rows_suite.lua on docker: a file per engine (tests.support.engines), so that each has a time limit of its own.
local world = setmetatable({ ONLY = "docker" }, { __index = _ENV })
assert(loadfile("tests/live/docker_rows_suite.lua", "t", world))()
