"""Makes docs/pictures/page.png: the coordinator's page in Chromium, with two real jobs that are compared.

python tests/system/page_picture.py        # two minutes
"""

import argparse
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, it does not find `support` by itself

from elche_client import Client
from support.prometheus import ROOT
from support.real_processes import Mark, agent, coordinator

DIGITS = ROOT / "examples" / "digits.py"
SIZE = {"width": 1280, "height": 1600}


def draw(url: str, other: str, out: Path) -> None:
    """Opens a job's page, compares it with another job, and writes the picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]  # a dict, as its documentation shows
        page.goto(url)
        page.get_by_label("Compare with").select_option(other)
        page.get_by_text(f"“other”: {other}").wait_for()
        page.wait_for_timeout(1000)  # the charts' lines are drawn in the frames after that
        page.screenshot(path=out)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "page.png")
    out, mark = parser.parse_args().out, Mark()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            coordinator(mark, folder) as one,
            agent(mark, folder, one.address, devices="cpu,cpu", env={"OMP_NUM_THREADS": "1"}),
            Client(one.address, token="") as client,
        ):
            jobs = [client.submit(DIGITS, num_ranks=2, slow_factors={1: slow}, epochs=6) for slow in (1.5, 3.0)]
            for job in jobs:
                job.result()
            draw(f"{one.page_url}/#job={jobs[1].id}", jobs[0].id, out)
    mark.assert_none_left()


if __name__ == "__main__":
    main()
