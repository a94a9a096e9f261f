"""The coordinator's page in a real browser: what a stranger sees, does and waits for."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from elche.network import user_at_host
from elche.v1 import agent_pb2
from elche_client import Client
from elche_client.client import JobHandle
from support.fakes import fake_agent
from support.fleets import SLOWLY, UNHURRIED
from support.real_processes import Cluster, Coordinator, Mark, agent, coordinator, eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

LINEAR = Path(__file__).resolve().parents[1] / "processes" / "jobs" / "linear.py"
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


expect.set_options(timeout=400_000)  # milliseconds: a hang, as in support.real_processes


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
        context.set_default_timeout(400_000)
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
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in small, and unhurried: the browser beside it has the processors for itself."""
    text = DIGITS.read_text(encoding="utf-8")
    for wanted, instead in (("NUM_COPIES = 20", "NUM_COPIES = 2"), ("WIDTH = 48", "WIDTH = 4")):
        assert wanted in text
        text = text.replace(wanted, instead)
    path = tmp_path_factory.mktemp("digits") / "digits.py"
    path.write_text(text + UNHURRIED, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def job(cluster: Cluster, digits: Path) -> Iterator[JobHandle]:
    """A job that trains for as long as the tests want."""
    handle = cluster.client.submit(digits, num_ranks=2, slow_factors={1: 3.0}, epochs=2000)
    yield handle
    handle.cancel()


@pytest.fixture(autouse=True)
def jobs_end_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Also those of a test that failed: they would slow down all others."""
    names = {"cluster", "other_cluster"} & set(request.fixturenames)
    clients = [request.getfixturevalue(name).client for name in names]
    before = {view.job_id for client in clients for view in client.jobs()}
    yield
    for client in clients:
        for view in client.jobs():
            if view.job_id not in before and not view.state.has_ended:
                client.cancel(view.job_id)


OFF_SCREEN = """() => {
  const scrolls = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const style = getComputedStyle(one);
      const can_scroll = one !== document.documentElement && /auto|scroll/.test(style.overflowX);
      if (can_scroll && one.scrollWidth > one.clientWidth) return true;
    }
    return false;
  };
  const off = [];
  const kinds = "button, input, select, a, h2, h3, h4, p, dd, dt, td, figure, figcaption, li, pre";
  for (const element of document.querySelectorAll(kinds)) {
    if (!element.checkVisibility() || element.closest(".unseen")) continue;
    const box = element.getBoundingClientRect();
    const is_cut = box.width && (box.left < -1 || box.right > innerWidth + 1);
    const is_hidden = scrolls(element) && element.tagName !== "PRE";
    if (is_cut || is_hidden) off.push(`${element.tagName} ${element.textContent.slice(0, 40)}`);
  }
  return off;
}"""


def looks_right(page: Page, width: int) -> None:
    """Nothing is cut, off the screen, hard to read or without a name, and no figure is none."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OFF_SCREEN) == []
    assert page.evaluate(CONTRAST) == []
    text = page.inner_text("body")
    for nothing in ("undefined", "NaN", "null", "Infinity", "[object"):
        assert nothing not in text
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, select, input:not([hidden])')]"
        ".filter((one) => one.checkVisibility() && !one.textContent.trim() && !one.labels?.length && !one.ariaLabel)"
        ".length"
    )
    assert nameless == 0


LYING = (
    "<img src=x onerror='window.lied = 1'><script>window.lied = 1</script>",
    "\x1b[2J\r\n",
    "p" * 1000,
    "__proto__",
    "turned \u202e",
)
"""What a host may say of itself, its devices and its problem."""


