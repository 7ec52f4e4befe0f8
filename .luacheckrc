std = "lua54"
max_line_length = 140
-- `local _box <close> = ...` is read by leaving its scope.
ignore = { "211/_.*", "212/_.*", "212/self" }
files["tests"] = { std = "+busted", read_globals = { "ONLY" } }
files["examples/**/policies"] = { read_globals = { "policy" } }
files["policies"] = { read_globals = { "policy" } }
files[".luacheckrc"] = { std = "+luacheckrc" }
