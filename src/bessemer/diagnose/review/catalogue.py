"""The rules of `bessemer review`: name, severity, why it matters and what to write instead."""

from __future__ import annotations

from dataclasses import dataclass, field

from bessemer.diagnose.review.edits import SourceEdit
from bessemer.run.finding import Finding


@dataclass(frozen=True)
class ReviewRule:
    """What a rule looks for. `critical`: the result is wrong or the script fails; `warning`: it is worse than needed."""

    severity: str
    why: str
    fix: str


@dataclass(frozen=True)
class ScriptFault:
    """A faulty line. `edits` are the patch, empty where the right change cannot be known."""

    rule: str
    line: int
    symptom: str
    edits: tuple[SourceEdit, ...] = field(default=(), compare=False)

    @property
    def severity(self) -> str:
        return RULES[self.rule].severity

    def finding(self, path: str) -> Finding:
        rule = RULES[self.rule]
        return Finding(
            self.symptom, {"file": path, "line": self.line, "patch": bool(self.edits)}, cause=rule.why,
            confidence=0.95 if rule.severity == "critical" else 0.8, fix=rule.fix, severity=rule.severity, rule=self.rule,
        )  # fmt: skip


def _rules(severity: str, rows: dict[str, tuple[str, str]]) -> dict[str, ReviewRule]:
    return {name: ReviewRule(severity, why, fix) for name, (why, fix) in rows.items()}