@pytest.mark.parametrize("width", [390, 1300])
def test_hosts_and_jobs_with_strange_names_change_nothing_else_on_the_page(
    width: int, tmp_path: Path, open_page: Callable[..., Page]
) -> None:
    """A problem in one long word made the page ten thousand pixels wide, and a character that turns writing around
    turned the numbers after it.
    """
    mark = Mark()
    with coordinator(mark, tmp_path) as one, grpc.insecure_channel(one.address) as channel, ExitStack() as stack:
        for text in LYING:
            liar = stack.enter_context(fake_agent(channel, host=text[:255], **{text[:60]: text[:60]}))
            fitness = agent_pb2.HostFitness(problem=text)
            liar.outgoing.put(agent_pb2.AttendRequest(host_fitness=fitness))
        with Client(one.address, token="") as client:
            (path := tmp_path / "job.py").write_text("job = 1")
            jobs = [client.submit(path, num_ranks=99, conditions=(f"zone={text[:190]}",)) for text in LYING]
            page = open_page(f"{one.page_url}/#hosts", width)
            for text in ("<img", "ppp", "__proto__", "turned"):
                expect(page.locator("#hosts")).to_contain_text(f"it can start no ranks: {text}")
            assert "\u202e" not in page.inner_text("#hosts")
            looks_right(page, width)
            for job in jobs:
                page.goto(f"{one.page_url}/#job={job.id}")
                expect(page.locator("#name")).to_have_text(job.id)
                looks_right(page, width)
            assert page.evaluate("[window.lied, document.querySelectorAll('img, script:not([src])').length]") == [
                None,
                0,
            ]
            page.close()  # before the coordinator ends
            for job in jobs:
                job.cancel()
    mark.assert_none_left()


def test_a_stranger_finds_the_answers(
    cluster: Cluster, job: JobHandle, digits: Path, open_page: Callable[..., Page]
) -> None:
    page = open_page(cluster.coordinator.page_url)
    answers = page.locator("#answers")
    expect(answers).to_contain_text(re.compile(r"rank 1.* times as fast"))
    expect(answers).to_contain_text("of the time")
    expect(answers).to_contain_text(re.compile(r"in \d+ "))
    expect(page.locator("#name")).to_have_text(job.id)
    expect(page.locator("#ranks tbody tr")).to_have_count(2)
    expect(page.locator("#ranks tr.slowest")).to_contain_text("1")
    expect(page.locator("#running canvas")).to_have_count(5)
    expect(page.locator("#events")).to_contain_text("training")
    expect(page.locator("#about")).to_contain_text(f"elche submit {digits} --ranks 2 --slow 1=3 --epochs 2000")
    expect(page.locator("#about")).to_contain_text(user_at_host())
    expect(page.locator("#settings")).to_contain_text("batch_size64")
    expect(page.locator("#cluster")).to_contain_text("1 of 1 job training · 2 of 2 slots busy")


def test_the_users_own_figures_are_drawn_as_they_are_wanted(
    cluster: Cluster, job: JobHandle, open_page: Callable[..., Page]
) -> None:
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}")
    learning = page.locator("#learning figure")
    expect(learning).to_have_count(3)
    assert [one.inner_text() for one in page.locator("#learning figcaption").all()] == [
        "Loss",
        "accuracy",
        "Learning rate",
    ]
    expect(learning.nth(1)).to_contain_text("evaluation")
    before = page.evaluate("plots.map((one) => one.plot.scales.x.max)")
    assert min(before) > 1e9  # seconds since 1970
    page.get_by_label("Over").select_option("epoch")
    _until(page, "plots.every((one) => one.plot.scales.x.max < 2001)")
    page.get_by_label("Over").select_option("step")
    loss = "plots.find((one) => one.figure.textContent.startsWith('Loss')).plot"
    _until(page, f"{loss}.scales.x.max === mine.moments.step.at(-1)")
    page.get_by_label("Log scale").check()
    _until(page, "plots.filter((one) => one.plot.scales.y.distr === 3).length === 3")
    jumps = (
        f"{loss}.data[1].filter((value) => value != null)"
        ".reduce((sum, value, i, all) => sum + Math.abs(value - (all[i - 1] ?? value)), 0)"
    )
    page.get_by_label("Log scale").uncheck()
    rough = page.evaluate(jumps)
    page.get_by_label("Smooth").fill("0.95")
    assert page.evaluate(jumps) < rough


