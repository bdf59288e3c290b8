"""Following a run: what stands in the log, what a pipe gets, what a terminal draws, and how little of it is kept."""

import errno
import io
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bessemer.observe.view import LineView, LiveView, RunView
from bessemer.run.directory import Run, RunWriter, summarize


def record(step: int, loss: float = 3.0, veto: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "accuracy": 0.2,
        "grad_norm": 1.0,
        "lr": 3e-4,
        "clipped": False,
        "veto": veto,
        "tokens": 1000 * (step + 1),
        "tokens_per_s": 2000.0,
        "mfu": 0.3,
        "step_s": 0.5,
        "data_wait_s": 0.05,
        "memory_bytes": 10**9,
    } | more


VALIDATION = {"step": 10, "loss": 2.5, "bits_per_byte": 1.2, "accuracy": 0.4}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "logs").mkdir()
    return Run(tmp_path)


def log_lines(run: Run) -> list[str]:
    return (run.folder / "logs" / "rank-0.log").read_text(encoding="utf-8").splitlines()


def test_the_log_gets_every_line_with_its_time(run: Run) -> None:
    view = RunView("my.yaml")
    with view.following(run):
        view.progress("reading 3 files")
        view.planned([("budget.batch", "4096", "the law", "DeepSeek")], "1M parameters")
        view.event({"kind": "started", "step": 0, "total_steps": 20, "resumed_from": None})
        view.step(record(0))
        view.validation(VALIDATION)
        view.event({"kind": "saved", "checkpoint": "step-10.a1", "seconds": 0.5, "stall_s": 0.25})
        view.log("two\nlines")
        view.outcome("finished", "the budget is spent", 20, run)
    lines = log_lines(run)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines)
    assert [line[21:] for line in lines] == [
        "data  reading 3 files",
        "plan  budget.batch = 4096  (the law; DeepSeek)",
        "plan  1M parameters",
        "step 1/20  loss 3.000 (mean of 1)  ppl 20.09  acc 20.0%  lr 3.00e-04  grad 1.00  2,000 tok/s  30% of peak  "
        "1 GB  eta 10s",
        "val   step 10  loss 2.5000  perplexity 12.18  1.200 bits per byte  accuracy 40.0%",
        "saved step-10.a1 in 0.50 s, training paused for 0.25 s",
        "two",
        "lines",
        f"finished  step 20  the budget is spent  validation loss 2.5000, 1.200 bits per byte  run: {run.folder}",
        f"try   bessemer generate {run.folder} --prompt '...'",
    ]


def test_a_second_start_adds_to_the_log(run: Run) -> None:
    for text in ("first", "second"):
        view = RunView()
        with view.following(run):
            view.say(text)
        view.say("nobody hears this")
    assert [line[21:] for line in log_lines(run)] == ["first", "second"]


def test_a_name_that_is_no_text_does_not_stop_the_log(run: Run) -> None:
    view = RunView()
    with view.following(run):
        view.say("file data/\udcff.txt")
    assert log_lines(run)[0].endswith(r"file data/\udcff.txt")


def test_a_pipe_gets_plain_lines(run: Run) -> None:
    out = io.StringIO()
    view = LineView("my.yaml", line_every_s=0.0, out=out)
    with view.following(run):
        view.event({"kind": "started", "step": 0, "total_steps": 20, "resumed_from": None})
        view.step(record(0, loss=4.0))
        view.step(record(1, loss=2.0))
        view.event({"kind": "saved", "checkpoint": "step-10.a1", "seconds": 0.5, "stall_s": 0.25})  # for the log alone
        view.outcome("interrupted", "SIGTERM", 2, run)
    shown = out.getvalue().splitlines()
    assert [line[:32] for line in shown[:2]] == ["step 1/20  loss 4.000 (mean of 1", "step 2/20  loss 3.000 (mean of 2"]
    assert shown[2:] == [f"interrupted  step 2  SIGTERM  run: {run.folder}", "continue with: bessemer train my.yaml"]
    assert len(log_lines(run)) == 5


