/* Mounts: what the core checks, makes and refuses before a backend sees a mount. The file system is a real one. */
#include "core.h"
#include "policy_world.h"

#include <fcntl.h>
#include <sys/stat.h>

/* ---- a place ---- */

static char place[256]; /* a fresh folder of the running test; "root" below it is the mount root */

static const char *at(const char *name)
{
    static char paths[8][600];
    static int turn;
    char *p = paths[turn = (turn + 1) % 8];
    snprintf(p, sizeof paths[0], "%s/%s", place, name);
    return p;
}

static void begin(void)
{
    static int n;
    snprintf(place, sizeof place, "%s/%d", test_tmpdir(), ++n);
    CHECK_INT(mkdir(place, 0755), 0);
    CHECK_INT(mkdir(at("root"), 0755), 0);
}

static void folder(const char *name)
{
    CHECK_INT(mkdir(at(name), 0755), 0);
}

static void file(const char *name)
{
    int fd = open(at(name), O_CREAT | O_WRONLY | O_EXCL, 0644);
    CHECK(fd >= 0);
    close(fd);
}

static void link_to(const char *target, const char *name)
{
    CHECK_INT(symlink(target, at(name)), 0);
}

static int mode_of(const char *name)
{
    struct stat st;
    return lstat(at(name), &st) < 0 ? -1 : (int)(st.st_mode & 07777);
}

/* What pdk_mounts_prepare answers to mounts as a policy gives them: Lua text in which "@" stands for the place. */
typedef struct outcome {
    int rc;
    pdk_pack out;
    pdk_error err;
} outcome;

static void fill(char *to, size_t room, const char *text)
{
    size_t n = 0;
    for (; *text != '\0' && n + 1 < room; text++)
        n += *text == '@' ? (size_t)snprintf(to + n, room - n, "%s", place) : (to[n] = *text, 1u);
    to[n < room ? n : room - 1] = '\0';
}

static outcome prepare(const char *composed, const char *extra, const char *roots)
{
    outcome o = { .rc = -1, .out = PDK_NO_PACK, .err = PDK_NO_ERROR };
    PDK_AUTO_PACK c = PDK_NO_PACK, e = PDK_NO_PACK, r = PDK_NO_PACK;
    char text[4000];
    fill(text, sizeof text, composed);
    pack_lua(&c, text);
    fill(text, sizeof text, extra);
    pack_lua(&e, text);
    fill(text, sizeof text, roots);
    pack_lua(&r, text);
    o.rc = pdk_mounts_prepare(pdk_view_of(&c), pdk_view_of(&e), pdk_view_of(&r), at("state"), NULL, &o.out, &o.err);
    return o;
}

static void end(outcome *o)
{
    pdk_pack_free(&o->out);
    pdk_error_clear(&o->err);
}

/* Mounts of a policy under the one root @/root: the kind of the error (PDK_OK = none), and a part of its message. */
static void expect(const char *composed, pdk_error_kind kind, const char *part)
{
    outcome o = prepare(composed, "{}", "{ '@/root' }");
    CHECK_INT(o.rc, kind == PDK_OK ? 0 : -1);
    CHECK_KIND(o.err, kind);
    if (part != NULL)
        CHECK_HAS(o.err.message, part);
    end(&o);
}

static const char *target_of(const outcome *o, size_t index, bool *read_only)
{
    size_t cursor = 0;
    pdk_view k, v;
    for (size_t i = 0; pdk_view_next(pdk_view_of(&o->out), &cursor, &k, &v); i++)
        if (i == index) {
            *read_only = pdk_view_bool(pdk_view_get(v, "read_only"), false);
            return pdk_view_str(pdk_view_get(v, "target"), NULL);
        }
    return NULL;
}

/* ---- create ---- */

