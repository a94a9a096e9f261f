"""A loop that says how many threads its rank may use."""

import os

print("threads", os.environ["OMP_NUM_THREADS"])
if False:
    from elche_worker import Trainer  # noqa: F401 - by which it is known as a loop
