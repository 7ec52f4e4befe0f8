#!/usr/bin/env python3
"""A double of the provisioner service: real HTTP on loopback, Pods that are pretended, faults by script.

What it answers is in provisioner.answers beside it. Each Pod has an endpoint: a pretended AIO server at /pods/UID of this very
server, or with --guest PATH a real paddock-guest on a port of its own, so that commands really run.

    provisioner.py --port-file F [--guest PATH] [--cert F --key F]     ends when its standard input does

Tests speak to it at /_double:
  GET            what it has seen and has: { log: [...], pods: {...}, connections, most_connections }
  POST { ... }   any of   set      { latency, slow_start, grace, api_key, attest: {}, capabilities: {}, endpoint: bool,
                                     preconditions: bool, state_root: path, plane_delay }
                          faults   a list, replacing the former: { route, id, method, after, times, ... what it does }
                          pods     { ID: { state, uid, attest } }: makes, changes
                          reset    true: everything as at the start

What a fault does, beside or in place of the answer (`route` is create, get, presence, delete, list, capabilities or plane; times 0 =
always; after = how many pass first):
  delay    seconds before it is acted upon         late     seconds between the act and the answer
  refuse   the connection is closed, nothing done  drop     done, and then the connection is closed
  cut      so many bytes of the answer are sent    half     half of the JSON, as if it were all
  status   another status, nothing done            acted    with `status`: done all the same
  body     another body (text)                     patch    fields of the answer to change; null = null, "-" = left out
  twice    a field that the answer then has twice  huge     so many bytes more, all blanks
  location a redirect to there (status 302)
"""
import argparse
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

HERE = os.path.dirname(os.path.abspath(__file__))
ROUTES = ["create", "get", "presence", "delete", "list"]
LARK = "/mnt/integrations/lark-cli/"


def read_answers(path):
    states, statuses = {}, {}
    for line in open(path, encoding="utf-8"):
        words = line.split("#")[0].split()
        if words[:1] == ["state"]:
            states[words[1]] = dict(zip(ROUTES, words[2:]))
        elif words[:1] == ["answer"]:
            statuses[words[1]] = int(words[2])
    return states, statuses


STATES, STATUSES = read_answers(os.path.join(HERE, "provisioner.answers"))


class Pod:
    def __init__(self, sandbox_id, double, request=None):
        self.id, self.uid, self.born = sandbox_id, str(uuid.uuid4()), time.monotonic()
        self.forced, self.deleted_at, self.request = None, None, request or {}
        self.attest, self.files, self.sessions, self.commands = {}, {}, set(), []
        self.process, self.url, self.home = None, None, None
        if double.guest:
            self.start_guest(double.guest)

    def start_guest(self, path):
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.home = tempfile.mkdtemp(prefix="pdk-pod.")
        settings_fd = os.memfd_create("settings")
        text = f"generation={uuid.uuid4().hex}\0workspace={self.home}\0orphan_ttl=120\0env=PATH=/usr/bin:/bin\0"
        os.write(settings_fd, text.encode())
        os.lseek(settings_fd, 0, 0)
        # Descriptors 3 and 4 by number: sh moves them there, as pass_fds keeps numbers as they are.
        self.process = subprocess.Popen(
            ["sh", "-c", f"exec 8<&{settings_fd} 9<&{listener.fileno()}; exec 3<&8 4<&9 8<&- 9<&- 5<&- 6<&-; exec \"$0\"", path],
            pass_fds=[settings_fd, listener.fileno()], stdin=subprocess.DEVNULL, cwd=self.home)
        self.url = "http://127.0.0.1:%d" % listener.getsockname()[1]
        listener.close()
        os.close(settings_fd)

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            subprocess.run(["rm", "-rf", self.home], check=False)
            self.process = None

    def state(self, double):
        now = time.monotonic()
        if self.deleted_at is not None:
            return "terminating"
        if self.forced:
            return self.forced
        return "running" if now - self.born >= double.slow_start else "pending"


