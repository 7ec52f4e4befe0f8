"""Real container engines for tests: a Docker daemon, podman's compatible service and a registry, away from the host.

    engines.py run COMMAND...     runs COMMAND where the engines' ports are reached (it must be loopback for both sides)
    engines.py start [PID]        starts them and keeps them until `stop`, or until process PID ends
    engines.py stop               ends them and removes all they left
    engines.py tell ORDER...      to running ones: see Init.order

All of it runs in a network, mount and process namespace of its own: no bridge, firewall rule, mount, port or process of
theirs is the host's, an engine of the host is never touched, and when the first process of the namespace ends, all end.
PDK_ENGINES is the folder of one such set (docker.sock, podman.sock, state.json); `run` without it makes a set for itself.
With it, the first `run` starts the engines, under a lock, and later ones share them (tests/run does that).

"rootless" is podman's service once more, of a user that is not root, with a store of its own, for containers without a network. It
is only there after `tell start rootless`, as few suites want it.

The Docker daemon also listens on TCP with --tlsverify, and a second service of podman on plain TCP, both on loopback.

state.json: {"why": null or why nothing runs, "docker": {"socket", "version", "why"}, "podman": {...},
             "registry": {"address", "why"}, "tls": {"address", "folder", "why"}, "plain": {"address", "why"},
             "rootless": {"socket", "uid", "home", "runtime", "why"}, "images": {"busybox": name, "aio": name}, "pid": init's pid for nsenter}
"""
import ctypes
import fcntl
import http.client
import io
import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import time

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
UNPACKED = os.path.realpath(os.path.join(TREE, "build/engines"))
START_LIMIT = 90  # seconds, for all of them; on an idle machine it takes three
BUSYBOX = "localhost/pdk-busybox:latest"  # podman 4.3 ignores the tag of an import
AIO = "localhost/pdk-aio:latest"
REGISTRY = "127.0.0.1:5000"
USER, ROOTLESS = "pdk-rootless", 61234  # the user, and its id and its group's: it is known in the namespaces only
SEEN = "/run/pdk-engines"  # UNPACKED, where that user reaches it: it may lie below root's own folder
TLS, PLAIN = "127.0.0.1:2376", "127.0.0.1:2375"

libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWIPC, NEWPID, NEWNET = 0x00020000, 0x08000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 8, 0x1000, 0x4000, 1 << 19
PR_SET_PDEATHSIG = 1


def check(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), "%s: %s" % (what, os.strerror(ctypes.get_errno())))


def mount(source, target, kind, flags=0, data=None):
    check(libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data and data.encode()),
          "mount " + target)


def search_path():
    own = [os.path.join(UNPACKED, d) for d in ("bin", "usr/sbin", "usr/bin")]
    return ":".join(own + ["/usr/local/sbin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"])


def program(name):
    return shutil.which(name, path=search_path())


# ---- HTTP on a unix socket -----------------------------------------------------------------------------------------------

