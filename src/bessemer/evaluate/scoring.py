"""Log-likelihoods of given continuations, many per forward pass.

Texts are packed as prefix trees: a beginning that several share (few-shot examples, a question before its choices) is
computed once per pass. Sorted by their tokens, neighbours share most, and a pass holds as many as fit. Only targets get
logits, in chunks, and nothing is read from the device before the last pass has been queued.
Legend: T columns of a packed row, U columns with targets, R targets, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.attention_mask import TILE, AttentionMask
from bessemer.model.transformer import Decoder
from bessemer.observe.progress import ProgressReport, silent
from bessemer.train.compile import CompiledBlocks, compilable
from bessemer.train.loss import has_triton

Ids = Sequence[int] | np.ndarray[Any, Any]
Gather = Callable[[Any], list[Any]]  # one value of each rank
PACK_GPU, PACK_CPU = 8192, 512  # tokens of a pass; on a CPU attention costs the square of them
LOGIT_BYTES = {"cuda": 512 << 20}  # of a chunk of float32 logits
LOGIT_BYTES_ELSE = 16 << 20


class Likelihood(NamedTuple):
    """The summed log-probability (nats) of a continuation, and whether each token was the most likely one."""

    logp: float
    greedy: bool


@dataclass(frozen=True)
class ScoredText:
    """What the model reads of some requests (all but the last target), and their targets: place in the text, id, and
    the request it belongs to."""

    inputs: np.ndarray[Any, np.dtype[np.int64]]
    targets: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Pack:
    """Arrays of one pass: tokens, where each column's continuations end, its place in its text; then columns, ids and
    requests of the targets, sorted by column. Rows are (B, T); packed trees have one row."""

    tokens_BT: np.ndarray[Any, Any]
    until_BT: np.ndarray[Any, Any] | None
    depth_BT: np.ndarray[Any, Any] | None
    targets_3R: np.ndarray[Any, Any]


class EvaluationBlocks(CompiledBlocks):
    """Compiled blocks for passes without gradients."""

    def serves(self, block: Any, x_BTW: Tensor) -> bool:
        return x_BTW.shape[:2] == self.size and x_BTW.dtype == self.dtype and not torch.is_grad_enabled()


class Scorer:
    """Scores continuations with a causal model in evaluation mode. `context` is the most tokens that it reads: longer
    texts lose their beginning, and `truncated` counts them. `share` divides the passes over ranks that all call with
    the same requests: (rank, ranks, gather)."""

    def __init__(
        self, model: Decoder, context: int | None = None, pack: int | None = None, compiled: bool = False,
        share: tuple[int, int, Gather] | None = None,
    ) -> None:  # fmt: skip
        shape = model.shape
        if shape.labels or not shape.causal or shape.decoder_layers:
            raise UserError("this model does not predict the next token of a text: evaluate it with its own data")
        self.model, self.device, self.context = model, model.head_weight.device, context or shape.position_limit
        on_gpu = self.device.type == "cuda"
        self.flex = on_gpu and has_triton() and not shape.wrapped
        self.pack = pack or (PACK_GPU if on_gpu else PACK_CPU)
        exact = shape.positions in ("rope", "learned", "none") and not shape.blocks[0] and not shape.global_tokens
        attends = all(shape.mixer(layer) == "attention" for layer in range(shape.layers))
        by_length = shape.positions == "rope" and shape.rope.scaling in ("longrope", "dynamic")
        self.trees = exact and attends and not by_length and not shape.wrapped
        self.by_length = by_length or shape.wrapped
        self.compiled, self.share, self.truncated, self.passes, self.computed = compiled, share, 0, 0, 0

    def score(self, requests: Sequence[tuple[Ids, Ids]], report: ProgressReport = silent) -> list[Likelihood]:
        """The likelihood of each (context, continuation), neither of which may be empty."""
        texts = self._texts(requests)
        packs = list(pack_trees(texts, self.pack) if self.trees else pack_rows(texts, self.pack, bool(self.by_length)))
        rank, ranks, gather = self.share or (0, 1, lambda value: [value])
        if self.compiled and self.trees:
            self._compile(max(pack.tokens_BT.shape[1] for pack in packs))
        results: list[tuple[Tensor, Tensor]] = []
        own = packs[rank::ranks]
        for number, pack in enumerate(own):
            report("scoring", number, len(own))
            results.append(self._run(pack))
        sums, misses = np.zeros(len(requests)), np.zeros(len(requests), np.int64)
        if own:
            at = np.concatenate([pack.targets_3R[2] for pack in own])
            logps = torch.cat([logp for logp, _ in results]).cpu().double().numpy()
            wrong = ~torch.cat([hit for _, hit in results]).cpu().numpy()
            np.add.at(sums, at, logps)
            np.add.at(misses, at, wrong)
        parts = gather((sums, misses)) if ranks > 1 else [(sums, misses)]
        parts = parts if ranks == 1 else [parts[i] for i in self._one_of_each(gather(rank))]
        sums, misses = np.sum([part[0] for part in parts], axis=0), np.sum([part[1] for part in parts], axis=0)
        return [Likelihood(float(logp), not wrong) for logp, wrong in zip(sums, misses, strict=True)]

    def _one_of_each(self, shares: list[int]) -> list[int]:
        """Ranks of tensor parallelism compute the same: the first of each share counts."""
        return [shares.index(share) for share in sorted(set(shares))]

    def _texts(self, requests: Sequence[tuple[Ids, Ids]]) -> list[ScoredText]:
        """Requests that read the same tokens are one text: choices of one token differ only in their target."""
        by_key: dict[bytes, ScoredText] = {}
        for number, (context, continuation) in enumerate(requests):
            assert len(context) and len(continuation), "neither part may be empty"
            full = np.concatenate((np.asarray(context), np.asarray(continuation))).astype(np.int64)
            if self.context is not None and len(full) > self.context + 1:
                self.truncated += 1
                full = full[-(self.context + 1) :]
            inputs, count = full[:-1], min(len(continuation), len(full) - 1)
            text = by_key.setdefault(inputs.astype(">u4").tobytes(), ScoredText(inputs, []))
            first = len(inputs) - count
            text.targets.extend((first + i, int(id), number) for i, id in enumerate(full[-count:]))
        # Big-endian bytes sort like the ids.
        return [by_key[key] for key in sorted(by_key)]

    @torch.no_grad()
    def _run(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Log-probability of each target, and whether it was the most likely token."""
        self.passes += 1
        self.computed += pack.tokens_BT.size
        mask = None
        if pack.until_BT is not None:
            mask = AttentionMask(until_BT=self._to(pack.until_BT), depth_BT=self._to(pack.depth_BT))
            mask.backend = "flex" if self.flex and pack.tokens_BT.shape[1] % TILE == 0 else None
        hidden_BTW = self.model(self._to(pack.tokens_BT), mask)
        columns, targets, _ = pack.targets_3R
        columns_U, target_row = np.unique(columns, return_inverse=True)
        hidden_UW = hidden_BTW.flatten(0, 1)[self._to(columns_U)]
        size = max(1, LOGIT_BYTES.get(self.device.type, LOGIT_BYTES_ELSE) // (4 * self.model.shape.outputs))
        logps, hits = [], []
        for start in range(0, len(columns_U), size):
            first, last = np.searchsorted(target_row, (start, start + size))
            logits_UV = self.model.logits(hidden_UW[start : start + size]).float()
            row_R, id_R = self._to(target_row[first:last] - start), self._to(targets[first:last])
            logps.append(logits_UV[row_R, id_R] - logits_UV.logsumexp(-1)[row_R])
            hits.append(logits_UV.argmax(-1)[row_R] == id_R)
        return torch.cat(logps), torch.cat(hits)

    def _to(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _compile(self, length: int) -> None:
        model, size = self.model, (1, length)
        if isinstance(model.chain, EvaluationBlocks) and model.chain.size == size:
            return
        blocks = [block for block in model.blocks if compilable(block)]
        if len(blocks) < len(model.blocks) or model.shape.parallel == "one_norm":
            return
        served = EvaluationBlocks(1, length, model.head_weight.dtype, torch.compile(dynamic=False, fullgraph=True))
        for block in blocks:
            block.compiled = served  # type: ignore[assignment]
        model.chain = served


def pack_trees(texts: Iterable[ScoredText], budget: int) -> Iterator[Pack]:
    """Sorted texts as prefix trees of one row each. All rows have the same length, so that a GPU compiles once."""
    texts = list(texts)
    longest = max((len(text.inputs) for text in texts), default=0)
    on_tiles = -(-max(longest, 1) // TILE) * TILE
    length = max(on_tiles, min(budget, -(-sum(len(text.inputs) for text in texts) // TILE) * TILE))
    tree = _Tree(length)
    for text in texts:
        if not tree.add(text):
            yield tree.finish()
            tree = _Tree(length)
            tree.add(text)
    if tree.size:
        yield tree.finish()


class _Tree:
    """A row that is being filled. The current path are the columns of the text added last."""

    def __init__(self, length: int) -> None:
        self.tokens, self.until = np.zeros(length, np.int64), np.zeros(length, np.int32)
        self.depth = np.zeros(length, np.int64)
        self.size, self.path, self.last = 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.targets: list[np.ndarray[Any, Any]] = []

    def add(self, text: ScoredText) -> bool:
        """False if there is no room."""
        inputs, both = text.inputs, min(len(text.inputs), len(self.last))
        differ = np.flatnonzero(inputs[:both] != self.last[:both])
        shared = int(differ[0]) if len(differ) else both
        end = self.size + len(inputs) - shared
        if end > len(self.tokens):
            return False
        self.until[self.path[shared:]] = self.size  # these branches are complete
        self.tokens[self.size : end], self.depth[self.size : end] = inputs[shared:], range(shared, len(inputs))
        self.path, self.last = np.concatenate((self.path[:shared], np.arange(self.size, end))), inputs
        self.size = end
        places, ids, requests = np.array(text.targets, np.int64).T
        self.targets.append(np.stack((self.path[places], ids, requests)))
        return True

    def finish(self) -> Pack:
        self.until[self.path] = self.size
        columns = np.arange(self.size, len(self.tokens))
        self.until[self.size :] = columns + 1  # padding attends to itself
        targets_3R = np.concatenate(self.targets, axis=1)
        targets_3R = targets_3R[:, np.argsort(targets_3R[0], kind="stable")]
        return Pack(self.tokens[None], self.until[None], self.depth[None], targets_3R)


def pack_rows(texts: Iterable[ScoredText], budget: int, same_length: bool) -> Iterator[Pack]:
    """Rows of their own, padded at the end, where no token of a causal model reads it. For layers whose mask or
    positions cannot describe a tree."""
    rows: list[ScoredText] = []
    for text in sorted(texts, key=lambda text: -len(text.inputs)):
        longest = len(rows[0].inputs) if rows else 0
        differs = same_length and longest != len(text.inputs)
        if rows and (differs or longest * (len(rows) + 1) > budget):
            yield _join_rows(rows)
            rows = []
        rows.append(text)
    if rows:
        yield _join_rows(rows)


def _join_rows(rows: list[ScoredText]) -> Pack:
    T = len(rows[0].inputs)
    tokens_BT = np.zeros((len(rows), T), np.int64)
    targets = []
    for number, row in enumerate(rows):
        tokens_BT[number, : len(row.inputs)] = row.inputs
        targets.append(np.array(sorted(row.targets), np.int64).T + np.array([[number * T], [0], [0]]))
    return Pack(tokens_BT, None, None, np.concatenate(targets, axis=1))