def test_two_jobs_are_laid_over_each_other(cluster: Cluster, job: JobHandle, open_page: Callable[..., Page]) -> None:
    other = cluster.client.submit(DIGITS, num_ranks=1)  # it waits: the slots are taken
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}")
    page.get_by_label("Compare with").select_option(other.id, timeout=60_000)
    expect(page.locator("#compared")).to_have_text(f"{other.id} has no figures.")
    page.goto(f"{cluster.coordinator.page_url}/#job={other.id}")
    expect(page.locator("#state")).to_contain_text("queued")
    expect(page.locator("#learning")).to_contain_text("No figures yet.")
    page.get_by_label("Compare with").select_option(job.id)
    expect(page.locator("#compared")).to_contain_text(f"Dashed, and “other”: {job.id}, which is training.")
    expect(page.locator("#learning")).to_contain_text("training, other")
    rows = page.locator("#differences tr").all_inner_texts()
    assert rows[0].split() == ["Setting", other.id, job.id]
    assert "ranks\t1\t2" in rows
    # a rank that is lost for a while has no line meanwhile, and one single figure a time, not midnight
    ranks = "plots.flatMap(({plot}) => plot.series.filter((one) => /^rank/.test(one.label)).map((one) => one.spanGaps))"
    page.goto(f"{cluster.coordinator.page_url}/#job={job.id}")
    expect(page.locator("#running")).to_contain_text("rank 1")
    assert set(page.evaluate(ranks)) == {False}
    assert page.evaluate("x_range({data: [[1000], [7]]}, 1000, 87400)") == [999, 1001]
    assert page.locator("#about .command span").all_inner_texts()[:2] == ["elche", "submit"]
    other.cancel()


def test_what_happened_is_found_by_its_time(cluster: Cluster, job: JobHandle, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}")
    first = page.locator("#events li").last
    expect(first).to_contain_text(re.compile("starting|training"))  # a start within a second is not seen
    at = first.locator("time").inner_text()
    page.fill("#filter", at)
    expect(page.locator("#events li time").first).to_have_text(at)
    page.fill("#filter", "no such thing")
    expect(page.locator("#events li")).to_have_count(0)


def test_changes_of_the_anchor_are_listed_when_they_are_searched_for(
    cluster: Cluster, job: JobHandle, open_page: Callable[..., Page]
) -> None:
    """They came every second or two, and pushed everything else out of sight."""
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}")
    expect(page.locator("#events li")).not_to_have_count(0)
    page.evaluate("take_events([{at: Date.now() / 1000, kind: 'pacing', text: 'anchor 1 → 2 batches'}])")
    expect(page.locator("#events li.pacing")).to_have_count(0)
    page.fill("#filter", "anchor 1 → 2")
    expect(page.locator("#events li.pacing").last).to_have_text(re.compile("anchor 1 → 2 batches"))


def test_it_is_worked_by_keyboard_alone(cluster: Cluster, job: JobHandle, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}")
    expect(page.locator("#ranks tbody tr")).to_have_count(2)
    pause = page.get_by_role("button", name="Pause")
    expect(pause).to_be_enabled()
    pause.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_contain_text("paused")
    page.keyboard.press("Enter")  # the same button says "Go on" now, and has kept the focus
    expect(page.locator("#state")).to_contain_text("training")
    page.get_by_role("button", name="Checkpoint").press("Enter")
    expect(page.locator("#checkpoints")).to_contain_text("batch ")
    page.get_by_role("button", name="Log of rank 1").press("Enter")
    expect(page.locator("#log-text")).not_to_have_text("…")
    page.keyboard.press("Escape")
    expect(page.locator("#log")).not_to_be_visible()
    page.get_by_role("link", name="Hosts").press("Enter")
    page.get_by_role("button", name="Drain", exact=False).press("Enter")
    expect(page.locator("#hosts")).to_contain_text("drained")
    page.get_by_role("button", name="Use", exact=False).press("Enter")
    expect(page.locator("#hosts")).not_to_contain_text("drained")
    page.get_by_role("link", name=f"{job.id}, rank 0").press("Enter")
    expect(page.locator("#name")).to_have_text(job.id)