class Double:
    def __init__(self, guest):
        self.lock, self.guest, self.base = threading.RLock(), guest, ""
        self.pods = {}
        self.open = self.most = self.connections = 0
        self.reset()

    def reset(self):
        for pod in self.pods.values():
            pod.stop()
        self.pods, self.faults, self.log = {}, [], []
        self.latency = self.slow_start = self.grace = self.plane_delay = 0
        self.api_key, self.endpoint, self.preconditions, self.state_root = None, True, True, None
        self.attest = {"lark_cli_broker": False, "max_shell_sessions": 10}
        self.capabilities = {"lark_cli_init_image": False, "lark_cli_broker_image": False}

    def sweep(self):
        """Pods whose grace period is over are gone."""
        for sandbox_id, pod in list(self.pods.items()):
            if pod.deleted_at is not None and time.monotonic() - pod.deleted_at >= self.grace:
                pod.stop()
                del self.pods[sandbox_id]

    def state_of(self, sandbox_id):
        self.sweep()
        pod = self.pods.get(sandbox_id)
        return (pod.state(self), pod) if pod else ("absent", None)

    def describe(self, pod):
        body = {"sandbox_id": pod.id, "status": pod.state(self).capitalize(), "container_id": pod.uid}
        if self.endpoint:
            body["sandbox_url"] = pod.url or f"{self.base}/pods/{pod.uid}"
        attest = dict(self.attest)
        if pod.request.get("max_shell_sessions") is not None and "max_shell_sessions" in attest:
            attest["max_shell_sessions"] = pod.request["max_shell_sessions"]
        if pod.request.get("provision_lark_cli_broker") and "lark_cli_broker" in attest:
            attest["lark_cli_broker"] = True
        attest.update(pod.attest)
        body.update({k: v for k, v in attest.items() if v != "-"})
        return body

    def targets(self, root):
        return ["/mnt/acp-workspace"] + [f"{root}/{n}" for n in ("public", "custom", "legacy", "integrations")] + \
            [LARK + n for n in ("config", "config/locks", "data", "runtime")]

    def complaint(self, body):
        """What a provisioner has against a create request: status and text, or None."""
        if not isinstance(body, dict):
            return "invalid", "a JSON object is expected"
        if not re.fullmatch(r"[a-z0-9-]{1,63}", str(body.get("sandbox_id"))):
            return "invalid", "sandbox_id"
        for key in ("thread_id", "user_id"):
            if not isinstance(body.get(key), str) or not re.fullmatch(r"[A-Za-z0-9_-]+", body[key]):
                return "invalid", f"{key}: letters, digits, - and _ only"
        mounts, seen = body.get("extra_mounts") or [], set()
        if len(mounts) > 10:
            return "refused", "more than 10 extra mounts"
        for mount in mounts:
            source, target = str(mount.get("host_path")), mount.get("container_path")
            if not source.startswith("/") or "/.." in source:
                return "refused", f"relative source {source}"
            if self.state_root and not source.startswith(self.state_root + "/"):
                return "refused", f"source {source} is outside the state root"
            if target not in self.targets(body.get("skills_container_path") or "/mnt/skills"):
                return "refused", f"target {target} is not accepted"
            if target in seen:
                return "refused", f"target {target} is repeated"
            seen.add(target)
        return None

    # ---- the acts: each gives the name of an answer and its body

    def create(self, body):
        wrong = self.complaint(body)
        if wrong:
            return wrong[0], {"detail": wrong[1]}
        state, pod = self.state_of(body["sandbox_id"])
        answer = STATES[state]["create"]
        if answer == "made":
            pod = self.pods[body["sandbox_id"]] = Pod(body["sandbox_id"], self, body)
        elif answer == "exists" and state == "serviceless":
            pod.forced = None                                    # a create makes the missing Service
        elif answer == "conflict":
            return answer, {"detail": f"sandbox {pod.id} is terminating"}
        return answer, self.describe(pod)

    def act(self, route, sandbox_id, body, headers):
        if route == "create":
            return self.create(body)
        if route == "list":
            self.sweep()
            found = [self.describe(p) for p in self.pods.values() if STATES[p.state(self)]["list"] == "yes"]
            return "pod", {"sandboxes": found, "count": len(found)}
        if route == "capabilities":
            return "pod", dict(self.capabilities)
        state, pod = self.state_of(sandbox_id)
        answer = STATES[state][route]
        if answer == "missing":
            return answer, {"detail": f"Sandbox '{sandbox_id}' not found"}
        if route == "presence":
            body = {"sandbox_id": sandbox_id, "present": answer == "there"}
            if pod:
                body["container_id"] = pod.uid
            return answer, body
        if route == "delete":
            wanted = headers.get("If-Match")
            if wanted and self.preconditions and wanted.strip('"') != pod.uid:
                return "superseded", {"detail": "another Pod has this name"}
            if pod.deleted_at is None:
                pod.deleted_at = time.monotonic()
            self.sweep()
            return answer, {"ok": True, "sandbox_id": sandbox_id}
        return answer, self.describe(pod)

    def fault_for(self, route, sandbox_id, method):
        for fault in self.faults:
            if fault.get("route", route) != route or fault.get("id", sandbox_id) != sandbox_id or \
                    fault.get("method", method) != method:
                continue
            if fault.get("after", 0) > 0:
                fault["after"] -= 1
                continue
            times = fault.get("times", 1)
            if times == 1:
                self.faults.remove(fault)
            elif times > 1:
                fault["times"] = times - 1
            return fault
        return {}

    def control(self, body):
        if body.get("reset"):
            self.reset()
        for key, value in body.get("set", {}).items():
            setattr(self, key, value)
        if "faults" in body:
            self.faults = [dict(fault) for fault in body["faults"]]
        for sandbox_id, fields in body.get("pods", {}).items():
            pod = self.pods.setdefault(sandbox_id, Pod(sandbox_id, self)) if sandbox_id not in self.pods else self.pods[sandbox_id]
            if fields.get("state") == "absent":
                self.pods.pop(sandbox_id).stop()
                continue
            if fields.get("state") == "terminating":
                pod.deleted_at = time.monotonic()
            elif "state" in fields:
                pod.forced = fields["state"]
            pod.uid = fields.get("uid", pod.uid)
            pod.attest.update(fields.get("attest", {}))

    def view(self):
        self.sweep()
        pods = {i: {"uid": p.uid, "state": p.state(self), "commands": p.commands, "request": p.request}
                for i, p in self.pods.items()}
        return {"log": self.log, "pods": pods, "connections": self.connections, "most_connections": self.most}


