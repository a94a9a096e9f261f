"""The corpus of tests/fuzz: messages and files of a small real run, by `tests/fuzz/make_corpus.py`."""

import json
from base64 import b64decode
from binascii import crc32
from functools import cache
from pathlib import Path
from struct import calcsize
from typing import Any

from google.protobuf.message import Message

from elche.v1 import access_pb2, agent_pb2, averaging_pb2, bundle_pb2, job_pb2, rank_pb2, store_pb2
from elche_audit.rank_file import CRC, HEAD, LAYOUTS

FOLDER = Path(__file__).parent.parent / "fuzz" / "corpus"
RUN = FOLDER / "run"
SERVICES = {
    service.full_name: (module, service)
    for module in (access_pb2, agent_pb2, averaging_pb2, bundle_pb2, job_pb2, rank_pb2, store_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}
METHODS = {f"/{name}/{method.name}": method for name, (_, service) in SERVICES.items() for method in service.methods}
"""Each method of each service, by the path of its calls."""


@cache
def _rows() -> tuple[dict[str, str], ...]:
    lines = (FOLDER / "messages.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(map(json.loads, lines))


@cache
def messages(method: str, way: str = "request") -> tuple[Message, ...]:
    """Messages of a method, such as "RankService/Converse"; an empty one where the run had none."""
    path = f"/elche.v1.{method}"
    descriptor = METHODS[path].input_type if way == "request" else METHODS[path].output_type
    kind = _message_class(descriptor)
    found = [kind.FromString(b64decode(row["data"])) for row in _rows() if (row["method"], row["way"]) == (path, way)]
    return tuple(found) or (kind(),)


def _message_class(descriptor: Any) -> Any:
    module = next(one for one, _ in SERVICES.values() if one.DESCRIPTOR.name == descriptor.file.name)
    return getattr(module, descriptor.name)


def file_of_run(pattern: str) -> Path:
    """The first file of the run whose path matches."""
    return sorted(RUN.glob(pattern))[0]


RANK_FILES = tuple(path.read_bytes() for path in sorted(RUN.glob("audit/*/*.bin")))
"""What ranks have written for the auditor."""
JOB = file_of_run("audit/*").name
CHECKPOINT = file_of_run("checkpoints/*/*")
MANIFEST: dict[str, Any] = json.loads((CHECKPOINT / "manifest.json").read_text())
RECORD: dict[str, Any] = json.loads((RUN / "record.json").read_text())
COMMAND: dict[str, Any] = json.loads((RUN / "run.json").read_text())
LEFT = {
    "job_id": "job-1", "rank": 0, "incarnation": 1, "secret": "abc.def", "store": "s", "num_sent": 3, "num_heard": 2,
    "messages": ["CAE=", "EgIIAQ=="], "round": 5, "draft": "/work/.stopped.x",
}  # fmt: skip
"""A record of a stopped rank."""


def resealed(data: bytes) -> bytes:
    """The file of a rank with right lengths and checksums, as an attacker would write it."""
    if len(data) < HEAD.size + CRC.size or (end := data.find(b"}", HEAD.size)) < 0:
        return data
    magic, version, flags, _ = HEAD.unpack_from(data)
    start = data[HEAD.size : end + 1]
    found = HEAD.pack(magic, version, flags, len(start)) + start
    crc = crc32(found)
    found, at = found + CRC.pack(crc), end + 1 + CRC.size
    while at < len(data) and (layout := LAYOUTS.get(data[at])) and at + 1 + calcsize(layout) <= len(data):
        record = data[at : at + 1 + calcsize(layout)]
        crc = crc32(record, crc)
        found, at = found + record + CRC.pack(crc), at + len(record) + CRC.size
    return found


def with_start(text: str) -> bytes:
    """The file of a rank that begins with this, and is as it was otherwise."""
    magic, version, flags, length = HEAD.unpack_from(RANK_FILES[0])
    start = text.encode("utf-8", "surrogatepass")
    head = HEAD.pack(magic, version, flags, len(start)) + start
    return resealed(head + RANK_FILES[0][HEAD.size + length :])


START = json.loads(RANK_FILES[0][HEAD.size : RANK_FILES[0].index(b"}") + 1])
