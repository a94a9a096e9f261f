"""A rank's log has a limit: its end is kept, and whoever writes goes on."""

import os
from pathlib import Path

import pytest

from elche_client.transport.rank_output import RankLines
from elche_worker.process import log_times
from elche_worker.process.log_times import NO_STAMP, TimesReader, TimesWriter, times_path
from elche_worker.process.rank_files import RankFiles
from elche_worker.rank.spawner import open_log, shorten_log


def test_a_log_that_is_too_long_keeps_its_end_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in range(10_000):
        os.write(log, b"line %d\n" % number)
    shorten_log(str(path), max_bytes=200_000, kept_bytes=1000)
    assert path.stat().st_size > 80_000, "it is within its limit"
    shorten_log(str(path), max_bytes=50_000, kept_bytes=1000)
    os.write(log, b"the next line\n")
    first, second, *_, last_but_one, last = path.read_text().splitlines()
    assert first == "[the log was longer than 0 MiB: only its end is kept]"
    assert second.startswith("line 99")
    assert (last_but_one, last) == ("line 9999", "the next line")
    assert path.stat().st_size < 1200
    os.close(log)


def test_a_log_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    shorten_log(str(tmp_path / "rank-0.log"))


def test_each_line_gets_the_time_at_which_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a second; of what was there before, none."""
    path, now_s = tmp_path / "rank-0.log", [0.0]
    monkeypatch.setattr(log_times.time, "time", lambda: now_s[0])
    path.write_text("before\n")
    with path.open("ab") as log:
        stream = open_log(log.fileno(), TimesWriter(str(path)))
        for at_s, text in ((1000.0, "one\ntwo"), (1000.5, " goes on\n"), (2000.0, "10 %\r20 %\n\nlast")):
            now_s[0] = at_s
            stream.write(text)
    data, reader = path.read_bytes(), TimesReader(path, RankFiles())
    parts = [reader.stamped(0, data[:15]), reader.stamped(15, data[15:])]
    lines = list(RankLines().add(0, b"".join(parts) + b"\n"))
    assert [line.text for line in lines] == ["before", "one", "two goes on", "20 %", "", "last"]
    times = [line.at.timestamp() if line.at else None for line in lines]
    assert times == [None, 1000.0, 1000.0, 2000.0, 2000.0, 2000.0]
    shorten_log(str(path), max_bytes=1, kept_bytes=10)
    assert times_path(path).stat().st_size == 0
    assert reader.stamped(len(data), b" of it\nagain\n") == b" of it\n" + NO_STAMP + b" again\n"


def test_lines_get_the_time_of_a_clock_that_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they had the last time before that until the clock had caught up, such as for an hour."""
    path, now_s = tmp_path / "rank-0.log", [0.0]
    monkeypatch.setattr(log_times.time, "time", lambda: now_s[0])
    with path.open("ab") as log:
        stream = open_log(log.fileno(), TimesWriter(str(path)))
        for now_s[0] in (4600.0, 1000.0, 1001.0):
            stream.write("line\n")
    stamped = TimesReader(path, RankFiles()).stamped(0, path.read_bytes())
    times = [line.at.timestamp() for line in RankLines().add(0, stamped) if line.at]
    assert times == [4600.0, 1000.0, 1001.0]


def test_times_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    times_path(tmp_path / "rank-0.log").write_text("no number\n")
    assert TimesReader(tmp_path / "rank-0.log", RankFiles()).stamped(0, b"text") == NO_STAMP + b" text"
