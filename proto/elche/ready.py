"""Conversion of a rank's settings to and from its `Ready` message, for both sides."""

from typing import Any

from elche.mapping import from_message, prepare_to_message, to_message
from elche.settings import AgreedSettings
from elche.v1 import rank_pb2

MAX_TENSORS = 1 << 14
"""Most tensors of a model that is described to the coordinator; of a larger one it gets only the hash."""
MAX_TENSORS_CHARS = 1 << 20
"""Most characters of their descriptions, since the coordinator holds those of all ranks of a job for a while."""

prepare_to_message(AgreedSettings, rank_pb2.Ready)


def ready_message(settings: AgreedSettings, **more: Any) -> rank_pb2.Ready:
    """The message of a rank with these settings; `more` are the fields about the rank itself."""
    return to_message(
        settings,
        rank_pb2.Ready,
        checkpoint_every_s=settings.checkpoint_every_s,
        more_is_better=settings.more_is_better,
        **more,
    )


def settings_of(ready: rank_pb2.Ready) -> AgreedSettings:
    """The rank's settings in the message."""
    return from_message(
        ready,
        AgreedSettings,
        checkpoint_every_minutes=ready.checkpoint_every_s / 60 or None,
        mode="max" if ready.more_is_better else "min",
    )
