"""A fake server or proxy, which `baton up` starts in tests.

    python fake_program.py KIND MODE [options]

MODE is one of:
- serve: is ready and serves.
- fail: reports why it fails.
- crash: raises an error.
- hang: is never ready.
- stubborn: ignores SIGTERM.
- slow: takes 3 s to name its model.
- die-later: serves, and exits after GET /die.
- waiting: answers GET /ready with 503.
- numbered: prints 2000 numbered lines before it serves.
- fragile: serves, but fails if it is started again with the port that it had.
- first: serves if it is the first program of its kind that this launcher has started,
  and otherwise reports why it fails.
- chatty: prints 4 MB before it serves, and a line when it exits.
- refusing: serves, but refuses every new member.

A fake proxy has the members of its command line, and the part of the admin API that
`baton up` uses. It reports that a drained member has no requests.
"""

import json
import os
import signal
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from protocol.process import lifecycle

kind, mode = sys.argv[1:3]
options = dict(
    word.removeprefix("--").split("=", 1) for word in sys.argv[3:] if "=" in word
)

# The fake proxy's members by URL, and the launcher's last report.
members = {
    word.split("=", 1)[1]: {"role": role, "state": "ready"}
    for word in sys.argv[3:]
    for role in ("prefill", "decode")
    if word.startswith(f"--{role}=http")
}
report: dict[str, object] = {}
num_refusals = 0


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        global num_refusals
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if mode == "refusing" and self.path == "/admin/members":
            num_refusals += 1
            self._answer({"error": {"message": "the name is taken"}}, 400)
            return
        match self.path.removeprefix("/admin/"):
            case "members":
                members[body["url"]] = {"role": body["role"], "state": "ready"}
            case "members/remove":
                del members[body["server"]]
            case "members/drain":
                members[body["server"]]["state"] = "drained"
            case "cluster":
                report.clear()
                report.update(body)
            case "scale":
                lifecycle.request_of_parent({"id": "a request", **body})
        self._answer({"id": "a request"})

    def do_GET(self) -> None:
        if self.path == "/die":
            print("out of luck", flush=True)
            os._exit(3)
        if self.path == "/v1/models" and mode == "slow":
            time.sleep(3)
        answer = {"data": [{"id": "fake"}], "argv": sys.argv[3:], "pid": os.getpid()}
        answer["refusals"] = num_refusals
        answer["environ"] = sorted(
            name for name in os.environ if name.startswith("BATON_")
        )
        is_waiting = mode == "waiting" and self.path == "/ready"
        if is_waiting:
            answer = {"missing": ["no prefill server is ready"]}
        if self.path == "/admin/members":
            answer = {"members": [{"url": url, **members[url]} for url in members]}
        if self.path == "/admin/cluster":
            answer = report
        self._answer(answer, 503 if is_waiting else 200)

    def _answer(self, answer: object, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def is_first() -> bool:
    """Whether this is the first program of its kind that this launcher has started."""
    global claim
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0fake-{kind}-of-{os.getppid()}")
    except OSError:
        return False
    return True


def main() -> int:
    lifecycle.watch_parent(grace_s=0.2)
    print(f"{kind} starts", flush=True)
    if mode == "crash":
        raise ValueError("--tp 3 does not divide 4 heads")
    if mode == "fail":
        lifecycle.report_failure(
            "no model here: see --tp, --model and --hang-timeout-s"
        )
        return 1
    if mode == "fragile" and "side-channel-port" in options:
        lifecycle.report_failure("the device is gone")
        return 1
    if mode == "first" and not is_first():
        lifecycle.report_failure("no memory is left")
        return 1
    if mode == "numbered":
        print("\n".join(f"line {number}" for number in range(2000)), flush=True)
    if mode == "chatty":
        print(
            "\n".join(["a line of a hundred bytes".ljust(99, ".")] * 40_000), flush=True
        )
    if mode == "hang":
        signal.pause()
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = ThreadingHTTPServer((options["host"], int(options["port"])), Handler)
    lifecycle.report_progress("serving")
    lifecycle.report_ready({"port": server.server_port, "side_channel_port": 1})
    server.serve_forever()
    return 0


sys.exit(main())
