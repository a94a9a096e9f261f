"""`python -m elche_worker.rank [--compiles-later] SOCKET`: the spawner, which agents start and fork ranks from."""

import sys

from elche_worker.process.ending import end
from elche_worker.rank.spawner import serve

if __name__ == "__main__":
    agent, *how = reversed(sys.argv[1:])
    del sys.argv[1:]  # a job's file must not see the spawner's arguments
    serve(int(agent), compiles_later=bool(how))
    end(0)  # Python's own way takes 0.2 s of processor, in which it destroys each module of torch
