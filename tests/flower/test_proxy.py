"""nginx with the configuration that is written: sites get through, everything else does not."""

from __future__ import annotations

import http.client
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fednh.flower.deploy import certificates, scaffold
from fednh.flower.deploy.processes import answers, free_ports
from fednh.flower.layout import FederationFolder

needs_nginx = pytest.mark.skipif(
    shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin") is None, reason="nginx is not installed"
)


class Behind(ThreadingHTTPServer):
    """A server with the federation's certificate in the SuperLink's place; it remembers what came through."""

    def __init__(self, certs: Path):
        seen = self.seen = list[str]()

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                seen.append(self.path)
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            do_GET = do_PUT = do_DELETE = do_POST

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Answer)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certs / "server.crt", certs / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True)


class Door:
    """A running nginx, and requests to it as they are written."""

    def __init__(self, port: int, ca: Path, behind: Behind):
        self.port, self.context, self.behind = port, ssl.create_default_context(cafile=str(ca)), behind

    def ask(self, path: str, method: str = "POST", body: bytes = b"") -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=self.context)
        connection.putrequest(method, path)
        connection.putheader("content-length", str(len(body)))
        connection.endheaders()
        with suppress(OSError):  # it may have heard enough
            connection.send(body)
        try:
            return connection.getresponse().status
        finally:
            connection.close()


@contextmanager
def nginx(folder: Path, certs: Path | None = None, **changes: str) -> Iterator[Door]:
    """nginx from a path with a blank, in front of a server of ours, which may have another certificate."""
    fed = folder / "a federation"
    certificates.make(fed, ["site-1"])
    behind, (port,) = Behind(certs or fed / "certs"), free_ports(1)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    conf = scaffold.write_proxy_config(
        fed / "proxy", FederationFolder(fed), f"127.0.0.1:{port}", behind.server_address[1]
    )
    for word, value in changes.items():
        assert re.search(rf"{word}=\w+", conf.read_text())
        conf.write_text(re.sub(rf"{word}=[\w/]+", f"{word}={value}", conf.read_text()))
    process = subprocess.Popen(scaffold.proxy_command(fed / "proxy"), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not answers(port):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield Door(port, fed / "sites/site-1/ca.crt", behind)
    finally:
        process.terminate()
        process.wait(20)
        behind.shutdown()


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with nginx(tmp_path_factory.mktemp("proxy")) as made:
        yield made


@needs_nginx
def test_a_site_gets_through(door: Door) -> None:
    assert door.ask("/v1/fleet/pull-messages", body=b"x" * 6_000_000) == 200
    assert door.behind.seen[-1] == "/v1/fleet/pull-messages"


@needs_nginx
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet",
        "/v1/fleetx/pull-messages",
        "/V1/FLEET/pull-messages",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet/%2E%2E%2Fcontrol%2Fstart-run",
        "//v1//control/start-run",
        "/v1/control/start-run?/v1/fleet/",
        "/v1/control/start-run%3f/v1/fleet/",
        "/v1/control/start-run;/../../fleet",
    ],
)
def test_everything_else_is_forbidden(path: str, door: Door) -> None:
    before = list(door.behind.seen)
    assert door.ask(path) in (301, 400, 403)
    assert door.behind.seen == before


@needs_nginx
@pytest.mark.parametrize(
    "path", ["/v1/control/../fleet/x", "/v1/fleet/%252e%252e/control/start-run", "/v1/fleet/x#/../../control/start-run"]
)
def test_what_gets_through_is_the_path_that_was_checked(path: str, door: Door) -> None:
    door.ask(path)
    assert all(seen.startswith("/v1/fleet/") and "/../" not in seen for seen in door.behind.seen)


@needs_nginx
def test_other_methods_and_large_bodies_are_refused(door: Door) -> None:
    before = list(door.behind.seen)
    assert [door.ask("/v1/fleet/x", method) for method in ("GET", "PUT", "DELETE", "TRACE")] == [403, 403, 403, 405]
    assert door.ask("/v1/fleet/push-object", body=b"x" * 17_000_000) == 413
    assert door.behind.seen == before


@needs_nginx
def test_a_flood_is_refused(tmp_path: Path) -> None:
    """With the limits made small enough for a test: the zone and the answer are those of the file."""
    with nginx(tmp_path, rate="1r/m", burst="3 nodelay") as quick:
        assert [quick.ask("/v1/fleet/x") for _ in range(6)] == [200] * 4 + [429] * 2
        assert quick.ask("/v1/control/start-run") in (403, 429)


@needs_nginx
def test_a_server_with_another_certificate_is_not_spoken_to(tmp_path: Path) -> None:
    certificates.make(tmp_path / "other", [])
    with nginx(tmp_path, tmp_path / "other/certs") as door:
        assert door.ask("/v1/fleet/x") == 502
        assert door.behind.seen == []


@needs_nginx
def test_what_init_writes_is_valid(tmp_path: Path) -> None:
    folder = tmp_path / "my federation"
    scaffold.write(folder, 1, [], {})
    certificates.make(folder, ["site-1"])
    words = scaffold.proxy_command(folder / "proxy")
    ended = subprocess.run([*words, "-t"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "listen 8443 ssl;" in (folder / "proxy/fednh.conf").read_text()


@needs_nginx
def test_nothing_in_a_path_is_taken_for_nginxs_own_signs(tmp_path: Path) -> None:
    """A dollar sign, quotation marks, a semicolon, a brace and a backslash."""
    folder = tmp_path / 'a$b "c"; d{e\\f'
    certificates.make(folder, [])
    scaffold.write_proxy_config(folder / "proxy", FederationFolder(folder), "127.0.0.1:8443", 8000)
    ended = subprocess.run(
        [*scaffold.proxy_command(folder / "proxy"), "-t"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
