"""Downloads against a real web server on this computer."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from fednh.data.published import RemoteFile, download
from fednh.data.sources import registry
from fednh.data.sources.builtin import BUILTIN
from fednh.data.sources.registry import PUBLISHED
from fednh.errors import UserError

CONTENT = np.random.default_rng(0).bytes(700_000)
SUM = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT and notes every request; the switches below make it misbehave."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.knows_ranges = True
        self.cut_after: int | None = None
        self.shift = 0  # answers with another range than asked

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is part of some tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers["Range"]
        self.server.ranges.append(asked)
        if self.path != "/file.bin":
            return self.send_error(404)
        start = 0
        if asked and self.server.knows_ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-")) + self.server.shift
            if start >= len(CONTENT):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        end = len(CONTENT) if self.server.cut_after is None else start + self.server.cut_after
        self.wfile.write(CONTENT[start:end])
        return None

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    web = Server()
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield web
    web.shutdown()
    thread.join()
    web.server_close()


def remote(*addresses: str, sha256: str = SUM, name: str = "sub/file.bin") -> list[RemoteFile]:
    return [RemoteFile(name, sha256, addresses)]


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_fresh_download(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    files = remote(f"{server.address}/file.bin")
    said = download("set", files, tmp_path / "new", lambda *at: seen.append(at))
    assert said == f"set: downloaded sub/file.bin to {tmp_path / 'new'}"
    assert (tmp_path / "new/sub/file.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new/sub").iterdir()] == ["file.bin"]
    assert server.ranges == [None]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    assert download("set", files, tmp_path / "new") == f"set is already complete in {tmp_path / 'new'}"
    assert len(server.ranges) == 1


def test_resumes_a_half_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:300_000])
    seen: list[tuple[int, int | None]] = []
    files = remote(f"{server.address}/file.bin", name="file.bin")
    download("set", files, tmp_path, lambda *at: seen.append(at))
    assert server.ranges == ["bytes=300000-"]
    assert seen[0] == (300_000, len(CONTENT))
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert not (tmp_path / "file.bin.part").exists()


def test_starts_over_where_the_server_cannot_resume(server: Server, tmp_path: Path) -> None:
    server.knows_ranges = False
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:300_000])
    download("set", remote(f"{server.address}/file.bin", name="file.bin"), tmp_path)
    assert server.ranges == ["bytes=300000-"]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_part_that_is_already_complete(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    download("set", remote(f"{server.address}/file.bin", name="file.bin"), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_wrong_range_is_not_pasted_in(server: Server, tmp_path: Path) -> None:
    server.shift = 5
    part = tmp_path / "file.bin.part"
    part.write_bytes(CONTENT[:300_000])
    with pytest.raises(UserError, match="another range"):
        download("set", remote(f"{server.address}/file.bin", name="file.bin"), tmp_path)
    assert part.read_bytes() == CONTENT[:300_000]


def test_a_broken_connection_is_resumed_by_the_next_call(server: Server, tmp_path: Path) -> None:
    server.cut_after = 400_000
    files = remote(f"{server.address}/file.bin", name="file.bin")
    with pytest.raises(UserError, match=r"after 400000 of 700000 bytes.*run the command again"):
        download("set", files, tmp_path)
    assert not (tmp_path / "file.bin").exists()
    server.cut_after = None
    download("set", files, tmp_path)
    assert server.ranges == [None, "bytes=400000-"]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("start", [b"", b"something else"])
def test_a_wrong_checksum_deletes_the_part(server: Server, tmp_path: Path, start: bytes) -> None:
    (tmp_path / "file.bin.part").write_bytes(start)
    sha256 = SUM if start else "0" * 64
    with pytest.raises(UserError, match="checksum differs") as caught:
        download("set", remote(f"{server.address}/file.bin", name="file.bin", sha256=sha256), tmp_path)
    assert server.address in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_second_address_is_tried(server: Server, tmp_path: Path) -> None:
    addresses = (f"http://127.0.0.1:{closed_port()}/file.bin", f"{server.address}/gone", f"{server.address}/file.bin")
    download("set", remote(*addresses), tmp_path)
    assert (tmp_path / "sub/file.bin").read_bytes() == CONTENT


def test_without_a_network_the_way_by_hand_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    address = f"http://127.0.0.1:{closed_port()}"
    files = [RemoteFile(f"sub/{name}", SUM, (f"{address}/{name}",)) for name in ("a", "b")]
    with pytest.raises(UserError, match="refused") as caught:
        download("set", files, tmp_path)
    text = str(caught.value)
    for name in ("a", "b"):
        assert f"{address}/{name} as {tmp_path}/sub/{name}" in text
    assert "\n" not in text


def test_http_errors_are_said(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="HTTP 404"):
        download("set", remote(f"{server.address}/gone"), tmp_path)


def test_a_file_of_somebody_else_is_not_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(UserError, match="not the published file"):
        download("set", remote(f"{server.address}/file.bin", name="file.bin"), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == b"mine"
    assert server.ranges == []


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file in the way")
    with pytest.raises(UserError, match="cannot use"):
        download("set", remote(f"{server.address}/file.bin"), tmp_path / "data")


def test_names_without_a_download(tmp_path: Path) -> None:
    for name in BUILTIN:
        assert "built in" in registry.download(name, tmp_path)
    for kind in registry.SOURCES.values():
        with pytest.raises(UserError, match="is data of your own"):
            registry.download(f"{kind.prefix}:{kind.example}", tmp_path)
    with pytest.raises(UserError, match="did you mean 'cifar100'"):
        registry.download("cifar-100", tmp_path)


def test_every_published_set_with_a_checksum_is_downloaded_over_https() -> None:
    for published in PUBLISHED.values():
        assert bool(published.files) != bool(published.by_hand)  # nobody publishes a checksum: where they come from
        for file in published.files:
            assert len(bytes.fromhex(file.sha256)) == 32
            assert file.addresses
            assert all(a.startswith("https://") and unquote(a).endswith(Path(file.name).name) for a in file.addresses)


def test_downloaded_files_lie_where_they_are_looked_for(tmp_path: Path) -> None:
    for name, published in PUBLISHED.items():
        for file in published.files:
            (tmp_path / file.name).parent.mkdir(exist_ok=True)
            (tmp_path / file.name).write_bytes(b"")
        if published.files:
            assert next(line for line in registry.available(tmp_path) if line.name == name).present
