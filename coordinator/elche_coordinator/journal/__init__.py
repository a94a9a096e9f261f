"""The journal of each job: what happened to it, what the core said to that, and what it refused; kept to be replayed.

`entries` says what is kept of an event, `journals` keeps the newest within bounds (`weights` counts the bytes),
`coding` writes and reads them as JSON, and `replaying` gives one to a fresh core. `elche_coordinator.journal_files`
writes those of jobs that did not succeed to disk.
"""
