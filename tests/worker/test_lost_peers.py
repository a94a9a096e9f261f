"""Errors of a collective in a loop of the user's own: whose they are, and what they are told as."""

import pytest

from elche.errors import Misuse, PeerLost
from elche_worker.collectives.world import lost_peers_named
from support.nccl import words


def raised(text: str) -> BaseException:
    with pytest.raises((Misuse, PeerLost, RuntimeError)) as caught, lost_peers_named():
        raise RuntimeError(text)
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
        "NCCL error in: NCCLUtils.cpp:93, remote process exited or there was a network error",
        "words that no table has",
    ],
)
def test_another_ranks_end_is_told_as_such(text: str) -> None:
    assert isinstance(error := raised(text), PeerLost)
    assert text in str(error)


@pytest.mark.parametrize("text", ["CUDA error: unspecified launch failure", "CUDA error: out of memory"])
def test_the_own_devices_error_stays(text: str) -> None:
    error = raised(text)
    assert type(error) is RuntimeError
    assert str(error) == text


def test_two_ranks_on_one_gpu_are_told_what_to_do() -> None:
    """Each rank got: another one has ended, and its own error says why."""
    error = raised(words.duplicate(1, 0, "60"))
    assert isinstance(error, Misuse)
    assert "init_process_group('gloo')" in str(error)
