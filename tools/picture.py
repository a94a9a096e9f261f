"""Makes docs/running.svg: the live view of a real run of the digits example, caught in its third epoch."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from elche_client import Client, JobView
from elche_client.display.panel import job_panel

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 104


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        coordinator = start("elche_coordinator", "--listen", "127.0.0.1:0", "--http", "off", "--data", folder)
        assert coordinator.stdout is not None
        address = coordinator.stdout.readline().decode().split()[-1]
        agent = start("elche_worker.agent", "--coordinator", address, "--devices", "cpu,cpu", "--work-dir", folder)
        try:
            view = view_of_third_epoch(address)
        finally:
            agent.terminate()
            coordinator.terminate()
            agent.wait()
            coordinator.wait()
    console = Console(record=True, width=WIDTH, force_terminal=True)
    console.print("[bold]$[/] elche run examples/digits.py --ranks 2 --slow 1=2.3")
    console.print(job_panel(view, width=WIDTH))
    picture = console.export_svg(title="elche")
    without_web_fonts = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    (ROOT / "docs" / "running.svg").write_text(without_web_fonts)


def start(module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def view_of_third_epoch(address: str) -> JobView:
    with Client(address) as client:
        job = client.submit(ROOT / "examples" / "digits.py", num_ranks=2, slow_factors={1: 2.3})
        for event in job.watch():
            if isinstance(event, JobView) and event.epoch == 2 and is_telling(event):
                job.cancel()
                return event
    sys.exit("the job ended before its third epoch")


def is_telling(view: JobView) -> bool:
    """True if the view shows ranks in the middle of a round in the middle of an epoch."""
    in_round = all(rank.state == "training" and rank.round_batches > 3 for rank in view.ranks)
    return in_round and view.epoch_committed > 0.4 * view.dataset_size


if __name__ == "__main__":
    main()
