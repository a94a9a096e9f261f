"""The tables of the coordinator's database."""

import sqlalchemy as sa

metadata = sa.MetaData()
jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("record", sa.Text, nullable=False),
    sa.Column("spec", sa.Text),
    sa.Column("source", sa.String),
)
sources = sa.Table(
    "sources",
    metadata,
    sa.Column("hash", sa.String, primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
)
"""The texts of users' files, each once; `jobs.source` names them."""
store = sa.Table(
    "store",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("secret", sa.LargeBinary, nullable=False),
)
tape = sa.Table(
    "tape",
    metadata,
    sa.Column("last", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("entries", sa.LargeBinary, nullable=False),
    sa.Column("written_at", sa.Float),
)
states = sa.Table(
    "states",
    metadata,
    sa.Column("last", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("code", sa.String, nullable=False),
    sa.Column("state", sa.LargeBinary, nullable=False),
    sa.Column("written_at", sa.Float),
)
parts = sa.Table(
    "parts",
    metadata,
    sa.Column("job", sa.String, primary_key=True),
    sa.Column("state", sa.LargeBinary, nullable=False),
)
"""Of the saved state, what each job has to itself."""
tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("hash", sa.String, nullable=False, unique=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("made_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("made_by", sa.String, nullable=False),
)
bundles = sa.Table(
    "bundles",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
"""Packed folders of user code, in parts, where several coordinators share a database."""
