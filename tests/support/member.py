"""A member of a gloo group in a process of its own: python member.py PORT POSITION SIZE HOW.

It has the first round of generation 1 and enters the second, in which it stops itself (HOW "stop") or is killed
("kill") after the header, so that the others wait for its values.
"""

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from elche_worker.collectives.header import AveragingOptions, Row
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.collectives.reduction import Reduction
from elche_worker.model.layout import Layout
from support.solo import JOB


def main(port: int, position: int, size: int, how: str) -> None:
    store = dist.TCPStore("127.0.0.1", port)
    cpu = torch.device("cpu")
    group = ProcessGroupCollectives(
        store, backend="gloo", attempt=1, generation=1, position=position, size=size, peer="127.0.0.1:1", device=cpu
    )
    model: Any = JOB.model()
    optimizer: Any = JOB.optimizer(model)
    layout = Layout(model, [optimizer])
    reduction = Reduction(layout, AveragingOptions())
    end = signal.SIGSTOP if how == "stop" else signal.SIGKILL
    for round_id in (1, 2):
        layout.place(cpu)
        layout.gather()
        if round_id == 2:
            group.all_reduce = lambda tensor: os.kill(os.getpid(), end)  # type: ignore[method-assign]
        reduction.run(group, Row(1, 1, round_id, layout.hash, 7 * (round_id - 1), 1, 0, 0, 0, round_id - 1))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
