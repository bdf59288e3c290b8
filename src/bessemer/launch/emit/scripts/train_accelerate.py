"""Trains the run beside this file with Hugging Face accelerate: same first weights, batches and rates as Bessemer.

    accelerate launch --config_file accelerate.yaml train.py

Losses go to losses.jsonl, states to states/, the model to trained/. Started again, it goes on from the last state.
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
    """Oldest first; a state that a kill left half written has no mark."""
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
    asked = json.loads((HERE / "train.json").read_text())
    run = open_emitted(HERE)
    accelerator = Accelerator(cpu=asked["cpu"])  # of a config's use_cpu only one process is told
    set_seed(run.spec.seed)
    model = load_model(HERE, asked["gradient_checkpointing"])
    settings = dict(asked["optimizer"])
    make, decay = getattr(torch.optim, settings.pop("class")), settings.pop("weight_decay")
    optimizer = make(decay_groups(model, decay), lr=0.0, **settings)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    saved = finished_states()
    if saved:
        accelerator.load_state(str(saved[-1]))
    first = int(saved[-1].name) if saved else 0
    model.train()
    for step in range(first, run.plan.total_steps):
        # One division by the step's count over all ranks; `ranks` undoes the mean that is taken over them.
        scale = 1.0 / run.count(step)
        batches = run.micro_batches(step, rank, ranks, device)
        total = torch.zeros((), device=device)
        for number, micro in enumerate(batches):
            with accelerator.no_sync(model) if number + 1 < len(batches) else nullcontext():
                loss = micro.loss(model(**micro.inputs, use_cache=False).logits) * scale
                accelerator.backward(loss * ranks)
            total += loss.detach()
        norm = accelerator.clip_grad_norm_(model.parameters(), asked["clip"])
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
        if (step + 1) % asked["save_steps"] == 0:
            save(accelerator, step + 1, asked["keep_last"])
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(HERE / "trained", state_dict=state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
