"""`python -m elche_coordinator` is `elche-coordinator`."""

from elche_coordinator.main import main

main()
