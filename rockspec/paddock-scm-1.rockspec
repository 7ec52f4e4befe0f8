rockspec_format = "3.0"
package = "paddock"
version = "scm-1"
-- `luarocks make rockspec/paddock-scm-1.rockspec` builds the tree it is called in; nothing is downloaded.
source = { url = "git+file://." }
description = {
  summary = "Runtime for the life cycle of agent sandboxes",
  detailed = [[
Hands out agent sandboxes, keeps them warm for their identity, and takes them down behind a fence. Policies in Lua, the
core in C. The Debian packages it needs are what `make deps` installs.]],
  license = "MIT",
}
supported_platforms = { "linux" }
dependencies = { "lua >= 5.4, < 5.5" }
build = {
  type = "make",
  build_target = "build",
  install_target = "install-lua",
  -- A compiler that warns about more than ours does must not keep anybody from installing.
  build_variables = { WERROR = "", CC = "$(CC)" },
  install_variables = {
    WERROR = "", CC = "$(CC)", PREFIX = "$(PREFIX)", BINDIR = "$(BINDIR)", LUADIR = "$(LUADIR)", LUACDIR = "$(LIBDIR)",
  },
}