def test_a_job_gets_fewer_ranks_and_more(cluster: Cluster, job: JobHandle, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}")
    row = page.locator("#ranks tbody tr").last
    expect(row).to_contain_text("training")
    page.get_by_role("button", name="Fewer ranks").click()
    expect(page.locator("#actions")).to_contain_text("1 wanted")
    expect(row).not_to_contain_text("training")
    expect(page.get_by_role("button", name="Fewer ranks")).to_be_disabled()
    page.get_by_role("button", name="More ranks").click()
    expect(page.locator("#actions")).to_contain_text("2 wanted")
    expect(row).to_contain_text("training")


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (390, "dark"), (390, "light"), (1300, "dark")])
def test_it_is_readable_on_every_screen(
    cluster: Cluster, job: JobHandle, open_page: Callable[..., Page], width: int, scheme: str
) -> None:
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}", width, color_scheme=scheme)
    expect(page.locator("#ranks tbody tr")).to_have_count(2)
    expect(page.locator("#learning figure")).to_have_count(3)
    page.locator("#settings-box summary").click()
    looks_right(page, width)
    page.goto(f"{cluster.coordinator.page_url}/#hosts")
    expect(page.locator("#hosts")).to_contain_text("agent-1")
    looks_right(page, width)


def test_a_button_that_is_pressed_stays_until_it_is_released(crowd_url: str, open_page: Callable[..., Page]) -> None:
    """The page draws its buttons anew at each update, two in a second: one click in five was lost."""
    page = open_page(f"{crowd_url}/#job=job-0")
    page.evaluate("globalThis.clicks = 0")
    caught = "document.addEventListener('click', (click) => { clicks += 1; click.stopPropagation(); }, true)"
    page.evaluate(caught)  # what the buttons do is another test's
    pressed = [page.locator("#actions").get_by_role("button", name="Pause"), page.locator("#ranks button").first]
    for number, button in enumerate(pressed, start=1):
        # None if it is drawn anew at this moment.
        box = eventually(button.bounding_box, "it is there")
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.down()
        updates = num_updates(page)
        eventually(lambda updates=updates: num_updates(page) > updates + 2, "it is updated meanwhile")
        old = button.element_handle()
        page.mouse.up()
        assert page.evaluate("clicks") == number
        eventually(lambda old=old: not old.evaluate("old => old.isConnected"), "then it is drawn anew")


def num_updates(page: Page) -> int:
    return int(page.locator("html").get_attribute("data-updates") or 0)


def test_a_job_is_cancelled_only_after_a_yes(cluster: Cluster, open_page: Callable[..., Page]) -> None:
    job = cluster.client.submit(DIGITS, num_ranks=2, epochs=2000)
    page = open_page(f"{cluster.coordinator.page_url}/#job={job.id}")
    cancel = page.locator("#actions").get_by_role("button", name="Cancel")
    expect(cancel).to_be_enabled()
    cancel.click()
    page.locator("#sure").get_by_role("button", name="No").click()
    expect(page.locator("#sure")).not_to_be_visible()
    cancel.click()
    page.locator("#sure").get_by_role("button", name="Yes").click()
    expect(page.locator("#state")).to_contain_text("cancelled")
    expect(page.locator("#outcome")).to_contain_text("Cancelled")
    expect(cancel).to_have_count(0)


