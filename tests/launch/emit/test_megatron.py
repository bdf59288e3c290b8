"""megatron.sh under Megatron-LM's own parser where there is one, and its rates under megatron-core's scheduler."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.launch.emit import RunToEmit, render

Resolve = Callable[..., RunToEmit]


def arguments_of(run: RunToEmit, folder: Path) -> list[str]:
    """The arguments as bash hands them to torchrun, which is stood in for by a script that prints them."""
    (folder / "torchrun").write_text('#!/bin/bash\nfor a in "$@"; do echo "$a"; done\n')
    (folder / "torchrun").chmod(0o755)
    (folder / "megatron.sh").write_text(render("megatron", run).files["megatron.sh"])
    done = subprocess.run(
        ["bash", "megatron.sh"], cwd=folder, env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    given = done.stdout.splitlines()
    return given[given.index("pretrain_gpt.py") + 1 :]


def value(given: list[str], flag: str) -> str:
    return given[given.index(flag) + 1]


def test_bash_hands_over_every_argument(resolved: Resolve, place: Path, tmp_path: Path) -> None:
    two = {
        "more": {"path": [str(place / "more.jsonl")], "weight": 3.0},
        "words": {"path": [str(place / "words.jsonl")]},
    }
    run = resolved(data={"sources": two}, parallel={"tp": 2, "dp_shard": 2})
    given = arguments_of(run, tmp_path)
    assert (value(given, "--hidden-size"), value(given, "--num-query-groups")) == ("32", "2")
    assert (value(given, "--global-batch-size"), value(given, "--micro-batch-size")) == ("8", "2")
    assert "--sequence-parallel" in given and "--use-distributed-optimizer" in given
    start = given.index("--data-path") + 1
    shares = dict(zip(given[start + 1 : start + 4 : 2], map(float, given[start : start + 4 : 2]), strict=True))
    assert {Path(prefix).name.split(".")[0]: share for prefix, share in shares.items()} == {"more": 0.75, "words": 0.25}
    for prefix in shares:
        assert Path(f"{prefix}.bin").exists() and Path(f"{prefix}.idx").exists()


def test_every_line_has_one_argument(resolved: Resolve) -> None:
    text = render("megatron", resolved()).files["megatron.sh"]
    inside = text[text.index("arguments=(") : text.index("\n)\n")].splitlines()[1:]
    for line in inside:
        words = shlex.split(line, comments=True)
        assert len([word for word in words if word.startswith("--")]) == (0 if line.lstrip().startswith("#") else 1)


def test_rates_after_the_warmup_are_ours(resolved: Resolve, tmp_path: Path) -> None:
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler", reason="megatron-core is not installed")
    run = resolved()
    given = arguments_of(run, tmp_path)
    rows = int(value(given, "--global-batch-size"))

    class Optimizer:
        param_groups: list[dict[str, Any]] = [{"lr": 0.0, "wd_mult": 1.0, "lr_mult": 1.0, "weight_decay": 0.1}]

    schedule = module.OptimizerParamScheduler(
        Optimizer(), init_lr=float(value(given, "--lr-warmup-init")), max_lr=float(value(given, "--lr")),
        min_lr=float(value(given, "--min-lr")), lr_warmup_steps=int(value(given, "--lr-warmup-iters")) * rows,
        lr_decay_steps=int(value(given, "--lr-decay-iters")) * rows, lr_decay_style=value(given, "--lr-decay-style"),
        start_wd=0.1, end_wd=0.1, wd_incr_steps=1, wd_incr_style="constant",
    )  # fmt: skip
    rates = []
    for _ in range(run.plan.total_steps):
        rates.append(float(Optimizer.param_groups[0]["lr"]))
        schedule.step(rows)
    ours = [run.schedule.lr(step) for step in range(run.plan.total_steps)]
    assert rates[0] == pytest.approx(ours[0])
    assert rates[run.plan.warmup_steps :] == pytest.approx(ours[run.plan.warmup_steps :], rel=1e-6)


def test_megatrons_parser_takes_them_all(resolved: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "Megatron-LM's megatron.training is not installed: no package index has it, clone it onto PYTHONPATH"
    module = pytest.importorskip("megatron.training.arguments", reason=reason)
    experts = {"moe": {"experts": 4, "top_k": 2, "dense_layers": [0]}}
    for parts in ({}, {"model": experts}, {"precision": "fp8"}, {"precision": "fp16", "loss_scale": 1024.0}):
        given = arguments_of(resolved(**parts), tmp_path)
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *given])
        found = module.parse_args()
        assert (found.num_layers, found.hidden_size, found.train_iters) == (2, 32, 20)


def test_what_megatron_lacks_is_a_comment(resolved: Resolve) -> None:
    run = resolved(model={"windows": [8, 0], "attention_cap": 50.0})
    text = render("megatron", run).files["megatron.sh"]
    assert re.search(r"^# - model.windows: .*ANOTHER MODEL", text, re.M)
    assert re.search(r"^# - model.attention_cap: 50.0 .*ANOTHER MODEL", text, re.M)
