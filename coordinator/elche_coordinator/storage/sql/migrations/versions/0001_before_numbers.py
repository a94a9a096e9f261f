"""Adds what databases from before numbered migrations may lack."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Adds the column `spec` of jobs, and the tables of identity, tape, states and tokens."""
    found = sa.inspect(op.get_bind())
    tables = found.get_table_names()
    if "spec" not in {column["name"] for column in found.get_columns("jobs")}:
        op.add_column("jobs", sa.Column("spec", sa.Text))
    if "store" not in tables:
        op.create_table(
            "store",
            sa.Column("id", sa.String, primary_key=True),
            sa.Column("secret", sa.LargeBinary, nullable=False),
        )
    if "tape" not in tables:
        op.create_table(
            "tape",
            sa.Column("last", sa.Integer, primary_key=True),
            sa.Column("entries", sa.LargeBinary, nullable=False),
        )
    if "states" not in tables:
        op.create_table(
            "states",
            sa.Column("last", sa.Integer, primary_key=True),
            sa.Column("code", sa.String, nullable=False),
            sa.Column("state", sa.LargeBinary, nullable=False),
        )
    if "tokens" not in tables:
        op.create_table(
            "tokens",
            sa.Column("id", sa.String, primary_key=True),
            sa.Column("hash", sa.String, nullable=False, unique=True),
            sa.Column("name", sa.String, nullable=False),
            sa.Column("role", sa.String, nullable=False),
            sa.Column("made_at", sa.Float, nullable=False),
            sa.Column("expires_at", sa.Float, nullable=False),
            sa.Column("made_by", sa.String, nullable=False),
        )
