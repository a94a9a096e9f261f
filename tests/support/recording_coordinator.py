"""A coordinator that keeps some messages of each kind that it gets and sends, as `python -m` this file.

They are the corpus of tests/fuzz: a line for each message in the file that MESSAGES names, as JSON with its method, its
direction, the kind of message where the stream has several, and its bytes in base64.
"""

import json
import os
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from elche_coordinator.services import validation

FILE = Path(os.environ["MESSAGES"])
MAX_OF_A_KIND = 3
MAX_BYTES = 3000


class RecordingInterceptor(validation.ValidationInterceptor):
    """Notes what it lets pass."""

    kept: ClassVar[Counter[tuple[str, str, str]]] = Counter()

    async def intercept_service(self, continuation: Callable[..., Any], handler_call_details: Any) -> Any:
        handler = await super().intercept_service(continuation, handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)

        def deserialize(data: bytes) -> Any:
            message = handler.request_deserializer(data)
            self.keep(method, "request", message, data)
            return message

        def serialize(message: Any) -> bytes:
            data = bytes(handler.response_serializer(message))
            self.keep(method, "response", message, data)
            return data

        return handler._replace(request_deserializer=deserialize, response_serializer=serialize)

    def keep(self, method: str, way: str, message: Any, data: bytes) -> None:
        names = [one.name for one in getattr(message, "DESCRIPTOR", None).oneofs] if data else []
        kind = (message.WhichOneof(names[0]) if names and not names[0].startswith("_") else "") or ""
        self.kept[method, way, kind] += 1
        if self.kept[method, way, kind] <= MAX_OF_A_KIND and len(data) <= MAX_BYTES:
            row = {"method": method, "way": way, "kind": kind, "data": b64encode(data).decode()}
            with FILE.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    from elche_coordinator import daemon, main

    daemon.ValidationInterceptor = RecordingInterceptor  # type: ignore[misc]
    main.main()
