"""Where the script of a submitted loop is written that was sent without its folder."""

from pathlib import Path

from elche_worker.rank.script import _written
from elche_worker.session.launch import Launch


def written(output: Path, job_id: str, source: str) -> Path:
    launch = Launch(
        coordinator="",
        secret="",
        job_id=job_id,
        rank=0,
        device="cpu",
        label="cpu",
        source=source,
        file_name="/home/anna/loop.py",
        output_dir=str(output),
        is_loop=True,
    )
    return Path(_written(launch))


def test_the_script_overwrites_neither_the_users_files_nor_another_jobs_script(tmp_path: Path) -> None:
    """It was written to OUTPUT_DIR/script/NAME, where a user's own file was replaced."""
    own = tmp_path / "script" / "loop.py"
    own.parent.mkdir()
    own.write_text("own")
    first, second = written(tmp_path, "loop-1", "first"), written(tmp_path, "loop-2", "second")
    assert [one.read_text() for one in (own, first, second)] == ["own", "first", "second"]
    assert first.name == "loop.py"
