"""Trains the run in this folder with DeepSpeed: the initial weights and batches of Bessemer, rates of ds_config.json.

    deepspeed train.py            (on a CPU: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 train.py)

Writes losses.jsonl and states/. The same command again resumes from the last state.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from bessemer.launch.emit.feed import decay_groups, load_model, open_emitted

HERE = Path(__file__).resolve().parent


def main() -> None:
    settings, config = (json.loads((HERE / name).read_text()) for name in ("train.json", "ds_config.json"))
    run = open_emitted(HERE)
    deepspeed.init_distributed()
    torch.manual_seed(run.spec.seed)
    model = load_model(HERE, settings["gradient_checkpointing"])
    groups = decay_groups(model, settings["weight_decay"])
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, state = engine.load_checkpoint(str(HERE / "states"))
    for step in range(state["done"] if state else 0, run.plan.total_steps):
        batches = run.micro_batches(step, rank, ranks, engine.device, engine.train_micro_batch_size_per_gpu())
        # Undo DeepSpeed's division by accumulation and ranks, to divide once by the step's count.
        scale, lift = 1.0 / run.count(step), ranks * engine.gradient_accumulation_steps()
        total = torch.zeros((), device=engine.device)
        for micro in batches:
            loss = micro.loss(engine(**micro.inputs, use_cache=False).logits) * scale
            engine.backward(loss * lift)
            lr = engine.get_lr()[0]  # of this update
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            record = {"step": step, "loss": float(total), "lr": lr}
            with (HERE / "losses.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(record, file=sys.stderr)
        if (step + 1) % settings["save_steps"] == 0:
            engine.save_checkpoint(str(HERE / "states"), client_state={"done": step + 1})


if __name__ == "__main__":
    main()
