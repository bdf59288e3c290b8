"""Logs in the shapes that the frameworks print."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.observe.foreign import ForeignRun, read, recognise
from bessemer.observe.foreign.text import progress


def read_text(tmp_path: Path, text: str, name: str = "train.log") -> ForeignRun:
    path = tmp_path / name
    path.write_text(text)
    (run,) = read(path)
    assert recognise(path) == run.format
    for series in run.series.values():
        assert (series.steps[1:] > series.steps[:-1]).all(), series.name
    return run


def points(run: ForeignRun, name: str) -> dict[int, float]:
    series = run.series[name]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def megatron_line(step: int, loss: float | None, skipped: int = 0, norm: float = 1.234) -> str:
    shown = f" lm loss: {loss:.6E} |" if loss is not None else ""
    return (
        f" [2026-11-19 12:00:00.123456] iteration {step:8d}/{100:8d} | consumed samples: {16 * step:12d} |"
        f" elapsed time per iteration (ms): 424.1 | throughput per GPU (TFLOP/s/GPU): 120.3 |"
        f" learning rate: 3.000000E-04 | global batch size: {16:5d} |{shown} loss scale: 65536.0 |"
        f" grad norm: {norm:.3f} | number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |\n"
    )


def test_megatron(tmp_path: Path) -> None:
    text = "  lr .............................................. 0.0003\n  seq_length ............... 4096\n"
    text += megatron_line(5, 9.1) + megatron_line(10, 8.5, skipped=2) + megatron_line(15, None, norm=math.nan)
    text += megatron_line(20, None, skipped=5)
    text += (
        " validation loss at iteration 20 on validation set | lm loss value: 2.500000E+00 | lm loss PPL: 1.2E+01 | \n"
    )
    text += " validation loss at iteration 20 on test set | lm loss value: 7.500000E+00 | lm loss PPL: 1.2E+03 | \n"
    run = read_text(tmp_path, text)
    assert run.format == "megatron" and run.total_steps == 100
    assert run.settings == {"lr": 0.0003, "seq_length": 4096}
    losses = points(run, "loss")
    assert losses[5] == 9.1 and losses[10] == 8.5 and math.isnan(losses[15])
    assert 20 not in losses, "all steps were skipped: there is no loss, and it was not NaN"
    assert run.series["loss"].mean_of == 5 and run.series["loss"].lines.tolist() == [3, 4, 5]
    assert points(run, "step_s")[5] == pytest.approx(0.4241)
    assert points(run, "skipped_steps") == {5: 0, 10: 2, 15: 2, 20: 7}, "counted since the start"
    assert math.isnan(points(run, "grad_norm")[15]) and points(run, "loss_scale")[5] == 65536
    assert points(run, "validation_loss") == {20: 2.5}


def test_restart_keeps_the_later_values(tmp_path: Path) -> None:
    first = "".join(megatron_line(step, 5.0) for step in range(10, 101, 10))
    second = "".join(megatron_line(step, 4.0) for step in range(60, 81, 10))
    run = read_text(tmp_path, first + second)
    assert run.restarts == [60]
    assert points(run, "loss") == dict.fromkeys(range(10, 60, 10), 5.0) | dict.fromkeys((60, 70, 80), 4.0)
    assert run.series["lr"].steps.max() == 80, "what the first start wrote after step 60 is not part of the run"


def test_ranks_and_colours(tmp_path: Path) -> None:
    line = (
        "[rank{rank}]:[titan] 2026-11-19 12:00:00 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {loss:8.5f}  "
        "\x1b[38;2;180;60;0mgrad_norm: 9.6669  \x1b[38;2;54;234;195mmemory: 48.87GiB(51.44%)  \x1b[34mtps: 4,376  "
        "\x1b[36mtflops: 25.31  \x1b[35mmfu: 25.62%\x1b[39m\n"
    )
    text = "".join(
        line.format(rank=rank, step=step, loss=10 - step / 10 + rank) for step in (1, 10, 20) for rank in (0, 1)
    )
    text += "[rank0]:[titan] 2026 - root - INFO - \x1b[33mvalidate step: 20  \x1b[32mloss:  7.5000  "
    text += "memory:  4.00GiB(4.00%)  tps: 9,000\n"
    run = read_text(tmp_path, text)
    assert run.format == "torchtitan"
    assert points(run, "loss") == {1: 9.9, 10: 9.0, 20: 8.0}, "of one rank"
    assert points(run, "mfu")[20] == pytest.approx(0.2562)
    assert points(run, "memory_bytes")[1] == pytest.approx(48.87 * 2**30)
    assert points(run, "tps")[1] == 4376 and "tokens_per_s" not in run.series
    assert points(run, "validation_loss") == {20: 7.5}


def test_nanogpt(tmp_path: Path) -> None:
    run = read_text(
        tmp_path,
        "step 0: train loss 4.2874, val loss 4.2823\niter 0: loss 4.2654, time 33234.22ms, mfu -100.00%\n"
        "iter 10: loss 3.2000, time 12.30ms, mfu 12.34%\niter 20: loss nan, time 12.30ms, mfu 12.34%\n"
        "step 20: train loss 2.1000, val loss 2.2000\n",
    )
    assert run.format == "nanogpt"
    assert points(run, "loss")[10] == 3.2 and math.isnan(points(run, "loss")[20])
    assert points(run, "validation_loss") == {0: 4.2823, 20: 2.2}
    assert points(run, "step_s")[10] == pytest.approx(0.0123)
    assert math.isnan(points(run, "mfu")[0]) and points(run, "mfu")[10] == pytest.approx(0.1234)


LINES = {
    "nanochat": (
        "step 00010/05000 (0.20%) | loss: 3.125000 | lrm: 1.00 | dt: 250.00ms | tok/sec: 2,097,152 | bf16_mfu: 48.20 | "
        "epoch: 1 | total time: 1.50m | eta: 20.0m\nStep 00010 | Validation bpb: 1.100000\n",
        {"loss": 3.125, "step_s": 0.25, "tokens_per_s": 2097152, "mfu": 0.482, "Validation bpb": 1.1, "epoch": 1},
    ),
    "modded_nanogpt": (
        "step:10/1750 val_loss:3.1250 train_time:1500ms step_avg:150.00ms\n"
        "step:11/1750 train_time:1650ms step_avg:150.00ms\n",
        {"validation_loss": 3.125, "step_avg": 0.15},
    ),
    "litgpt": (
        "Epoch 1 | iter 40 step 10 | loss train: 3.125, val: n/a | iter time: 250.00 ms (step) "
        "remaining time: 0:10:00\n",
        {"loss": 3.125, "step_s": 0.25},
    ),
    "deepspeed": (
        "[2026-11-19 12:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, lr=[1e-05, 2e-05], "
        "mom=[(0.9, 0.95), (0.9, 0.95)]\nsteps: 10 loss: 3.1250 iter time (s): 0.250 samples/sec: 128.000\n"
        "[2026-11-19 12:00:00,000] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=10, "
        "RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=25.7, MemAllocated=4.32GB, MaxMemAllocated=8.00GB\n",
        {"loss": 3.125, "lr": 1e-5, "skipped_steps": 2, "step_s": 0.25, "memory_bytes": 2**33},
    ),
    "nemo": (
        "Training epoch 0, iteration 9/99 | lr: 5.6e-06 | global_batch_size: 4 | global_step: 10 | "
        "reduced_train_loss: 3.125 | train_step_timing in s: 0.25 | val_loss: 3.5\n",
        {"loss": 3.125, "lr": 5.6e-6, "step_s": 0.25, "validation_loss": 3.5},
    ),
    "maxtext": (
        "completed step: 10, seconds: 0.250, TFLOP/s/device: 470.000, Tokens/s/device: 57000.000, total_weights: 1000, "
        "loss: 3.125\n",
        {"loss": 3.125, "step_s": 0.25, "TFLOP/s/device": 470},
    ),
    "verl": (
        "(TaskRunner pid=1) step:10 - actor/entropy:0.5 - actor/kl_loss:nan - actor/grad_norm:np.float64(1.5) - "
        "critic/rewards/mean:0.25 - response_length/mean:100.0 - response_length/clip_ratio:0.125 - "
        "timing_s/step:40.0\n",
        {"entropy": 0.5, "kl": math.nan, "grad_norm": 1.5, "reward": 0.25, "answer_length": 100, "cut_answers": 0.125,
         "step_s": 40},
    ),
    "openrlhf": (
        "2026-11-19 12:00:00.000 INFO ✨ Global step 10: {'policy_loss': 0.1, 'actor_lr': 1e-06, 'reward': 0.25, "
        "'kl': 0.01, 'response_length': 100.0, 'truncated': 0.125}\n",
        {"reward": 0.25, "kl": 0.01, "lr": 1e-6, "answer_length": 100, "cut_answers": 0.125, "policy_loss": 0.1},
    ),
    "olmo_core": (
        "2026-11-19 12:00:00\thost:0\tolmo_core.train:1\tINFO\t[step=10/1000,epoch=1,eta=10:00]\n"
        "    optim/total grad norm=1.5\n    optim/LR (group 0)=0.0001\n    train/CE loss=3.125\n    "
        "train/PPL=22.76\nother\n",
        {"loss": 3.125, "grad_norm": 1.5},
    ),
    "composer": (
        "[batch=10/100]:\n\t Train time/batch: 9\n\t Train loss/train/total: 3.1250\n"
        "\t Train lr-DecoupledAdamW/group0: 0.0001\n",
        {"loss": 3.125},
    ),
    "text_log": (
        "Epoch 1 Step 10/100 Train Loss: 3.125 Learning Rate: 1e-05\n",
        {"loss": 3.125, "lr": 1e-5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("format", LINES)
def test_one_line_of_each(tmp_path: Path, format: str) -> None:
    text, expected = LINES[format]
    run = read_text(tmp_path, f"Loading the model\n{text}")
    assert run.format == format
    for name, value in expected.items():
        assert points(run, name)[10] == pytest.approx(value, nan_ok=True), (name, run.series)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (" samples/sec: 31.1 | iteration       10/  320000 | elapsed time per iteration (s): 4.50 |"
         " learning rate: 6.0E-05 | approx flops per GPU: 52.2TFLOPS | lm_loss: 3.125E+00 | loss scale: 4096.0 |"
         " number of skipped iterations:   0"
         " | number of nan iterations:   0 |", {"loss": 3.125, "step_s": 4.5, "lr": 6e-5, "loss_scale": 4096}),
        ("step   10/18865 | loss 3.125000 (+0.10z)| norm 1.5000 (-0.31z)| lr 8.57e-07 | 1000.00 ms |"
         " 30.0% bf16 MFU | 52 tok/s",
         {"loss": 3.125, "grad_norm": 1.5, "lr": 8.57e-7}),
        ("step    10 | loss: 3.125 | lr 6.0e-04 | norm: 1.5 | dt: 250.00ms | tok/sec: 5000.0",
         {"loss": 3.125, "step_s": 0.25, "tokens_per_s": 5000, "lr": 6e-4}),
        ("[2026-11-19 12:00:00] INFO train: iteration=10 loss=3.125 val_loss=nan gpu_mem=4.0GiB",
         {"loss": 3.125, "validation_loss": math.nan, "gpu_mem": 2**32}),
        ("{'loss': 3.125, 'grad_norm': 1.5, 'learning_rate': 1e-05, 'memory/max_active (GiB)': 2.0, 'epoch': 0.1,"
         " 'global_step/max_steps': '10/20'}", {"loss": 3.125, "memory_bytes": 2**31}),
        ("{'loss': 0.6931, 'rewards/chosen': 0.5, 'rewards/rejected': -0.5, 'rewards/accuracies': 0.75,"
         " 'rewards/margins': 1.0, 'logps/chosen': -100.0, 'logps/rejected': -120.0, 'epoch': 0.1"
         ", 'global_step/max_steps': '10/20'}",
         {"chosen_reward": 0.5, "rejected_reward": -0.5, "accuracy": 0.75, "reward_margin": 1.0, "chosen_logp": -100}),
    ],
)  # fmt: skip
def test_lines_of_relatives(tmp_path: Path, line: str, expected: dict[str, float]) -> None:
    """GPT-NeoX, llm.c, scripts, Axolotl, TRL."""
    run = read_text(tmp_path, line + "\n")
    for name, value in expected.items():
        assert points(run, name)[10] == pytest.approx(value, nan_ok=True), (name, run.series)


def test_steps_that_begin_again_in_each_epoch(tmp_path: Path) -> None:
    lines = [f"Epoch {e}/3 Step {s}/500 Loss: {10 * e + s / 1000}" for e in (1, 2, 3) for s in range(100, 501, 100)]
    run = read_text(tmp_path, "\n".join(lines))
    assert run.series["loss"].steps.tolist() == list(range(100, 1501, 100))
    assert not run.restarts and run.total_steps is None and any("each epoch" in note for note in run.notes)


def test_overflows_of_deepspeed_lower_the_scale(tmp_path: Path) -> None:
    line = "[2026-11-19 12:00:00,000] [INFO] [loss_scaler.py:183] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
    text = (
        f"{line}Attempted loss scale: 65536, reducing to 32768\n{line}Attempted loss scale: 32768, reducing to 16384\n"
    )
    text += (
        "[INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, lr=[1e-05], mom=[(0.9, 0.95)]\nstep 10 loss 3.0\n"
    )
    run = read_text(tmp_path, text)
    assert points(run, "loss_scale") == {1: 32768, 2: 16384} and points(run, "skipped_steps") == {10: 2}
    assert points(run, "loss") == {10: 3.0}


def test_lightning_bars(tmp_path: Path) -> None:
    bars = [
        f"Epoch {epoch}:  {n}%|█         | {n}/100 [00:01<00:09,  9.99it/s, v_num=0, "
        f"train_loss={loss:.3f}, val_loss={val}]"
        for epoch, n, loss, val in ((0, 50, 3.0, "4.00"), (0, 100, 2.5, "4.00"), (1, 50, 2.0, "3.50"))
    ]
    run = read_text(tmp_path, "\r".join(bars) + "\n")
    assert run.format == "lightning"
    assert points(run, "loss") == {50: 3.0, 100: 2.5, 150: 2.0}
    assert points(run, "validation_loss") == {50: 4.0, 150: 3.5}, "the bar repeats the last validation"


def test_openrlhf_bar(tmp_path: Path) -> None:
    bars = [f"Train epoch [{e}/2]: {n}%|█▏  | {n}/100 [00:10<01:00,  1.20it/s, gpt_loss={l}, lr=1e-5]"
            for e, n, l in ((1, 50, 3.0), (2, 50, 2.0))]  # fmt: skip
    run = read_text(tmp_path, "\r".join(bars))
    assert run.format == "openrlhf" and points(run, "loss") == {50: 3.0, 150: 2.0} and points(run, "lr")[50] == 1e-5


@pytest.mark.parametrize(
    "noise",
    ["a", "a ", " ", "1", "1,", "A", "'a", "- a", ".", "=", "| a ", "a: ", "step ", "(", "- a:", "a_", "%|", "\\t"],
)
@pytest.mark.parametrize("head", list(LINES))
def test_no_line_takes_quadratic_time(tmp_path: Path, head: str, noise: str) -> None:
    """Lines of 60 kB with the markers of each format; a quadratic pattern would take minutes."""
    text = LINES[head][0].splitlines()[0]
    path = tmp_path / "long.log"
    path.write_text(
        f"{text} {noise * (60_000 // len(noise))}\n{text[:12]}{noise * (60_000 // len(noise))}{text[12:]}\n"
    )
    recognise(path)


@pytest.mark.parametrize(
    "text", ["", "hello\n", "Loss of signal at step 3\n", "step 1: accuracy 0.5\n", "\x00\x01\x02binary loss step 3 "]
)
def test_other_text_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.log"
    path.write_text(text)
    assert recognise(path) is None
    with pytest.raises(UserError, match=r"notes\.log: not a run in a known format; looked for trainer_state\.json"):
        read(path)


def test_a_line_without_an_end_is_read_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "bar.log"
    with path.open("w") as file:
        for step in range(1, 10_001):
            file.write(
                f"\rstep {step:05d} (1.0%) | loss: 3.000000 | lrm: 1.00 | dt: 250ms | tok/sec: 2,097 | epoch: 1 | "
                "remaining: 3s    "
            )
    (run,) = read(path)
    assert run.format == "nanochat" and len(run.series["loss"]) == 10_000


def test_reading_reports_how_much_of_a_file_has_been_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"iter {i}: loss 2.5, time 4.00ms, mfu 37.00%\n" for i in range(60_000)))
    shares: list[float] = []
    token = progress.set(lambda _, share: shares.append(share))
    try:
        (run,) = read(path)
    finally:
        progress.reset(token)
    assert len(run.series["loss"]) == 60_000 and run.series["loss"].lines[-1] == 60_000
    assert len(shares) > 2 and shares[-1] == 1.0
