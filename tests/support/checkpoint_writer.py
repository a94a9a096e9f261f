"""Writes checkpoints into a folder, forever, or one where there is no space: `checkpoint_writer.py FOLDER [full]`."""

import resource
import signal
import sys

import torch

from elche_worker.model.checkpoint import About, CheckpointData, CheckpointTarget

ABOUT = About(job="job", file_name="train.py", source="job = 1")
MOST_BYTES = 100_000
"""Of a file, where there is no space."""


def main(folder: str, is_full: bool) -> None:
    kept = CheckpointData({"weight": torch.arange(60_000.0).reshape(3, -1)}, {"buffers": {}, "rank": 0})
    target = CheckpointTarget(folder)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            target.write("1-00000002", kept, ABOUT, {"attempt": 1, "version": 2})
        except OSError as error:
            print(error)
        return
    number = 0
    while True:
        number += 1
        target.write(f"1-{number:08d}", kept, ABOUT, {"attempt": 1, "version": number})
        target.keep_only([f"1-{one:08d}" for one in (number - 1, number)])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["full"])