TEST("create makes the source with exactly its mode, whatever the umask, and again changes nothing [D2]")
{
    begin();
    const mode_t masks[] = { 0, 022, 077 };
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        char mounts[300], made[40];
        snprintf(made, sizeof made, "root/m%zu", i);
        snprintf(mounts, sizeof mounts, "{ { source = '@/%s', target = '/a', create = '0777' } }", made);
        mode_t old = umask(masks[i]);
        expect(mounts, PDK_OK, NULL);
        expect(mounts, PDK_OK, NULL);
        umask(old);
        CHECK_INT(mode_of(made), 0777);
    }
    expect("{ { source = '@/root/a/b/c', target = '/a', create = '0711' } }", PDK_OK, NULL);
    CHECK_INT(mode_of("root/a/b/c"), 0711);
    CHECK_INT(chmod(at("root/m0"), 0700), 0);
    expect("{ { source = '@/root/m0', target = '/a', create = '0777' } }", PDK_OK, NULL);
    CHECK_INT(mode_of("root/m0"), 0777);
    CHECK_INT(mode_of("root"), 0755);
}

TEST("create does not follow a link out of the root, nor make what a link leads to nowhere")
{
    begin();
    folder("out");
    folder("root/in");
    link_to("../out", "root/up");
    link_to(at("out"), "root/abs");
    link_to("in", "root/fine");
    link_to("missing", "root/nowhere");
    expect("{ { source = '@/root/up/x', target = '/a', create = '0777' } }", PDK_E_POLICY_ERROR, "link");
    expect("{ { source = '@/root/abs/x', target = '/a', create = '0777' } }", PDK_E_POLICY_ERROR, "link");
    expect("{ { source = '@/root/nowhere', target = '/a', create = '0777' } }", PDK_E_POLICY_ERROR, "link on the way");
    expect("{ { source = '@/root/nowhere/x', target = '/a', create = '0777' } }", PDK_E_POLICY_ERROR, "link on the way");
    expect("{ { source = '@/root/fine/x', target = '/a', create = '0777' } }", PDK_OK, NULL);
    CHECK_INT(mode_of("root/in/x"), 0777);
    CHECK_INT(mode_of("out/x"), -1);
    CHECK_INT(mode_of("root/missing"), -1);
}

TEST("a mount that is refused leaves nothing of the others half-made")
{
    static const char *const bad[] = {
        "{ source = '@/root/none', target = '/z' }",                           "{ source = '@/root/f', target = '/z', create = '0777' }",
        "{ source = '@/root/f/x', target = '/z', create = '0777' }",            "{ source = '@/root/nowhere', target = '/z', create = '0777' }",
        "{ source = '@/root/up', target = '/z' }",                              "{ source = '@/elsewhere', target = '/z' }",
        "{ source = '@/root/../x', target = '/z', create = '0777' }",           "{ source = '@/root/tree', target = '/z', owner_only = true }",
        "{ source = '@/root/f', target = '/z', owner_only = true }",
    };
    begin();
    file("root/f");
    folder("root/tree");
    link_to("../f", "root/tree/link");
    link_to("missing", "root/nowhere");
    link_to("..", "root/up");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char mounts[600];
        snprintf(mounts, sizeof mounts,
                 "{ { source = '@/root/n/e/w', target = '/a', create = '0777' }, "
                 "{ source = '@/root', target = '/r', owner_only = false }, %s }",
                 bad[i]);
        expect(mounts, PDK_E_POLICY_ERROR, "mounts: source");
        CHECK_INT(mode_of("root/n"), -1);
        CHECK_INT(mode_of("root/f"), 0644);
        CHECK_INT(mode_of("root/tree"), 0755);
    }
}

TEST("what was made is taken back when a later mount cannot be made, but not what was there")
{
    begin();
    folder("root/kept");
    const char *mounts = "{ { source = '@/root/kept/a/b', target = '/a', create = '0777' }, "
                         "{ source = '@/root/c', target = '/c', create = '0777' }, "
                         "{ source = '/proc/self/fd/x', target = '/d', create = '0777' } }"; /* nothing can be made there */
    outcome o = prepare(mounts, "{}", "{ '@/root', '/proc' }");
    CHECK_INT(o.rc, -1);
    CHECK_KIND(o.err, PDK_E_IO_ERROR);
    end(&o);
    CHECK_INT(mode_of("root/kept"), 0755);
    CHECK_INT(mode_of("root/kept/a"), -1);
    CHECK_INT(mode_of("root/c"), -1);
}

/* ---- sources ---- */

