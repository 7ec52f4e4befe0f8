# Seeded schedules: the core on fibers (see tests/sim/sim.h). Its objects are built for this alone: fixed addresses, checks on,
# liblua linked in.
SIM_B      := build/sim
SIM_OBJ     = $(patsubst %.c,$(SIM_B)/%.o,$(filter-out core/sync.c,$(CORE_SRC)) $(wildcard tests/sim/*.c))
SIM_CFLAGS  = -std=c11 -D_GNU_SOURCE $(WARN) -fno-pie -pthread -Icore -Itests/sim $(LUA_CFLAGS) -DPDK_SIM -DPDK_CHECKS $(SIM_OPT)
SIM_OPT    ?= -O2 -g
SIM_LIBS    = -Wl,-Bstatic -llua5.4-cjson -llua5.4 -Wl,-Bdynamic -lcurl -lcrypto -lhiredis -lseccomp -ledit -lm
SIM_WRAP   := getpid madvise time clock open openat mkdir mkdirat unlinkat renameat fstat fstatat fchmod fsync pread pwrite close \
              fdopendir readdir closedir EVP_Digest pdk_lock_range pdk_log_write pdk_fence_teardown pdk_acquire_begin pdk_acquire_step pdk_acquire_end __assert_fail SHA256 localtime_r
SIM_LINK    = $(CC) -no-pie -pthread -o $@ $(1) $(SIM_WRAP:%=-Wl,--wrap=%) $(SIM_LIBS)
SIM        := $(SIM_B)/sim
N          ?= 100000

sim: $(SIM)  ## 100,000 seeded schedules of threads, crashes, faults and cancellations; SEED=n replays one step by step; N=count
	$(Q)$(SIM) $(if $(SEED),-s $(SEED),-n $(N) -j $(JOBS))

sim-mutants: $(SIM)  ## one fault in the core at a time (tests/sim/mutants): does a schedule find it? T=part of a name
	$(Q)CC='$(CC)' CFLAGS='$(SIM_CFLAGS)' LINK='$(SIM_WRAP:%=-Wl,--wrap=%) $(SIM_LIBS)' SIM_B=$(SIM_B) EMBEDDED=$(B)/embedded.c JOBS=$(JOBS) \
	    BUDGET=$(N) $(LUA) tests/sim/mutate.lua $(if $(T),'$(T)')

$(SIM): $(SIM_OBJ) $(SIM_B)/embedded.o
	$(call say,link )
	$(Q)$(call SIM_LINK,$^)

$(SIM_B)/%.o: %.c tests/sim/sim.mk Makefile
	$(call say,cc   )
	@mkdir -p $(@D)
	$(Q)$(CC) $(SIM_CFLAGS) -MMD -MP -c $< -o $@

$(SIM_B)/embedded.o: $(B)/embedded.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(SIM_CFLAGS) -c $< -o $@

# The tests take a share of them; a sanitizer has nothing to see there.
tests-c: $(if $(SANITIZE),,$(SIM))

.PHONY: sim sim-mutants
-include $(SIM_OBJ:.o=.d)
