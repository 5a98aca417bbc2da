"""docs/serve/haproxy.cfg before two servers: a conversation stays with the server that remembers it, different ones are spread, events come as
they are said, and a server that stops is missed by nobody."""

import json
import re
import signal
import socket
import subprocess
import time
import urllib.request

from run import check


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response), response.headers.get("x-served-by")


def started(server):
    """Jobs that a server has begun."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
        return sum(int(n) for n in re.findall(r"^loaf_started_total\{[^}]*\} (\d+)$", response.read().decode(), re.M))


def until(what, true):
    start = time.monotonic()
    while not true():
        check(what, time.monotonic() - start < 60, "not within a minute")
        time.sleep(0.02)


def balance(haproxy, config, folder, servers, models):
    port = free_port()
    addresses = [server.url.removeprefix("http://") for server in servers]
    text = config.read_text()
    # Nothing but the addresses differs from what is documented.
    for before, after in [("127.0.0.1:8080", f"127.0.0.1:{port}"), ("127.0.0.1:8081", addresses[0]), ("127.0.0.1:8082", addresses[1])]:
        check(f"balancer: {before} in the example", text.count(before) == 1, text.count(before))
        text = text.replace(before, after)
    made = folder / "haproxy.cfg"
    made.write_text(text)
    done = subprocess.run([haproxy, "-c", "-f", made], capture_output=True, text=True)
    check("balancer: the example is well", done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr)
    proxy = subprocess.Popen([haproxy, "-f", made], stderr=subprocess.DEVNULL)
    try:
        asked(f"http://127.0.0.1:{port}", servers, models)
    finally:
        proxy.terminate()
        proxy.wait(timeout=30)


def asked(url, servers, models):
    def ready():
        try:
            return urllib.request.urlopen(url + "/health", timeout=5).status == 200
        except OSError:
            return False

    until("balancer: ready", ready)
    by_server = {}
    for n in range(8):
        messages = [{"role": "user", "content": f"find files larger than {n} megabytes"}]
        places = set()
        for turn in range(3):
            body = {"model": models[n % 2], "messages": messages, "max_tokens": 20, "seed": n}
            answer, place = post(url, "/v1/chat/completions", body)
            places.add(place)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            check(f"balancer: conversation {n}, turn {turn}", turn == 0 or cached > 0, answer)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            messages.append({"role": "user", "content": f"and {turn} more"})
        check(f"balancer: conversation {n} stays where it began", len(places) == 1, places)
        by_server.setdefault(places.pop(), []).append(n)
    check("balancer: conversations are spread", len(by_server) == 2, by_server)
    check("balancer: so the servers say, too", all(started(s) >= 3 for s in servers), [started(s) for s in servers])

    kinds = {
        "messages": ("/v1/messages", lambda n: {"system": "Be brief.", "messages": [{"role": "user", "content": f"list {n}"}], "max_tokens": 2}),
        "completions": ("/v1/completions", lambda n: {"prompt": f"list {n} files", "max_tokens": 2}),
        "responses": ("/v1/responses", lambda n: {"input": "list", "prompt_cache_key": f"talk {n}", "max_output_tokens": 2}),
    }
    for kind, (path, body) in kinds.items():
        places = [[post(url, path, body(n))[1] for _ in range(2)] for n in range(12)]
        check(f"balancer: {kind} are spread, each always alike", len({p[0] for p in places}) == 2 and all(a == b for a, b in places), places)

    # A response is gone on with where it is kept, if the client says which conversation it is of.
    common = {"model": "hybrid", "prompt_cache_key": "one", "max_output_tokens": 2}
    first, _ = post(url, "/v1/responses", common | {"input": "list"})
    after, _ = post(url, "/v1/responses", common | {"input": "more", "previous_response_id": first["id"]})
    check("balancer: a response gone on with", after["usage"]["input_tokens"] > first["usage"]["input_tokens"], after)

    # Events pass as they come: the first is here while the server still works on the rest.
    body = {"model": "hybrid", "prompt": "once", "max_tokens": 3000, "seed": 1, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as response:
        check("balancer: the first event", response.readline().startswith(b"data: "), "")
        busy = [s for s in servers if running(s)]
        check("balancer: comes while others are being made", len(busy) == 1, busy)
        stopped, other = (servers[0], servers[1]) if busy[0] is servers[0] else (servers[1], servers[0])
        # The server that makes them is asked to stop: the stream ends whole, and whoever comes meanwhile is answered by the other.
        stopped.process.send_signal(signal.SIGTERM)
        until("balancer: it takes no more", lambda: not listens(stopped))
        before = started(other)
        for n in range(6):
            answer, _ = post(url, "/v1/completions", {"prompt": f"list {n} files", "max_tokens": 2})
            check(f"balancer: request {n} while a server stops", answer["choices"], answer)
        check("balancer: the other server did all of them", started(other) == before + 6, started(other))
        rest = response.read()
        check("balancer: the stream of the one that stopped is whole", rest.endswith(b"data: [DONE]\n\n") and rest.count(b'"text"') > 100, rest[-300:])


def listens(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as s:
        return s.connect_ex((host, int(port))) == 0


def running(server):
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
        return sum(int(n) for n in re.findall(r"^loaf_running\{[^}]*\} (\d+)$", response.read().decode(), re.M))
