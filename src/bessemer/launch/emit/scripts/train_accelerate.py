"""Trains the run in this folder with Hugging Face accelerate: the initial weights, batches and rates of Bessemer.

    accelerate launch --config_file accelerate.yaml train.py

Writes losses.jsonl, states/ and trained/. The same command again resumes from the last state.
"""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from bessemer.launch.emit.feed import decay_groups, load_model, open_emitted

HERE = Path(__file__).resolve().parent


def finished_states() -> list[Path]:
    """Complete states, oldest first; a half-written state has no mark."""
    return sorted(mark.parent for mark in (HERE / "states").glob("*/finished"))


def save(accelerator: Accelerator, done: int, keep_last: int) -> None:
    folder = HERE / "states" / f"{done:08}"
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / "finished").touch()
        for old in finished_states()[:-keep_last]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def main() -> None:
    settings = json.loads((HERE / "train.json").read_text())
    run = open_emitted(HERE)
    accelerator = Accelerator(cpu=settings["cpu"])  # use_cpu of the config reaches only one process
    set_seed(run.spec.seed)
    model = load_model(HERE, settings["gradient_checkpointing"])
    options = dict(settings["optimizer"])
    optimizer_class, decay = getattr(torch.optim, options.pop("class")), options.pop("weight_decay")
    optimizer = optimizer_class(decay_groups(model, decay), lr=0.0, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    saved = finished_states()
    if saved:
        accelerator.load_state(str(saved[-1]))
    first = int(saved[-1].name) if saved else 0
    model.train()
    for step in range(first, run.plan.total_steps):
        # Divide once by the step's count over all ranks; `ranks` undoes the mean over ranks.
        scale = 1.0 / run.count(step)
        batches = run.micro_batches(step, rank, ranks, device)
        total = torch.zeros((), device=device)
        for number, micro in enumerate(batches):
            with accelerator.no_sync(model) if number + 1 < len(batches) else nullcontext():
                loss = micro.loss(model(**micro.inputs, use_cache=False).logits) * scale
                accelerator.backward(loss * ranks)
            total += loss.detach()
        norm = accelerator.clip_grad_norm_(model.parameters(), settings["clip"])
        lr = run.lr(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(total, "sum")
        if accelerator.is_main_process:
            record = {"step": step, "loss": float(mean), "grad_norm": float(norm), "lr": lr}
            with (HERE / "losses.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(record, file=sys.stderr)
        if (step + 1) % settings["save_steps"] == 0:
            save(accelerator, step + 1, settings["keep_last"])
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(HERE / "trained", state_dict=state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