class Plane:
    """The pretended AIO server of a Pod."""

    def __init__(self, pod):
        self.pod = pod

    def run(self, command):
        word, _, rest = command.partition(" ")
        if word == "echo":
            return rest + "\n", 0
        if word == "exit":
            return "", int(rest or 0)
        return "", 0

    def answer(self, method, path, query, body):
        pod = self.pod
        if path == "/v1/sandbox":
            return 200, {"success": True, "data": "a pretended sandbox", "home_dir": "/home/gem", "version": "1.9.4"}
        if path.endswith("/exec"):
            pod.commands.append(body)
            session = body.get("id") or body.get("session_id")
            if session and session not in pod.sessions:
                return 404, {"success": False, "message": "Session not found", "data": None, "hint": None}
            out, code = self.run(body.get("command", ""))
            return 200, {"success": True, "data": {"session_id": session or "default", "command_id": "c", "status": "completed",
                                                   "output": out, "stdout": out, "stderr": "", "exit_code": code, "offset": len(out),
                                                   "stderr_offset": 0}}
        if path.endswith("/sessions/create"):
            session = body.get("id") or body.get("session_id")
            pod.sessions.add(session)
            return 200, {"success": True, "data": {"session_id": session, "working_dir": "/"}}
        if "/sessions/" in path:
            pod.sessions.discard(unquote(path.split("/")[4]))
            return 200, {"success": True, "data": None}
        if path == "/v1/file/download":
            name = query.get("path", [""])[0]
            return (200, pod.files[name]) if name in pod.files else (404, {"success": False, "message": "not found", "data": None})
        if path == "/v1/file/upload":
            name = re.search(rb'name="path"\r\n\r\n(.*?)\r\n', body, re.S).group(1).decode()
            data = re.search(rb'filename="[^"]*"\r\nContent-Type:[^\r]*\r\n\r\n(.*)\r\n--', body, re.S).group(1)
            pod.files[name] = data
            return 200, {"success": True, "data": {"file_path": name, "file_size": len(data), "success": True}}
        if path == "/v1/file/list":
            files = [{"name": os.path.basename(n), "path": n, "is_directory": False, "size": len(d)} for n, d in pod.files.items()]
            return 200, {"success": True, "data": {"path": body["path"], "files": files}}
        return 404, {"detail": "Not Found"}


