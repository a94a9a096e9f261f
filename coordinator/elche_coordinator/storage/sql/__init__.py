"""The store in a SQL database: a file of SQLite, or PostgreSQL. Nothing else imports SQLAlchemy."""
