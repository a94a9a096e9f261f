"""Durable data: the tape, saved states, files of users, and the database."""
