/* open.h -- from what a host gave to what pdk_runtime_open takes: shared by the Lua binding and the C API. */
#ifndef PDK_OPEN_H
#define PDK_OPEN_H

#include "runtime.h"

/* Has lua/paddock/config.lua check the plain options and fill in the defaults; `out` gets the packed map. */
int pdk_options_normalize(pdk_script *s, pdk_view plain, pdk_pack *out, pdk_error *err);

/* What a configuration text comes to. The tables of functions live in the universe. */
typedef struct pdk_setup { /* one owner; start as zero, end with pdk_setup_clear */
    pdk_pack options;
    pdk_iface *backend, *ownership, *journal;
    bool has_log;
    int log; /* a reference to the log function, when has_log */
} pdk_setup;
/* `text` NULL: from the file `name`; both NULL: all defaults. */
int pdk_setup_read(pdk_script *s, const char *text, const char *name, pdk_setup *out, pdk_error *err);
void pdk_setup_clear(pdk_script *s, pdk_setup *c);

/* What option `use` of a configuration file names, which is not opened: empty for paddock itself. Makes a universe for it. */
int pdk_config_use(const char *config_file, char *out, size_t size, pdk_error *err);

/* A JSON object as packed requirements. */
int pdk_requirements_from_json(pdk_script *s, const char *json, pdk_pack *out, pdk_error *err);

#endif
