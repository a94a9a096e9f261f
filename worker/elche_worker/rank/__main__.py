"""`python -m elche_worker.rank SOCKET` is what agents start: the process that ranks are forked from."""

import sys

from elche_worker.rank.spawner import serve

if __name__ == "__main__":
    serve(int(sys.argv.pop()))  # what a job's file finds there is as without elche
