"""Embeddings of encoders, and labels of classifiers: texts of several requests are computed in one padded batch.

Legend: B texts, T columns, W width, L labels.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import Decoder
from bessemer.serve.scheduler import InferenceJob, SampleProgress
from bessemer.spec.classify import ClassifySpec
from bessemer.spec.load import load_spec

BATCH_TOKENS = 8192  # of a padded batch
PADDING = -1  # document number of padding columns
_PROBLEMS: dict[str, Any] = {"multi_label_classification": "multi", "regression": "regression"}


def read_classes(place: Path, model: Decoder) -> ClassifySpec:
    """What a classifier's labels mean: from its run's spec, or from a Hugging Face config."""
    if (place / "spec.yaml").is_file():
        spec = load_spec(place / "spec.yaml").classify
        if spec is not None:
            return spec
    config = json.loads((place / "config.json").read_text())
    names = config.get("id2label") or {str(i): f"LABEL_{i}" for i in range(model.shape.labels)}
    by_token = str((config.get("architectures") or [""])[0]).endswith("ForTokenClassification")
    problem = _PROBLEMS.get(config.get("problem_type"), "regression" if model.shape.labels == 1 else "single")
    labels = [] if problem == "regression" else [names[str(i)] for i in range(model.shape.labels)]
    return ClassifySpec(kind="token" if by_token else "sequence", problem=problem, labels=labels)


def read_pooling(place: Path) -> Literal["mean", "first"]:
    """How an encoder's tokens become one vector: as its sentence-transformers file says, else their mean."""
    file = place / "1_Pooling" / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    return "first" if config.get("pooling_mode_cls_token") else "mean"


@dataclass(eq=False)
class EncoderBackend:
    """Computes the texts of started jobs, oldest first, as many as fit a batch. A job's result is one tensor for each
    text: its embedding, or the logits of its labels (of each token with `kind: token`)."""

    model: Decoder
    pooling: Literal["mean", "first"] = "mean"
    classes: ClassifySpec | None = None
    slots: int = 64

    def __post_init__(self) -> None:
        self.queue: deque[tuple[InferenceJob, int]] = deque()
        self.jobs: set[InferenceJob] = set()
        if self.classes is None:
            self.model.transform = None  # of the masked-token head, which embeddings come before

    def free(self) -> int:
        return self.slots - len(self.jobs)

    def start(self, job: InferenceJob) -> None:
        job.results = [None] * len(job.work)
        self.jobs.add(job)
        self.queue.extend((job, i) for i in range(len(job.work)))

    def cancel(self, job: InferenceJob) -> None:
        self.jobs.discard(job)
        self.queue = deque(entry for entry in self.queue if entry[0] is not job)

    def reset(self) -> None:
        self.jobs.clear()
        self.queue.clear()

    def progress(self, job: InferenceJob) -> list[SampleProgress]:
        done = sum(result is not None for result in job.results)
        if done < len(job.work):
            return [SampleProgress(0, "", None)]
        self.jobs.discard(job)
        return [SampleProgress(0, "", "stop")]

    @torch.inference_mode()
    def step(self) -> None:
        batch: list[tuple[InferenceJob, int]] = []
        longest = 0
        while self.queue:
            job, i = self.queue[0]
            longest = max(longest, len(job.work[i]))
            if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
                break
            batch.append(self.queue.popleft())
        if batch:
            results = self.compute([job.work[i] for job, i in batch])
            for (job, i), result in zip(batch, results, strict=True):
                job.results[i] = result

    def compute(self, texts: list[list[int]]) -> list[Tensor]:
        """One result for each text, on the CPU."""
        device, lengths = self.model.head_weight.device, [len(ids) for ids in texts]
        T = max(lengths)
        tokens_BT = torch.tensor([[*ids, *[0] * (T - len(ids))] for ids in texts], device=device)
        lengths_B1 = torch.tensor(lengths, device=device)[:, None]
        read_BT = torch.arange(T, device=device) < lengths_B1
        mask = AttentionMask(torch.where(read_BT, 0, PADDING)) if min(lengths) < T else AttentionMask()
        hidden_BTW = self.model(tokens_BT, mask)
        rows_B = torch.arange(len(texts), device=device)
        if self.classes is None:
            if self.pooling == "first":
                vectors_BW = hidden_BTW[:, 0]
            else:
                vectors_BW = (hidden_BTW * read_BT[..., None]).sum(1) / lengths_B1
            return list(F.normalize(vectors_BW.float(), dim=-1).cpu())
        if self.classes.kind == "token":
            logits_BTL = self.model.logits(hidden_BTW).float().cpu()
            return [logits_TL[:length] for logits_TL, length in zip(logits_BTL, lengths, strict=True)]
        at_B = lengths_B1[:, 0] - 1 if self.classes.pool_for(self.model.shape.causal) == "last" else 0 * rows_B
        return list(self.model.logits(hidden_BTW[rows_B, at_B]).float().cpu())


def classification(index: int, logits: Tensor, classes: ClassifySpec, spans: list[tuple[int, int]]) -> dict[str, Any]:
    """The API's object of one text. `spans` are the characters of each token, for `kind: token`."""
    if classes.kind == "token":
        best = logits.softmax(-1).max(-1)
        tokens = [
            {"start": start, "end": end, "label": classes.labels[label], "probability": probability}
            for (start, end), label, probability in zip(spans, best.indices.tolist(), best.values.tolist(), strict=True)
            if end > start
        ]
        return {"index": index, "tokens": tokens}
    if classes.problem == "regression":
        return {"index": index, "value": float(logits[0])}
    multi = classes.problem == "multi"
    shares = (logits.sigmoid() if multi else logits.softmax(-1)).tolist()
    named = {"probabilities": dict(zip(classes.labels, shares, strict=True))}
    if multi:
        chosen = [label for label, share in named["probabilities"].items() if share > 0.5]
        return {"index": index, "labels": chosen, **named}
    return {"index": index, "label": classes.labels[int(logits.argmax())], **named}
