"""`python -m elche_coordinator.planning`: plans a job for `elche plan`, which does not import the coordinator.

Standard input has a `PlanRequest` as JSON; standard output gets the `Plan`. An error is one line on standard error,
with exit code 2.
"""

import json
import sys
from dataclasses import asdict

from elche.errors import ElcheError
from elche.plan import PlanRequest
from elche_coordinator.simulator.planned import plan


def main() -> int:
    """Returns the exit code."""
    request = PlanRequest.of(json.load(sys.stdin))
    try:
        planned = plan(request)
    except (ElcheError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 2
    json.dump(asdict(planned), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