TEST("a source outside of mount_roots is refused, and the longest root that holds it counts")
{
    begin();
    folder("root/a");
    folder("rooted");
    expect("{ { source = '@/root/a', target = '/a' } }", PDK_OK, NULL);
    expect("{ { source = '@/root', target = '/a' } }", PDK_OK, NULL);
    expect("{ { source = '@/rooted', target = '/a' } }", PDK_E_POLICY_ERROR, "outside the option mount_roots");
    expect("{ { source = '@', target = '/a' } }", PDK_E_POLICY_ERROR, "outside the option mount_roots");
    expect("{ { source = '/', target = '/a' } }", PDK_E_POLICY_ERROR, "outside the option mount_roots");
    outcome o = prepare("{ { source = '@/root/a', target = '/a' } }", "{}", "{}");
    CHECK_KIND(o.err, PDK_E_POLICY_ERROR);
    end(&o);
    o = prepare("{ { source = '@/root/a', target = '/a' } }", "{}", "{ '/' }");
    CHECK_INT(o.rc, 0);
    end(&o);
    folder("root/b");
    link_to("../b", "root/a/link"); /* leads out of the inner root, not of the outer one: the inner one counts */
    o = prepare("{ { source = '@/root/a/link', target = '/a' } }", "{}", "{ '@/root', '@/root/a/' }");
    CHECK_KIND(o.err, PDK_E_POLICY_ERROR);
    end(&o);
    o = prepare("{ { source = '@/root/a/link', target = '/a' } }", "{}", "{ '@/root' }");
    CHECK_INT(o.rc, 0);
    end(&o);
}

TEST("dot-dot, empty parts and relative sources are refused")
{
    static const char *const bad[] = { "@/root/../root", "@/root/..", "@/root/./a", "@/root//a", "root", "", "@/root/a/", "@/root/." };
    begin();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char mounts[300];
        snprintf(mounts, sizeof mounts, "{ { source = '%s', target = '/a', create = '0777' } }", bad[i]);
        expect(mounts, PDK_E_POLICY_ERROR, "must be an absolute path");
    }
    CHECK_INT(mode_of("root/a"), -1);
}

TEST("a link that leads out of the root is refused as first, middle and last part; one that stays inside is not [B012]")
{
    begin();
    folder("out");
    folder("out/deep");
    folder("root/in");
    folder("root/in/deep");
    link_to("../out", "root/first");
    link_to("../../out", "root/in/middle");
    link_to("/etc", "root/in/last");
    link_to("/proc/self/root", "root/magic");
    link_to("in/deep", "root/inside");
    static const char *const bad[] = { "first", "first/deep", "in/middle/deep", "in/last", "magic/etc" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char mounts[300];
        snprintf(mounts, sizeof mounts, "{ { source = '@/root/%s', target = '/a', if_exists = true } }", bad[i]);
        expect(mounts, PDK_E_POLICY_ERROR, "leads out of its mount root");
    }
    expect("{ { source = '@/root/inside', target = '/a' } }", PDK_OK, NULL);
}

TEST("if_exists leaves a mount out, and with it its claim on the target")
{
    begin();
    folder("root/there");
    outcome o = prepare("{ { source = '@/root/none', target = '/a', if_exists = true }, "
                        "{ source = '@/root/none', target = '/b', if_exists = true }, { source = '@/root/there', target = '/b' } }",
                        "{}", "{ '@/root' }");
    bool read_only = false;
    CHECK_INT(o.rc, 0);
    CHECK_INT(pdk_view_count(pdk_view_of(&o.out)), 1);
    CHECK_STR(target_of(&o, 0, &read_only), "/b");
    CHECK(read_only);
    end(&o);
    o = prepare("{ { source = '@/gone/x', target = '/a', if_exists = true } }", "{}", "{ '@/gone' }");
    CHECK_INT(o.rc, 0);
    CHECK_INT(pdk_view_count(pdk_view_of(&o.out)), 0);
    end(&o);
    expect("{ { source = '@/root/none', target = '/a' } }", PDK_E_POLICY_ERROR, "does not exist");
}

