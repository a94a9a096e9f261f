"""The texts of users' files go into a table of their own, each once; jobs name theirs by its hash. Saved states are in
parts.
"""

import hashlib
import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Moves the texts, job by job; leaves damaged records unchanged."""
    op.add_column("jobs", sa.Column("source", sa.String))
    sources = op.create_table(
        "sources",
        sa.Column("hash", sa.String, primary_key=True),
        sa.Column("text", sa.Text, nullable=False),
    )
    op.create_table(
        "parts",
        sa.Column("job", sa.String, primary_key=True),
        sa.Column("state", sa.LargeBinary, nullable=False),
    )
    connection = op.get_bind()
    update = sa.text("UPDATE jobs SET record = :record, spec = :spec, source = :source WHERE id = :id")
    known = set()
    for job_id in connection.execute(sa.text("SELECT id FROM jobs")).scalars().all():
        row = connection.execute(sa.text("SELECT record, spec FROM jobs WHERE id = :id"), {"id": job_id}).one()
        try:
            record = json.loads(row.record)
            spec = record.pop("spec") if row.spec is None else json.loads(row.spec)
            source = str(spec.pop("source"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        name = hashlib.sha256(source.encode()).hexdigest() if source else ""
        if name and name not in known:
            known.add(name)
            connection.execute(sources.insert().values(hash=name, text=source))
        spec["source_hash"] = name
        values = {"record": json.dumps(record), "spec": json.dumps(spec), "source": name or None, "id": job_id}
        connection.execute(update, values)
