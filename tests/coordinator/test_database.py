"""A database of each earlier schema is brought to the present one with what it contains."""

import hashlib
import json
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import op
from alembic.config import Config
from alembic.script import ScriptDirectory

import elche_coordinator.storage.sql.migrations
from elche.token import Role
from elche_coordinator.access.tokens import IssuedTokens
from elche_coordinator.config import CannotStart
from elche_coordinator.config import Config as CoordinatorConfig
from elche_coordinator.lifecycle.backup import restore
from elche_coordinator.lifecycle.leadership import Leadership
from elche_coordinator.lifecycle.standby import DATABASE, loading, open_store
from elche_coordinator.storage.sql.database import OLDEST, REVISION, metadata
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import BadStore, DamagedStore, JobRow, SavedState
from elche_coordinator.storage.tape import BACKED_UP

SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.sql"))


def columns(path: Path) -> dict[str, set[str]]:
    found = sa.inspect(sa.create_engine(f"sqlite:///{path}"))
    return {table: {column["name"] for column in found.get_columns(table)} for table in found.get_table_names()}


def add_job(old: sqlite3.Connection) -> None:
    """A job as coordinators of that time wrote it."""
    name = hashlib.sha256(b"text").hexdigest()
    row = (json.dumps({"submitted_at": 3.0}), json.dumps({"name": "old", "source_hash": name}), name)
    old.execute("INSERT INTO jobs (id, record, spec, source) VALUES ('job', ?, ?, ?)", row)
    old.execute("INSERT INTO sources (hash, text) VALUES (?, 'text')", [name])


def test_the_newest_migration_is_the_one_that_is_expected() -> None:
    config = Config()
    config.set_main_option("script_location", elche_coordinator.storage.sql.migrations.__path__[0])
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [REVISION]
    earlier = {one.revision for one in scripts.walk_revisions()} - {REVISION}
    assert {path.stem for path in SCHEMAS} == earlier, "each earlier schema has a file here"
    assert min(earlier) == OLDEST


