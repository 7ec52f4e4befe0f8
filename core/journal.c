/* journal.c -- the interface of the journal, its form in memory, and its form as a table of Lua functions. */
#include "journal.h"

#include <stdlib.h>
#include <string.h>

struct pdk_journal { /* fixed at birth */
    const pdk_journal_ops *ops;
    void *self;
};

pdk_journal *pdk_journal_new(const pdk_journal_ops *ops, void *self, pdk_error *err)
{
    pdk_journal *j = self == NULL ? NULL : calloc(1, sizeof *j);
    if (j == NULL) {
        if (self != NULL)
            ops->free(self);
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the journal");
        return NULL;
    }
    *j = (pdk_journal){ ops, self };
    return j;
}

void pdk_journal_free(pdk_journal *j)
{
    if (j == NULL)
        return;
    j->ops->free(j->self);
    free(j);
}
void pdk_journal_close(pdk_journal *j)
{
    if (j->ops->close != NULL)
        j->ops->close(j->self);
}
const char *pdk_journal_type(const pdk_journal *j)
{
    return j->ops->type;
}
int pdk_journal_record(pdk_journal *j, const char *id, const char *generation, const char *why, pdk_error *err)
{
    return j->ops->record(j->self, id, generation, why, err);
}
int pdk_journal_has(pdk_journal *j, const char *id, const char *generation, pdk_error *err)
{
    return j->ops->has(j->self, id, generation, err);
}
int pdk_journal_retire(pdk_journal *j, const char *id, const char *generation, pdk_error *err)
{
    return j->ops->retire(j->self, id, generation, err);
}
int pdk_journal_list(pdk_journal *j, pdk_pack *out, pdk_error *err)
{
    if (j->ops->list == NULL)
        return pdk_fail(err, PDK_E_UNSUPPORTED, 0, "this journal cannot list its records");
    return j->ops->list(j->self, out, err);
}
int pdk_journal_republish(pdk_journal *j, pdk_error *err)
{
    return j->ops->republish == NULL ? 0 : j->ops->republish(j->self, err);
}

/* ---- memory ---- */

typedef struct mark { /* lock */
    struct mark *next;
    char id[64];
    char *generation, *why; /* generation NULL = unknown */
} mark;

typedef struct memory {
    pdk_mutex lock;
    mark *first; /* lock; failures are rare: a list will do */
} memory;

static bool same(const char *a, const char *b)
{
    return a == NULL ? b == NULL : b != NULL && strcmp(a, b) == 0;
}

static void mark_free(mark *m)
{
    free(m->generation);
    free(m->why);
    free(m);
}

static int memory_record(void *self, const char *id, const char *generation, const char *why, pdk_error *err)
{
    memory *j = self;
    PDK_GUARD(j->lock);
    for (mark *m = j->first; m != NULL; m = m->next)
        if (strcmp(m->id, id) == 0 && same(m->generation, generation))
            return 0;
    mark *m = calloc(1, sizeof *m);
    if (m == NULL || (generation != NULL && (m->generation = strdup(generation)) == NULL) || (m->why = strdup(why)) == NULL) {
        if (m != NULL)
            mark_free(m);
        return pdk_fail(err, PDK_E_IO_ERROR, 0, "no memory to record that %s must not be used again", id);
    }
    strncpy(m->id, id, sizeof m->id - 1);
    m->next = j->first;
    j->first = m;
    return 0;
}

static int memory_has(void *self, const char *id, const char *generation, pdk_error *err)
{
    (void)err;
    memory *j = self;
    PDK_GUARD(j->lock);
    for (mark *m = j->first; m != NULL; m = m->next)
        if (strcmp(m->id, id) == 0 && (m->generation == NULL || generation == NULL || strcmp(m->generation, generation) == 0))
            return 1;
    return 0;
}

