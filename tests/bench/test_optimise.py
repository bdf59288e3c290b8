"""`bessemer bench optimise`: what may be tried, what is kept, what is written, and the whole with real processes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from bessemer.bench import optimise as module
from bessemer.bench.candidates import Configuration, Predictor, changes
from bessemer.bench.optimise import Optimiser, Timing, as_settings, table, write_best
from bessemer.bench.scaling import timed_spec
from bessemer.bench.scaling_worker import LEAST, ScalingSession
from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import ONE_PROCESS, Layout
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SLOW_SPEC = """# a spec that nobody tuned
name: small
runs: {runs}
model: {{width: 16, layers: 2, heads: 2, kv_heads: 1, ffn: 32}}  # tiny
tokenizer: {{vocab: 280}}
data:
  sources: {{words: {words}}}
  context: 16
  workers: 0
budget:
  # rows
  batch: 512
  micro_batch: 1
  steps: 1000
precision: fp32
memory: {{activations: full}}  # saves memory
parallel: {{device: cpu, threads: 1}}
"""


@pytest.fixture
def slow_spec(tmp_path: Path) -> Path:
    words = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"]
    lines = [json.dumps({"text": " ".join(words[i % 12 :] + words[: i % 7])}) for i in range(300)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    path = tmp_path / "small.yaml"
    path.write_text(SLOW_SPEC.format(runs=tmp_path / "runs", words=tmp_path / "words.jsonl"))
    return path


Speed = Callable[[dict[str, Any]], float | str]


@pytest.fixture
def search(slow_spec: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Optimiser]:
    """An optimiser whose trials are answered by a function of the settings over the spec."""

    def make(speed: Speed, error: float = 0.001, **options: Any) -> Optimiser:
        optimiser = Optimiser(slow_spec, [], **options)

        def measure(settings: dict[str, Any]) -> Timing | str:
            optimiser.count += 1
            rate = speed(settings)
            if isinstance(rate, str):
                return rate
            training = replace(
                optimiser.resolved.training, compile=settings.get("compile", "off"),
                activations=settings.get("memory.activations", "full"),
                micro_rows=settings.get("budget.micro_batch", 1), precision=settings.get("precision", "fp32"),
            ) if "auto" not in settings.values() else optimiser.resolved.training  # fmt: skip
            config = Configuration(
                settings, training, ONE_PROCESS, settings.get("data.workers", 0), 0.2 * (not settings)
            )
            return Timing(rate, error, config, 1 << 20, {})

        monkeypatch.setattr(optimiser, "measure", measure)
        monkeypatch.setattr(Predictor, "_timed", predicted_step)
        return optimiser

    return make


def predicted_step(predictor: Predictor, config: Configuration) -> float | None:
    if config.training.compiled:
        return None
    return (4 / 3 if config.training.activations == "full" else 1.0) * (1 + 1 / config.training.micro_rows)


def additive(settings: dict[str, Any]) -> float | str:
    """Recomputation costs a third, larger micro-batches gain up to 16 rows and do not fit above; compiling fails."""
    if settings.get("compile", "off") != "off":
        return "no C++ compiler"
    rows = settings.get("budget.micro_batch", 1)
    if rows == "auto":
        return 1500.0
    if rows > 16:
        return "out of memory"
    rate = 1000.0 * (1 + rows / 16) * (4 / 3 if settings.get("memory.activations") == "none" else 1.0)
    return rate * (1.1 if settings.get("data.workers", 0) else 1.0)


def test_the_descent_ends_at_the_best_and_failures_are_rows(search: Callable[..., Optimiser]) -> None:
    result = search(additive).run()
    assert result.best == {"budget.micro_batch": 16, "memory.activations": "none", "data.workers": 1}
    assert result.gain == pytest.approx(2 * 4 / 3 * 1.1 / (1 + 1 / 16) - 1)
    verdicts = {trial.change: (trial.verdict, trial.why) for trial in result.trials}
    assert verdicts["budget.micro_batch: 32"] == ("failed", "out of memory")
    assert verdicts["compile: chain"] == ("failed", "no C++ compiler")
    none = next(trial for trial in result.trials if trial.change == "memory.activations: none")
    assert none.gain == pytest.approx(1 / 3) and none.predicted_gain == pytest.approx(1 / 3)
    tried = [trial.predicted_gain for trial in result.trials if trial.predicted_gain is not None]
    assert tried[0] == max(tried), "the largest predicted gain is measured first"
    text = "\n".join(table(result))
    assert "memory.activations: none" in text and "best: " in text and "no C++ compiler" in text


def test_a_gain_within_the_noise_is_not_kept(search: Callable[..., Optimiser]) -> None:
    rates = iter([1000.0, 960.0])  # the baselines: 4 % apart

    def restless(settings: dict[str, Any]) -> float:
        return 1010.0 if settings else next(rates, 980.0)

    result = search(restless).run()
    assert result.noise == pytest.approx(1000 / 960 - 1)
    assert result.best == {} and result.gain == 0.0
    assert {trial.verdict for trial in result.trials[1:]} == {"no gain"}


def test_an_unclear_gain_is_measured_again_beside_the_present_settings(search: Callable[..., Optimiser]) -> None:
    calls: list[dict[str, Any]] = []

    def drifting(settings: dict[str, Any]) -> float:
        calls.append(settings)
        return 1000.0 + 5 * len(calls)  # others leave the machine: every measurement is faster than the last

    optimiser = search(drifting)
    optimiser.run()
    first = next(i for i, settings in enumerate(calls) if settings)
    assert calls[first + 1] == {} and calls[first + 2] == calls[first]
    assert "measured twice" in optimiser.trials[1].why


def test_the_search_is_bounded(search: Callable[..., Optimiser]) -> None:
    optimiser = search(additive, most=4)
    result = optimiser.run()
    assert optimiser.count == 4 and "--trials 4" in result.stopped and result.best


def test_a_spec_that_does_not_train_is_refused_with_its_fault(search: Callable[..., Optimiser]) -> None:
    with pytest.raises(UserError, match=r"small\.yaml: the spec does not train as given: out of memory"):
        search(lambda settings: "out of memory").run()


def test_precision_is_only_tried_with_permission(search: Callable[..., Optimiser], slow_spec: Path) -> None:
    seen: list[Any] = []

    def record(settings: dict[str, Any]) -> float | str:
        seen.append(settings.get("precision"))
        return additive(settings)

    search(record).run()
    assert set(seen) == {None}
    result = search(record, allow=["precision"]).run()
    assert "bf16" in seen
    assert "changes the numbers" in next(trial.note for trial in result.trials if "bf16" in trial.change)
    with pytest.raises(UserError, match="--allow speed: write precision or fp8"):
        Optimiser(slow_spec, [], ["speed"])


def test_rollouts_are_refused(slow_spec: Path) -> None:
    settings = ["objective=grpo", "rl.rewards=[{verifier: math}]"]
    with pytest.raises(UserError):
        Optimiser(slow_spec, settings)


def options(config: Configuration, spec: RunSpec, device: torch.device, devices: int = 1) -> set[str]:
    allowed = {"precision", "fp8"}
    return {str(change) for change, _ in changes(config, spec, 32, allowed, device, devices)}


def test_changes_are_divisors_of_the_batch_and_kinds_the_device_has(search: Callable[..., Optimiser]) -> None:
    optimiser = search(additive)
    training = replace(optimiser.resolved.training, micro_rows=4, activations="selective", compile="off")
    config = Configuration({}, training, ONE_PROCESS, 1, 0.0)
    on_cpu = options(config, optimiser.spec, CPU)
    assert {"budget.micro_batch: 2", "budget.micro_batch: 8", "budget.micro_batch: 32"} <= on_cpu
    assert not any("workers" in change or "fp8" in change or "tf32" in change for change in on_cpu)
    assert {"precision: tf32", "precision: fp8", "precision: bf16"} <= options(config, optimiser.spec, GPU)
    settled = replace(config, settings={"budget.micro_batch": 4})
    sizes = {change for change in options(settled, optimiser.spec, CPU) if "micro_batch" in change}
    assert sizes == {"budget.micro_batch: 2", "budget.micro_batch: 8"}
    waits = options(replace(config, data_wait=0.1), optimiser.spec, CPU)
    assert {"data.workers: 2", "data.workers: 4"} <= waits


def test_layouts_are_over_all_devices(search: Callable[..., Optimiser]) -> None:
    optimiser = search(additive)
    training = replace(optimiser.resolved.training, micro_rows=8)
    config = Configuration({}, training, Layout(dp_shard=4), 1, 0.0)
    found_layouts = [
        change for change, _ in changes(config, optimiser.spec, 32, set(), GPU, 4) if change.axis == "layout"
    ]
    assert {change.value for change in found_layouts} == {
        "dp_replicate=4", "dp_replicate=2 dp_shard=2", "dp_shard=2 tp=2",
    }  # fmt: skip
    assert all(change.settings["budget.micro_batch"] == 8 for change in found_layouts)


def test_predictions_of_a_gpu_are_those_of_the_catalogue(search: Callable[..., Optimiser]) -> None:
    optimiser = search(additive)
    peaks = {"fp32": 5e13, "tf32": 4e14, "bf16": 8e14}
    machine = Machine("cuda", "NVIDIA H200", 140 << 30, 8, peaks)
    predictor = replace(optimiser.predictor, machine=machine, device=GPU)
    training = replace(optimiser.resolved.training, micro_rows=8, activations="full", compile="off")
    config = Configuration({}, training, ONE_PROCESS, 1, 0.0)
    seconds = predictor.seconds(config)
    assert seconds is not None

    def faster(**keys: Any) -> float:
        other = predictor.seconds(replace(config, training=replace(training, **keys)))
        assert other is not None
        return seconds / other

    assert faster(activations="none") > 1 and faster(compile="chain") > 1 and faster(micro_rows=4) < 1
    waiting = predictor.seconds(replace(config, data_wait=0.5))
    assert waiting == pytest.approx(2 * seconds)
    assert not predictor.too_large(config)
    assert "by estimate" in replace(predictor, machine=replace(machine, memory_bytes=1 << 12)).too_large(config)


def test_the_best_spec_keeps_its_comments(slow_spec: Path, tmp_path: Path) -> None:
    best = as_settings({"budget.micro_batch": 32, "compile": "off", "memory.activations": "none", "parallel.tp": 1})
    out = tmp_path / "fast.yaml"
    write_best(slow_spec, best, out)
    assert load_spec(out).model_dump() == load_spec(slow_spec, best).model_dump()
    text = out.read_text()
    assert all(comment in text for comment in ("# a spec that nobody tuned", "# tiny", "# rows", "# saves memory"))
    assert "micro_batch: 32" in text and "{tp: 1, device: cpu, threads: 1}" in text
    with pytest.raises(UserError, match=r"--out .*: cannot be written"):
        write_best(slow_spec, best, tmp_path / "small.yaml" / "fast.yaml")


@pytest.mark.slow
def test_a_trial_times_as_many_steps_as_fit(slow_spec: Path, tmp_path: Path) -> None:
    spec = timed_spec(load_spec(slow_spec), None, 512, steps=50)
    session = ScalingSession(spec, tmp_path / "scratch", steps=50, seconds=1e-6)
    session.train()
    result = session.result
    assert len(result["times_s"]) == LEAST and result["tokens"] == 512
    assert result["training"]["micro_rows"] == 1 and result["training"]["activations"] == "full"
    assert 0 <= result["data_wait"] < 1 and result["layout"]["tp"] == 1
    timing = module._timing(result, {}, 0)
    assert timing.tokens_per_s == 512 / result["step_s"] and "attention" in timing.decided


def test_mistakes_are_one_line(slow_spec: Path) -> None:
    for arguments, words in ((["--allow", "speed"], "--allow speed"), (["--out", str(slow_spec)], "the file exists")):
        result = CliRunner().invoke(app, ["bench", "optimise", str(slow_spec), *arguments])
        assert isinstance(result.exception, UserError | SystemExit)
        assert words in str(result.exception) + result.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slow_spec_becomes_faster_in_real_processes(slow_spec: Path, tmp_path: Path) -> None:
    """Micro-batches of one row of 16 tokens take several times as long as larger ones, on a busy machine too."""
    out = tmp_path / "fast.yaml"
    arguments = ["--minutes", "5", "--trials", "5", "--seconds", "0.5", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, ["bench", "optimise", str(slow_spec), *arguments], catch_exceptions=False)
    answer = json.loads(result.stdout)
    assert answer["best"]["budget.micro_batch"] > 1
    assert answer["gain"] > 0 and answer["trials"][0]["verdict"] == "baseline"
    assert answer["command"] == f"bessemer train {out}"
    assert yaml.safe_load(out.read_text())["budget"]["micro_batch"] == answer["best"]["budget.micro_batch"]
