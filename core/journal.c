/* journal.c -- see journal.h. `lock` guards the memory form's list. */
#include "journal.h"

#include <stdlib.h>
#include <string.h>

typedef struct mark { /* lock */
    struct mark *next;
    char id[64];
    char *generation; /* NULL = unknown */
} mark;

struct pdk_journal {
    pdk_iface *table; /* fixed at birth; NULL = memory */
    pdk_mutex lock;
    mark *first;      /* lock; failures are rare: a list will do */
};

static pdk_journal *journal_new(pdk_error *err)
{
    pdk_journal *j = calloc(1, sizeof *j);
    if (j == NULL)
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the journal");
    else
        pdk_mutex_init(&j->lock);
    return j;
}

pdk_journal *pdk_journal_memory(pdk_error *err)
{
    return journal_new(err);
}

pdk_journal *pdk_journal_table(pdk_iface *table, pdk_error *err)
{
    pdk_journal *j = journal_new(err);
    if (j == NULL)
        pdk_iface_free(table);
    else
        j->table = table;
    return j;
}

static void mark_free(mark *m)
{
    free(m->generation);
    free(m);
}

void pdk_journal_free(pdk_journal *j)
{
    if (j == NULL)
        return;
    for (mark *m = j->first, *next; m != NULL; m = next) {
        next = m->next;
        mark_free(m);
    }
    pdk_iface_free(j->table);
    pdk_mutex_destroy(&j->lock);
    free(j);
}

static bool same(const char *a, const char *b)
{
    return a == NULL ? b == NULL : b != NULL && strcmp(a, b) == 0;
}

static int table_call(pdk_journal *j, const char *method, const char *id, const char *generation, const char *why,
                      pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK;
    pdk_put_cstr(&args, id);
    pdk_put_cstr(&args, generation);
    pdk_put_cstr(&args, why);
    if (args.failed)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to ask the journal");
    if (pdk_iface_call(j->table, method, &args, out, pdk_limit_current(), PDK_E_IO_ERROR, err) < 0)
        return pdk_error_become(err, PDK_E_IO_ERROR, NULL, "the journal failed (%s of %s)", method, id);
    return 0;
}

int pdk_journal_record(pdk_journal *j, const char *id, const char *generation, const char *why, pdk_error *err)
{
    if (j->table != NULL) {
        PDK_AUTO_PACK out = PDK_NO_PACK;
        return table_call(j, "record", id, generation, why, &out, err);
    }
    PDK_GUARD(j->lock);
    for (mark *m = j->first; m != NULL; m = m->next)
        if (strcmp(m->id, id) == 0 && same(m->generation, generation))
            return 0;
    mark *m = calloc(1, sizeof *m);
    if (m == NULL || (generation != NULL && (m->generation = strdup(generation)) == NULL)) {
        free(m);
        return pdk_fail(err, PDK_E_IO_ERROR, 0, "no memory to record that %s must not be used again", id);
    }
    strncpy(m->id, id, sizeof m->id - 1);
    m->next = j->first;
    j->first = m;
    return 0;
}

int pdk_journal_has(pdk_journal *j, const char *id, const char *generation, pdk_error *err)
{
    if (j->table != NULL) {
        PDK_AUTO_PACK out = PDK_NO_PACK;
        if (table_call(j, "has", id, generation, NULL, &out, err) < 0)
            return -1;
        char tag = pdk_view_tag(pdk_view_of(&out));
        if (tag != 't' && tag != 'f')
            return pdk_fail(err, PDK_E_IO_ERROR, 0, "the journal's has must answer true or false (asked for %s)", id);
        return tag == 't';
    }
    PDK_GUARD(j->lock);
    for (mark *m = j->first; m != NULL; m = m->next)
        if (strcmp(m->id, id) == 0 &&
            (m->generation == NULL || generation == NULL || strcmp(m->generation, generation) == 0))
            return 1;
    return 0;
}

int pdk_journal_retire(pdk_journal *j, const char *id, const char *generation, pdk_error *err)
{
    if (j->table != NULL) {
        PDK_AUTO_PACK out = PDK_NO_PACK;
        return table_call(j, "retire", id, generation, NULL, &out, err);
    }
    PDK_GUARD(j->lock);
    for (mark **at = &j->first; *at != NULL;) {
        mark *m = *at;
        /* who was proven absent with an unknown generation was all that there was under the id */
        if (strcmp(m->id, id) == 0 && (generation == NULL || same(m->generation, generation))) {
            *at = m->next;
            mark_free(m);
        } else {
            at = &m->next;
        }
    }
    return 0;
}
