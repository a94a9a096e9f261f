"""A rank's log has a limit: its end is kept, and whoever writes goes on."""

import os
from pathlib import Path

from elche_worker.rank.spawner import shorten_log


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