def test_lines_come_no_more_often_than_asked(run: Run) -> None:
    out = io.StringIO()
    view = LineView(line_every_s=3600.0, out=out)
    for step in range(100):
        view.step(record(step))
    assert out.getvalue().count("step") == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), ""),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device. The run continues"),
    ],
)
def test_an_output_that_takes_nothing_does_not_stop_the_run(
    run: Run, fault: OSError, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(io.StringIO):
        def write(self, _: str) -> int:
            raise fault

    view = LineView(line_every_s=0.0, out=Refusing())
    with view.following(run):
        view.step(record(0))
        view.step(record(1))
    assert len(log_lines(run)) == 2
    said = capsys.readouterr().err
    assert (told in said and said.count("rank-0.log") == 1) if told else not said


def test_a_full_disk_under_the_log_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    view = RunView()
    with view.following(Run(tmp_path)):
        view.say("a line")


def test_the_mean_loss_is_that_of_the_list_of_runs_also_after_a_resume_and_a_rollback(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        for step in range(40):
            run.step(record(step, loss=float(step)))
        view = RunView()
        with view.following(run):
            view.event(run.event("started", step=40))
            for _ in range(2):
                run.step(record(40, loss=100.0))
                view.step(record(40, loss=100.0))
                assert view.smooth()["loss"] == summarize(run).mean_loss == (sum(range(9, 40)) + 100.0) / 32
                assert summarize(run).loss == 100.0
                run.remove_metrics_from(40)
                view.event(run.event("rollback", step=41, to_step=40, origin="memory", reason="-"))


def test_means_are_of_the_accepted_steps_and_rates_of_all(run: Run) -> None:
    view = RunView()
    view.total = 100
    view.step(record(0, loss=2.0, step_s=1.0, tokens_per_s=100.0, mfu=0.1, data_wait_s=0.0))
    view.step(record(1, loss=900.0, veto="loss outlier", step_s=1.0, tokens_per_s=100.0, mfu=0.1, data_wait_s=0.0))
    view.step(record(2, loss=4.0, step_s=2.0, tokens_per_s=400.0, mfu=0.4, data_wait_s=1.0))
    smooth = view.smooth()
    assert smooth["loss"] == 3.0
    assert smooth["rate"] == (100 + 100 + 800) / 4  # tokens over seconds, not a mean of rates
    assert smooth["mfu"] == pytest.approx((0.1 + 0.1 + 0.8) / 4)
    assert smooth["wait"] == 0.25
    assert smooth["left_s"] == pytest.approx(97 * 4 / 3)
    assert (view.vetoes, view.clipped, view.steps_seen) == (1, 0, 3)


def test_only_vetoes_so_far(run: Run) -> None:
    view = RunView()
    view.step(record(0, loss=math.nan, veto="non-finite loss or gradient"))
    assert math.isnan(view.smooth()["loss"])
    assert view.smooth()["left_s"] == 0.0  # before the run said how long it is


def test_a_million_steps_are_kept_in_little_memory() -> None:
    view = RunView()
    view._line_due = math.inf
    shared = record(0)
    for step in range(1_000_000):
        shared["loss"] = 10.0 - step / 1e5
        view.step(shared)
    assert view.steps_seen == 1_000_000
    assert 1024 <= len(view.losses) <= 4096 and len(view.recent) == 32
    assert view.losses == sorted(view.losses, reverse=True)  # still the whole curve, in order
    assert view.losses[0] > 9.9 and view.losses[-1] < 0.1


def terminal(width: int) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=40, color_system="truecolor", record=True
    )


def drawn(view: LiveView) -> str:
    view.console.print(view.render())
    return view.console.export_text()


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_the_panel_before_and_after_steps(width: int) -> None:
    view = LiveView(console=terminal(width))
    assert "starting" in drawn(view)
    view.progress("reading")
    assert "reading" in drawn(view)
    view.event({"kind": "started", "step": 0, "total_steps": 1000, "resumed_from": None})
    for step in range(50):
        view.step(record(step, loss=5.0 - step / 20, clipped=step % 2 == 0))
    assert drawn(view)
    view.validation(VALIDATION)
    view.step(record(50, loss=math.nan, veto="non-finite loss or gradient", grad_norm=math.inf))
    text = drawn(view)
    assert max(map(len, text.splitlines())) <= width
    if width >= 60:
        assert "step 51/1,000" in text and "7m 54s left" in text
        words = " ".join(text.replace("│", " ").split())
        for part in (
            "mean loss 3.3000",
            "validation 2.5000",
            "gradient norm inf",
            "clipped 49%",
            "tokens/s 2,000",
            "vetoes 1",
        ):
            assert part in words
        assert "█" in text and "…" not in text


def test_the_panel_with_nothing_but_nan() -> None:
    view = LiveView(console=terminal(80))
    view.last_validation = VALIDATION | {"loss": math.nan, "bits_per_byte": math.nan}
    view.step(record(0, loss=math.nan, accuracy=math.nan, grad_norm=math.nan, veto="non-finite loss or gradient"))
    assert "loss nan" in drawn(view)


def test_events_scroll_above_the_panel(run: Run) -> None:
    view = LiveView("my.yaml", console=terminal(80))
    with view.following(run):
        view.event({"kind": "started", "step": 0, "total_steps": 10, "resumed_from": None})
        view.step(record(0))
        view.event({"kind": "save_failed", "step": 1, "reason": "[/red] disk [full]"})  # no markup
        view.outcome("failed", "disk full", 1, run)
    text = view.console.export_text()
    assert "save failed  step 1  [/red] disk [full]" in text
    assert "failed  step 1  disk full" in text
    assert "continue with: bessemer train my.yaml" in text
    assert [line[21:].split()[0] for line in log_lines(run)] == ["step", "save", "failed", "continue"]


def test_drawing_while_steps_arrive(run: Run) -> None:
    """The display draws in its own thread: a step in between must not break it."""
    view = LiveView(console=terminal(80))
    view._line_due = math.inf
    view.step(record(0))
    done = threading.Event()
    errors: list[BaseException] = []

    def draw() -> None:
        while not done.is_set():
            try:
                view.render()
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=draw)
    thread.start()
    for step in range(1, 20_000):
        view.step(record(step))
    done.set()
    thread.join()
    assert errors == []