@pytest.fixture(scope="module")
def other_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One whose slots are free."""
    mark, folder = Mark(), tmp_path_factory.mktemp("other")
    with (
        coordinator(mark, folder) as one,
        agent(mark, folder, one.address, devices="cpu,cpu") as other,
        Client(one.address, token="") as client,
    ):
        yield Cluster(one, other, client, mark)
    mark.assert_none_left()


def test_a_failed_job_leads_with_its_error_and_goes_on(
    other_cluster: Cluster, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    text = LINEAR.read_text(encoding="utf-8").replace(
        "    x, y, index = batch\n",
        "    x, y, index = batch\n"
        "    if os.environ['ELCHE_RANK'] == '1' and Path(__file__).with_suffix('.break').exists():\n"
        "        print('on shard 17')\n"
        "        raise ValueError('three channels')\n",
    )
    (tmp_path / "broken.py").write_text(text + SLOWLY)
    job = other_cluster.client.submit(tmp_path / "broken.py", num_ranks=2, epochs=5000, checkpoint_every_epochs=1)
    page = open_page(f"{other_cluster.coordinator.page_url}/#job={job.id}")
    expect(page.locator("#checkpoints")).to_contain_text("epoch 1")
    (tmp_path / "broken.break").touch()
    outcome = page.locator("#outcome")
    expect(outcome).to_contain_text("Failed on rank 1")
    expect(outcome).to_contain_text("ValueError: three channels")
    expect(outcome.locator("pre").first).to_contain_text("in train_step")
    expect(outcome.locator("pre").last).to_contain_text("on shard 17")
    expect(outcome.locator("pre").last).not_to_contain_text("has failed")
    expect(page.locator("#ranks tr.failed")).to_contain_text("failed")
    tops = page.evaluate("['outcome', 'answers'].map((id) => document.getElementById(id).getBoundingClientRect().top)")
    assert tops == sorted(tops)
    told = page.locator("#events li.error").all_inner_texts()
    assert len(told) == 1, told
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        looks_right(page, width)
    (tmp_path / "broken.break").unlink()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#name")).not_to_have_text(job.id)
    expect(page.locator("#state")).to_contain_text("training")
    expect(page.locator("#about")).to_contain_text("Resumed from")
    page.get_by_role("button", name="Cancel").click()
    page.locator("#sure").get_by_role("button", name="Yes").click()
    expect(page.locator("#state")).to_contain_text("cancelled")


def test_a_finished_job_shows_its_best_and_gives_its_model(
    other_cluster: Cluster, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    settings = {"epochs": 2, "monitor": "mse", "checkpoint_every_epochs": 1}
    file = tmp_path / "linear.py"  # it writes beside itself
    file.write_text(LINEAR.read_text(encoding="utf-8"))
    job = other_cluster.client.submit(file, num_ranks=1, **settings)
    job.result()
    page = open_page(f"{other_cluster.coordinator.page_url}/#job={job.id}")
    outcome = page.locator("#outcome")
    expect(outcome).to_contain_text("Succeeded")
    expect(outcome).to_contain_text(re.compile(r"Best mse.*after epoch \d", re.DOTALL))
    expect(outcome).to_contain_text("model.safetensors")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download model").click()
    assert waiting.value.suggested_filename == f"{job.id}.safetensors"
    wanted = other_cluster.client.download(job.id, tmp_path / "model").read_bytes()
    assert Path(waiting.value.path()).read_bytes() == wanted
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Journal").click()
    assert waiting.value.suggested_filename == f"{job.id}.journal.jsonl"
    assert "JobSubmitted" in Path(waiting.value.path()).read_text(encoding="utf-8")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        looks_right(page, width)


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
    expect(page.locator("#nothing")).to_contain_text("No job yet.")
    assert not any("correct" in url for url in urls)
    page.get_by_role("button", name="Log out").click()
    expect(page.locator("#door")).to_be_visible()
    page.reload()
    expect(page.locator("#door")).to_be_visible()


def test_it_says_when_the_coordinator_is_gone_and_comes_back_by_itself(
    tmp_path: Path, open_page: Callable[..., Page], browser: Browser
) -> None:
    mark = Mark()
    with coordinator(mark, tmp_path) as one:
        context = browser.new_context()
        page = context.new_page()  # its console may show the lost connection
        page.goto(one.page_url)
        expect(page.locator("#nothing")).to_contain_text("No job yet.")
        one.process.kill()
        expect(page.locator("#connection")).to_contain_text("does not answer")
        context.close()
    mark.assert_none_left()


@pytest.fixture(scope="module")
def crowd_url() -> Iterator[str]:
    """The page over a made-up crowd."""
    crowd = [sys.executable, str(Path(__file__).parent / "crowd.py")]
    with subprocess.Popen(crowd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def test_with_a_thousand_ranks_it_stays_quick(crowd_url: str, open_page: Callable[..., Page]) -> None:
    """What is drawn is bounded and goes on changing. How long it takes is the machine's, and is printed (`-s`)."""
    started_s = time.monotonic()
    page = open_page(f"{crowd_url}/#job=job-0")
    expect(page.locator("#ranks tbody tr")).to_have_count(100)
    first_paint_s = time.monotonic() - started_s
    expect(page.locator("html")).to_have_attribute("data-updates", re.compile(r"^([5-9]|\d\d)$"))
    update_ms = float(page.evaluate("document.documentElement.dataset.updateMs"))
    print(f"first paint {first_paint_s:.2f} s, update {update_ms:.0f} ms")