TEST("without one root that can be opened a mount is an io_error that names it")
{
    begin();
    outcome o = prepare("{ { source = '@/gone/x', target = '/a', create = '0777' } }", "{}", "{ '@/gone' }");
    CHECK_KIND(o.err, PDK_E_IO_ERROR);
    CHECK_HAS(o.err.message, "/gone");
    end(&o);
    CHECK_INT(mode_of("gone"), -1);
}

/* ---- owner_only ---- */

TEST("owner_only makes the tree 0700 and 0600 [D7]")
{
    begin();
    folder("root/t");
    folder("root/t/d");
    file("root/t/f");
    file("root/t/d/g");
    CHECK_INT(chmod(at("root/t/f"), 0), 0);
    CHECK_INT(chmod(at("root/t/d/g"), 04755), 0);
    CHECK_INT(chmod(at("root/t/d"), 0777), 0);
    expect("{ { source = '@/root/t', target = '/a', owner_only = true } }", PDK_OK, NULL);
    CHECK_INT(mode_of("root/t"), 0700);
    CHECK_INT(mode_of("root/t/d"), 0700);
    CHECK_INT(mode_of("root/t/f"), 0600);
    CHECK_INT(mode_of("root/t/d/g"), 0600);
    CHECK_INT(mode_of("root"), 0755);
    expect("{ { source = '@/root/new', target = '/b', owner_only = true, create = '0755' } }", PDK_OK, NULL);
    CHECK_INT(mode_of("root/new"), 0700);
}

TEST("a symbolic link anywhere in an owner_only tree is refused before any mode is changed [D7]")
{
    begin();
    file("outside");
    folder("root/t");
    folder("root/t/a");
    folder("root/t/a/b");
    file("root/t/a/f");
    for (int where = 0; where < 3; where++) {
        static const char *const links[] = { "root/t/zz", "root/t/a/zz", "root/t/a/b/zz" };
        link_to(at("outside"), links[where]);
        expect("{ { source = '@/root/t', target = '/a', owner_only = true } }", PDK_E_POLICY_ERROR, "zz, which is a symbolic link");
        CHECK_INT(mode_of("root/t"), 0755);
        CHECK_INT(mode_of("root/t/a"), 0755);
        CHECK_INT(mode_of("root/t/a/f"), 0644);
        CHECK_INT(mode_of("outside"), 0644);
        CHECK_INT(unlink(at(links[where])), 0);
    }
    CHECK_INT(mkfifo(at("root/t/pipe"), 0644), 0);
    expect("{ { source = '@/root/t', target = '/a', owner_only = true } }", PDK_E_POLICY_ERROR, "pipe, which is no plain file");
    CHECK_INT(mode_of("root/t"), 0755);
    CHECK_INT(unlink(at("root/t/pipe")), 0);
    link_to("t", "root/link"); /* the source itself is one: what it leads to is inside, and is what counts */
    expect("{ { source = '@/root/link', target = '/a', owner_only = true } }", PDK_OK, NULL);
    CHECK_INT(mode_of("root/t"), 0700);
}

TEST("a tree that is too deep for owner_only is refused, and no descriptor is left")
{
    begin();
    char path[1000];
    snprintf(path, sizeof path, "root/t");
    folder(path);
    for (int i = 0; i < 66; i++) {
        strcat(path, "/d");
        folder(path);
    }
    int fds = test_fds();
    expect("{ { source = '@/root/t', target = '/a', owner_only = true } }", PDK_E_POLICY_ERROR, "nested too deeply");
    CHECK_INT(mode_of("root/t"), 0755);
    CHECK_INT(test_fds(), fds);
}

/* ---- the option mounts ---- */

TEST("the operator's own mounts need no root, come last, and yield to the policy's target [D9]")
{
    begin();
    folder("root/a");
    folder("own");
    bool read_only = false;
    outcome o = prepare("{ { source = '@/root/a', target = '/a', read_only = false } }",
                        "{ { source = '@/own', target = '/own' }, { source = '@/own', target = '/a' }, "
                        "{ source = '@/elsewhere', target = '/own', read_only = false } }",
                        "{ '@/root' }");
    CHECK_INT(o.rc, 0);
    CHECK_INT(pdk_view_count(pdk_view_of(&o.out)), 2);
    CHECK_STR(target_of(&o, 0, &read_only), "/a");
    CHECK(!read_only);
    CHECK_STR(target_of(&o, 1, &read_only), "/own");
    CHECK(read_only);
    end(&o);
}

