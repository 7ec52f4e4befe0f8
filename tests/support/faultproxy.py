"""faultproxy.py SOCKET UPSTREAM -- sits on a unix socket before a real engine, and spoils single calls as told.

Orders come as HTTP to SOCKET.control (tests/support/faultproxy.lua sends them):
  POST /rules    a rule as JSON: {"id"}       GET /rules   rules with "hits": how often each one has struck
  DELETE /rules  forget all rules, release what hangs, come up again, and forget the calls
  GET /calls     every call since: {"n", "method", "path" (no version, no query), "query", "passed" (the engine got it),
                 "status" (the engine's), "rule", "time" (seconds since the start), "done",
                 "seconds" (once done: from the request's last byte to the answer's last from the engine), "body" (of the request, when it is JSON)}
  POST /release  what hangs goes on          POST /drop    close all client connections that are open now
  POST /down, /up   refuse connections, as an engine that is not there, and accept them again
  GET /open      {"connections", "calls" (under way)}

A rule: {"method": "POST" or null, "path": regular expression for the path without /v1.41, "query": expression or null,
  "skip": 0 (calls that match and are left alone first), "times": 1 (-1: always), "action": ..., "at": ...}
  action "delay"      "seconds"; at "before" (the request is passed on) or "after" (the answer is complete; the default)
  action "cut"        closes the connection: at "before" (the engine never sees the request), "after" (it has answered, the
                      client gets nothing; the default), "middle" (part of the answer: "bytes" of its body, else half of it, or
                      of the first part of a stream)
  action "hang"       the same three places; the connection stays open and silent until released or dropped
  action "rewrite"    "status", "body" (whole), "headers" (laid over), "replace" ([from, to], texts, all places in the body);
                      "pass": false answers without asking the engine
  action "duplicate"  "what": "answer" (its bytes come twice), "request" (the engine gets it twice, the second answer counts),
                      "lines" (each line of a stream comes twice)
"""
import json
import os
import re
import select
import socket
import sys
import threading
import time


class Gone(Exception):
    """A side of the connection ended."""


class Reader:
    """Bytes from a socket, by line and by count, noticing when `other` (the client) goes away meanwhile."""
    def __init__(self, sock, other=None):
        self.sock, self.other, self.data = sock, other, b""

    def more(self):
        while True:
            watched = [self.sock] + ([self.other] if self.other else [])
            ready, _, _ = select.select(watched, [], [])
            if self.sock in ready:
                part = self.sock.recv(65536)
                if not part:
                    return False
                self.data += part
                return True
            if not self.other.recv(1, socket.MSG_PEEK):
                raise Gone()
            self.other = None  # the next request came early: no more to learn from this side

    def head(self):
        while b"\r\n\r\n" not in self.data:
            if not self.more():
                if self.data:
                    raise Gone()
                return None
        head, self.data = self.data.split(b"\r\n\r\n", 1)
        return head

    def line(self):
        while b"\r\n" not in self.data:
            if not self.more():
                raise Gone()
        line, self.data = self.data.split(b"\r\n", 1)
        return line + b"\r\n"

    def exactly(self, n):
        while len(self.data) < n:
            if not self.more():
                raise Gone()
        part, self.data = self.data[:n], self.data[n:]
        return part

    def any(self, most=None):
        if not self.data and not self.more():
            return b""
        n = len(self.data) if most is None else min(most, len(self.data))
        part, self.data = self.data[:n], self.data[n:]
        return part


def parse_head(head):
    lines = head.split(b"\r\n")
    fields = [tuple(part.strip() for part in line.split(b":", 1)) for line in lines[1:] if b":" in line]
    return lines[0], fields


def field(fields, name):
    for key, value in fields:
        if key.lower() == name:
            return value
    return None


def join_head(first, fields):
    return first + b"\r\n" + b"".join(k + b": " + v + b"\r\n" for k, v in fields) + b"\r\n"


