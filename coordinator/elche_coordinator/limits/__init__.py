"""Bounds on what callers use, of each and of all together, so that no caller can stop the others.

Connections: `open_files`, and `listener` for those of the page that have not said yet what they want. Calls: `budgets`
(what calls in progress use), `receiving` (requests that have not come whole), `releasing` (refused ones), `processor`
(time of the event loop). Streams: `backlog`. Jobs: `open_jobs`; of ended ones, `sharing` chooses whose records go
first.
"""
