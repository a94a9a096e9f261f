"""A loop whose rank 0 ends at once with an error, while rank 1 sleeps."""

import os
import time

if False:
    from elche_worker import Trainer  # noqa: F401 - by which it is known as a loop

time.sleep(600 * int(os.environ["RANK"]))
raise ZeroDivisionError("division by zero")
