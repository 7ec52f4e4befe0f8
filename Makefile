# paddock: build, test, install. `make` alone prints the targets; `make V=1 ...` shows every command.
# Modes (MODE=dev, asan, tsan) have a folder each under build/; what users run is built in mode dev.

MODE    ?= dev
PREFIX  ?= /usr/local
DESTDIR ?=
BINDIR  ?= $(PREFIX)/bin
LIBDIR  ?= $(PREFIX)/lib
INCDIR  ?= $(PREFIX)/include
LUADIR  ?= $(PREFIX)/share/lua/5.4
LUACDIR ?= $(PREFIX)/lib/lua/5.4
DATADIR ?= $(PREFIX)/share/paddock
CC      := $(if $(filter default,$(origin CC)),gcc,$(CC))
CFLAGS  ?= -O2 -g
WERROR  ?= -Werror
LUA     ?= lua5.4
T       ?=# part of a name: only the suites (files) that contain it run
JOBS    ?= 2# compilations at once
SUITES  ?= 4# suites that run at once: most of them wait most of the time
Q       := $(if $(V),,@)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules

# What is installed where: a system that only runs paddock needs none of the last two lines.
PKG_BUILD := gcc libc6-dev make pkg-config lua5.4 liblua5.4-dev lua-cjson lua-cjson-dev libcurl4-openssl-dev \
             libhiredis-dev libseccomp-dev libedit-dev libssl-dev libhttp-parser-dev libjansson-dev bubblewrap
PKG_TEST  := lua-busted curl python3 busybox-static procps redis-server openssl
# Container engines and a registry: unpacked beside the system, not installed (.ci/engines).
PKG_ENGINES := docker.io podman runc netavark conmon docker-registry iptables uidmap
PKG_DEV   := lua-check clang clang-format valgrind luarocks

B   := build/$(MODE)
OUT := $(if $(filter dev,$(MODE)),build,$(B))
VERSION := $(shell sed -n 's/^\#define PDK_VERSION "\(.*\)"/\1/p' core/paddock.h)
SOVERSION := 0

SANITIZE_asan := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
SANITIZE_tsan := -fsanitize=thread -fno-omit-frame-pointer
SANITIZE := $(SANITIZE_$(MODE))
CHECKS   := $(if $(SANITIZE),-DPDK_CHECKS)

# Cutting a text to its field's size is what snprintf is used for here.
WARN := -Wall -Wextra -Wno-format-truncation $(WERROR)
# Asked for when first used, so that `make deps` and `make help` need no pkg-config.
LUA_CFLAGS = $(eval LUA_CFLAGS := $$(shell pkg-config --cflags lua5.4))$(LUA_CFLAGS)
LUA_LIBS   = $(eval LUA_LIBS := $$(shell pkg-config --libs lua5.4))$(LUA_LIBS)

ALL_CFLAGS   = -std=c11 -D_GNU_SOURCE $(WARN) -fvisibility=hidden -fPIC -pthread -Icore \
               $(LUA_CFLAGS) $(CHECKS) $(CFLAGS) $(SANITIZE)
GUEST_CFLAGS = -std=c11 -D_GNU_SOURCE $(WARN) -Icore -Icore/guest $(CFLAGS)
LDFLAGS_ALL  = -pthread -Wl,--as-needed $(LDFLAGS) $(SANITIZE)
# Without Lua itself: the Lua module must use the Lua of the interpreter that loads it, as two copies cannot be mixed.
LIBS_CORE    = -llua5.4-cjson -lcurl -lcrypto -lhiredis -lseccomp -ledit -lm
LIBS         = $(LIBS_CORE) $(LUA_LIBS)

