"""A coordinator whose clock is wrong: `ELCHE_TEST_CLOCK_S` seconds ahead."""

import os
import sys
import time

_right = time.time
time.time = lambda: _right() + float(os.environ["ELCHE_TEST_CLOCK_S"])

from elche_coordinator.main import main  # noqa: E402

sys.exit(main())
