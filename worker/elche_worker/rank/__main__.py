"""`python -m elche_worker.rank [--compiles-later] SOCKET` is what agents start: what ranks are forked from."""

import sys

from elche_worker.rank.spawner import serve

if __name__ == "__main__":
    agent, *how = reversed(sys.argv[1:])
    del sys.argv[1:]  # what a job's file finds there is as without elche
    serve(int(agent), compiles_later=bool(how))
