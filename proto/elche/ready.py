"""The settings in the message that a rank sends when it is ready; both sides read and write it here."""

from typing import Any

from elche.mapping import from_message, prepare_to_message, to_message
from elche.settings import AgreedSettings
from elche.v1 import rank_pb2

MAX_TENSORS = 1 << 14
"""Tensors of a model that is described to the coordinator; of one with more it knows the hash alone."""
MAX_TENSORS_CHARS = 1 << 20
"""Characters of their descriptions. Each rank of a job sends them, and the coordinator has them all for a while."""

prepare_to_message(AgreedSettings, rank_pb2.Ready)


def ready_message(settings: AgreedSettings, **more: Any) -> rank_pb2.Ready:
    """The message of a rank with these settings; `more` are the fields that say what the rank itself is."""
    return to_message(
        settings,
        rank_pb2.Ready,
        checkpoint_every_s=settings.checkpoint_every_s,
        more_is_better=settings.more_is_better,
        **more,
    )


def settings_of(ready: rank_pb2.Ready) -> AgreedSettings:
    """What the rank has loaded."""
    return from_message(
        ready,
        AgreedSettings,
        checkpoint_every_minutes=ready.checkpoint_every_s / 60 or None,
        mode="max" if ready.more_is_better else "min",
    )
