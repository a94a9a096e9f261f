"""The coordinator's page in a real browser: what a stranger sees, does and waits for."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "processes"))

from real_processes import Cluster, Coordinator, Mark, agent, coordinator

from elche_client import Client
from elche_client.client import JobHandle

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
TOKEN = "correct horse battery"
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
CONTRAST = """() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$/.test(color) && color !== "transparent") return color;
    }
    return "rgb(255, 255, 255)";
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const has_text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!has_text || !element.checkVisibility() || element.disabled) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort().reverse();
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${element.tagName} ${element.textContent.slice(0, 30)}`);
  }
  return poor;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=SWITCHES)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; at the end none of them has had an error."""
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error" and "401" not in message.text:
            errors.append(message.text)

    contexts = []

    def open_page(url: str, width: int = 1300, **options: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    mark, folder = Mark(), tmp_path_factory.mktemp("cluster")
    with (
        coordinator(mark, folder) as one,
        agent(mark, folder, one.address, devices="cpu,cpu") as other,
        Client(one.address, token="") as client,
    ):
        yield Cluster(one, other, client, mark)
    mark.assert_none_left()


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> Iterator[JobHandle]:
    """A job that trains for as long as the tests want."""
    handle = cluster.client.submit(DIGITS, num_ranks=2, slow_factors={1: 3.0}, epochs=2000)
    yield handle
    handle.cancel()


def test_a_stranger_finds_the_answers(cluster: Cluster, job: JobHandle, open_page: Callable[..., Page]) -> None:
    page = open_page(cluster.coordinator.page_url)
    answers = page.locator("#answers")
    expect(answers).to_contain_text("rank 1, by ", timeout=60_000)
    expect(answers).to_contain_text("of the time", timeout=60_000)
    expect(answers).to_contain_text(re.compile(r"in \d+ "), timeout=60_000)
    expect(page.locator("#name")).to_have_text(job.id)
    expect(page.locator("#ranks tbody tr")).to_have_count(2)
    expect(page.locator("#ranks tr.slowest")).to_contain_text("1")
    expect(page.locator("#charts canvas")).to_have_count(6)
    expect(page.locator("#events")).to_contain_text("training")
    expect(page.locator("#cluster")).to_contain_text("1 of 1 jobs train · 1 hosts · 2 of 2 slots busy")


def test_what_happened_is_found_by_its_time(cluster: Cluster, job: JobHandle, open_page: Callable[..., Page]) -> None:
    page = open_page(cluster.coordinator.page_url)
    first = page.locator("#events li").last
    expect(first).to_contain_text("starting", timeout=60_000)
    at = first.locator("time").inner_text()
    page.fill("#filter", at)
    expect(page.locator("#events li time").first).to_have_text(at)
    page.fill("#filter", "no such thing")
    expect(page.locator("#events li")).to_have_count(0)


def test_it_is_worked_by_keyboard_alone(cluster: Cluster, job: JobHandle, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}")
    expect(page.locator("#ranks tbody tr")).to_have_count(2, timeout=60_000)
    pause = page.get_by_role("button", name="Pause")
    expect(pause).to_be_enabled(timeout=60_000)
    pause.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_contain_text("paused", timeout=20_000)
    page.keyboard.press("Enter")  # the same button says "Go on" now, and has kept the focus
    expect(page.locator("#state")).to_contain_text("training", timeout=20_000)
    page.get_by_role("button", name="Checkpoint").press("Enter")
    expect(page.locator("#checkpoints")).to_contain_text("version", timeout=30_000)
    page.get_by_role("button", name="Log of rank 1").press("Enter")
    expect(page.locator("#log-text")).not_to_have_text("…", timeout=20_000)
    page.keyboard.press("Escape")
    expect(page.locator("#log")).not_to_be_visible()
    page.get_by_role("button", name="Drain", exact=True).press("Enter")
    expect(page.locator("#hosts")).to_contain_text("drained", timeout=10_000)
    page.get_by_role("button", name="Use", exact=True).press("Enter")
    expect(page.locator("#hosts")).not_to_contain_text("drained", timeout=10_000)


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark"), (390, "light"), (1300, "dark")])
def test_it_is_readable_on_every_screen(
    cluster: Cluster, job: JobHandle, open_page: Callable[..., Page], width: int, scheme: str
) -> None:
    page = open_page(cluster.coordinator.page_url, width, color_scheme=scheme)
    expect(page.locator("#ranks tbody tr")).to_have_count(2, timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input:not([hidden])')]"
        ".filter((one) => one.checkVisibility() && !one.textContent.trim() && !one.labels?.length).length"
    )
    assert nameless == 0


def test_a_job_is_cancelled_only_after_a_yes(cluster: Cluster, open_page: Callable[..., Page]) -> None:
    job = cluster.client.submit(DIGITS, num_ranks=2, epochs=2000)
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}")
    cancel = page.locator("#actions").get_by_role("button", name="Cancel")
    expect(cancel).to_be_enabled(timeout=60_000)
    cancel.click()
    page.locator("#sure").get_by_role("button", name="No").click()
    expect(page.locator("#sure")).not_to_be_visible()
    cancel.click()
    page.locator("#sure").get_by_role("button", name="Yes").click()
    expect(page.locator("#state")).to_contain_text("cancelled", timeout=30_000)
    expect(cancel).to_be_disabled()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Coordinator]:
    mark = Mark()
    with coordinator(mark, tmp_path, env={"ELCHE_TOKEN": TOKEN}) as one:
        yield one
        assert TOKEN not in one.log.read_text()
    mark.assert_none_left()


def test_the_page_asks_for_the_token_and_keeps_it_to_itself(
    guarded: Coordinator, open_page: Callable[..., Page]
) -> None:
    page = open_page(guarded.page_url)
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.fill("#token", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#door-error")).to_contain_text("not the coordinator's token")
    page.fill("#token", TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#hosts")).to_contain_text("No host attends.", timeout=10_000)
    assert not any("correct" in url for url in urls)


def test_it_says_when_the_coordinator_is_gone_and_comes_back_by_itself(
    tmp_path: Path, open_page: Callable[..., Page], browser: Browser
) -> None:
    mark = Mark()
    with coordinator(mark, tmp_path) as one:
        context = browser.new_context()
        page = context.new_page()  # its console may show the lost connection
        page.goto(one.page_url)
        expect(page.locator("#hosts")).to_contain_text("No host attends.", timeout=10_000)
        one.process.kill()
        expect(page.locator("#connection")).to_contain_text("does not answer", timeout=10_000)
        context.close()
    mark.assert_none_left()


def test_with_a_thousand_ranks_it_stays_quick(open_page: Callable[..., Page]) -> None:
    crowd = [sys.executable, str(Path(__file__).parent / "crowd.py")]
    with subprocess.Popen(crowd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()
        started_s = time.monotonic()
        page = open_page(f"{url}/#job=job-0")
        expect(page.locator("#ranks tbody tr")).to_have_count(100, timeout=20_000)
        first_paint_s = time.monotonic() - started_s
        expect(page.locator("html")).to_have_attribute("data-updates", re.compile(r"^([5-9]|\d\d)$"), timeout=20_000)
        update_ms = float(page.evaluate("document.documentElement.dataset.updateMs"))
        print(f"first paint {first_paint_s:.2f} s, update {update_ms:.0f} ms")
        assert first_paint_s < 2.0
        assert update_ms < 200.0
        page.close()
        process.stdin.close()
