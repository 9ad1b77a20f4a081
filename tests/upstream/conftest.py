"""A package index on this machine that serves wheels by byte range, and misbehaves on request."""

from __future__ import annotations

import io
import os
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specmortem import upstream
from specmortem.upstream import index as index_module

Archive = Callable[[zipfile.ZipFile], None]


@dataclass
class LocalIndex:
    """Wheels by name; `status` overrides answers, `hang` delays them, `requests` is (method, path, range)."""

    url: str = ""
    wheels: dict[str, bytes] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    hang: dict[str, float] = field(default_factory=dict)
    ranges: bool = True
    suffix_ranges: bool = True
    password: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def simple(self) -> str:
        return f"{self.url}/simple"

    def add(self, version: str, members: Mapping[str, str], platform: str = "manylinux_2_28_x86_64") -> str:
        def write(archive: zipfile.ZipFile) -> None:
            for name, text in members.items():
                archive.writestr(name, text)

        return self.add_archive(version, write, platform)

    def add_archive(self, version: str, write: Archive, platform: str = "manylinux_2_28_x86_64") -> str:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            write(archive)
        name = f"vllm-{version}-cp38-abi3-{platform}.whl"
        self.wheels[name] = content.getvalue()
        return name

    def wheel_requests(self) -> list[tuple[str, str, str]]:
        return [request for request in self.requests if request[1].startswith("/files/")]


def _handler(index: LocalIndex) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            index.requests.append((self.command, self.path, wanted))
            time.sleep(index.hang.get(self.path, 0))
            if self.path in index.status:
                self._send(index.status[self.path], b"as told")
            elif index.password and "Basic" not in self.headers.get("Authorization", ""):
                self._send(401, b"who are you?")
            elif self.path == "/simple/vllm/":
                self._send(200, self._page(), kind="text/html")
            elif self.path.removeprefix("/files/") in index.wheels:
                self._file(index.wheels[self.path.removeprefix("/files/")], wanted)
            else:
                self._send(404, b"no such thing")

        def _page(self) -> bytes:
            links = (f'<a href="/files/{name}#sha256={"0" * 64}">{name}</a>' for name in index.wheels)
            return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()

        def _file(self, data: bytes, wanted: str) -> None:
            found = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
            if not found or not index.ranges or (not found[1] and not index.suffix_ranges):
                return self._send(200, data)
            first = int(found[1]) if found[1] else max(0, len(data) - int(found[2]))
            last = min(int(found[2]) if found[1] and found[2] else len(data) - 1, len(data) - 1)
            part = data[first : last + 1]
            return self._send(206, part, {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

        def _send(
            self, status: int, body: bytes, headers: Mapping[str, str] | None = None, kind: str = ""
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind or "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


class _Server(ThreadingHTTPServer):
    """Clients may hang up on a body that they did not ask for."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@pytest.fixture
def local_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    """An empty index that pip's settings point to; no other setting of this machine counts."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    index_module._page.cache_clear()  # ports come back
    index = LocalIndex()
    with _Server(("127.0.0.1", 0), _handler(index)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        index.url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("PIP_INDEX_URL", index.simple)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield index
        server.shutdown()


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., upstream.Tree]:
    """Writes files below a folder and resolves it as `tree:DIR`."""

    def make(files: Mapping[str, str], folder: str = "checkout") -> upstream.Tree:
        for name, text in files.items():
            place = tmp_path / folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        return upstream.resolve(f"tree:{tmp_path / folder}")

    return make
