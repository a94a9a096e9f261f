"""`python -m elche_worker.agent` is `elche-worker`."""

from elche_worker.agent.main import main

main()
