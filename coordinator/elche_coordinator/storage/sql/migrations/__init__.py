"""Changes of the database's schema, in order; Alembic applies those that a database lacks."""