class Call(http.client.HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("engine", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def call(path, method, target, body=None, headers=None, timeout=60):
    """One request: (status, body)."""
    conn = Call(path, timeout)
    try:
        conn.request(method, target, body, headers or {})
        answer = conn.getresponse()
        return answer.status, answer.read()
    finally:
        conn.close()


# ---- images --------------------------------------------------------------------------------------------------------------

def static_busybox():
    """busybox-static's program; plain busybox needs libraries that a small image has not."""
    for path in ("/bin/busybox", "/usr/bin/busybox", os.path.join(UNPACKED, "bin/busybox")):
        try:
            with open(path, "rb") as f:
                head = f.read(4096)
        except OSError:
            continue
        if b"ld-linux" not in head and b"ld-musl" not in head:
            return path
    raise RuntimeError("there is no static busybox (Debian's busybox-static)")


def image_tar(extra=()):
    """A root file system: busybox with all its names, the usual folders, a user 1000, and the files (path, source)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        def add(name, kind, mode, data=None, link="", owner=0):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.mtime, info.linkname = kind, mode, 1700000000, link
            info.uid = info.gid = owner
            info.size = len(data) if data is not None else 0
            tar.addfile(info, io.BytesIO(data) if data is not None else None)
        for name in "bin etc dev proc sys run root var usr usr/bin usr/local usr/local/bin home mnt".split():
            add(name, tarfile.DIRTYPE, 0o755)
        add("home/gem", tarfile.DIRTYPE, 0o755, owner=1000)
        for name in ("tmp", "var/tmp"):
            add(name, tarfile.DIRTYPE, 0o1777)
        busybox = static_busybox()
        with open(busybox, "rb") as f:
            add("bin/busybox", tarfile.REGTYPE, 0o755, f.read())
        for name in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
            if name != "busybox":
                add("bin/" + name, tarfile.SYMTYPE, 0o777, link="busybox")
        add("etc/passwd", tarfile.REGTYPE, 0o644, b"root:x:0:0:root:/root:/bin/sh\ngem:x:1000:1000:gem:/home/gem:/bin/sh\n")
        add("etc/group", tarfile.REGTYPE, 0o644, b"root:x:0:\ngem:x:1000:\n")
        for name in ("etc/resolv.conf", "etc/hosts"):
            add(name, tarfile.REGTYPE, 0o644, b"")
        for name, source in extra:
            with open(source, "rb") as f:
                add(name, tarfile.REGTYPE, 0o755, f.read())
    return out.getvalue()


# ---- the daemons ---------------------------------------------------------------------------------------------------------

class Daemon:
    """A child of Init. `sock` (a unix socket) or `port`: where it answers; `args` and `env` start it, `later`: when it is told to."""
    def __init__(self, folder, name, args, env=None, sock=None, port=None, later=False):
        self.name, self.args, self.sock, self.port, self.later = name, args, sock, port, later
        # Not the folders of the suite that came first: they go when it ends, the daemons stay.
        temporary = os.path.join(folder, "tmp")
        os.makedirs(temporary, exist_ok=True)
        self.env = {**os.environ, "TMPDIR": temporary, "HOME": folder, **(env or {})}
        self.log = os.path.join(folder, name + ".log")
        self.pid = 0

    def start(self):
        if self.sock and os.path.exists(self.sock):
            os.unlink(self.sock)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open("/dev/null", os.O_RDONLY)
        try:
            self.pid = os.posix_spawn(self.args[0], self.args, self.env, setsid=True, file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
                setsigmask=[], setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        finally:
            os.close(log)
            os.close(null)

    def answers(self):
        try:
            if self.port:
                socket.create_connection(("127.0.0.1", self.port), 5).close()
                return True
            if self.name == "containerd":
                s = socket.socket(socket.AF_UNIX)
                s.connect(self.sock)
                s.close()
                return True
            return call(self.sock, "GET", "/_ping", timeout=5)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def last_words(self):
        try:
            with open(self.log, errors="replace") as f:
                lines = [line.strip() for line in f if line.strip()]
        except OSError:
            lines = []
        wrong = [line for line in lines if re.search(r"level=(fatal|error)|^failed|^Error", line)]
        return (wrong or lines or ["it said nothing"])[-1][:300]


def overlay_works(folder):
    """Overlays do not lie on overlays: in a container, plain copies it is."""
    place = tempfile.mkdtemp(dir=folder)
    parts = [os.path.join(place, d) for d in ("l", "u", "w", "m")]
    for d in parts:
        os.mkdir(d)
    try:
        mount("overlay", parts[3], "overlay", 0, "lowerdir=%s,upperdir=%s,workdir=%s" % tuple(parts[:3]))
        libc.umount2(parts[3].encode(), 0)
        return True
    except OSError:
        return False
    finally:
        shutil.rmtree(place, ignore_errors=True)


def write(path, text):
    with open(path, "w") as f:
        f.write(text)


def cgroup_name(folder):
    return os.path.basename(folder)


def make_certificates(folder):
    """Two authorities in `folder`, `ours` and `other`, each a folder as DOCKER_CERT_PATH has it: ca.pem, and cert.pem and key.pem of a
    client; in `ours` also server.pem for 127.0.0.1 (no other name) and expired.pem, both with server.key. None, or why not."""
    if not program("openssl"):
        return "there is no openssl"

    def openssl(*words):
        run = subprocess.run(["openssl", *words], cwd=place, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError("openssl %s: %s" % (words[0], run.stderr.strip()[-200:]))

    def key(name):
        openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", name)

    def signed(name, key_name, use, *more):
        openssl("req", "-new", "-key", key_name, "-subj", "/CN=pdk", "-out", "request")
        write(place + "/extensions", "extendedKeyUsage = %s\nsubjectAltName = IP:127.0.0.1\n" % use)
        openssl("x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions",
                "-out", name, *more)

    try:
        for who in ("ours", "other"):
            place = os.path.join(folder, who)
            os.makedirs(place)
            key("ca.key")
            openssl("req", "-x509", "-new", "-key", "ca.key", "-days", "2", "-subj", "/CN=pdk-" + who, "-out", "ca.pem")
            key("key.pem")
            signed("cert.pem", "key.pem", "clientAuth", "-days", "2")
            if who == "ours":
                key("server.key")
                signed("server.pem", "server.key", "serverAuth", "-days", "2")
                signed("expired.pem", "server.key", "serverAuth", "-days", "-1")
    except RuntimeError as err:
        return str(err)
    return None


def daemons(folder):
    """(name, Daemon or why it cannot run) in the order of their start."""
    driver = "overlay" if overlay_works(folder) else "vfs"
    path = {"PATH": search_path()}
    if os.path.isdir(os.path.join(UNPACKED, "usr/lib")):
        libs = [os.path.join(UNPACKED, "usr/lib", d) for d in os.listdir(os.path.join(UNPACKED, "usr/lib")) if "-linux-" in d]
        path["LD_LIBRARY_PATH"] = ":".join(libs)
        for d in libs:
            if os.path.isdir(os.path.join(d, "xtables")):
                path["XTABLES_LIBDIR"] = os.path.join(d, "xtables")
    out = []

    def need(*names):
        for name in names:
            if not program(name):
                return "there is no %s (make deps fetches it)" % name
        return None

    why = need("dockerd", "containerd", "runc", "docker-proxy", "iptables")
    d = os.path.join(folder, "docker")
    os.makedirs(d, exist_ok=True)
    if why:
        out.append(("docker", why))
    else:
        ctr = os.path.join(d, "containerd.sock")
        write(os.path.join(d, "containerd.toml"), "\n".join([
            "version = 2", 'root = "%s/containerd"' % d, 'state = "%s/containerd-state"' % d, "oom_score = 0",
            'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.btrfs",'
            ' "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]',
            "[grpc]", '  address = "%s"' % ctr, ""]))
        # live-restore: containers outlive their daemon, as with podman.
        write(os.path.join(d, "daemon.json"), json.dumps({"live-restore": True}))
        sock = os.path.join(folder, "docker.sock")
        pem = os.path.join(folder, "tls")
        without = make_certificates(pem)
        tls = [] if without else ["-H", "tcp://" + TLS, "--tlsverify", "--tlscacert", pem + "/ours/ca.pem", "--tlscert",
                                  pem + "/ours/server.pem", "--tlskey", pem + "/ours/server.key"]
        out.append(("tls", without or ("docker", {"address": TLS, "folder": pem})))
        out.append(("containerd", Daemon(folder, "containerd",
                    [program("containerd"), "--config", d + "/containerd.toml"], path, sock=ctr)))
        out.append(("docker", Daemon(folder, "docker", [
            program("dockerd"), "--config-file", d + "/daemon.json", "--data-root", d + "/data", "--exec-root", d + "/exec",
            "--pidfile", d + "/pid", "--containerd", ctr, "-H", "unix://" + sock, "--exec-opt", "native.cgroupdriver=cgroupfs",
            "--cgroup-parent", "/" + cgroup_name(folder), "--default-ulimit", "nofile=1024:1024", "--oom-score-adjust", "0",
            "--storage-driver", "overlay2" if driver == "overlay" else "vfs", "--group", "root"] + tls, path, sock=sock)))

    why = need("podman", "conmon", "runc", "iptables")
    d = os.path.join(folder, "podman")
    helpers = [p for p in (UNPACKED + "/usr/lib/podman", "/usr/lib/podman", "/usr/libexec/podman") if os.path.isdir(p)]
    if not why and not any(os.path.exists(p + "/netavark") for p in helpers):
        why = "there is no netavark (make deps fetches it)"
    if why:
        out.append(("podman", why))
    else:
        os.makedirs(d + "/home/.config/containers", exist_ok=True)
        write(d + "/containers.conf", "\n".join([
            "[containers]", 'default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]', "[engine]", 'runtime = "runc"',
            'cgroup_manager = "cgroupfs"', 'events_logger = "file"', 'events_logfile_path = "%s/events.log"' % d,
            'tmp_dir = "%s/tmp"' % d, 'volume_path = "%s/volumes"' % d,
            # conmon hands its own environment to the clean-up of a container, whose programs are unpacked ones, too.
            "conmon_env_vars = %s" % json.dumps(["%s=%s" % item for item in path.items()]),
            "helper_binaries_dir = %s" % json.dumps(helpers), "conmon_path = %s" % json.dumps([program("conmon")]),
            "[engine.runtimes]", "runc = %s" % json.dumps([program("runc")]),
            "[network]", 'network_backend = "netavark"', 'network_config_dir = "%s/networks"' % d, ""]))
        write(d + "/storage.conf", '[storage]\ndriver = "%s"\ngraphroot = "%s/graph"\nrunroot = "%s/run"\n' % (driver, d, d))
        write(d + "/registries.conf", 'unqualified-search-registries = []\n[[registry]]\nlocation = "%s"\ninsecure = true\n'
              % REGISTRY)
        write(d + "/home/.config/containers/policy.json", '{"default":[{"type":"insecureAcceptAnything"}]}')
        sock = os.path.join(folder, "podman.sock")
        env = dict(path, CONTAINERS_CONF=d + "/containers.conf", CONTAINERS_STORAGE_CONF=d + "/storage.conf",
                   CONTAINERS_REGISTRIES_CONF=d + "/registries.conf", HOME=d + "/home", XDG_CONFIG_HOME=d + "/home/.config")
        # The same flags as podman gives to the clean-up of a container that ended. Without them the two have databases of their
        # own, the clean-up knows no container, and everything that waits for an end takes 20 s longer.
        service = [program("podman"), "--root", d + "/graph", "--runroot", d + "/run", "--tmpdir", d + "/tmp", "--storage-driver", driver,
                   "--network-config-dir", d + "/networks", "--volumepath", d + "/volumes", "system", "service", "--time", "0"]
        out.append(("podman", Daemon(folder, "podman", service + ["unix://" + sock], env, sock=sock)))
        # Plain TCP: dockerd speaks TLS on all its ports, or on none. One store has as many services as one starts.
        out.append(("plain", Daemon(folder, "plain", service + ["tcp://" + PLAIN], env, port=int(PLAIN.split(":")[1]))))

    why = why or rootless_lacks()
    out.append(("rootless", why or rootless(folder, helpers)))

    why = need("docker-registry")
    if why:
        out.append(("registry", why))
    else:
        d = os.path.join(folder, "registry")
        os.makedirs(d, exist_ok=True)
        write(d + "/config.yml", "version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: %s/data},"
              " delete: {enabled: true}}\nhttp: {addr: '%s'}\n" % (d, REGISTRY))
        out.append(("registry", Daemon(folder, "registry", [program("docker-registry"), "serve", d + "/config.yml"], path,
                                       port=int(REGISTRY.split(":")[1]))))
    return out


def seen(path):
    return path.replace(UNPACKED, SEEN, 1) if path.startswith(UNPACKED + "/") else path


def rootless_lacks():
    if not program("setpriv"):
        return "there is no setpriv"
    for name in ("newuidmap", "newgidmap"):
        path = program(name)
        if not path:
            return "there is no %s (make deps fetches it)" % name
        if not os.stat(path).st_mode & stat.S_ISUID or os.statvfs(path).f_flag & os.ST_NOSUID:
            return "%s may not become root for a user (setuid)" % path
    probe = subprocess.run([program("setpriv"), "--reuid", str(ROOTLESS), "--regid", str(ROOTLESS), "--clear-groups",
                            "unshare", "-U", "true"], capture_output=True, text=True, cwd="/")
    return "a user may make no user namespace here: " + probe.stderr.strip()[-200:] if probe.returncode != 0 else None


def unpacked_libraries():
    """Where UNPACKED has libraries, as the other user reaches it."""
    return [SEEN + "/usr/lib/" + name for name in listdir(UNPACKED + "/usr/lib") if "-linux-" in name]


def rootless(folder, helpers):
    """Podman's service of the user ROOTLESS: its own home, store and runtime directory, and no systemd session."""
    d = os.path.join(folder, "rootless")
    runtime, temporary = d + "/run", d + "/tmp"
    for path in (runtime + "/podman", d + "/home/.config/containers", temporary):
        os.makedirs(path)
    write(d + "/home/.config/containers/policy.json", '{"default":[{"type":"insecureAcceptAnything"}]}')
    path = {"PATH": ":".join(seen(p) for p in search_path().split(":"))}
    if unpacked_libraries():
        path["LD_LIBRARY_PATH"] = ":".join(unpacked_libraries())
    write(d + "/containers.conf", "\n".join([
        "[containers]", 'default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]', "[engine]", 'runtime = "runc"',
        'cgroup_manager = "cgroupfs"', 'events_logger = "file"',  # both would be systemd's, which such a user has not here
        "conmon_env_vars = %s" % json.dumps(["%s=%s" % item for item in path.items()]),
        "helper_binaries_dir = %s" % json.dumps([seen(p) for p in helpers]),
        "conmon_path = %s" % json.dumps([seen(program("conmon"))]),
        "[engine.runtimes]", "runc = %s" % json.dumps([seen(program("runc"))]),
        "[network]", 'network_backend = "netavark"', ""]))
    write(d + "/storage.conf", '[storage]\ndriver = "vfs"\n')
    for at, _, files in os.walk(d):
        for name in [at] + [os.path.join(at, f) for f in files]:
            os.chown(name, ROOTLESS, ROOTLESS)
    os.chmod(runtime, 0o700)
    os.chmod(folder, 0o711)
    env = dict(path, CONTAINERS_CONF=d + "/containers.conf", CONTAINERS_STORAGE_CONF=d + "/storage.conf", HOME=d + "/home",
               XDG_CONFIG_HOME=d + "/home/.config", XDG_RUNTIME_DIR=runtime, TMPDIR=temporary, USER=USER)
    sock = runtime + "/podman/podman.sock"  # where a user's service has it
    return Daemon(folder, "rootless", [program("setpriv"), "--reuid", str(ROOTLESS), "--regid", str(ROOTLESS), "--clear-groups",
                                       seen(program("podman")), "system", "service", "--time", "0", "unix://" + sock], env,
                  sock=sock, later=True)


# ---- init: the first process of the namespaces ---------------------------------------------------------------------------

class Init:
    def __init__(self, folder):
        self.folder = folder
        self.daemons = {}
        self.prepared = set()  # engines that have the images
        self.dead = {}  # pid -> wait status, of daemons that ended
        self.state = {"why": None, "images": {}}

    def reap(self, _signal=0, _frame=None):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if any(d.pid == pid for d in self.daemons.values()):
                self.dead[pid] = status

    def namespaces(self):
        check(libc.unshare(NEWNS | NEWIPC), "unshare")
        mount("none", "/", "none", MS_REC | MS_SLAVE)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        # Names that the engines do not let one choose: shims' sockets, network namespaces, podman's locks.
        mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
        mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        os.mkdir("/run/lock", 0o1777)
        # An /etc without what the host's engines have there; dockerd writes a key into /etc/docker, wherever its root is.
        host = self.folder + "/etc"
        os.mkdir(host)
        mount("/etc", host, "none", MS_BIND | MS_REC)
        mount("tmpfs", "/etc", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
        for name in os.listdir(host):
            if name not in ("docker", "containers", "cni", "passwd", "group", "subuid", "subgid"):
                os.symlink(host + "/" + name, "/etc/" + name)
        for name, line in (("passwd", "%s:x:%d:%d::/:/bin/sh" % (USER, ROOTLESS, ROOTLESS)), ("group", "%s:x:%d:" % (USER, ROOTLESS)),
                           ("subuid", USER + ":200000:65536"), ("subgid", USER + ":200000:65536")):
            with open(host + "/" + name if os.path.exists(host + "/" + name) else os.devnull) as f:
                write("/etc/" + name, f.read() + line + "\n")
        if os.path.isdir(UNPACKED):
            os.mkdir(SEEN)
            mount(UNPACKED, SEEN, "none", MS_BIND | MS_REC)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # ip link set lo up
            fcntl.ioctl(s, 0x8914, b"lo".ljust(16, b"\0") + b"\x41\0".ljust(24, b"\0"))

    def await_answer(self, daemon, limit):
        end = time.monotonic() + limit
        while not daemon.answers():
            self.reap()
            if daemon.pid in self.dead:
                return "%s ended: %s" % (daemon.name, daemon.last_words())
            if time.monotonic() > end:
                return "%s does not answer after %d s: %s" % (daemon.name, limit, daemon.last_words())
            time.sleep(0.02)
        return None

    def start(self):
        end = time.monotonic() + START_LIMIT
        for name, daemon in daemons(self.folder):
            if isinstance(daemon, str):
                self.state[name] = {"why": daemon}
                continue
            if isinstance(daemon, tuple):  # another one's: facts about it
                self.state[name] = daemon[1]
                continue
            self.daemons[name] = daemon
            self.state[name] = {"why": None}
            if daemon.later:
                continue
            daemon.start()
            if name == "containerd":  # the daemon would start one of its own
                self.state["docker"] = {"why": self.await_answer(daemon, 60)}
                if self.state["docker"]["why"]:
                    break
        for name, daemon in self.daemons.items():
            if self.state[name]["why"] is None and not daemon.later:
                self.state[name]["why"] = self.await_answer(daemon, max(1, end - time.monotonic()))
        self.state.pop("containerd", None)
        if "registry" in self.daemons:
            self.state["registry"]["address"] = REGISTRY
        if "rootless" in self.daemons:
            self.state["rootless"].update(socket=self.daemons["rootless"].sock, uid=ROOTLESS, home=self.folder + "/rootless/home",
                                          runtime=self.folder + "/rootless/run")
        if "plain" in self.daemons:
            self.state["plain"]["address"] = PLAIN
        if "address" in self.state.get("tls", {}):
            self.state["tls"]["why"] = self.state["docker"]["why"]
        filled = False
        for name in ("docker", "podman"):
            if self.state[name]["why"] is None:
                try:
                    self.prepare(name)
                    if self.state["registry"]["why"] is None and not filled:
                        self.fill_registry(name)
                        filled = True
                except (OSError, http.client.HTTPException, RuntimeError, ValueError) as err:
                    self.state[name]["why"] = "%s: %s" % (name, err)

    def prepare(self, name):
        """Imports the images; the last step of an engine's start."""
        sock = self.daemons[name].sock
        self.state[name]["socket"] = sock
        self.state[name]["version"] = json.loads(call(sock, "GET", "/version")[1])["Version"]
        self.prepared.add(name)
        images = {"busybox": (BUSYBOX, image_tar(), ["CMD [\"sh\"]"])}
        standin = os.path.join(os.environ.get("B") or "build/dev", "tests/aio_standin")
        guest = os.path.join(os.environ.get("OUT") or "build", "bin/paddock-guest")
        if name != "rootless" and os.path.exists(os.path.join(TREE, standin)) and os.path.exists(os.path.join(TREE, guest)):
            images["aio"] = (AIO, image_tar([("usr/local/bin/aio-standin", os.path.join(TREE, standin)),
                                             ("usr/local/bin/paddock-guest", os.path.join(TREE, guest))]),
                             ["ENTRYPOINT [\"/usr/local/bin/aio-standin\"]", "EXPOSE 8080"])
        for key, (image, tar, changes) in images.items():
            repo, tag = image.rsplit(":", 1)
            query = "&".join("changes=" + quote(c) for c in ["ENV PATH=/usr/local/bin:/usr/bin:/bin"] + changes)
            status, body = call(sock, "POST", "/images/create?fromSrc=-&repo=%s&tag=%s&%s" % (quote(repo), tag, query), tar,
                                {"Content-Type": "application/x-tar"})
            if status != 200 or b"error" in body:
                raise RuntimeError("importing %s: %d %s" % (image, status, body[:200]))
            self.state["images"][key] = image

    def fill_registry(self, name):
        """Puts the images there as pdk/NAME:1, from one engine, which forgets those names again."""
        sock, auth = self.daemons[name].sock, {"X-Registry-Auth": "e30="}
        for key, image in self.state["images"].items():
            there = "%s/pdk/%s" % (REGISTRY, key)
            for method, target in (("POST", "/images/%s/tag?repo=%s&tag=1" % (quote(image), quote(there))),
                                   ("POST", "/images/%s/push?tag=1&tlsVerify=false" % there),
                                   ("DELETE", "/images/%s:1" % there)):
                status, body = call(sock, method, target, None, auth)
                if status >= 300 or b"errorDetail" in body:
                    raise RuntimeError("%s %s: %d %s" % (method, target, status, body[-200:]))

    # Orders, one line each, answered by "ok" or "error: ...".
    def order(self, words):
        """stop NAME [SIGNAL] | start NAME | restart NAME [SIGNAL] | freeze NAME | thaw NAME | pid NAME
        NAME: docker, containerd, podman, plain, rootless, registry. A stopped docker or podman leaves its containers running."""
        verb, name = words[0], words[1]
        if name not in self.daemons:
            return "error: there is no %s" % name
        daemon = self.daemons[name]
        if verb in ("stop", "restart"):
            number = getattr(signal, "SIG" + (words[2] if len(words) > 2 else "TERM"))
            if daemon.pid and daemon.pid not in self.dead:
                os.kill(daemon.pid, signal.SIGCONT)
                os.kill(daemon.pid, number)
            end = time.monotonic() + 60
            while daemon.pid and daemon.pid not in self.dead:
                self.reap()
                if time.monotonic() > end:
                    return "error: %s did not end" % name
                time.sleep(0.01)
            daemon.pid = 0
        if verb in ("start", "restart"):
            if daemon.pid and daemon.pid not in self.dead:
                return "error: %s runs" % name
            daemon.start()
            why = self.await_answer(daemon, 60)
            if why:
                return "error: " + why
            if daemon.later and name not in self.prepared:
                self.prepare(name)
        if verb == "freeze":
            os.kill(daemon.pid, signal.SIGSTOP)
        if verb == "thaw":
            os.kill(daemon.pid, signal.SIGCONT)
        if verb not in ("start", "stop", "restart", "freeze", "thaw", "pid"):
            return "error: no such order: " + verb
        return "ok %d" % daemon.pid

    def serve(self):
        path = os.path.join(self.folder, "orders.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(16)
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_w, False)
        os.set_blocking(wake_r, False)
        signal.set_wakeup_fd(wake_w)
        signal.signal(signal.SIGCHLD, self.reap)
        while True:
            ready, _, _ = select.select([listener, wake_r], [], [], 5)
            self.reap()
            if wake_r in ready:
                os.read(wake_r, 4096)
            if listener in ready:
                conn, _ = listener.accept()
                with conn, conn.makefile("rw") as f:
                    try:
                        words = f.readline().split()
                        f.write(self.order(words) if len(words) > 1 else "error: an order is VERB NAME")
                    except (OSError, AttributeError, ValueError, RuntimeError, http.client.HTTPException) as err:
                        f.write("error: %s" % err)

    def run(self, ready):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            self.namespaces()
            self.start()
        except (OSError, RuntimeError) as err:
            self.state["why"] = "container engines cannot run here: %s" % err
        os.write(ready, json.dumps(self.state).encode())
        os.close(ready)
        if self.state["why"] is None:
            self.serve()


def quote(text):
    from urllib.parse import quote as q
    return q(text, safe="")


# ---- the keeper: outside, starts init, ends it with its owner, sweeps up -------------------------------------------------

def sweep_cgroups(name, containers):
    """Control groups outlive the processes in them, and have no namespace of their own here."""
    for top in ["/sys/fs/cgroup"] + ["/sys/fs/cgroup/" + d for d in listdir("/sys/fs/cgroup")]:
        for group in ([top + "/" + name] + ["%s/libpod_parent/libpod-%s%s" % (top, p, c) for c in containers
                                            for p in ("", "conmon-")]):
            if os.path.isdir(group):
                for at, _, _ in os.walk(group, topdown=False):
                    try:
                        os.rmdir(at)
                    except OSError:
                        pass
        for group in ("/libpod_parent/conmon", "/libpod_parent"):  # podman's own; they stay while somebody's are in them
            try:
                os.rmdir(top + group)
            except OSError:
                pass


def listdir(path):
    try:
        return os.listdir(path)
    except OSError:
        return []


def home_of(pid):
    """HOME in the environment that a process began with; "" where it has none or has ended."""
    try:
        with open("/proc/%s/environ" % pid, "rb") as f:
            for one in f.read().split(b"\0"):
                if one.startswith(b"HOME="):
                    return os.fsdecode(one[5:])
    except OSError:
        pass
    return ""


def end_processes(ours):
    """Ends what runs on the host with a home of which ours(home) is true, and waits for it: podman that a suite calls by hand as the
    other user leaves one process that holds that user's namespaces, with nothing of the set in its command line."""
    ended = []
    for pid in listdir("/proc"):
        if pid.isdigit() and ours(home_of(pid)):
            try:
                fd = os.pidfd_open(int(pid))
            except OSError:
                continue
            ended.append(fd)
            if ours(home_of(pid)):  # the number may have become another one's before it was held
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                except OSError:
                    pass
    end = time.monotonic() + 10
    for fd in ended:
        select.select([fd], [], [], max(0, end - time.monotonic()))
        os.close(fd)


def sweep(folder):
    """All that a set left behind whose engines are gone."""
    end_processes(lambda home: home.startswith(folder + "/"))
    containers = listdir(folder + "/podman/graph/%s-containers" % "overlay") + listdir(folder + "/podman/graph/vfs-containers")
    containers += [n[7:] for n in listdir(folder + "/podman/cgroups")]
    end = time.monotonic() + 10
    while True:  # a killed container's processes may need a moment
        sweep_cgroups(cgroup_name(folder), containers)
        left = [t for t in listdir("/sys/fs/cgroup") if os.path.isdir("/sys/fs/cgroup/%s/%s" % (t, cgroup_name(folder)))]
        if not left or time.monotonic() > end:
            break
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def sweep_strays(fresh):
    """Sets whose keeper was killed: its lock is free. Their engines died with it. Also what runs of sets whose folders are gone, or
    of a former one where `fresh` will be."""
    def gone(home):
        parts = home.split("/")
        folder = "/".join(parts[:3])
        return len(parts) > 3 and folder.startswith("/tmp/pdk-engines.") and (folder == fresh or not os.path.lexists(folder))

    end_processes(gone)
    for name in listdir("/tmp"):
        folder = "/tmp/" + name
        if not name.startswith("pdk-engines.") or not os.path.isfile(folder + "/keeper"):
            continue
        try:
            with open(folder + "/keeper") as f:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sweep(folder)
        except OSError:
            pass


def keeper(folder, owner, ready):
    """Lives as long as the set: until SIGTERM, the owner's end, or init's."""
    os.setsid()
    lock = os.open(folder + "/keeper", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, str(os.getpid()).encode())
    # One end of this pair stays with the keeper: signals become readable there.
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    watched = [wake_r]
    if owner:
        try:
            watched.append(os.pidfd_open(owner))
        except OSError:
            owner = -1
    check(libc.unshare(NEWPID | NEWNET), "unshare")
    init = os.fork()
    if init == 0:
        signal.set_wakeup_fd(-1)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(lock)  # only the keeper's own life holds it
        os.chdir(folder)  # conmon leaves an empty file "oom" where it stands when a container's memory ran out
        try:
            Init(folder).run(ready)
        finally:
            os._exit(1)
    os.close(ready)
    write(folder + "/pid", str(init))
    if owner != -1:
        select.select(watched, [], [])
    os.kill(init, signal.SIGKILL)
    while True:
        try:
            os.waitpid(init, 0)
            break
        except InterruptedError:
            pass
    sweep(folder)


def start(folder, owner):
    """Starts the set of this folder unless it runs: its state. Only one at a time does; the others wait for it."""
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/start", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with open(folder + "/state.json") as f:
                return json.load(f)
        except OSError:
            pass
        if os.geteuid() != 0:
            state = {"why": "container engines need root here"}
        else:
            sweep_strays(folder)
            r, w = os.pipe()
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                try:
                    os.close(r)
                    lock.close()
                    null = os.open("/dev/null", os.O_RDWR)
                    log = os.open(folder + "/keeper.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                    for fd, to in ((null, 0), (log, 1), (log, 2)):
                        os.dup2(fd, to)
                    keeper_fds = {0, 1, 2, w}
                    for fd in [int(n) for n in os.listdir("/proc/self/fd")]:
                        if fd not in keeper_fds:
                            try:
                                os.close(fd)
                            except OSError:
                                pass
                    if os.fork() == 0:
                        keeper(folder, owner, w)
                except BaseException:
                    import traceback
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.close(w)
            os.waitpid(child, 0)
            text = b""
            while True:
                part = os.read(r, 65536)
                if not part:
                    break
                text += part
            os.close(r)
            if text:
                state = json.loads(text)
            else:
                with open(folder + "/keeper.log") as f:
                    state = {"why": "container engines cannot run here: " + (f.read().strip().split("\n") or ["?"])[-1]}
            try:
                with open(folder + "/pid") as f:
                    state["pid"] = int(f.read())
            except OSError:
                pass
        write(folder + "/state.new", json.dumps(state))
        os.rename(folder + "/state.new", folder + "/state.json")
        return state


def stop(folder):
    try:
        with open(folder + "/keeper") as f:
            pid = int(f.read())
            os.kill(pid, signal.SIGTERM)
            fcntl.flock(f, fcntl.LOCK_EX)  # free when it has swept
    except (OSError, ValueError):
        pass
    sweep(folder)  # what the keeper did not: it may have been killed


def run(folder, command):
    given = folder
    folder = folder or tempfile.mkdtemp(prefix="pdk-engines.", dir="/tmp")
    state = start(folder, int(os.environ.get("PDK_ENGINES_OWNER") or 0) or os.getpid())
    if state.get("why"):  # nothing runs that would sweep this up
        os.environ["PDK_ENGINES_WHY"] = state["why"]
        if not given:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        os.environ["PDK_ENGINES"] = folder
        fd = os.open("/proc/%d/ns/net" % state["pid"], os.O_RDONLY)
        check(libc.setns(fd, NEWNET), "setns")
        os.close(fd)
    os.execvp(command[0], command)


def tell(folder, words):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(folder + "/orders.sock")
        s.sendall((" ".join(words) + "\n").encode())
        with s.makefile() as f:
            answer = f.read()
    print(answer)
    return 0 if answer.startswith("ok") else 1


def main(args):
    folder = os.environ.get("PDK_ENGINES") and os.path.abspath(os.environ["PDK_ENGINES"])
    if len(args) > 1 and args[0] == "run":
        run(folder, args[1:])
    if not folder:
        sys.exit("PDK_ENGINES is not set: the folder of the engines")
    if args[:1] == ["start"]:
        state = start(folder, int(args[1]) if len(args) > 1 else 0)
        print(json.dumps(state, indent=1))
        return 1 if state.get("why") else 0
    if args[:1] == ["stop"]:
        stop(folder)
        return 0
    if len(args) > 2 and args[0] == "tell":
        return tell(folder, args[1:])
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
