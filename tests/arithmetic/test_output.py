"""Output that takes any text."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from elche.formatting import last_words
from elche.output import add_flush, notice, outlive_readers, take_any_text, use_empty_input


def test_what_the_terminals_encoding_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arrow that a rank printed ended its training."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    take_any_text()
    print("loss \u2192 caf\u00e9", flush=True)
    assert raw.getvalue().decode("latin-1") == "loss ? caf\u00e9\n"


def test_a_log_has_its_own_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    take_any_text(encoding="utf-8")
    print("\u2192 \ud800", flush=True)
    assert raw.getvalue() == "\u2192 \\ud800\n".encode()


def test_a_stream_that_cannot_be_changed_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    take_any_text()
    assert sys.stdout is closed


def pipe_without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("opened", [pipe_without_reader, full_disk])
def test_what_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch, opened: Callable[[], int]) -> None:
    """`elche run train.py | head` ended the training, without a word."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, os.fdopen(opened(), "w"))
    told: list[str] = []
    outlive_readers(told.append)
    for stream in (sys.stdout, sys.stderr, sys.stdout):
        print("epoch 1", file=stream)
    assert len(told) == 1
    assert told[0].startswith("standard output cannot be written (")


@pytest.mark.parametrize("opened", [pipe_without_reader, full_disk, lambda: None])
def test_a_notice_ends_nothing(monkeypatch: pytest.MonkeyPatch, opened: Callable[[], int | None]) -> None:
    """A loop with `2> >(head -1)` ended with the second line that elche said."""
    descriptor = opened()
    stream = None if descriptor is None else io.TextIOWrapper(io.FileIO(descriptor, "w"), write_through=True)
    monkeypatch.setattr(sys, "stderr", stream)
    notice("the coordinator does not answer")
    if stream is not None:
        with pytest.raises(OSError):  # as without `notice`
            print("epoch 1", file=stream)


def test_a_notice_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of a loop lost the coordinator, and their two lines were one."""
    raw = Pieces()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
    notice("training goes on")
    assert list(filter(None, raw.written)) == [b"elche: training goes on\n"]


class Pieces(io.BytesIO):
    """What is written, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> int:
        self.written.append(bytes(data))
        return len(data)


def test_the_last_words_of_a_process_are_no_frame_around_them() -> None:
    """typer and rich draw one, and its lower edge was shown as the reason of a failure."""
    boxed = [
        "\u256d\u2500 Error \u2500\u256e",
        "\u2502 No such option: --lrr    \u2502",
        "\u2570\u2500\u2500\u2500\u256f",
        "",
    ]
    assert last_words(boxed) == "No such option: --lrr"
    assert last_words(["[rank1]: ValueError: [rank] - on purpose "]) == "ValueError: [rank] - on purpose"
    assert not last_words([" \u2500 "])


def test_what_libraries_print_as_a_process_ends_is_not_its_reason() -> None:
    """A script that kept its own process group was told to have failed by that group's end."""
    reason = "elche.errors.Misuse: the model is in DistributedDataParallel"
    parting = [
        "terminate called without an active exception",
        "[rank0]:[W1130 08:11:50.123456789 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called",
        "/usr/lib/python3.13/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There seem to be",
        "  warnings.warn('resource_tracker: There appear to be %d leaked semaphore objects",
    ]
    for words in parting:
        assert last_words([f"[rank0]: {reason}", words]) == reason
    assert last_words([f"[rank0]: {reason}", *parting]) == reason
    assert last_words(parting[:1]) == parting[0]
    fatal = "[F1130 08:11:50.123456789 context.cpp:12] Check failed: it is broken"
    assert last_words(["epoch 3", fatal, parting[0]]) == fatal


class WritesTwice:
    """What scripts put in the place of `sys.stdout` to have a log, too."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_a_stream_that_only_writes_is_flushed_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended Trainer.setup, whose lines are flushed."""
    monkeypatch.setattr(sys, "stdout", WritesTwice())
    monkeypatch.setattr(sys, "stderr", None)
    add_flush()
    print("trained", flush=True)
    assert sys.stdout.text == "trained\n"  # type: ignore[attr-defined]


def test_a_script_that_reads_standard_input_is_told_that_it_is_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cat data | elche run train.py` said that the data set is empty."""
    monkeypatch.setattr(sys, "stdin", None)
    use_empty_input()
    assert not capsys.readouterr().err
    assert [*sys.stdin] == []
    assert sys.stdin.read() == ""
    assert capsys.readouterr().err.count("elche: standard input is empty for ranks") == 1


def test_an_empty_standard_input_is_no_file_that_nobody_has_closed() -> None:
    code = "from elche.output import use_empty_input; use_empty_input()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, timeout=100)
    assert done.stderr == b""
