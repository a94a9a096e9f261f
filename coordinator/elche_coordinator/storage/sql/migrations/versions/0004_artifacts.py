"""Records of what the artifact store has of jobs that have ended."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds an empty table: before it, there was no artifact store."""
    op.create_table(
        "artifacts",
        sa.Column("job", sa.String, primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
    )