# The program alone: its main and the line editor, which libpaddock must not pull in.
MAIN_SRC  := core/main.c core/lineedit.c
CORE_SRC  := $(filter-out $(MAIN_SRC),$(wildcard core/*.c))
CORE_OBJ  := $(CORE_SRC:%.c=$(B)/%.o) $(B)/embedded.o
MAIN_OBJ  := $(patsubst %.c,$(B)/%.o,$(wildcard $(MAIN_SRC)))
GUEST_OBJ := $(patsubst %.c,$(B)/%.o,$(wildcard core/guest/*.c))
TEST_SRC  := $(wildcard tests/c/test_*.c)
TEST_BIN  := $(TEST_SRC:tests/c/%.c=$(B)/tests/%)
STANDIN   := $(B)/tests/aio_standin
HOST_SRC  := $(wildcard examples/*.c)
HOST_BIN  := $(HOST_SRC:examples/%.c=$(OUT)/examples/%)
EMBED     := $(sort $(shell find lua policies -name '*.lua' 2>/dev/null))

STATIC := $(OUT)/lib/libpaddock.a
SHARED := $(OUT)/lib/libpaddock.so
MODULE := $(OUT)/lua/paddock/core.so
CLI    := $(if $(MAIN_OBJ),$(OUT)/bin/paddock)
GUEST  := $(if $(GUEST_OBJ),$(OUT)/bin/paddock-guest)
# Sanitizers have to be in the program from its start: their modes bring an interpreter of their own to load the module.
RUNLUA := $(if $(SANITIZE),$(OUT)/bin/lua)

help:  ## this list
	@echo "paddock $(VERSION): make TARGET [V=1] [MODE=dev|asan|tsan] [T=part of a test file's name]"
	@awk -F'## ' '/^[a-z][a-z -]*:.*## /{sub(/:.*/,"",$$1); printf "  %-11s %s\n",$$1,$$NF}' Makefile tests/sim/sim.mk

deps:  ## install what is missing (Debian; root or sudo); this, demo and test alone use the network
	@sh .ci/deps $(PKG_BUILD) $(PKG_TEST) $(PKG_DEV)
	@sh .ci/engines build/engines $(PKG_ENGINES)
deps-build:
	@sh .ci/deps $(PKG_BUILD)
deps-test:
	@sh .ci/deps $(PKG_BUILD) $(PKG_TEST)
	@sh .ci/engines build/engines $(PKG_ENGINES)

build: $(STATIC) $(SHARED) $(MODULE) $(CLI) $(GUEST) $(RUNLUA) $(OUT)/env.sh $(OUT)/lib/pkgconfig/paddock.pc  ## command, guest, libraries, Lua module, build/env.sh

demo: deps-build  ## install and build what is missing, then run the main job on real data
	@$(MAKE) -j$(JOBS) build
	@. build/env.sh && $(LUA) examples/demo.lua

run:  ## the interactive prompt (repl) on this tree
	@$(MAKE) build
	@. build/env.sh && exec build/bin/paddock repl $(ARGS)

test:  ## install and build what is missing, then all tests (C, busted, live engines); T=part selects files
	@$(if $(SANITIZE),:,$(MAKE) deps-test)
	@$(MAKE) -j$(JOBS) build $(if $(SANITIZE),,examples) tests-c
	@MODE=$(MODE) OUT=$(OUT) B=$(B) LUA=$(LUA) SUITES=$(SUITES) V=$(V) STRICT=$(STRICT) sh tests/run $(T)

asan:  ## the same tests with AddressSanitizer and UBSan
	@$(MAKE) MODE=asan test
tsan:  ## the same tests with ThreadSanitizer
	@$(MAKE) MODE=tsan test
valgrind:  ## the C tests under valgrind memcheck
	@$(MAKE) build tests-c
	@MODE=valgrind OUT=build B=$(B) LUA=$(LUA) SUITES=$(SUITES) V=$(V) sh tests/run $(T)

