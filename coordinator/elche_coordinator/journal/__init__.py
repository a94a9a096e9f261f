"""The journal of each job: the events that reached it, the core's commands and refusals, in a form that can be
replayed.

`entries` reduces an event to what is kept, `journals` keeps the newest entries within bounds (`weights` estimates their
bytes), `coding` converts them to JSON and back, and `replaying` gives a journal's events to a new core.
`elche_coordinator.telemetry.journal_files` writes the journals of jobs that did not succeed to disk.
"""