TEST("their fields have their effect too: create, if_exists, owner_only [B172]")
{
    begin();
    folder("real");
    folder("tree");
    link_to("real", "link");
    outcome o = prepare("{}",
                        "{ { source = '@/link/new', target = '/a', create = '0777' }, { source = '@/none', target = '/b', if_exists = true }, "
                        "{ source = '@/tree', target = '/c', owner_only = true } }",
                        "{}");
    CHECK_INT(o.rc, 0);
    CHECK_KIND(o.err, PDK_OK);
    CHECK_INT(pdk_view_count(pdk_view_of(&o.out)), 2);
    CHECK_INT(mode_of("real/new"), 0777);
    CHECK_INT(mode_of("tree"), 0700);
    end(&o);
    link_to("nowhere", "tree/link");
    o = prepare("{}", "{ { source = '@/new', target = '/x', create = '0777' }, { source = '@/tree', target = '/c', owner_only = true } }", "{}");
    CHECK_KIND(o.err, PDK_E_INVALID_ARGUMENT);
    CHECK_HAS(o.err.message, "option mounts");
    CHECK_INT(mode_of("new"), -1);
    end(&o);
}

TEST("a source in Windows form is the engine's: it is passed on, and nothing is made for it [D13]")
{
    begin();
    bool read_only;
    outcome o = prepare("{}", "{ { source = 'C:\\\\data\\\\x', target = '/a' }, { source = '\\\\\\\\nas\\\\share', target = '/b' } }", "{}");
    CHECK_INT(o.rc, 0);
    CHECK_STR(target_of(&o, 1, &read_only), "/b");
    end(&o);
    o = prepare("{}", "{ { source = 'C:\\\\data', target = '/a', create = '0777' } }", "{}");
    CHECK_KIND(o.err, PDK_E_INVALID_ARGUMENT);
    end(&o);
}

TEST("many mounts, made and refused again and again, leave no descriptor")
{
    begin();
    folder("root/t");
    int fds = test_fds();
    for (int i = 0; i < 50; i++) {
        expect("{ { source = '@/root/a/b', target = '/a', create = '0777' }, { source = '@/root/t', target = '/t', owner_only = true } }",
               PDK_OK, NULL);
        expect("{ { source = '@/root/q/b', target = '/a', create = '0777' }, { source = '@/root/none', target = '/t' } }",
               PDK_E_POLICY_ERROR, NULL);
    }
    CHECK_INT(test_fds(), fds);
}

int main(int argc, char **argv)
{
    if (test_valgrind()) {
        puts("skip  mounts: valgrind has no openat2");
        puts("0 passed, 0 failed, 1 skipped");
        return 0;
    }
    return test_main(argc, argv);
}
/* ---- here, optional, exclude ---- */

TEST("here: the folders are made where this machine sees them, and the engine gets its own path [D13]")
{
    begin();
    outcome o = prepare("{ { source = '/engine/a', here = '@/root/a', target = '/a', create = '0777' },"
                        "  { source = 'D:\\\\x\\\\b', here = '@/root/b', target = '/b', create = '0700', owner_only = true } }",
                        "{}", "{ '@/root', '/engine', 'D:/y', 'D:\\\\x' }");
    CHECK_INT(o.rc, 0);
    CHECK_INT(mode_of("root/a"), 0777);
    CHECK_INT(mode_of("root/b"), 0700);
    pdk_view k, v;
    size_t cursor = 0;
    CHECK(pdk_view_next(pdk_view_of(&o.out), &cursor, &k, &v));
    CHECK_STR(pdk_info_str(v, "source"), "/engine/a");
    CHECK(pdk_info_str(v, "here") == NULL);
    end(&o);
}