def route_of(method, path):
    if path == "/api/sandboxes":
        return {"POST": "create", "GET": "list"}.get(method), None
    if path == "/api/capabilities" and method == "GET":
        return "capabilities", None
    match = re.fullmatch(r"/api/sandboxes/([a-z0-9-]+)(/presence)?", path)
    if match and match.group(2) and method == "GET":
        return "presence", match.group(1)
    if match and not match.group(2):
        return {"GET": "get", "DELETE": "delete"}.get(method), match.group(1)
    return None, None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    double = None

    def setup(self):
        super().setup()
        with self.double.lock:
            self.double.connections += 1
            self.number = self.double.connections
            self.double.open += 1
            self.double.most = max(self.double.most, self.double.open)

    def finish(self):
        with self.double.lock:
            self.double.open -= 1
        super().finish()

    def log_message(self, *_):
        pass

    def send(self, status, payload, extra=None, cut=None):
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        for name, value in (extra or {}).items():
            head += f"{name}: {value}\r\n"
        data = head.encode() + b"\r\n" + payload
        self.wfile.write(data if cut is None else data[:len(head) + 2 + cut])
        self.wfile.flush()
        if cut is not None:
            self.hang_up()

    def hang_up(self):
        self.close_connection = True
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def handle_one(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        if parts.path == "/_double":
            with self.double.lock:
                if self.command == "POST":
                    self.double.control(json.loads(raw))
                payload = json.dumps(self.double.view()).encode()
            return self.send(200, payload)
        if parts.path.startswith("/pods/"):
            return self.plane(parts, raw)
        return self.api(parts, raw)

    do_GET = do_POST = do_DELETE = do_PUT = handle_one

    def api(self, parts, raw):
        double = self.double
        path = parts.path[len("/base"):] if parts.path.startswith("/base/") else parts.path
        route, sandbox_id = route_of(self.command, path)
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = "no JSON"
        with double.lock:
            named = body.get("sandbox_id") if route == "create" and isinstance(body, dict) else sandbox_id
            double.log.append({"method": self.command, "path": self.path, "route": route or "none", "id": named, "body": body, "at": time.monotonic(),
                               "headers": {k.lower(): v for k, v in self.headers.items()}, "connection": self.number})
            fault = double.fault_for(route, named, self.command)
            pause = double.latency + fault.get("delay", 0)
        time.sleep(pause)
        if fault.get("refuse"):
            return self.hang_up()
        if fault.get("location"):
            return self.send(fault.get("status", 302), b"", {"Location": fault["location"]})
        if fault.get("status") and not fault.get("acted"):
            return self.send(fault["status"], fault.get("body", '{"detail":"told to fail"}').encode())
        with double.lock:
            if double.api_key and self.headers.get("X-API-Key") != double.api_key:
                name, answer = "unauthorized", {"detail": "Invalid or missing API key"}
            elif route is None:
                name, answer = "missing", {"detail": "Not Found"}
            else:
                name, answer = double.act(route, sandbox_id, body, self.headers)
        return self.reply(fault, STATUSES[name], answer)

    def reply(self, fault, status, answer):
        for key, value in fault.get("patch", {}).items():
            answer.pop(key, None)
            if value != "-":
                answer[key] = value
        payload = json.dumps(answer).encode()
        if "twice" in fault:
            payload = payload[:-1] + b", %s: %s}" % (json.dumps(fault["twice"]).encode(), json.dumps("x").encode())
        if "body" in fault:
            payload = fault["body"].encode()
        if "huge" in fault:
            payload += b" " * fault["huge"]  # still good JSON: only its size is wrong
        if fault.get("half"):
            payload = payload[:len(payload) // 2]
        time.sleep(fault.get("late", 0))
        if fault.get("drop"):
            return self.hang_up()
        return self.send(fault.get("status", status), payload, cut=fault.get("cut"))

    def plane(self, parts, raw):
        double = self.double
        _, _, uid, rest = parts.path.split("/", 3)
        with double.lock:
            double.sweep()
            pod = next((p for p in double.pods.values() if p.uid == uid), None)
            fault = double.fault_for("plane", pod and pod.id, self.command)
            alive = pod is not None and pod.state(double) == "running"
        time.sleep(double.plane_delay + fault.get("delay", 0))
        if not alive or fault.get("refuse"):
            return self.hang_up()
        if fault.get("status"):
            return self.send(fault["status"], fault.get("body", "{}").encode())
        body = raw
        if self.headers.get("Content-Type", "").startswith("application/json") and raw:
            body = json.loads(raw)
        with double.lock:
            status, answer = Plane(pod).answer(self.command, "/" + rest, parse_qs(parts.query), body)
        if fault.get("drop"):
            return self.hang_up()
        return self.send(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())


class Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True

    def handle_error(self, request, client_address):
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, ssl.SSLError, OSError)):
            super().handle_error(request, client_address)


def main():
    args = argparse.ArgumentParser()
    for name in ("--port-file", "--guest", "--cert", "--key"):
        args.add_argument(name)
    options = args.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(256 * 1024)
    server = Server(("127.0.0.1", 0), Handler)
    if options.cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.cert, options.key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    double = Handler.double = Double(options.guest and os.path.abspath(options.guest))
    double.base = "%s://127.0.0.1:%d" % ("https" if options.cert else "http", server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with open(options.port_file + ".new", "w", encoding="utf-8") as file:
        file.write(str(server.server_address[1]))
    os.rename(options.port_file + ".new", options.port_file)
    sys.stdin.read()
    with double.lock:
        double.reset()
    os._exit(0)


main()