# gcc's own names of warnings, and what libseccomp's macros leave out.
CLANG_LESS := -Wno-unknown-warning-option -Wno-missing-field-initializers
lint:  ## luacheck, and clang with its lock analysis
	$(Q)luacheck -q lua policies tests examples .luacheckrc
	$(Q)for f in core/*.c; do clang $(ALL_CFLAGS) $(CLANG_LESS) -fsyntax-only -Wthread-safety $$f || exit 1; done
	$(Q)for f in core/guest/*.c; do clang $(GUEST_CFLAGS) $(CLANG_LESS) -fsyntax-only $$f || exit 1; done

fmt:  ## clang-format on the C code
	$(Q)clang-format -i core/*.[ch] core/guest/*.[ch] $(wildcard tests/c/*.[ch] tests/bench/*.c examples/*.c)

soak:  ## three processes, real sandboxes, kills, stops and full disks, a minute per store; SECONDS=n STORE=file|redis SEED=n KEEP=1
	@$(MAKE) build
	@. $(OUT)/env.sh && PATH="$(CURDIR)/build/bin:$$PATH" MODE=$(MODE) LUA=$(or $(RUNLUA),$(LUA)) \
	   $(or $(RUNLUA),$(LUA)) tests/live/soak.lua $(if $(SECONDS),--seconds $(SECONDS)) $(if $(STORE),--store $(STORE)) \
	   $(if $(SEED),--seed $(SEED)) $(if $(KEEP),--keep)

bench:  ## the measurements: the core alone, then real sandboxes beside bwrap and a bare spawn; SCENARIO=name CORE=part ARGS=--json
	@$(MAKE) build $(B)/bench
	@$(B)/bench $(filter --json,$(ARGS)) $(CORE)
	@. $(OUT)/env.sh && $(OUT)/bin/paddock bench $(ARGS) $(SCENARIO)

bench-containers:  ## what paddock adds to a container engine's own times, and its calls of it; ARGS="--engine docker --plane guest --rounds 20"
	@$(MAKE) build
	@. $(OUT)/env.sh && python3 tests/support/engines.py run $(LUA) tests/bench/containers.lua $(ARGS)

soak-containers:  ## cycles of containers on both real engines, and what they leave; CYCLES=2000 ENGINE=docker|podman PLANE=guest|aio|exec
	@$(MAKE) build
	@. $(OUT)/env.sh && python3 tests/support/engines.py run $(LUA) tests/live/containers_soak.lua \
	   --cycles $(or $(CYCLES),2000) $(if $(ENGINE),--engine $(ENGINE)) $(if $(PLANE),--plane $(PLANE))

contract:  ## the rows of tests/CONTRACT.md that no test names in brackets
	@sh tests/run --contract

install: install-lua  ## PREFIX=/usr/local DESTDIR=: command, guest, libraries, header, pkg-config, Lua module, policies
	$(Q)install -d $(addprefix $(DESTDIR),$(LIBDIR)/pkgconfig $(INCDIR))
	$(Q)install -m 644 $(STATIC) $(DESTDIR)$(LIBDIR)
	$(Q)install -m 755 $(SHARED).$(VERSION) $(DESTDIR)$(LIBDIR)
	$(Q)ln -sf libpaddock.so.$(VERSION) $(DESTDIR)$(LIBDIR)/libpaddock.so.$(SOVERSION)
	$(Q)ln -sf libpaddock.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)/libpaddock.so
	$(Q)install -m 644 core/paddock.h $(DESTDIR)$(INCDIR)
	$(Q)$(call fill_pc,$(PREFIX),$(LIBDIR),$(INCDIR)) > $(DESTDIR)$(LIBDIR)/pkgconfig/paddock.pc
	$(Q)$(call copy_tree,policies,$(DESTDIR)$(DATADIR)/policies)
	$(Q)sed -e 's|@BINDIR@|$(BINDIR)|g' -e 's|@LIBDIR@|$(LIBDIR)|g' -e 's|@LUADIR@|$(LUADIR)|g' -e 's|@LUACDIR@|$(LUACDIR)|g' \
	   core/installed.sh.in > $(DESTDIR)$(DATADIR)/env.sh
	$(Q)$(if $(DESTDIR),:,ldconfig 2> /dev/null || :) # as root: programs find the library from now on
	@$(if $(filter /usr /usr/local,$(PREFIX)),:,echo "installed below $(PREFIX); in each shell:  . $(DATADIR)/env.sh")

install-lua: build
	$(Q)install -d $(addprefix $(DESTDIR),$(BINDIR) $(LUADIR) $(LUACDIR)/paddock)
	$(Q)install -m 755 $(CLI) $(GUEST) $(DESTDIR)$(BINDIR)
	$(Q)$(call copy_tree,lua,$(DESTDIR)$(LUADIR))
	$(Q)install -m 755 $(MODULE) $(DESTDIR)$(LUACDIR)/paddock/core.so

clean:  ## remove build/
	$(Q)rm -rf build

.PHONY: help deps deps-build deps-test build demo run test soak soak-containers bench-containers asan tsan valgrind bench lint fmt contract install install-lua clean tests-c \
        examples FORCE

# ---- files -------------------------------------------------------------------------------------------------

copy_tree = cd $(1) && find . -name '*.lua' -type f | while read -r f; do install -D -m 644 "$$f" "$(2)/$$f" || exit 1; done
# fill_pc(prefix, libdir, includedir). The tree's own is relative to where it lies: a tree may be moved.
fill_pc = sed -e 's|@VERSION@|$(VERSION)|' -e 's|@PREFIX@|$(1)|' -e 's|@LIBDIR@|$(2)|' -e 's|@INCDIR@|$(3)|' core/paddock.pc.in
pc_top = $${pcfiledir}/../../..$(if $(filter dev,$(MODE)),,/..)
say = $(if $(V),,@echo "  $(1) $@")

# The end of a recipe that wrote $@.PID: two makes in one tree do not meet, and an equal content keeps its old time.
keep_old = if cmp -s $@.$$$$ $@; then rm $@.$$$$; else mv $@.$$$$ $@; fi

# Rewritten only when its content changes, so that changed flags rebuild everything of this mode.
$(B)/flags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(CC) $(ALL_CFLAGS) $(LDFLAGS_ALL) $(GUEST_CFLAGS)' > $@.$$$$; $(keep_old)

$(B)/%.o: %.c $(B)/flags Makefile
	$(call say,cc   )
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) -MMD -MP -c $< -o $@

$(B)/core/guest/%.o: core/guest/%.c $(B)/flags Makefile
	$(call say,cc   )
	@mkdir -p $(@D)
	$(Q)$(CC) $(GUEST_CFLAGS) -MMD -MP -c $< -o $@

# The Lua files go into the library: the assembler reads them, a table in C names them.
$(B)/embedded.list: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' $(EMBED) > $@.$$$$; $(keep_old)

$(B)/embedded.c: $(B)/embedded.list $(EMBED) Makefile
	@{ echo '/* Generated by the Makefile. */'; echo '#include "script.h"'; n=0; \
	   for f in $(EMBED); do n=$$((n + 1)); \
	     printf '__asm__(".section .rodata\\npdk_file_%d: .incbin \\"%s\\"\\n.byte 0\\n.previous\\n");\n' $$n $$f; \
	     printf 'extern const unsigned char pdk_file_%d[];\n' $$n; \
	   done; n=0; \
	   echo 'const pdk_embedded pdk_embedded_files[] = {'; \
	   for f in $(EMBED); do n=$$((n + 1)); printf '    { "%s", pdk_file_%d, %d },\n' $$f $$n $$(wc -c < $$f); done; \
	   echo '    { NULL, NULL, 0 },'; echo '};'; } > $@.$$$$ && mv $@.$$$$ $@