@pytest.mark.parametrize("width", [1280, 1440, 390])
@pytest.mark.parametrize("address", ["#job=job-0", "#job=past-0", "#job=past-1", "#hosts"])
def test_a_crowd_fits_on_every_screen(crowd_url: str, open_page: Callable[..., Page], width: int, address: str) -> None:
    page = open_page(f"{crowd_url}/{address}", width)
    shown = "#hosts .host" if address == "#hosts" else "#ranks tbody tr"
    expect(page.locator(shown).first).to_be_visible()
    looks_right(page, width)


def test_a_rank_that_stands_still_is_said_to(crowd_url: str, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{crowd_url}/#job=job-1")
    expect(page.locator("#answers")).to_contain_text("rank 9 has stalled")
    expect(page.locator("#answers")).to_contain_text("not known")
    row = page.locator("#ranks tr.stalled")
    expect(row).to_contain_text("stalled")
    expect(row).not_to_contain_text("samples/s")


def test_a_job_without_figures_shows_none(crowd_url: str, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{crowd_url}/#job=past-1")
    expect(page.locator("#ranks")).to_contain_text("No figures of its ranks were saved.")
    expect(page.locator("#answers")).not_to_contain_text("0.0 %")


def test_a_long_list_is_searched_and_turned(crowd_url: str, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{crowd_url}/#job=job-0")
    jobs = page.locator("#jobs li")
    expect(jobs).to_have_count(25)
    page.get_by_role("button", name="Older").press("Enter")
    expect(page.locator("#jobs-pager")).to_contain_text("2 of 5")
    page.get_by_label("State").select_option("failed")
    expect(jobs).to_have_count(10)
    page.get_by_label("Find a job").fill("past-2")
    expect(jobs).to_have_count(1)
    expect(jobs).to_contain_text("past-20")
    expect(page.locator("#name")).to_have_text("job-0")
    page.get_by_role("link", name="Hosts").click()
    expect(page.locator("#hosts > li")).to_have_count(25)
    page.get_by_label("Find a host").fill("a-host-with")
    expect(page.locator("#hosts > li")).to_have_count(3)
    expect(page.get_by_role("button", name="Drain a-host-with", exact=False)).to_have_count(3)
    names = {one.get_attribute("aria-label") for one in page.locator("#hosts button").all()}
    assert len(names) == 3


def test_many_metrics_are_few_charts_until_they_are_wanted(crowd_url: str, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{crowd_url}/#job=job-0")
    expect(page.locator("#learning figure")).to_have_count(12)
    page.get_by_role("button", name="Show all 64 charts").click()
    expect(page.locator("#learning figure")).to_have_count(64)


def _until(page: Page, expression: str) -> None:
    """Waits until a JavaScript expression is true on the page.

    Playwright's own `wait_for_function` evaluates its text again inside the page, which the page's policy forbids.
    """
    eventually(lambda: page.evaluate(expression), expression)
