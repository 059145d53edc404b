"""The page of `fednh watch --web`: the table of runs and their curves, for browsers on this machine alone.

It listens on 127.0.0.1 and answers requests for its own address only, so that no page of another site can read it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from fednh.cli.watch_screen import SHOWN, cells, columns, headline, metrics
from fednh.errors import UserError
from fednh.storage.run_state import RunState, RunStates

FILES = {
    "/": ("watch.html", "text/html"),
    "/watch.js": ("watch.js", "text/javascript"),
    "/report.css": ("report.css", "text/css"),
}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"


@contextmanager
def serve(runs: RunStates, every: float, port: int = 0) -> Iterator[str]:
    """Answer in a thread of its own; yields the address of the page."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler)
    except OSError as error:
        raise UserError(f"port {port} cannot be used: {error.strerror}; choose another --port, or 0") from error
    lock, port = threading.Lock(), server.server_port

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
                self.send_error(403)
            elif self.path == "/runs.json":
                with lock:
                    content = json.dumps(answer(runs, every)).encode()
                self._send(content, "application/json")
            elif self.path in FILES:
                name, kind = FILES[self.path]
                self._send(resources.files("fednh").joinpath("report", "web", name).read_bytes(), kind)
            else:
                self.send_error(404)

        def _send(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
            safe = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
            for name, value in (headers | safe).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Do not log requests."""

    server.RequestHandlerClass = Handler
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.shutdown()
        server.server_close()


def answer(runs: RunStates, every: float) -> dict[str, Any]:
    """What the page draws."""
    states = runs.look()
    shown = metrics(states)
    return {
        "every": every,
        "said": headline(states) or "No run yet.",
        "columns": columns(states),
        "metrics": {key: SHOWN[key] for key in shown},
        "runs": [
            {"state": state.state, "cells": row, "curves": {key: _points(state, key) for key in shown}}
            for state, row in zip(states, cells(runs, states), strict=True)
        ],
    }


def _points(state: RunState, metric: str) -> list[tuple[int, float]]:
    return [(int(r["round"]), float(r[metric])) for r in state.records if r.get(metric) is not None]