class Parts:
    """The body of a message, part by part as it comes: (raw bytes, payload)."""
    def __init__(self, reader, fields, empty, until_close):
        self.chunked = (field(fields, b"transfer-encoding") or b"").lower() == b"chunked" and not empty
        length = field(fields, b"content-length")
        self.left = 0 if empty else int(length) if length is not None and not self.chunked else None
        self.until_close = until_close and self.left is None and not self.chunked
        if not until_close and self.left is None:
            self.left = 0
        self.reader = reader
        self.length = self.left

    def __iter__(self):
        if self.chunked:
            while True:
                size = self.reader.line()
                n = int(size.split(b";")[0], 16)
                data = self.reader.exactly(n + 2)
                yield size + data, data[:-2]
                if n == 0:
                    return
        while self.left is None or self.left > 0:
            data = self.reader.any(self.left)
            if not data:
                if self.left is None:
                    return
                raise Gone()
            if self.left is not None:
                self.left -= len(data)
            yield data, data


class Proxy:
    def __init__(self, path, upstream):
        self.path, self.upstream = path, upstream
        self.lock = threading.Lock()  # guards all below
        self.rules, self.log, self.clients, self.under_way = [], [], set(), 0
        self.number = 0
        self.released = threading.Event()
        self.started = time.monotonic()
        self.listener = None

    # ---- rules ----

    def match(self, method, target):
        path, _, query = target.partition("?")
        path = re.sub(r"^/v\d+\.\d+(?=/)", "", path)
        entry = {"method": method, "path": path, "query": query, "passed": False, "status": None, "rule": None,
                 "time": time.monotonic() - self.started, "done": False}
        with self.lock:
            entry["n"] = len(self.log) + 1
            self.log.append(entry)
            for rule in self.rules:
                if rule.get("method") not in (None, method) or not re.search(rule.get("path") or "", path):
                    continue
                if rule.get("query") and not re.search(rule["query"], query):
                    continue
                if rule["skip"] > 0:
                    rule["skip"] -= 1
                    continue
                if rule["times"] == 0:
                    continue
                rule["times"] -= rule["times"] > 0
                rule["hits"] += 1
                entry["rule"] = rule["id"]
                return rule, entry
        return {}, entry

    def hold(self, client):
        """Until released; True when the client is still there."""
        released = self.released
        while not released.wait(0.01):
            ready, _, _ = select.select([client], [], [], 0)
            if ready:
                try:
                    if not client.recv(1, socket.MSG_PEEK):
                        return False
                except OSError:
                    return False
        return True

    # ---- a connection ----

    def client(self, client):
        try:
            reader = Reader(client)
            while self.request(client, reader):
                pass
        except (Gone, OSError, ValueError):
            pass
        finally:
            with self.lock:
                self.clients.discard(client)
            client.close()

    def request(self, client, reader):
        """One request and its answer: whether the connection can take another."""
        reader.other = None
        head = reader.head()
        if head is None:
            return False
        first, fields = parse_head(head)
        method, target, _ = first.decode("latin-1").split(" ", 2)
        if (field(fields, b"expect") or b"").lower() == b"100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            fields = [f for f in fields if f[0].lower() != b"expect"]
        upgrade = field(fields, b"upgrade") is not None
        parts = list(Parts(reader, fields, False, False))
        body = b"".join(raw for raw, _ in parts)
        rule, entry = self.match(method, target)
        try:
            entry["body"] = json.loads(b"".join(data for _, data in parts))
        except ValueError:
            pass
        with self.lock:
            self.under_way += 1
        try:
            return self.answer(client, reader, method, join_head(first, fields) + body, upgrade, rule, entry)
        finally:
            with self.lock:
                self.under_way -= 1
                entry["done"] = True

    def answer(self, client, reader, method, request, upgrade, rule, entry):
        action, at = rule.get("action"), rule.get("at") or "after"
        if at == "before":
            if action == "cut":
                return False
            if action == "delay":
                time.sleep(rule["seconds"])
            if action == "hang" and not self.hold(client):
                return False
        if action == "rewrite" and rule.get("pass") is False:
            client.sendall(self.rewritten(rule, b"HTTP/1.1 200 OK", [(b"Content-Type", b"application/json")], b""))
            return True
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self.upstream)
            server.sendall(request)
            entry["passed"] = True
            if action == "duplicate" and rule.get("what") == "request":
                for _ in self.parts(Reader(server, client), method)[2]:
                    pass
                server.close()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self.upstream)
                server.sendall(request)
            return self.relay(client, reader, Reader(server, None if upgrade else client), method, rule, entry)
        finally:
            server.close()

    @staticmethod
    def parts(source, method):
        while True:
            head = source.head()
            if head is None:
                raise Gone()
            first, fields = parse_head(head)
            status = int(first.split(b" ")[1])
            if status != 100:
                break
        return first, fields, Parts(source, fields, method == "HEAD" or status in (204, 304) or status < 200, status != 101)

    def relay(self, client, reader, source, method, rule, entry):
        action, at = rule.get("action"), rule.get("at") or "after"

        def pass_on(data):
            entry["seconds"] = time.monotonic() - self.started - entry["time"]
            client.sendall(data)
        first, fields, parts = self.parts(source, method)
        entry["status"] = int(first.split(b" ")[1])
        keep = not parts.until_close and (field(fields, b"connection") or b"").lower() != b"close"
        head = join_head(first, fields)
        if entry["status"] == 101:
            client.sendall(head + source.data)
            client.setblocking(True)
            self.tunnel(client, reader, source.sock)
            return False
        whole = action in ("cut", "hang", "delay") and at == "after" or action == "rewrite" or \
            action == "duplicate" and rule.get("what", "answer") == "answer"
        if whole:  # the engine has said all before the client hears of it
            raws, payload = [], b""
            for raw, data in parts:
                raws.append(raw)
                payload += data
            if action == "cut" or action == "hang" and not self.hold(client):
                return False
            if action == "delay":
                time.sleep(rule["seconds"])
            answer = head + b"".join(raws)
            if action == "rewrite":
                answer = self.rewritten(rule, first, fields, payload)
                keep = True
            pass_on(answer * (2 if action == "duplicate" else 1))
            return keep
        if at == "middle" and action in ("cut", "hang") and parts.length == 0:  # no body: part of the head
            client.sendall(head[:len(head) // 2])
            if action == "cut" or not self.hold(client):
                return False
            head = head[len(head) // 2:]
        pass_on(head)
        left = rule.get("bytes")
        if left is None and parts.length is not None:
            left = parts.length // 2
        for raw, data in parts:
            if at == "middle" and action in ("cut", "hang"):
                if left is None:
                    left = len(data) // 2
                if len(data) >= left:
                    split = left + (len(raw) - len(data) - 2 if parts.chunked else 0)
                    client.sendall(raw[:split])
                    if action == "cut" or not self.hold(client):
                        return False
                    client.sendall(raw[split:])
                    action = None
                    continue
                left -= len(data)
            if action == "duplicate" and rule["what"] == "lines" and data:
                data = b"".join(line * 2 for line in data.splitlines(True))
                raw = b"%x\r\n%s\r\n" % (len(data), data) if parts.chunked else data
            pass_on(raw)
        return keep

    @staticmethod
    def rewritten(rule, first, fields, payload):
        if rule.get("status"):
            first = b"HTTP/1.1 %d Rewritten" % rule["status"]
        if rule.get("body") is not None:
            body = rule["body"]
            payload = (body if isinstance(body, str) else json.dumps(body)).encode()
        if rule.get("replace"):
            payload = payload.replace(rule["replace"][0].encode(), rule["replace"][1].encode())
        given = {k.lower().encode(): (k.encode(), str(v).encode()) for k, v in (rule.get("headers") or {}).items()}
        gone = set(given) | {b"content-length", b"transfer-encoding"}
        fields = [f for f in fields if f[0].lower() not in gone] + list(given.values())
        if int(first.split(b" ")[1]) in (204, 304):
            return join_head(first, fields)
        return join_head(first, fields + [(b"Content-Length", b"%d" % len(payload))]) + payload

    @staticmethod
    def tunnel(client, reader, server):
        if reader.data:
            server.sendall(reader.data)
        open_sides = {client: server, server: client}
        while open_sides:
            ready, _, _ = select.select(list(open_sides), [], [])
            for side in ready:
                data = side.recv(65536)
                if data:
                    open_sides[side].sendall(data)
                    continue
                other = open_sides.pop(side)
                try:
                    other.shutdown(socket.SHUT_WR)
                except OSError:
                    return
                if side is server:
                    return

    # ---- listening ----

    def up(self):
        if self.listener:
            return
        listener = socket.socket(socket.AF_UNIX)
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        listener.bind(self.path)
        listener.listen(128)
        self.listener = listener
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()

    def accept(self, listener):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self.listener is not listener:
                client.close()
                return
            with self.lock:
                self.clients.add(client)
            threading.Thread(target=self.client, args=(client,), daemon=True).start()

    def down(self):
        listener, self.listener = self.listener, None
        if listener:
            os.unlink(self.path)
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def drop(self):
        with self.lock:
            for client in self.clients:
                try:
                    client.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    # ---- orders ----

    def order(self, method, path, body):
        if (method, path) == ("POST", "/rules"):
            rule = json.loads(body)
            re.compile(rule.get("path") or "")
            if rule.get("action") not in ("delay", "cut", "hang", "rewrite", "duplicate"):
                raise ValueError("no such action: %s" % rule.get("action"))
            with self.lock:
                self.number += 1
                rule.update(id=self.number, hits=0, skip=rule.get("skip") or 0, times=rule.get("times") or 1)
                self.rules.append(rule)
            return {"id": rule["id"]}
        if (method, path) == ("GET", "/rules"):
            with self.lock:
                return list(self.rules)
        if (method, path) == ("DELETE", "/rules"):
            with self.lock:
                self.rules, self.log = [], []
            self.release()
            self.up()
            return {}
        if (method, path) == ("GET", "/calls"):
            with self.lock:
                return [dict(entry) for entry in self.log]
        if (method, path) == ("GET", "/open"):
            with self.lock:
                return {"connections": len(self.clients), "calls": self.under_way}
        if method == "POST" and path in ("/release", "/drop", "/down", "/up"):
            getattr(self, path[1:])()
            return {}
        raise ValueError("no such order: %s %s" % (method, path))

    def release(self):
        released, self.released = self.released, threading.Event()
        released.set()

    def control(self, conn):
        with conn:
            reader = Reader(conn)
            first, fields = parse_head(reader.head() or b"")
            body = b"".join(raw for raw, _ in Parts(reader, fields, False, False))
            try:
                method, path, _ = first.decode().split(" ")
                status, answer = 200, self.order(method, path, body)
            except (ValueError, TypeError, re.error) as err:
                status, answer = 400, {"error": str(err)}
            text = json.dumps(answer).encode()
            conn.sendall(b"HTTP/1.1 %d x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))

    def serve(self):
        orders = socket.socket(socket.AF_UNIX)
        orders.bind(self.path + ".control")
        orders.listen(16)
        self.up()
        while True:  # ends with whoever holds the other end of its standard input
            ready, _, _ = select.select([orders, 0], [], [])
            if 0 in ready and not os.read(0, 4096):
                return
            if orders in ready:
                try:
                    self.control(orders.accept()[0])
                except (OSError, Gone, ValueError):
                    pass


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    for place in (sys.argv[1], sys.argv[1] + ".control"):
        if os.path.exists(place):
            os.unlink(place)
    try:
        Proxy(sys.argv[1], sys.argv[2]).serve()
    finally:
        for place in (sys.argv[1], sys.argv[1] + ".control"):
            if os.path.exists(place):
                os.unlink(place)