$(B)/embedded.o: $(B)/embedded.c $(B)/flags
	@$(CC) $(ALL_CFLAGS) -MMD -MP -c $< -o $@

$(STATIC): $(CORE_OBJ)
	$(call say,ar   )
	@mkdir -p $(@D)
	$(Q)rm -f $@ && ar rcs $@ $^

# nodelete: an interpreter that closes unloads its modules, also while a thread of ours is on its way out.
$(SHARED): $(CORE_OBJ)
	$(call say,link )
	@mkdir -p $(@D)
	$(Q)$(CC) -shared -Wl,-soname,libpaddock.so.$(SOVERSION) -Wl,-z,defs -Wl,-z,nodelete -o $@.$(VERSION) $^ $(LDFLAGS_ALL) $(LIBS)
	$(Q)ln -sf libpaddock.so.$(VERSION) $@.$(SOVERSION) && ln -sf libpaddock.so.$(SOVERSION) $@

$(MODULE): $(CORE_OBJ)
	$(call say,link )
	@mkdir -p $(@D)
	$(Q)$(CC) -shared -Wl,-z,nodelete -o $@ $^ $(LDFLAGS_ALL) $(LIBS_CORE)

$(OUT)/bin/paddock: $(MAIN_OBJ) $(STATIC)
	$(call say,link )
	@mkdir -p $(@D)
	$(Q)$(CC) -o $@ $^ $(LDFLAGS_ALL) $(LIBS)