@pytest.mark.parametrize("dump", SCHEMAS, ids=lambda path: path.stem)
def test_an_earlier_schema(dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "elche.sqlite"
    with sqlite3.connect(path) as old:
        old.executescript(dump.read_text(encoding="utf-8"))
        add_job(old)
    store = SqlStore.in_file(path)
    new = {table.name: {column.name for column in table.columns} for table in metadata.sorted_tables}
    assert columns(path) == new | {"alembic_version": {"version_num"}}
    (row,) = store.load_rows()
    assert row == store.load_row("job")
    assert json.loads(row.record)["submitted_at"] == 3.0
    assert row.spec is not None
    found = json.loads(row.spec)
    assert store.load_source(str(found.pop("source_hash"))) == "text"
    assert found == {"name": "old"}
    store.write([], last=7, entries=b"a piece")
    assert store.load_state().pieces == [b"a piece"]
    assert store.identity().id == "the-store"
    assert [one.name for one in IssuedTokens(store).all()] == ["ada"]
    SqlStore.in_file(path)  # once more changes nothing
    assert store.load_state().pieces == [b"a piece"]


@pytest.mark.parametrize("dump", SCHEMAS, ids=lambda path: path.stem)
def test_a_migration_that_is_cut_short_leaves_the_database_as_it_was(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "elche.sqlite"
    with sqlite3.connect(path) as old:
        old.executescript(dump.read_text(encoding="utf-8"))
        add_job(old)
    before, create = columns(path), op.create_table
    with monkeypatch.context() as patch:
        patch.setattr(op, "create_table", lambda name, *rest: 1 / 0 if name == "artifacts" else create(name, *rest))
        with pytest.raises(ZeroDivisionError):
            SqlStore.in_file(path)
    assert columns(path) == before
    assert json.loads(SqlStore.in_file(path).load_row("job").record)["submitted_at"] == 3.0


@pytest.mark.parametrize(
    ("revision", "why"),
    [
        ("9999", r"newer version \(9999; this one knows .*\): start that"),
        ("0002", r"a version before the first release \(0002\): begin with another folder"),
    ],
)
def test_a_database_of_another_time_is_refused_and_left_as_it_is(revision: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "elche.sqlite"
    SqlStore.in_file(path).close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE alembic_version SET version_num = ?", [revision])
    before = path.read_bytes()
    with pytest.raises(BadStore, match=why):
        SqlStore.in_file(path)
    assert path.read_bytes() == before


TABLES = ("alembic_version", *metadata.tables)


@pytest.mark.parametrize("table", TABLES)
def test_a_database_that_lacks_a_table_is_refused_and_left_as_it_is(table: str, tmp_path: Path) -> None:
    """One without jobs was given a new table, and started without them."""
    path = tmp_path / "elche.sqlite"
    SqlStore.in_file(path).close()
    with sqlite3.connect(path) as database:
        database.execute(f"DROP TABLE {table}")
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(DamagedStore, match=rf"elche.sqlite is damaged \(it lacks the table {table}\): put back a"):
            SqlStore.in_file(path)
    assert path.read_bytes() == before


def test_a_database_that_lacks_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "elche.sqlite"
    SqlStore.in_file(path).close()
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE tape RENAME COLUMN written_at TO writtem_at")
    with pytest.raises(DamagedStore, match=r"it lacks tape\.written_at"):
        SqlStore.in_file(path)


def test_a_page_that_is_lost_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "elche.sqlite"
    store = SqlStore.in_file(path)
    store.write([JobRow(f"job-{number}", "x" * 1000) for number in range(100)])
    store.close()
    content = path.read_bytes()
    last = len(content) - 4096
    path.write_bytes(content[:last] + bytes(4096))
    with pytest.raises(DamagedStore, match="is damaged"):
        SqlStore.in_file(path)
    path.write_bytes(content[: last - 2048])
    with pytest.raises(DamagedStore, match=r"is damaged \(database disk image is malformed\)"):
        SqlStore.in_file(path)


def test_a_token_with_a_role_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "elche.sqlite"
    store = SqlStore.in_file(path)
    IssuedTokens(store).make("ada", Role.USER, expires_s=0, made_by="")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE tokens SET role = 'king'")
    with pytest.raises(DamagedStore, match="a token has an unknown role: 'king'"):
        IssuedTokens(store)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("db.lab/elche", "--store is not a URL, such as postgresql://elche@db/elche"),
        ("postgresql://elche@db:port/elche", "--store is not a URL, such as postgresql://elche@db/elche"),
        ("mysql://db.lab/elche", "--store names mysql, and only postgresql:// can be shared"),
        ("sqlite:///x", "--store names sqlite, and only postgresql:// can be shared"),
        ("postgresql:///elche?host=a&host=b&port=1&port=2", "--store: Can't mix 'multihost' formats"),
        ("postgresql:///elche?host=a,b&port=1,2,3", "--store: "),
    ],
)
def test_a_store_that_is_none(url: str, message: str) -> None:
    with pytest.raises(BadStore, match=message):
        SqlStore.at(url)


@pytest.mark.parametrize("option", ["hots=db1", "sslmode=on"])
def test_options_that_are_none_are_not_waited_for(option: str) -> None:
    store = SqlStore.at(f"postgresql://elche@/elche?{option}")
    with pytest.raises(BadStore, match=r"the database .* cannot be used"):
        Leadership(store, "one", lambda reason: None).await_turn(threading.Event())


def test_how_long_nobody_has_written(tmp_path: Path) -> None:
    """That time counts for the jobs; a clock that went back does not make it negative."""
    path = tmp_path / "elche.sqlite"
    store, began_s = SqlStore.in_file(path), time.monotonic()
    store.write([], last=1, entries=b"one", saved=SavedState(1, "code", b"state"))
    assert store.load_state().age_s <= time.monotonic() - began_s + 1  # of whole seconds
    with sqlite3.connect(path) as database:
        database.execute("UPDATE tape SET written_at = written_at - 100")
        database.execute("UPDATE states SET written_at = written_at - 200")
    assert 99 <= store.load_state().age_s <= 100 + time.monotonic() - began_s + 1
    with sqlite3.connect(path) as database:
        database.execute("UPDATE tape SET written_at = written_at + 500")
    assert store.load_state().age_s == 0.0


def test_what_the_artifact_store_has_is_kept_as_long_as_its_job(tmp_path: Path) -> None:
    store = SqlStore.in_file(tmp_path / "elche.sqlite")
    store.write([JobRow(id="job", record="{}")])
    for record in ("one", "two"):
        store.save_artifacts("job", record)
    store.save_artifacts("nobody's", "one")
    assert store.load_artifacts() == {"job": "two"}
    store.write([], forgotten=["job"])
    assert store.load_artifacts() == {}


def test_a_database_that_may_not_be_written_is_not_called_damaged(tmp_path: Path) -> None:
    """The advice was to move it away and begin anew, without its jobs."""
    store = SqlStore.in_file(tmp_path / "elche.sqlite")
    store.prepare()
    store.close()
    store = SqlStore.in_file(tmp_path / "elche.sqlite")
    sa.event.listen(store._engine, "connect", lambda connection, _: connection.execute("PRAGMA query_only = ON"))
    with pytest.raises(CannotStart, match="cannot be used: attempt to write a readonly database"), loading(store):
        store.drop_tape()


@pytest.mark.parametrize(("mode", "is_said"), [(0o777, True), (0o770, False)])
def test_a_folder_to_which_every_user_may_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_said: bool
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    open_store(CoordinatorConfig(listen="127.0.0.1:0", http=None, data=data, keep_jobs=1))
    assert (f"every user may write to {data}, and replace the database" in caplog.text) == is_said


@pytest.mark.parametrize("ran_on", [True, False])
def test_a_restored_coordinator_gives_no_process_a_number_of_one_that_may_still_run(
    tmp_path: Path, ran_on: bool
) -> None:
    """A rank of the coordinator that ran on after its backup has a secret of its job, number and incarnation, and was
    taken for the one that the restored coordinator had started.
    """
    (tmp_path / "backup").mkdir()
    store = SqlStore.in_file(tmp_path / "backup" / DATABASE)
    store.write([JobRow("job", json.dumps({"incarnation": 7})), JobRow("damaged", "no JSON")])
    store.close()
    with closing(sqlite3.connect(tmp_path / "backup" / DATABASE)) as database:
        row = [BACKED_UP if ran_on else "as it is", b""]
        database.execute("INSERT INTO states (last, code, state) VALUES (1, ?, ?)", row)
        database.commit()
    began = time.time_ns() // 1_000_000
    restore(tmp_path / "backup", tmp_path / "data")
    with sqlite3.connect(tmp_path / "data" / DATABASE) as database:
        records = dict(database.execute("SELECT id, record FROM jobs"))
    found = json.loads(records["job"])["incarnation"]
    assert found >= began if ran_on else found == 7
    assert records["damaged"] == "no JSON"
