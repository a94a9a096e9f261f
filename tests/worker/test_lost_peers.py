"""Errors of a collective in a loop of the user's own: whose they are, and what they are told as."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elche.errors import Misuse, PeerLost
from elche.torchrun import environment_of_rank, free_port
from elche_worker.collectives import meeting
from elche_worker.collectives.world import lost_peers_named
from elche_worker.process import alive, parent
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


HOLDS = """
import sys
from elche_worker.process.alive import show_alive
show_alive(sys.argv[1], "job-1", 1)
print(flush=True)
sys.stdin.read()
"""


def test_a_submitted_rank_sees_one_that_has_exited_before_its_first_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for half an hour: an agent does not tell, as `elche run` does, which ranks have exited."""
    for name, value in environment_of_rank(0, ("cpu", "cpu"), free_port(), {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "LIMIT_S", 0.2)
    monkeypatch.setattr(alive, "_held", [])
    monkeypatch.setattr(alive, "_files", [])
    alive.show_alive(str(tmp_path), "job-1", 0)
    other = subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(Misuse, match="rank 1 has not come in"):
        meeting.Meeting().next()
    other.communicate()
    with pytest.raises(Misuse, match="rank 1 has exited without it; every rank has to set up as many"):
        meeting.Meeting().next()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_in_its_first_setup_hears_of_one_that_has_exited(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a rank returned before it, the other waited in silence, for half an hour or without end."""
    for name, value in environment_of_rank(rank, ("cpu", "cpu"), free_port(), {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "NOTICE_S", -1.0)
    monkeypatch.setattr(meeting, "LIMIT_S", 0.2)
    with pytest.raises(Misuse, match=f"number 1 in this script: rank {1 - rank} has not come in"):
        meeting.Meeting().next()
    assert f"rank {rank} waits in Trainer.setup for rank {1 - rank}\n" in capsys.readouterr().err
    reads, writes = os.pipe()
    os.write(writes, f"{1 - rank}\n".encode())
    os.close(writes)
    monkeypatch.setattr(parent, "_inputs", [reads])
    monkeypatch.setattr(parent, "_received", bytearray())
    with pytest.raises(Misuse, match=f"rank {1 - rank} has exited without it; every rank has to set up as many"):
        meeting.Meeting().next()
    os.close(reads)