$(OUT)/bin/paddock-guest: $(GUEST_OBJ)
	$(call say,link )
	@mkdir -p $(@D)
	$(Q)$(CC) -static -o $@ $^ $(LDFLAGS) -lhttp_parser -ljansson

$(OUT)/bin/lua: $(B)/tests/support/lua.o
	@mkdir -p $(@D)
	$(Q)$(CC) -o $@ $^ -Wl,-E $(LDFLAGS_ALL) $(LUA_LIBS)

tests-c: $(TEST_BIN) $(STANDIN)
# In a container of its own, without this system's libraries.
$(STANDIN): tests/support/aio_standin.c $(B)/flags Makefile
	$(call say,link )
	@mkdir -p $(@D)
	$(Q)$(CC) $(GUEST_CFLAGS) -static $< -o $@
$(B)/tests/test_%: $(B)/tests/c/test_%.o $(STATIC)
	$(call say,link )
	@mkdir -p $(@D)
	$(Q)$(CC) -o $@ $^ $(LDFLAGS_ALL) $(LIBS) -lhttp_parser -ljansson

$(B)/bench: $(B)/tests/bench/core.o $(STATIC)
	$(call say,link )
	@mkdir -p $(@D)
	$(Q)$(CC) -o $@ $^ $(LDFLAGS_ALL) $(LIBS)

# As a user would: with the public header and the shared library alone.
examples: $(HOST_BIN)
$(OUT)/examples/%: examples/%.c core/paddock.h $(SHARED) $(B)/flags
	$(call say,link )
	@mkdir -p $(@D)
	$(Q)$(CC) -std=c11 $(WARN) $(CFLAGS) -Icore -pthread $< -o $@ -L$(OUT)/lib -lpaddock

$(OUT)/env.sh: core/env.sh.in Makefile
	@mkdir -p $(@D)
	@sed 's|@OUT@|$(CURDIR)/$(OUT)|' $< > $@

$(OUT)/lib/pkgconfig/paddock.pc: core/paddock.pc.in core/paddock.h Makefile
	@mkdir -p $(@D)
	@$(call fill_pc,$(pc_top),$${pcfiledir}/..,$${prefix}/core) > $@

include tests/sim/sim.mk

.SECONDARY:
-include $(CORE_OBJ:.o=.d) $(B)/tests/support/lua.d $(MAIN_OBJ:.o=.d) $(GUEST_OBJ:.o=.d) $(TEST_SRC:%.c=$(B)/%.d) $(B)/tests/bench/core.d
