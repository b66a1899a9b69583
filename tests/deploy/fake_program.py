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
- chatty: prints 4 MB before it serves, and a line when it exits.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from protocol.process import lifecycle

kind, mode = sys.argv[1:3]
options = dict(
    word.removeprefix("--").split("=", 1) for word in sys.argv[3:] if "=" in word
)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            print("out of luck", flush=True)
            os._exit(3)
        if self.path == "/v1/models" and mode == "slow":
            time.sleep(3)
        answer = {"data": [{"id": "fake"}], "argv": sys.argv[3:], "pid": os.getpid()}
        answer["environ"] = sorted(
            name for name in os.environ if name.startswith("BATON_")
        )
        is_waiting = mode == "waiting" and self.path == "/ready"
        if is_waiting:
            answer = {"missing": ["no prefill server is ready"]}
        body = json.dumps(answer).encode()
        self.send_response(503 if is_waiting else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


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
