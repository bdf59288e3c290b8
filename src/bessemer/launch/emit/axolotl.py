"""Axolotl: its YAML for the parts of a run that it has: the exported model, the files' text, optimizer, rates, sizes.

Axolotl reads text files itself: curation, mixing by counts and our order stay behind, and the notes say so.
"""

from __future__ import annotations

from typing import Any

import yaml

from bessemer.data.read import list_files
from bessemer.errors import UserError
from bessemer.launch.emit.accelerate import cover_transformers, mixed_precision, recomputed
from bessemer.launch.emit.resolve import EmittedFiles, KeyLedger, ResolvedRun, comments, first_weights

READERS = {"jsonl": "json", "csv": "csv", "parquet": "parquet", "arrow": "arrow", "text": "text"}
OPTIMIZERS = {
    "adamw": "adamw_torch_fused", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop", "lion": "lion_pytorch",
    "adafactor": "adafactor", "muon": "muon",
}  # fmt: skip


def write(run: ResolvedRun, ledger: KeyLedger) -> EmittedFiles:
    """axolotl.yaml."""
    cover_transformers(run, ledger)
    ledger.covers("tokenizer", "seed", "start_from", "data.context", "compile")
    ledger.covers(*(f"budget.{key}" for key in ("tokens", "steps", "epochs", "batch", "micro_batch")))
    sections = {
        "The model: first weights and tokenizer, written by the command before": {
            "base_model": str(run.folder.absolute() / "model"),
            "tokenizer_config": str(run.folder.absolute() / "model"),
        },
        "Data: the files as they are": _data(run, ledger),
        "Batches and length": _batches(run),
        "Optimizer and rates": _optimizer(run, ledger),
        "Precision and memory": _memory(run, ledger),
        "Layout": _layout(run, ledger),
        "Saves": _saves(run, ledger),
    }  # fmt: skip
    notes = ledger.notes()
    said = {title: yaml.safe_dump(part, sort_keys=False, width=10_000) for title, part in sections.items() if part}
    text = "".join(f"# {title}\n{part}\n" for title, part in said.items())
    start = f"axolotl train {run.folder}/axolotl.yaml"
    if run.ranks > 1:
        start += f" --launcher torchrun -- --nproc-per-node {min(run.world, 8)}"
    return EmittedFiles({"axolotl.yaml": text + comments(notes)}, f"{first_weights(run.folder)} && {start}", notes)


