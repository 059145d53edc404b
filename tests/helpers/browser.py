"""A headless Chromium, driven over its DevTools protocol: open a page, run script, collect errors, take pictures."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import ProxyHandler, build_opener

from websocket import WebSocket, create_connection

FLAGS = (
    "--headless",
    "--no-sandbox",  # tests run as root in containers, where Chromium's sandbox refuses to start
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


def find() -> str | None:
    """The path of a Chromium, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page; `errors` collects uncaught exceptions and everything the console calls an error."""

    def __init__(self, profile: Path):
        self.profile, self.errors = profile, list[str]()
        self._number = 0

    def __enter__(self) -> Browser:
        binary = find()
        assert binary is not None
        self.profile.mkdir(parents=True)
        flags = [*FLAGS, f"--user-data-dir={self.profile}"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen([binary, *flags, "about:blank"], stdout=quiet, stderr=quiet)
        try:
            self._socket = self._connect()
        except BaseException:
            self._process.kill()
            raise
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(timeout=20)

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file from disk at a window size, and wait until it has loaded."""
        self.visit(file.resolve().as_uri(), width, height, dark)

    def visit(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """The same with an address."""
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=address)
        deadline = time.monotonic() + 30
        while self.run("location.href + document.readyState") != address + "complete":
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, file: Path, whole: bool = False) -> None:
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that arrive meanwhile are searched for errors."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._notice(message)

    def _notice(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(str(params["entry"]))

    def _connect(self) -> WebSocket:
        """The browser writes the port that it chose into its profile."""
        file, deadline = self.profile / "DevToolsActivePort", time.monotonic() + 60
        direct = build_opener(ProxyHandler({}))  # the browser is on this machine, whatever proxy is set
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"Chromium ended with code {self._process.returncode}")
            lines = file.read_text().splitlines() if file.exists() else []
            if lines:
                pages = json.load(direct.open(f"http://127.0.0.1:{lines[0]}/json", timeout=20))
                found = [page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"]
                if found:
                    return create_connection(found[0], timeout=60, http_no_proxy=["127.0.0.1"])
            time.sleep(0.1)
        raise RuntimeError("Chromium did not answer within a minute")
