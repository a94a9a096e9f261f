"""Notices of clouds that a machine will be taken away, by local stand-ins for their metadata services."""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from elche_worker.agent.notices import CLOUDS, watch
from support.real_processes import eventually

DEEP = b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 60_000
"""An answer of lists within lists."""


class Metadata(BaseHTTPRequestHandler):
    """The three services, as their documentation says; `is_noticed` is of the server, and `raw` answers instead."""

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
        self._answer("a-token")

    def do_GET(self) -> None:
        is_noticed = self.server.is_noticed
        if self.server.raw:
            self.wfile.write(self.server.raw)
            return
        match self.path:
            case "/latest/meta-data/spot/instance-action" if self.headers["X-aws-ec2-metadata-token"] == "a-token":
                action = {"action": "terminate", "time": "2026-01-01T00:00:00Z"}
                self._answer(json.dumps(action) if is_noticed else "", 200 if is_noticed else 404)
            case "/computeMetadata/v1/instance/preempted" if self.headers["Metadata-Flavor"] == "Google":
                self._answer("TRUE" if is_noticed else "FALSE")
            case "/metadata/scheduledevents?api-version=2020-07-01" if self.headers["Metadata"] == "true":
                event = {"EventType": "Preempt" if is_noticed else "Reboot", "Resources": ["vm"]}
                self._answer(json.dumps({"DocumentIncarnation": 1, "Events": [event]}))
            case _:
                self._answer("", 403)

    def _answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def metadata(*, is_noticed: bool = False) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.is_noticed, server.raw = is_noticed, b""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("is_noticed", [True, False])
def test_what_each_cloud_says(cloud: str, is_noticed: bool) -> None:
    with metadata(is_noticed=is_noticed) as server:
        assert CLOUDS[cloud].is_noticed(address(server)) is is_noticed


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_comes_while_it_is_watched(cloud: str) -> None:
    left = threading.Event()
    with metadata() as server:
        watch(cloud, left.set, address=address(server), every_s=0.02)
        assert not left.wait(0.2)
        server.is_noticed = True
        assert left.wait(400)


@pytest.mark.parametrize("raw", [b"220 mail\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[", DEEP])
def test_a_service_whose_answer_is_none_is_asked_again(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The thread ended with a traceback, and the host did not leave when it was to be taken away."""
    left = threading.Event()
    with caplog.at_level(logging.WARNING), metadata(is_noticed=True) as server:
        server.raw = raw
        watch("azure", left.set, address=address(server), every_s=0.02)
        eventually(lambda: caplog.records, "it is told")
        server.raw = b""
        assert left.wait(400)


def test_a_service_that_does_not_answer_is_told_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    left = threading.Event()
    with caplog.at_level(logging.WARNING), metadata() as server:
        there = address(server)
        server.shutdown()
        server.server_close()
        watch("gcp", left.set, address=there, every_s=0.02)
        eventually(lambda: caplog.records, "it is told")
        assert not left.wait(0.2)
        assert len([record for record in caplog.records if "does not say if" in record.message]) == 1