def _data(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    """Files by source. A mixture is not expressed: axolotl puts its datasets end to end and shuffles."""
    found = []
    for name, source in run.spec.data.sources.items():
        key = f"data.sources.{name}"
        if not source.path:
            raise UserError(f"{key}.path: missing: axolotl reads the files, not the published store")
        entries = list_files(source)
        kinds = {entry.format for entry in entries}
        if len(kinds) != 1 or not kinds <= set(READERS):
            ledger.differs(key, f"files of {', '.join(sorted(kinds))} are not read: turn them into jsonl first")
            continue
        reader = READERS[kinds.pop()]
        column = "text" if reader == "text" else source.text_field
        files = [entry.name for entry in entries]
        found.append({"path": reader, "data_files": files, "split": "train", "type": "completion", "field": column})
        ledger.covers(f"{key}.path", f"{key}.format", f"{key}.text_field", f"{key}.include", f"{key}.exclude")
    if run.spec.data.cross_documents:
        ledger.differs("data.cross_documents", "true: packed samples are always kept apart")
    ledger.differs("data.sources", "text is tokenized anew, in axolotl's own order, by the size of the files")
    held_out = run.spec.data.validation
    ledger.covers("data.validation")
    if held_out:
        ledger.differs("data.validation", f"{held_out:g}: other documents are held out than ours")
    return {
        "datasets": found,
        "val_set_size": held_out,
        "dataset_prepared_path": str(run.folder.absolute() / "prepared"),
    }


def _batches(run: ResolvedRun) -> dict[str, Any]:
    batches = run.batches()
    return {
        "sequence_len": run.plan.context, "sample_packing": True, "pad_to_sequence_len": True,
        "micro_batch_size": batches.micro, "gradient_accumulation_steps": batches.accumulate,
        "max_steps": run.plan.total_steps, "seed": run.spec.seed,
    }  # fmt: skip


def _optimizer(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    asked, plan, settings = run.spec.optimizer, run.plan, run.spec.optimizer.settings()
    ledger.covers("schedule", "optimizer.lr", "optimizer.clip", "optimizer.weight_decay")
    name = OPTIMIZERS.get(asked.name)
    if name is None:
        ledger.differs("optimizer.name", f"{asked.name} is not there: adamw stands in")
        name = "adamw_torch_fused"
    ledger.covers("optimizer.name")
    said: dict[str, Any] = {
        "optimizer": name, "learning_rate": plan.peak_lr, "weight_decay": settings.get("weight_decay", 0.0),
        "max_grad_norm": asked.clip, "warmup_steps": plan.warmup_steps,
    }  # fmt: skip
    if "betas" in settings:
        said |= {"adam_beta1": settings["betas"][0], "adam_beta2": settings["betas"][1]}
        ledger.covers("optimizer.betas")
    if "eps" in settings:
        said["adam_epsilon"] = settings["eps"]
        ledger.covers("optimizer.eps")
    kind, floor = run.spec.schedule.kind, run.spec.schedule.floor
    said["lr_scheduler"] = "constant_with_warmup" if kind == "constant" else kind
    if kind == "cosine":
        said["cosine_min_lr_ratio"] = floor
    elif kind == "linear" and floor:
        ledger.differs("schedule.floor", f"{floor:g}: the linear schedule falls to zero")
    ledger.differs(
        "schedule.warmup", f"{plan.warmup_steps} steps: transformers' first rate is zero, one step behind ours"
    )
    return said


def _memory(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    half = mixed_precision(run, ledger)
    said: dict[str, Any] = {"bf16": half == "bf16", "fp16": half == "fp16", "tf32": run.plan.precision == "tf32"}
    said["gradient_checkpointing"] = recomputed(run, ledger)
    if run.spec.memory.moments == "8bit" and run.spec.optimizer.name == "adamw":
        ledger.differs("memory.moments", "8bit: write optimizer: adamw_bnb_8bit for bitsandbytes' kind of it")
    return said | {"torch_compile": run.plan.compiled, "attn_implementation": "sdpa"}


def _layout(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    ledger.covers(*(f"parallel.{key}" for key in ("dp_replicate", "dp_shard", "tp", "cp")))
    if run.device != "cuda":
        ledger.differs("parallel.device", f"{run.device}: axolotl takes the GPUs it finds")
    said: dict[str, Any] = {}
    sizes = {
        "dp_replicate_size": run.replicas, "dp_shard_size": run.degree("dp_shard"),
        "tensor_parallel_size": run.degree("tp"), "context_parallel_size": run.degree("cp"),
    }  # fmt: skip
    said |= {name: size for name, size in sizes.items() if size > 1}
    if run.degree("dp_shard") > 1:
        said["fsdp_version"] = 2
        said["fsdp_config"] = {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True,
            "state_dict_type": "SHARDED_STATE_DICT", "offload_params": run.spec.memory.offload_optimizer,
        }  # fmt: skip
        if run.spec.memory.offload_optimizer:
            ledger.differs("memory.offload_optimizer", "weights go to the host along with the moments")
    return said


def _saves(run: ResolvedRun, ledger: KeyLedger) -> dict[str, Any]:
    ledger.covers("checkpoint.every", "checkpoint.keep_last", "evaluate.every")
    said = {
        "output_dir": str(run.folder.absolute() / "trained"), "save_steps": run.save_steps(),
        "save_total_limit": run.spec.checkpoint.keep_last, "logging_steps": 1,
    }  # fmt: skip
    if run.spec.data.validation:
        said["eval_steps"] = run.plan.evaluate.steps or run.save_steps()
    return said
