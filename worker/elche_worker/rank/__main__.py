"""`python -m elche_worker.rank` is what agents start."""

from elche_worker.rank.main import main

main()
