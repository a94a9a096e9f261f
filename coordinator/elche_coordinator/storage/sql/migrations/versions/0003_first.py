"""The oldest tables that are brought to the present ones; new databases begin with the newest revision."""

revision = "0003"
down_revision = None


def upgrade() -> None:
    """Nothing comes before these tables."""