static int memory_retire(void *self, const char *id, const char *generation, pdk_error *err)
{
    (void)err;
    memory *j = self;
    PDK_GUARD(j->lock);
    for (mark **at = &j->first; *at != NULL;) {
        mark *m = *at;
        if (strcmp(m->id, id) == 0 && (generation == NULL || same(m->generation, generation))) {
            *at = m->next;
            mark_free(m);
        } else {
            at = &m->next;
        }
    }
    return 0;
}

static int memory_list(void *self, pdk_pack *out, pdk_error *err)
{
    memory *j = self;
    PDK_GUARD(j->lock);
    pdk_mark list = pdk_begin_list(out);
    for (mark *m = j->first; m != NULL; m = m->next, list.count++) {
        pdk_mark one = pdk_begin_map(out);
        pdk_kv_cstr(out, &one, "sandbox_id", m->id);
        pdk_kv_cstr(out, &one, "generation", m->generation);
        pdk_kv_cstr(out, &one, "why", m->why);
        pdk_end(out, &one);
    }
    pdk_end(out, &list);
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the journal's list") : 0;
}

static void memory_free(void *self)
{
    memory *j = self;
    for (mark *m = j->first, *next; m != NULL; m = next) {
        next = m->next;
        mark_free(m);
    }
    pdk_mutex_destroy(&j->lock);
    free(j);
}

static const pdk_journal_ops memory_ops = { .type = "memory", .record = memory_record, .has = memory_has,
                                            .retire = memory_retire, .list = memory_list, .free = memory_free };

pdk_journal *pdk_journal_memory(pdk_error *err)
{
    memory *j = calloc(1, sizeof *j);
    if (j != NULL)
        pdk_mutex_init(&j->lock);
    return pdk_journal_new(&memory_ops, j, err);
}

/* ---- a table of Lua functions: self is its iface ---- */

static int call(pdk_iface *f, const char *method, const char *id, const char *generation, const char *why, pdk_pack *out,
                pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK;
    pdk_put_cstr(&args, id);
    pdk_put_cstr(&args, generation);
    pdk_put_cstr(&args, why);
    if (args.failed)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to ask the journal");
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    if (pdk_iface_call(f, method, &args, out, pdk_limit_current(), PDK_E_IO_ERROR, &own) == 0)
        return 0;
    pdk_error_become(&own, PDK_E_IO_ERROR, NULL, "the journal failed (%s of %s)", method, id != NULL ? id : "all");
    pdk_error_move(err, &own);
    return -1;
}

static int table_record(void *self, const char *id, const char *generation, const char *why, pdk_error *err)
{
    PDK_AUTO_PACK out = PDK_NO_PACK;
    return call(self, "record", id, generation, why, &out, err);
}

static int table_has(void *self, const char *id, const char *generation, pdk_error *err)
{
    PDK_AUTO_PACK out = PDK_NO_PACK;
    if (call(self, "has", id, generation, NULL, &out, err) < 0)
        return -1;
    char tag = pdk_view_tag(pdk_view_of(&out));
    if (tag != 't' && tag != 'f')
        return pdk_fail(err, PDK_E_IO_ERROR, 0, "the journal's has must answer true or false (asked for %s)", id);
    return tag == 't';
}

static int table_retire(void *self, const char *id, const char *generation, pdk_error *err)
{
    PDK_AUTO_PACK out = PDK_NO_PACK;
    return call(self, "retire", id, generation, NULL, &out, err);
}

static int table_list(void *self, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK answer = PDK_NO_PACK;
    if (call(self, "list", NULL, NULL, NULL, &answer, err) < 0)
        return -1;
    pdk_put_view(out, pdk_view_of(&answer));
    return 0;
}

static void table_free(void *self)
{
    pdk_iface_free(self);
}

static const pdk_journal_ops table_ops = { .type = "table", .record = table_record, .has = table_has,
                                           .retire = table_retire, .list = table_list, .free = table_free };

pdk_journal *pdk_journal_table(pdk_iface *table, pdk_error *err)
{
    return pdk_journal_new(&table_ops, table, err);
}
