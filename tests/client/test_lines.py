"""What ranks print, as lines: whole, bounded, and never what a rank says of its own end."""

from pathlib import Path
from queue import SimpleQueue

from elche_client.display.progress import printed_text
from elche_client.transport.rank_output import (
    EXIT_NOTE,
    MAX_LINE_CHARS,
    MAX_LINES,
    LogPosition,
    LogTail,
    RankLines,
    RankOutput,
)


def texts(tail: LogTail) -> dict[str, list[str]]:
    """What a tail finds at the end, by rank."""
    return {printed.rank: list(printed.lines) for printed in tail.stop()}


def test_lines_that_come_in_parts_of_several_ranks_stay_whole() -> None:
    lines = RankLines()
    first = [*lines.add(0, b"one\nt"), *lines.add(1, b"other\n"), *lines.add(0, b"wo\n\xc3"), *lines.add(0, b"\xa9")]
    assert [(line.rank, line.text) for line in first] == [(0, "one"), (1, "other"), (0, "two")]
    assert [(line.rank, line.text) for line in lines.rest()] == [(0, "é")]


def test_a_log_is_gone_on_with_at_the_line_that_was_not_whole() -> None:
    at, lines = b"2026-01-31T12:00:00Z ", RankLines()
    assert list(lines.begin(LogPosition(rank=0, log="h:/log", offset=100))) == []
    assert not list(lines.add(0, at + b"cut"))
    long = at + b"x" * 200_000
    texts = [line.text for part in (b" line\n" + at + b"two\n", long, b"yy") for line in lines.add(0, part)]
    assert texts == ["cut line", "two"]
    assert lines.can_go_on
    assert lines.positions() == [LogPosition(rank=0, log="h:/log", offset=100 + len("cut line\ntwo\n"))]
    list(lines.add(0, b"\n"))
    assert lines.positions()[0].offset == 113 + 200_002 + 1
    list(lines.add(1, b"of a host that does not say where"))
    assert not lines.can_go_on


def test_the_last_words_of_a_killed_process_are_not_lost_when_its_rank_writes_another_log() -> None:
    lines = RankLines()
    for log, told in (("one:/log", []), ("one:/log", []), ("two:/log", ["cut"])):
        assert [line.text for line in lines.begin(LogPosition(rank=0, log=log, offset=0))] == told
        assert not list(lines.add(0, b"cut"))


def test_a_progress_bar_is_the_line_that_it_was_last() -> None:
    (line,) = RankLines().add(0, b" 10 %\r 50 %\r100 %\r\n")
    assert line.text == "100 %"


def test_each_ranks_log_is_read_from_where_it_was(tmp_path: Path) -> None:
    queue: SimpleQueue[RankOutput] = SimpleQueue()
    (tmp_path / "rank-0.log").write_text("begins\n")
    tail = LogTail(tmp_path, queue)
    tail.start()
    assert queue.get(timeout=400) == RankOutput(rank="0", lines=("begins",))
    with (tmp_path / "rank-0.log").open("a") as log:
        log.write("goes on\nhas no")
    (tmp_path / "rank-1.log").write_text("also\n")
    found = [queue.get(timeout=400), queue.get(timeout=400)]
    assert {one.rank: one.lines for one in found} == {"0": ("goes on",), "1": ("also",)}
    with (tmp_path / "rank-0.log").open("a") as log:
        log.write(" end")
    assert texts(tail) == {"0": ["has no end"]}


def test_of_more_than_anybody_can_read_the_newest_lines_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    with (tmp_path / "rank-0.log").open("w") as log:
        log.writelines(f"{number} {'x' * 100}\n" for number in range(100_000))
    (printed,) = LogTail(tmp_path, SimpleQueue()).stop()
    assert len(printed.lines) == MAX_LINES
    assert printed.num_dropped == 100_000 - MAX_LINES
    assert printed.lines[-1].startswith("99999 ")
    assert printed_text(printed).splitlines()[0] == "rank 0 | (100 k lines dropped)"


def test_a_log_that_was_shortened_goes_on_in_a_line_of_its_own(tmp_path: Path) -> None:
    """What had been read of a line, and what the log begins with now, were one line."""
    queue: SimpleQueue[RankOutput] = SimpleQueue()
    (tmp_path / "rank-0.log").write_text("begins\nhalf of a li")
    tail = LogTail(tmp_path, queue)
    tail.start()
    assert queue.get(timeout=400).lines == ("begins",)
    (tmp_path / "rank-0.log").write_text("the end\n")
    late = tail.stop()
    read = [queue.get() for _ in range(queue.qsize())]
    assert [line for printed in [*read, *late] for line in printed.lines] == ["half of a li", "the end"]


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("x" * 3_000_000)
    assert texts(LogTail(tmp_path, SimpleQueue())) == {"0": ["x" * MAX_LINE_CHARS]}


def test_what_a_rank_says_of_its_own_end_is_left_to_the_run(tmp_path: Path) -> None:
    traceback = "Traceback (most recent call last):\n  File 'train.py'\n    raise\nValueError: no\n"
    end = f"{EXIT_NOTE.decode()}has failed: {traceback}"
    (tmp_path / "rank-0.log").write_text("prints\n" + end)
    (tmp_path / "rank-1.log").write_text(end)
    (tmp_path / "rank-2.log").write_text("it says elche: this rank leaves\n")
    assert texts(LogTail(tmp_path, SimpleQueue())) == {"0": ["prints"], "2": ["it says elche: this rank leaves"]}


def test_a_line_that_looks_like_an_exit_note_hides_nothing_but_itself(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("elche: this rank is mine\nstill printing\n")
    tail = LogTail(tmp_path, SimpleQueue())
    with (tmp_path / "rank-1.log").open("w") as log:
        log.write(
            f"{EXIT_NOTE.decode()}has failed: Traceback (most recent call last):\n  File 'a.py'\nKeyError: 1\nlater\n"
        )
    assert texts(tail) == {"0": ["still printing"], "1": ["later"]}


def test_what_ranks_print_cannot_steer_the_terminal() -> None:
    printed = RankOutput(rank="0", lines=("\x1b]0;title\x07 red \x1b[31m", "a\tb"))
    assert printed_text(printed) == "rank 0 |  ]0;title  red  [31m\nrank 0 | a   b"
