/* agents.c -- a C host: 20 agents, each on a thread of its own, each with a sandbox of its own, two turns each.
 *
 *     agents [CONFIG.lua [AGENTS]]
 *
 * Between its turns an agent lets go of its sandbox; in the second one it finds its file of the first again. The program
 * fails (status 1) when anything went otherwise, and names the agent.
 * Build: cc agents.c $(pkg-config --cflags --libs paddock) -pthread
 */
#include <paddock.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURNS = 2, MAX_AGENTS = 200 };

typedef struct agent {
    pdk_runtime *rt; /* shared: a runtime may be used by all threads at once */
    int number;
    char first_box[64]; /* the sandbox of turn 1 */
    bool ok;
} agent;

static bool complain(const agent *a, const char *what, pdk_error *err)
{
    fprintf(stderr, "agent %d: %s: %s: %s\n", a->number, what, pdk_error_kind_name(err->kind), err->message);
    pdk_error_clear(err);
    return false;
}

/* One turn: acquire, append a line, read all lines back, release. */
static bool turn(agent *a, int number)
{
    pdk_error err = PDK_NO_ERROR;
    char user[32], command[128], want[128];
    snprintf(user, sizeof user, "agent-%d", a->number);

    pdk_box *box = NULL;
    if (pdk_acquire(a->rt, &(pdk_request){ .user = user, .thread = "main", .timeout = 60 }, &box, &err) < 0)
        return complain(a, "acquire", &err);
    if (number == 1) snprintf(a->first_box, sizeof a->first_box, "%s", pdk_box_id(box));

    snprintf(command, sizeof command, "echo turn %d of %s >> notes.txt; cat notes.txt", number, user);
    want[0] = 0;
    for (int i = 1; i <= number; i++)
        snprintf(want + strlen(want), sizeof want - strlen(want), "turn %d of %s\n", i, user);

    pdk_result r = { 0 };
    bool ok = pdk_exec(box, &(pdk_command){ .command = command, .timeout = 30 }, &r, &err) == 0;
    if (!ok)
        complain(a, "exec", &err);
    else if (r.outcome != PDK_COMPLETED || strcmp(r.out, want) != 0 || strcmp(pdk_box_id(box), a->first_box) != 0)
        ok = false, fprintf(stderr, "agent %d: turn %d (%s, %s): its notes are \"%s\" %s\n", a->number, number,
                            pdk_box_source(box), pdk_outcome_name(r.outcome), r.out, r.err);
    pdk_result_free(&r);

    if (pdk_release(box, &err) < 0) ok = complain(a, "release", &err);
    pdk_box_free(box);
    return ok;
}

static void *work(void *arg)
{
    agent *a = arg;
    a->ok = true;
    for (int i = 1; i <= TURNS && a->ok; i++) a->ok = turn(a, i);
    return NULL;
}

int main(int argc, char **argv)
{
    int n = argc > 2 ? atoi(argv[2]) : 20;
    if (n < 1 || n > MAX_AGENTS) {
        fprintf(stderr, "usage: agents [CONFIG.lua [AGENTS, 1 to %d]]\n", MAX_AGENTS);
        return 64;
    }
    pdk_error err = PDK_NO_ERROR;
    /* `replicas` is how many sandboxes are kept; above it, warm ones make room for new ones. */
    pdk_runtime *rt = argc > 1 ? pdk_open(argv[1], &err)
                               : pdk_open_text("return { backend = 'process', replicas = 200 }", "agents", &err);
    if (rt == NULL) {
        fprintf(stderr, "agents: %s: %s\n", pdk_error_kind_name(err.kind), err.message);
        pdk_error_clear(&err);
        return 1;
    }

    static agent agents[MAX_AGENTS];
    static pthread_t threads[MAX_AGENTS];
    int started = 0, good = 0;
    for (; started < n; started++) {
        agents[started] = (agent){ .rt = rt, .number = started + 1 };
        if (pthread_create(&threads[started], NULL, work, &agents[started]) != 0) break;
    }
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
        good += agents[i].ok;
    }

    bool down = pdk_shutdown(rt, &err) == 0;
    if (!down) {
        fprintf(stderr, "agents: shutdown: %s\n", err.message);
        pdk_error_clear(&err);
    }
    pdk_free(rt);
    printf("%d of %d agents found their notes again\n", good, n);
    return good == n && down ? 0 : 1;
}
