"""Clouds' notices that this machine will be interrupted, polled from the metadata service every few seconds."""

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import NamedTuple

log = logging.getLogger(__name__)

ASK_EVERY_S = 5.0
"""Seconds between two questions; AWS, which gives 120 s, recommends 5."""
ANSWER_S = 2.0
"""Limit in seconds for the metadata service to answer."""
MAX_BYTES = 64 << 10
"""Most bytes of an answer that are read."""
INVALID = (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError)
"""Errors of a service that does not answer, or of an answer that is none."""
# Without the proxies of the environment: the service answers for the machine that asks, which would be the proxy's.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get(url: str, method: str = "GET", **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=named)
    with _opener.open(request, timeout=ANSWER_S) as response:
        return str(response.read(MAX_BYTES).decode(errors="replace"))


def _aws(base: str) -> bool:
    token = _get(f"{base}/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    try:
        _get(f"{base}/latest/meta-data/spot/instance-action", X_aws_ec2_metadata_token=token)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise
    return True


def _gcp(base: str) -> bool:
    return _get(f"{base}/computeMetadata/v1/instance/preempted", Metadata_Flavor="Google").strip() == "TRUE"


def _azure(base: str) -> bool:
    answer = json.loads(_get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", Metadata="true"))
    return any(event["EventType"] in ("Preempt", "Terminate") for event in answer["Events"])


class Cloud(NamedTuple):
    """The address of a cloud's notices, and the function that reads them."""

    address: str
    is_noticed: Callable[[str], bool]
    """Asks the service at an address; returns True if there is a notice. Raises one of `INVALID`."""


CLOUDS = {
    "aws": Cloud("http://169.254.169.254", _aws),
    "gcp": Cloud("http://metadata.google.internal", _gcp),
    "azure": Cloud("http://169.254.169.254", _azure),
}
"""By name: spot interruption (AWS), preemption (Google Cloud), scheduled events (Azure)."""


def watch(cloud: str, leave: Callable[[], object], *, address: str = "", every_s: float = ASK_EVERY_S) -> None:
    """Calls `leave` on a thread of its own once the cloud gives notice. `address` replaces that of its service."""
    threading.Thread(target=_watch, args=(CLOUDS[cloud], leave, address, every_s), daemon=True).start()


def _watch(cloud: Cloud, leave: Callable[[], object], address: str, every_s: float) -> None:
    base, problem, pause = address or cloud.address, "", threading.Event()
    while True:
        try:
            if cloud.is_noticed(base):
                log.info("the cloud gives notice that this machine will be interrupted")
                leave()
                return
            problem = ""
        except INVALID as error:
            if not problem:
                log.warning("%s does not say if this machine will be interrupted: %s; asking again", base, error)
            problem = str(error) or type(error).__name__
        pause.wait(every_s)
