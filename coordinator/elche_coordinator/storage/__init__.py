"""Durable data: the tape, saved states, files of users, and the database.

An event goes to the `tape`, whose `writer` puts it into the database (`store`, `sql`) with the changed `job_rows`. Now
and then the tape begins anew, with the core's state (`snapshots`, read by `unpickling`). Users' files: `sources`, and
`bundles` for folders.
"""
