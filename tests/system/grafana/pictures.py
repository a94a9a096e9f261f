"""Draws docs/pictures/*.png: a real job on unequal ranks, a real Prometheus, and Grafana's own components.

(cd tests/system/grafana && npm ci) && python tests/system/grafana/pictures.py
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a program, it does not find `support` by itself

from elche_client import Client
from support.prometheus import ROOT, prometheus
from support.real_processes import Mark, agent, coordinator

HERE = Path(__file__).parent
GPT, DIGITS = (ROOT / "examples" / f"{name}.py" for name in ("bytes_gpt", "digits"))


SCRAPE_S = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="how long the job trains before the pictures")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    mark, seconds = Mark(), options.minutes * 60
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, slots = {"ELCHE_EXAMPLE_SIZE": "small", "OMP_NUM_THREADS": "1"}, "cpu,cpu,cpu,cpu"
        with coordinator(mark, folder) as one, agent(mark, folder, one.address, devices=slots, env=small):
            client = Client(one.address, token="")
            with (
                client,
                prometheus(folder, one.page_url.removeprefix("http://").split("/")[0], scrape_s=SCRAPE_S) as server,
            ):
                start_s = time.time()
                settings = {"epochs": int(15 * options.minutes), "max_batch_diff": 60, "checkpoint_every_minutes": 1}
                job = client.submit(GPT, num_ranks=3, slow_factors={1: 1.7, 2: 3.0}, **settings)
                time.sleep(0.3 * seconds)
                other = client.submit(DIGITS, num_ranks=1, epochs=3, name="another")
                time.sleep(0.35 * seconds)
                client.submit(DIGITS, num_ranks=4, name="needs more")
                job.pause()
                time.sleep(0.05 * seconds)
                job.pause(is_paused=False)
                time.sleep(0.3 * seconds)
                for each in client.jobs():
                    print(each.job_id, each.state, each.reason)
                draw(server.url, job.id, start_s - 5, options.out)
                for each in client.jobs():
                    client.cancel(each.job_id)
                for each in (job, other):
                    list(each.watch())
    mark.assert_none_left()


def draw(prometheus_url: str, job: str, start_s: float, out: Path) -> None:
    """Runs draw.mjs over the time since `start_s`."""
    span = ("--from", str(start_s), "--to", str(time.time() - 1), "--scrape", str(SCRAPE_S))
    command = ("node", HERE / "draw.mjs", "--prometheus", prometheus_url, "--job", job, *span, "--out", out)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
