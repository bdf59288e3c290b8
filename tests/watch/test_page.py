"""The page in a real browser over a run that trains meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("msgspec")

from playwright.sync_api import sync_playwright

from bessemer.observe.profile import read_trace
from bessemer.run.directory import Run, RunWriter
from bessemer.watch.app import CHARTS, page_file

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.skipif(
        not page_file(CHARTS[0]), reason="the chart library was not fetched when Bessemer was installed"
    ),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
LONG_MS = 240_000
SHOTS = os.environ.get("BESSEMER_SCREENSHOTS")  # a folder to keep pictures in


def python(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def start_run(runs: Path, name: str, steps: int, seconds: float, lr: float = 0.01) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("live_run.py")
    return python(str(script), str(runs), name, str(steps), str(seconds), str(lr))


def start_server(runs: Path, port: int, *options: str) -> subprocess.Popen[bytes]:
    server = python("-m", "bessemer", "watch", str(runs), "--port", str(port), "--no-browser", *options)
    assert server.stdout is not None
    line = server.stdout.readline().decode()
    assert line.startswith("watching"), line + server.stdout.read().decode()
    server.address = next(word for word in line.split() if word.startswith("http"))  # type: ignore[attr-defined]
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run, and one that trains for as long as the tests take."""
    runs = tmp_path_factory.mktemp("page") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(runs.with_name("cache")))
        done = start_run(runs, "done", 60, 0.0, 0.03)
        output, _ = done.communicate()
        assert done.returncode == 0, output.decode()
        live = start_run(runs, "live", 100_000, 0.2)
        give_up = time.monotonic() + 600
        while not any(True for _ in Run(runs / "live").metrics()):
            assert live.poll() is None and time.monotonic() < give_up, live.stdout
            time.sleep(0.2)
        yield runs
        end(live)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def open_page(browser: Any, address: str, **options: Any) -> Any:
    """A page whose errors fail the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 860}, **options)
    page.set_default_timeout(LONG_MS)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    page.goto(address)
    page.wait_for_selector("body[data-ready='1']")
    return page


def until(page: Any, expression: str) -> None:
    """Wait for an expression. Playwright's own wait needs `eval`, which the page's policy forbids."""
    give_up = time.monotonic() + LONG_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < give_up, f"{expression}; {page.problems}"
        page.wait_for_timeout(100)


def shoot(page: Any, name: str) -> None:
    if SHOTS:
        page.wait_for_timeout(1500)
        page.screenshot(path=f"{SHOTS}/{name}.png")


def points(page: Any, name: str = "loss") -> int:
    return int(page.get_attribute(f"[data-name='{name}']", "data-points") or 0)


def test_the_page_follows_a_live_run(folder: Path, browser: Any) -> None:
    port = free_port()
    server = start_server(folder, port)
    page = open_page(browser, f"{server.address}?run=live")  # type: ignore[attr-defined]
    page.evaluate("window.mine = 1")  # a reload would lose it
    page.wait_for_selector("[data-name='loss'] canvas")
    until(page, "document.querySelector(\"[data-name='loss']\").dataset.points > 0")
    before = points(page)
    until(page, f"document.querySelector(\"[data-name='loss']\").dataset.points > {before + 5}")
    shown = page.inner_text("[data-name='loss'] .read")
    assert float(shown) > 0

    # The vetoed step is marked, and the mark opens its report.
    page.wait_for_selector("[data-name='loss'] .mark[data-kind='veto']", state="attached")
    page.keyboard.press("Escape")
    page.evaluate("document.querySelector(\"[data-name='loss'] .mark[data-kind='veto']\").click()")
    frame = page.frame_locator("#dialog iframe")
    frame.locator("h1").wait_for()
    assert "25" in frame.locator("h1").inner_text()
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('#dialog').open")

    # The server is killed and comes back: the page goes on by itself.
    end(server)
    page.wait_for_selector("#link.lost")
    stale = points(page)
    server = start_server(folder, port)
    until(page, f"document.querySelector(\"[data-name='loss']\").dataset.points > {stale + 3}")
    until(page, "document.querySelector('#link').textContent === 'live'")
    assert page.evaluate("window.mine") == 1
    lost = [text for text in page.problems if "ERR_CONNECTION" not in text and "ERR_INCOMPLETE" not in text]
    assert lost == []
    shoot(page, "live")
    page.close()
    end(server)


def test_compare_zoom_keys_and_the_address(folder: Path, browser: Any) -> None:
    server = start_server(folder, free_port())
    page = open_page(browser, f"{server.address}?run=done")  # type: ignore[attr-defined]
    until(page, "document.querySelector(\"[data-name='loss']\").dataset.points == 60")
    page.check("[aria-label='Draw live over the current run']")
    until(page, "document.querySelector(\"[data-name='loss']\").dataset.points > 60 || "
                           "document.querySelectorAll('#legend span').length >= 2")  # fmt: skip
    assert page.inner_text("#legend").split() == ["done", "live"] and "with=live" in page.url
    shoot(page, "overlay")
    page.keyboard.press("8")
    page.wait_for_selector("#panel[data-tab='compare'] table")
    assert "optimizer.lr" in page.inner_text("#panel")
    page.keyboard.press("1")
    page.wait_for_selector("#panel[data-tab='curves']")
    page.wait_for_selector("[data-name='loss'] canvas")

    # A drag zooms all charts, and a link to the view shows the same.
    box = page.locator("[data-name='loss'] .u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    until(page, "new URLSearchParams(location.search).get('from')")
    page.keyboard.press("l")
    page.keyboard.press("t")
    query = page.evaluate("location.search")
    assert "log=1" in query and "from=" in query and "theme=" in query
    again = open_page(browser, page.url)
    again.wait_for_selector("[data-name='lr'] canvas")
    assert again.evaluate("location.search") == query and again.get_attribute("#log", "aria-pressed") == "true"
    again.keyboard.press("r")
    until(again, "!new URLSearchParams(location.search).get('from')")
    again.keyboard.press("/")
    again.keyboard.type("grad")
    until(again, "document.querySelectorAll('.chart').length === 1")
    again.keyboard.press("Escape")
    until(again, "document.querySelector('#runs a').textContent.includes('live')")  # the newest run is the first
    again.keyboard.press("k")
    until(again, "new URLSearchParams(location.search).get('run') === 'live'")
    again.keyboard.press("j")
    until(again, "new URLSearchParams(location.search).get('run') === 'done'")
    again.keyboard.press("?")
    again.wait_for_selector("#dialog[open] kbd")
    assert page.problems == [] and again.problems == []
    page.close()
    again.close()
    end(server)


def test_every_tab_on_a_phone_and_in_the_dark(folder: Path, browser: Any) -> None:
    run = Run(folder / "done")
    markup = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    (run.folder / "rollouts").mkdir(exist_ok=True)
    (run.folder / "rollouts" / "round-00000000.jsonl").write_text(
        json.dumps({"prompt": "Say", "answer": markup}) + "\n"
    )
    server = start_server(folder, free_port())
    page = open_page(browser, f"{server.address}?run=done", color_scheme="dark")  # type: ignore[attr-defined]
    page.wait_for_selector("[data-name='loss'] canvas")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(int(part) for part in dark[4:-1].split(",")) < 150
    shoot(page, "dark")
    page.set_viewport_size({"width": 390, "height": 800})
    for number, tab in enumerate(
        ["curves", "events", "plan", "spec", "samples", "checkpoints", "ranks", "compare", "layers", "system"], 1
    ):
        page.keyboard.press(str(number % 10))
        page.wait_for_selector(f"#panel[data-tab='{tab}']")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, tab
        shoot(page, f"phone-{tab}")
        if tab == "samples":
            assert page.inner_text(".sample p:nth-of-type(2)") == markup
    page.click("#menu")
    page.wait_for_selector("#runs.open a")
    page.click("#runs a[href*='live']")
    until(page, "document.querySelector('h1').textContent === 'live'")
    page.keyboard.press("6")
    page.click("text=Verify >> nth=0")
    until(page, "/sound, \\d+ files/.test(document.querySelector('#panel').textContent)")
    assert page.evaluate("window.hacked") is None and page.problems == []
    page.close()
    end(server)


def test_control_from_the_page(folder: Path, browser: Any) -> None:
    server = start_server(folder, free_port(), "--control")
    assert "token=" in server.address  # type: ignore[attr-defined]
    page = open_page(browser, f"{server.address}&run=live")  # type: ignore[attr-defined]
    assert "token" not in page.url
    page.click("#control >> text=Pause")
    run = Run(folder / "live")
    wait_for_control(run, "pause")
    at = sum(1 for _ in run.metrics())
    page.click("#control >> text=Resume")
    wait_for_control(run, "resume")
    page.wait_for_selector(".mark[data-kind='control']", state="attached")
    assert sum(1 for _ in run.metrics()) - at < 30 and page.problems == []
    page.close()
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0


def test_layers_readings_and_a_profile_of_a_live_run(folder: Path, browser: Any) -> None:
    server = start_server(folder, free_port(), "--control")
    page = open_page(browser, f"{server.address}&run=live")  # type: ignore[attr-defined]
    page.click("#control >> text=Profile 10 steps")
    page.keyboard.press("9")
    page.wait_for_selector("canvas.heat[data-name='gradient norm']")
    layers = page.evaluate("document.querySelector(\"canvas.heat[data-name='gradient norm']\").height")
    assert layers == 4  # the embedding, two blocks, the last norm
    colours = """(() => { const canvas = document.querySelector("canvas.heat[data-name='gradient norm']");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const colours = Array.from({ length: pixels.length / 4 }, (_, i) => pixels.slice(4 * i, 4 * i + 4).join());
        return new Set(colours).size; })()"""
    assert page.evaluate(colours) > 4
    assert page.locator("canvas.heat").count() == 3
    page.click("#panel .tools >> text=weight norm")
    until(page, "document.querySelectorAll('canvas.heat').length === 4")
    page.hover("canvas.heat[data-name='update ratio']")
    until(page, "/ · /.test([...document.querySelectorAll('#panel .read')].map(one => one.textContent).join())")
    shoot(page, "layers")
    page.keyboard.press("0")
    until(page, "document.querySelector(\"[data-name='system:cpu_busy_share']\")?.dataset.points > 1")
    assert page.inner_text("[data-name='system:ram_bytes'] .read").endswith("iB")
    assert page.locator("[data-name^='system:gpu']").count() == 0  # absent, not zero
    shoot(page, "system")
    page.keyboard.press("2")
    page.wait_for_selector("#panel >> text=Profile", timeout=LONG_MS)
    page.click("#panel button >> text=Profile >> nth=0")
    page.wait_for_selector("#profile-parts td")
    assert "matmul" in page.inner_text("#profile-parts")
    with page.expect_download() as download:
        page.click("#dialog a[download]")
    assert read_trace(Path(download.value.path()))
    shoot(page, "profile")
    assert page.problems == []
    page.close()
    end(server)


def test_runs_of_a_sweep_as_parallel_coordinates(browser: Any, tmp_path: Path) -> None:
    for i, (lr, name) in enumerate([(1e-4, "adamw"), (1e-3, "adamw"), (1e-2, "muon"), (3e-2, "muon")]):
        with RunWriter(tmp_path / "runs" / f"trial-{i}") as run:
            run.write_file(
                "spec.yaml",
                f"name: trial-{i}\noptimizer:\n  lr: {lr}\n  name: {name}\nbudget:\n  batch: {512 << i % 2}\n",
            )
            run.event("started", step=0, total_steps=2)
            for step in range(2):
                run.step({"step": step, "loss": 3.0 - i / 2 - step / 10, "step_s": 0.1, "tokens_per_s": 100.0})
            run.validation({"step": 2, "loss": 3.1 - i / 2})
            run.event("finished", step=2, reason="done")
    server = start_server(tmp_path / "runs", free_port())
    page = open_page(browser, f"{server.address}?run=trial-0&tab=compare")  # type: ignore[attr-defined]
    page.click("text=Compare all shown")
    page.wait_for_selector(".parallel polyline")
    assert page.locator(".parallel polyline").count() == 4
    box = page.locator(".parallel [data-axis='validation loss']").bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + box["height"] - 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 10, box["y"] + 0.55 * box["height"], steps=4)
    page.mouse.up()  # the lower half: the two best
    out = "[...document.querySelectorAll('.parallel polyline.out')].map(line => line.dataset.run).join()"
    assert page.evaluate(out) == "trial-0,trial-1"
    shoot(page, "parallel")
    page.locator(".parallel text.name", has_text="validation loss").click()
    assert page.evaluate(out) == ""
    assert "optimizer.lr" in page.inner_text("#panel table") and page.problems == []
    page.close()
    end(server)


def wait_for_control(run: Run, action: str) -> dict[str, Any]:
    give_up = time.monotonic() + LONG_MS / 1000
    while True:
        if found := [event for event in run.events("control") if event["action"] == action]:
            assert found[-1]["done"] and found[-1]["who"].startswith("page")
            return found[-1]
        assert time.monotonic() < give_up
        time.sleep(0.2)


def test_an_exported_file_needs_no_server(folder: Path, browser: Any, tmp_path: Path) -> None:
    out = tmp_path / "done.html"
    command = [sys.executable, "-m", "bessemer", "watch", "export", str(folder / "done"), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    page = open_page(browser, out.as_uri())
    until(page, "document.querySelector(\"[data-name='loss']\").dataset.points == 60")
    page.evaluate("document.querySelector(\"[data-name='loss'] .mark[data-kind='veto']\").click()")
    page.frame_locator("#dialog iframe").locator("h1").wait_for()
    page.keyboard.press("Escape")
    for number in range(2, 11):
        page.keyboard.press(str(number % 10))
        until(page, "document.querySelector('#panel').dataset.tab")
    assert page.problems == []
    page.close()
