"""Conversations with agents, ranks and clients.

`streams` numbers messages and keeps them until they are received, `send_queue` holds those of one connection, and
`presence` decides when one that is away is lost. `watchers` distributes reports. `agents` and `transfers` ask hosts for
files.
"""