LOOP = {
    "zero-grad-missing": (
        "Gradients of all earlier steps are added to each new one.",
        "call optimizer.zero_grad() once per optimizer step",
    ),
    "zero-grad-before-step": (
        "The gradients are cleared before the optimizer uses them, so nothing is learned.",
        "clear the gradients after the step or before the backward pass",
    ),
    "zero-grad-in-accumulation": (
        "Each micro-batch clears what the ones before it accumulated; only the last one counts.",
        "clear the gradients only where the optimizer steps",
    ),
    "accumulation-not-divided": (
        "Gradients of the micro-batches are summed, so the step is larger by the number of micro-batches.",
        "divide the loss by the number of micro-batches, or by the tokens of all of them",
    ),
    "step-missing": ("Gradients are computed but no weight changes.", "call optimizer.step() after the backward pass"),
    "step-before-backward": (
        "The optimizer uses the gradients of the previous iteration, or none.",
        "step after the backward pass",
    ),
    "clip-after-step": ("The gradients are clipped after they were used.", "clip before optimizer.step()"),
    "clip-before-backward": ("The gradients of this step do not exist yet.", "clip after the backward pass"),
    "clip-before-unscale": (
        "The gradients are still multiplied by the loss scale, so clipping shrinks nearly every step.",
        "call scaler.unscale_(optimizer) before clipping",
    ),
    "scaler-update-missing": (
        "The loss scale never adapts: after an overflow every step is skipped.",
        "call scaler.update() after scaler.step()",
    ),
    "scaler-step-bypassed": (
        "The optimizer uses gradients that are still multiplied by the loss scale.",
        "call scaler.step(optimizer) and scaler.update()",
    ),
    "scheduler-unit": (
        "The schedule counts another unit (epochs or steps) than the loop that advances it.",
        "advance it once per unit of its horizon",
    ),
    "schedule-in-micro-steps": (
        "The schedule is as long as the micro-batches, but it advances once per optimizer step: it never ends.",
        "divide the number of training steps by the accumulation",
    ),
    "scheduler-every-micro-step": (
        "The schedule counts optimizer steps but advances at every micro-batch: it ends too early.",
        "advance it where the optimizer steps",
    ),
    "loss-keeps-graph": (
        "Adding the loss tensor keeps the graph of every step alive, so memory grows until it runs out.",
        "use loss.detach() or loss.item()",
    ),
    "loss-detached": ("The loss has no graph, so the backward pass reaches no weight.", "use the loss as computed"),
}
MODES = {
    "eval-mode-missing": (
        "Dropout is active and batch norm uses and updates batch statistics during evaluation.",
        "call model.eval() before evaluating",
    ),
    "train-mode-not-restored": (
        "After the first evaluation the model trains in evaluation mode: no dropout, frozen batch statistics.",
        "call model.train() before training continues",
    ),
    "train-mode-missing": (
        "from_pretrained returns a model in evaluation mode, so dropout is off during training.",
        "call model.train() before the loop",
    ),
    "generate-in-train-mode": ("Dropout changes the generated text.", "call model.eval() before generate"),
    "seed-in-loop": (
        "Every iteration draws the same random numbers: the same dropout masks and augmentations.",
        "set the seed once, before the loop",
    ),
}
LOSS = {
    "softmax-into-cross-entropy": (
        "Cross entropy applies log-softmax itself; a second softmax flattens the distribution and weakens gradients.",
        "pass logits",
    ),
    "sigmoid-twice": ("The loss applies the sigmoid itself.", "pass logits"),
    "nll-without-log-softmax": ("NLL loss expects log-probabilities.", "use cross entropy on logits"),
    "labels-shifted-twice": (
        "Causal models of transformers shift the labels themselves: the model learns to predict two tokens ahead.",
        "pass the same ids as input and labels",
    ),
    "labels-not-shifted": (
        "Each position is trained to repeat its own input; the loss falls to 0 and nothing is learned.",
        "compare the logits of position t with token t + 1",
    ),
    "pad-in-loss": ("Padding counts as text to learn.", "set the labels of padding to -100"),
    "pad-is-eos": (
        "Padding and end of text have the same id, so the end of text is masked too and the model never learns to stop.",
        "mask by attention_mask, or add a padding token",
    ),
    "attention-mask-missing": ("Tokens attend to padding.", "pass attention_mask"),
    "best-keeps-worst": ("A lower loss is better; this keeps the worst checkpoint.", "keep the lowest"),
}
MODULES = {
    "dropout-always-on": (
        "F.dropout is active by default, in evaluation too.",
        "pass training=self.training or use nn.Dropout",
    ),
    "unregistered-layers": (
        "Layers in a plain list are not parameters of the module: neither trained, moved nor saved.",
        "use nn.ModuleList",
    ),
    "best-state-alias": (
        "state_dict() returns references, so the best weights change with every later step.",
        "copy it with copy.deepcopy",
    ),
    "optimizer-before-wrap": (
        "The optimizer holds the parameters from before the model was changed; the new ones are not trained.",
        "build the optimizer afterwards",
    ),
    "model-not-moved": ("The batches are on the device, the model is not.", "move the model with .to(device)"),
    "to-result-unused": ("tensor.to() returns a copy; the tensor stays where it is.", "assign the result"),
    "resume-without-optimizer": (
        "The optimizer starts from zero moments, although the checkpoint has its state.",
        "load the optimizer's state",
    ),
    "workers-share-seed": (
        "All loader workers draw the same random numbers, so augmentations repeat.",
        "add the worker's number to the seed",
    ),
    "use-cache-with-checkpointing": (
        "Gradient checkpointing recomputes the forward pass and cannot use the key-value cache.",
        "set use_cache=False",
    ),
}
RANKS = {
    "shuffle-with-sampler": ("DataLoader refuses shuffle together with a sampler.", "shuffle in the sampler"),
    "set-epoch-missing": (
        "DistributedSampler gives the same order in every epoch.",
        "call sampler.set_epoch(epoch) in each epoch",
    ),
    "sampler-missing": ("Every rank reads all the data.", "use a DistributedSampler"),
    "sync-batchnorm-after-ddp": (
        "DDP has registered the layers that the conversion replaces.",
        "convert before wrapping with DDP",
    ),
    "ddp-before-to": ("DDP needs the parameters on their device when it wraps.", "move the model first"),
    "global-rank-as-device": ("The second node has no GPU of that number.", "use LOCAL_RANK"),
    "save-on-all-ranks": ("All ranks write the same file at once and damage it.", "save on rank 0"),
    "module-prefix": (
        "The saved keys carry the wrapper's prefix (`module.`, `_orig_mod.`) and do not load into the plain model.",
        "save the state of the wrapped model",
    ),
    "collective-in-one-rank": ("The other ranks never join the collective, and the job hangs.", "call it on all ranks"),
    "reduce-not-averaged": (
        "all_reduce sums over the ranks: the value grows with their number.",
        "divide by the world size",
    ),
}
FRAMEWORKS = {
    "accelerate-backward": (
        "Accelerate neither scales the loss nor divides it by the accumulation.",
        "call accelerator.backward(loss)",
    ),
    "accumulate-context-missing": (
        "Without the context every micro-batch steps, although the loss is divided for accumulation.",
        "put the step in `with accelerator.accumulate(model):`",
    ),
    "accumulation-divided-twice": (
        "The framework divides the loss by the accumulation itself.",
        "pass the undivided loss",
    ),
    "accelerate-unprepared": (
        "An optimizer outside prepare() steps at every micro-batch and ignores the loss scale.",
        "pass it to accelerator.prepare",
    ),
    "lightning-manual-backward": (
        "In automatic optimization Lightning runs backward and step itself: both happen twice.",
        "return the loss only, or set self.automatic_optimization = False",
    ),
    "lightning-no-loss": (
        "Without a returned loss Lightning skips the optimization of the batch.",
        "return the loss from training_step",
    ),
    "lightning-raw-backward": (
        "Plain backward bypasses the precision and the strategy.",
        "call self.manual_backward(loss)",
    ),
    "deepspeed-backward": ("The engine neither scales the loss nor reduces gradients.", "call engine.backward(loss)"),
    "deepspeed-step": (
        "The engine's accumulation, clipping and schedule are bypassed.",
        "call engine.step() after every backward pass",
    ),
    "deepspeed-conditional-step": (
        "The engine counts micro-batches in step() and accumulates itself; calling it less often multiplies both.",
        "call engine.step() after every engine.backward()",
    ),
    "trainer-two-precisions": ("The Trainer refuses fp16 and bf16 together.", "choose one"),
    "trainer-best-without-evaluation": (
        "load_best_model_at_end needs equal strategies of evaluation and saving.",
        "set eval_strategy to save_strategy's value",
    ),
    "compute-loss-signature": (
        "The Trainer passes num_items_in_batch to compute_loss.",
        "accept num_items_in_batch=None or **kwargs",
    ),
}
RULES: dict[str, ReviewRule] = {
    **_rules("critical", LOOP | MODES | LOSS | MODULES | RANKS | FRAMEWORKS),
    **_rules("warning", {
        "no-grad-missing": (
            "Evaluation builds graphs that nothing uses: it needs the memory of training.",
            "evaluate under torch.no_grad() or torch.inference_mode()",
        ),
        "scheduler-before-optimizer": ("The first value of the schedule is skipped.", "step the optimizer first"),
        "scaler-with-bf16": (
            "bf16 has the range of fp32; scaling only costs time and skips steps.",
            "disable the scaler",
        ),
        "fp16-without-scaler": (
            "Small gradients underflow to zero in fp16 without a loss scale.",
            "use bfloat16, or a GradScaler",
        ),
        "retain-graph": ("The graph of every step is kept although nothing uses it again.", "drop retain_graph=True"),
        "adam-l2": (
            "In Adam, weight decay is added to the gradient and divided by its second moment: it hardly decays.",
            "use AdamW",
        ),
        "load-without-map-location": (
            "Every rank loads onto the GPU that saved, usually GPU 0, which runs out of memory.",
            "pass map_location",
        ),
        "load-without-weights-only": ("Unpickling runs code of the file.", "pass weights_only=True"),
        "clip-without-sync-gradients": (
            "Partly accumulated gradients are clipped at each micro-batch.",
            "clip under `if accelerator.sync_gradients:`",
        ),
        "accelerate-torch-clip": (
            "Gradients are still scaled in fp16, and sharded norms are partial.",
            "call accelerator.clip_grad_norm_",
        ),
        "lightning-sync-dist": (
            "Each rank logs its own part; the checkpoint is chosen by that of rank 0.",
            "pass sync_dist=True",
        ),
    }),
    **_rules("note", {
        "weight-decay-on-norms": (
            "Biases and norms are decayed too; language models usually exclude them.",
            "use two parameter groups",
        ),
        "item-every-step": (
            "Each .item() waits for the device. Several in every step cost throughput.",
            "keep tensors on the device and read them every N steps",
        ),
        "cuda-amp-deprecated": ("torch.cuda.amp is deprecated.", "use torch.amp with the device's name"),
        "log-softmax-twice": ("Cross entropy applies log-softmax itself; the first one is wasted.", "pass logits"),
        "accumulation-without-no-sync": (
            "DDP reduces gradients at every micro-batch although only the last one needs it.",
            "use model.no_sync() for all but the last",
        ),
    }),
}  # fmt: skip


def rules_table() -> str:
    """The table of docs/review.md."""
    rows = ["| rule | severity | why | instead |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {rule.severity} | {rule.why} | {rule.fix} |" for name, rule in RULES.items()]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":  # python -m bessemer.diagnose.review.catalogue
    print(rules_table(), end="")