TEST("here: what the engine would see must lie below mount_roots too, and no link may lead it out [B012]")
{
    begin();
    static const char *const sources[] = { "/etc", "/enginex/a", "D:\\\\xy", "\\\\\\\\nas\\\\x", "E:/x", "@/root/../a", "/" };
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        char text[300];
        snprintf(text, sizeof text, "{ { source = '%s', here = '@/root/a', target = '/a', create = '0777' } }", sources[i]);
        outcome o = prepare(text, "{}", "{ '@/root', '/engine', 'D:\\\\x' }");
        CHECK_INT(o.rc, -1);
        CHECK_KIND(o.err, PDK_E_POLICY_ERROR);
        end(&o);
    }
    link_to("/etc", "root/out");
    expect("{ { source = '@/root/out/x', here = '@/root/a', target = '/a', create = '0777' } }", PDK_E_POLICY_ERROR, "leads out");
    CHECK_INT(mode_of("root/a"), -1);
}

TEST("optional: what fails leaves its whole name out, whichever of them fails, and nothing of it is left behind [D14]")
{
    begin();
    file("root/plain");
    static const char *const orders[] = {
        "{ %s, { source = '@/root/b', target = '/b', create = '0777', optional = 'g' }, %s }",
        "{ { source = '@/root/b', target = '/b', create = '0777', optional = 'g' }, %s, %s }",
    };
    for (size_t i = 0; i < 2; i++) {
        char text[600];
        snprintf(text, sizeof text, orders[i], "{ source = '@/root/plain/x', target = '/bad', create = '0777', optional = 'g' }",
                 "{ source = '@/root/c', target = '/c', create = '0777' }, { source = '@/root/d', target = '/d', if_exists = true, "
                 "optional = 'h' }");
        outcome o = prepare(text, "{}", "{ '@/root' }");
        bool read_only;
        CHECK_INT(o.rc, 0);
        CHECK_INT((int)pdk_view_count(pdk_view_of(&o.out)), 1);
        CHECK_STR(target_of(&o, 0, &read_only), "/c");
        CHECK_INT(mode_of("root/b"), -1);
        end(&o);
    }
    /* What is outside of every root is the policy's fault, and not one folder's. */
    expect("{ { source = '/etc', target = '/e', optional = 'g' } }", PDK_E_POLICY_ERROR, "mount_roots");
}

TEST("no source may show the state directory, or lie in it, also through a link or by the option [K19]")
{
    begin();
    folder("state");
    folder("state/leases");
    folder("root/mine");
    link_to(at("state"), "root/other");
    static const char *const lists[] = {
        "{ { source = '@', target = '/a' } }", "{ { source = '@/state', target = '/a' } }",
        "{ { source = '@/state/leases', target = '/a', read_only = true } }", "{ { source = '@/root/other', target = '/a' } }",
        "{ { source = '/', target = '/a' } }", "{ { source = '@/root/other/leases', target = '/a' } }",
        "{ { source = '@/state/new', target = '/a', create = '0777' } }",
    };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        outcome o = prepare(lists[i], "{}", "{ '/' }");
        CHECK_INT(o.rc, -1);
        CHECK_KIND(o.err, PDK_E_POLICY_ERROR);
        CHECK_HAS(o.err.message, "state_dir");
        end(&o);
        o = prepare("{}", lists[i], "{}");
        CHECK_INT(o.rc, -1);
        CHECK_KIND(o.err, PDK_E_INVALID_ARGUMENT);
        end(&o);
    }
    CHECK_INT(mode_of("state/new"), -1);
    outcome o = prepare("{ { source = '@/root/mine', target = '/a' } }", "{ { source = '@/root', target = '/b' } }", "{ '@/root' }");
    CHECK_INT(o.rc, 0);
    end(&o);
}

TEST("exclude keeps configured mounts away from a target and from below it, and only those [D12]")
{
    begin();
    outcome o = prepare("{ { exclude = '/s' }, { source = '@/root/a', target = '/s/a', create = '0755' } }",
                        "{ { source = '/x', target = '/s' }, { source = '/x', target = '/s/b' }, { source = '/x', target = '/sb' } }",
                        "{ '@/root' }");
    bool read_only;
    CHECK_INT(o.rc, 0);
    CHECK_INT((int)pdk_view_count(pdk_view_of(&o.out)), 2);
    CHECK_STR(target_of(&o, 0, &read_only), "/s/a");
    CHECK_STR(target_of(&o, 1, &read_only), "/sb");
    end(&o);
}

