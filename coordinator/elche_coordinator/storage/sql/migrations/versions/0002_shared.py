"""For several coordinators with one database: the times at which the tape was written, and users' folders."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds `written_at` to tape and states, and the table of bundles."""
    op.add_column("tape", sa.Column("written_at", sa.Float))
    op.add_column("states", sa.Column("written_at", sa.Float))
    op.create_table(
        "bundles",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