def test_a_long_step_shows_its_micro_batches_the_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("bessemer.observe.view.time.monotonic", lambda: now)
    out = io.StringIO()
    plain, live = LineView(line_every_s=5.0, out=out), LiveView(console=terminal(80))
    for view in (plain, live):
        view.event({"kind": "started", "step": 0, "total_steps": 1000, "resumed_from": None})
    for done, seconds in enumerate([0, 3, 1, 1, 1, 1, 1]):  # the first one compiles
        now += seconds
        for view in (plain, live):
            view.micro_batch(0, done, 16, 16_384)
    assert out.getvalue().splitlines() == ["step 1/1,000  micro-batch 2/16  1,024 tok/s  eta 4h 26m"]
    text = drawn(live)
    assert "step 1/1,000  micro-batch 6/16" in text and "4h 26m left" in text and "tokens/s 1,024" in text
    live.step(record(0, step_s=20.0))
    live.micro_batch(1, 0, 16, 16_384)
    assert "step 1/1,000" in drawn(live)  # short ones are not worth it
    now += 5
    live.micro_batch(1, 4, 16, 16_384)
    text = drawn(live)
    assert "step 2/1,000  micro-batch 4/16" in text and "loss 3.0000" in text and "5h 32m left" in text


def test_short_steps_get_no_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("bessemer.observe.view.time.monotonic", lambda: now)
    out = io.StringIO()
    view = LineView(line_every_s=5.0, out=out)
    for step in range(20):
        for done in range(4):
            view.micro_batch(step, done, 3, 300)
            now += 0.1
    assert out.getvalue() == ""


def test_how_far_preparing_is_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("bessemer.observe.view.time.monotonic", lambda: now)
    out = io.StringIO()
    view = LineView(out=out)
    for second in range(21):
        view.progress(f"tokenizing {second} % 1.5 MB/s")
        now += 1
    view.progress("merging")
    assert [line.split(" ", 3)[2] for line in out.getvalue().splitlines()] == [
        "tokenizing",
        "tokenizing",
        "tokenizing",
        "merging",
    ]


@pytest.mark.parametrize("say", [True, False])
def test_a_live_view_outlives_its_terminal(tmp_path: Path, say: bool) -> None:
    master, terminal = os.openpty()
    with RunWriter(tmp_path / "r") as run, os.fdopen(terminal, "w") as out:
        view = LiveView(console=Console(file=out, force_terminal=True))
        with view.following(run):
            os.close(master)  # from here on a write fails with EIO
            if say:
                view.say("stopping")
                assert not view.output_works
        out.write("later lines go nowhere")
    assert ("stopping" in (run.folder / "logs" / "rank-0.log").read_text()) == say
