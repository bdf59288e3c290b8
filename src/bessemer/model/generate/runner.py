"""Forward passes of generation: prompts into slots, then the next token of every selected slot.

`SlotRunner` runs native models in batches. `RowRunner` runs requests one by one, each with its own cache: for wrapped
models, and for rotary tables that depend on the length of the text (LongRoPE, dynamic scaling). The last token and the
position of every slot stay on the device, so a pass can start before the host has read the tokens of the one before.
Legend: B rows, T positions, S slots, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bessemer.model.attention_mask import AttentionMask
from bessemer.model.encoder_decoder import EncoderDecoder
from bessemer.model.generate.cache import Rows, SlotBatch, SlotCaches
from bessemer.model.generate.compiled import CompiledDecoding, can_compile
from bessemer.model.generate.sampling import SamplingBatch
from bessemer.model.generate.single_row import SingleRowDecoding, can_fuse
from bessemer.model.transformer import Decoder
from bessemer.model.virtual_tokens import cache_prompt

SPARE = 32  # positions of a slot behind its last: for drafts, and for a token that is computed after a row has ended
START = 0  # the token that T5's decoder starts with: its padding
PACKED_TOKENS = 8192  # prompts that a GPU reads in one pass
STACKED_TOKENS = 2048  # prompts of one length that a CPU reads in one pass
# A GPU reads new prompts together and continues a cached beginning alone: a chat template's first tokens in common must
# not take every prompt out of that pass.
PACKED_LEAST_PREFIX = 256

GraphKind = Literal["logits", "greedy", "sampled"]  # what a decoding graph ends with


class Runner(Protocol):
    """What the scheduler needs of a model. Slots are numbered from 0."""

    reuses_prefixes: bool  # a slot can be cut back to its first positions
    least_prefix: int  # tokens; a shorter beginning is read again
    copies: bool  # a slot can be copied

    def first_tokens(self, prompt: list[int]) -> list[int]:
        """What the decoder reads before it writes."""
        ...

    def prefill(self, prompts: Sequence[tuple[int, list[int], int]]) -> Tensor:
        """(prompts, V) logits after each prompt, given as (slot, tokens, positions that the slot holds already)."""
        ...

    def select(self, slots: Sequence[int]) -> None:
        """Choose the rows of the next `step` and `accept` calls."""
        ...

    def step(self) -> Tensor:
        """(B, V) logits after the last accepted token of each selected slot."""
        ...

    def drawing_step(self, settings: SamplingBatch, scored: bool) -> Tensor | None:
        """(B, 2) float64: the next token of each selected slot, accepted, and, if `scored`, its log-probability; the
        next step may overwrite them. The settings have no filters or penalties. None if this takes several calls."""
        ...

    def next_positions(self) -> Tensor:
        """(B,): the position of the next token of each selected slot."""
        ...

    def accept(self, tokens_B: Tensor) -> None:
        """Append one token to each selected slot."""
        ...

    def read(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """(B, T, V) logits after each of T tokens, which start at the positions `starts`."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot."""
        ...

    def weights_changed(self) -> None:
        """Drop what was derived from weights that have moved in memory."""
        ...


def make_runner(model: Decoder, slots: int, capacity: int, compiled: bool = False) -> Runner:
    by_length = model.shape.rope.scaling in ("longrope", "dynamic") and model.shape.positions == "rope"
    return RowRunner(model) if model.shape.wrapped or by_length else SlotRunner(model, slots, capacity, compiled)


class SlotRunner:
    """All slots in one cache. On a GPU, decoding runs as CUDA graphs; with `compiled`, blocks are compiled before."""

    def __init__(self, model: Decoder, slots: int, capacity: int, compiled: bool = False) -> None:
        self.model, self.device = model, model.head_weight.device
        self.batch = SlotBatch(slots, capacity)
        self.caches = SlotCaches(model, self.batch)
        self.token_S = torch.zeros(slots + 1, dtype=torch.int64, device=self.device)
        self.position_S = torch.zeros(slots + 1, dtype=torch.int64, device=self.device)
        self.positions = [0] * (slots + 1)  # the host's copy
        self.slots: list[int] = []
        self.slots_B = self.token_S[:0]
        shape = model.shape
        self.encodes, on_gpu = isinstance(model, EncoderDecoder), self.device.type == "cuda"
        half = model.head_weight.element_size() == 2
        cache_prompt(model)
        plain_rows = not self.encodes and not self.caches.has_states and not model.virtual
        self.packs, self.stacks = on_gpu and plain_rows, not on_gpu and plain_rows
        plain = shape.positions in ("rope", "learned", "none") and not shape.blocks[0] and not shape.global_tokens
        self.direct = self.packs and half and plain and shape.mla is None
        self.least_prefix = PACKED_LEAST_PREFIX if self.packs else 1
        self.captures = self.packs and plain and not model.lockstep  # collectives in a graph are untested
        self.draws = model.head_weight.dtype != torch.float64 and importlib.util.find_spec("triton") is not None
        self.graphs: dict[tuple[int, GraphKind], DecodeGraph] = {}
        self.pool: Any = None
        self.reuses_prefixes, self.copies = not self.caches.has_states and not self.encodes, True
        compiles = compiled and self.direct and not model.lockstep and can_compile(model)
        self.compiled = CompiledDecoding(model) if compiles else None
        self.single_row: SingleRowDecoding | None = None
        if self.compiled is not None and can_fuse(self.compiled):
            self.single_row = SingleRowDecoding(self.compiled)
        self.addresses = [parameter.data_ptr() for parameter in model.parameters()]

    def first_tokens(self, prompt: list[int]) -> list[int]:
        return [START] if self.encodes else prompt

    def prefill(self, prompts: Sequence[tuple[int, list[int], int]]) -> Tensor:
        logits: dict[int, Tensor] = {}
        packed: list[tuple[int, list[int]]] = []
        stacked: dict[int, list[tuple[int, list[int]]]] = {}  # by their length
        for slot, tokens, start in prompts:
            if self.encodes:
                logits[slot] = self._encode(slot, tokens)
            elif self.packs and not start:
                packed.append((slot, tokens))
            elif self.stacks and not start:
                stacked.setdefault(len(tokens), []).append((slot, tokens))
            else:
                logits[slot] = self._prefill_one(slot, tokens[start:], start)
            self._place([slot], [0 if self.encodes else len(tokens) - 1])
        while packed:
            count, total = 0, 0
            while count < len(packed) and (not count or total + len(packed[count][1]) <= PACKED_TOKENS):
                total += len(packed[count][1])
                count += 1
            logits |= self._prefill_packed(packed[:count])
            packed = packed[count:]
        for length, equal in stacked.items():
            size = max(1, STACKED_TOKENS // length)
            for at in range(0, len(equal), size):
                logits |= self._prefill_stacked(equal[at : at + size])
        return torch.stack([logits[slot] for slot, _, _ in prompts])

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _place(self, slots: list[int], positions: list[int]) -> None:
        for slot, position in zip(slots, positions, strict=True):
            self.positions[slot] = position
            self.position_S[slot] = position

    def _allocate(self, positions: int) -> None:
        before = self.batch.allocated
        self.batch.allocate(positions + SPARE)
        if self.batch.allocated != before:
            self._drop_graphs()  # they read and write the smaller caches

    def _drop_graphs(self) -> None:
        """Graphs share a pool of memory, which goes with the last of them: a capture into it would fail."""
        self.graphs.clear()
        self.pool = None

    def reserve(self) -> None:
        """Make room for slots of full length. Layers allocate at their first pass."""
        self._allocate(self.batch.capacity)
        if not self.encodes:
            self._prefill_one(self.batch.null_slot, [START], 0)

    def _prefill_one(self, slot: int, tokens: list[int], start: int) -> Tensor:
        """(V,) after the tokens of one slot that holds `start` positions already."""
        T, batch = len(tokens), self.batch
        self._allocate(start + T)
        batch.rows, batch.start, batch.fresh, batch.direct = slice(slot, slot + 1), start, start == 0, False
        batch.reach = start + T
        batch.slots_BT = self._tensor([[slot]])
        batch.positions_BT = torch.arange(start, start + T, device=self.device)[None]
        hidden_1TW = self.model(self._tensor([tokens]), caches=self.caches.layers)
        return self.model.logits(hidden_1TW[0, -1])

    def _prefill_stacked(self, prompts: Sequence[tuple[int, list[int]]]) -> dict[int, Tensor]:
        """Several prompts of one length, each a row. On a CPU the calls of a small model take longer than its sums."""
        batch, slots, tokens = self.batch, [slot for slot, _ in prompts], [tokens for _, tokens in prompts]
        self._allocate(len(tokens[0]))
        batch.start, batch.fresh, batch.direct = 0, True, False
        batch.slots_BT = self._tensor(slots)[:, None]
        batch.positions_BT = torch.arange(len(tokens[0]), device=self.device)[None]
        hidden_BTW = self.model(self._tensor(tokens), caches=self.caches.layers)
        return dict(zip(slots, self.model.logits(hidden_BTW[:, -1]), strict=True))

    def _prefill_packed(self, prompts: Sequence[tuple[int, list[int]]]) -> dict[int, Tensor]:
        """Several prompts in one row, each a document of its own."""
        batch, lengths = self.batch, torch.tensor([len(tokens) for _, tokens in prompts])
        self._allocate(int(lengths.max()))
        ends = lengths.cumsum(0)
        documents = torch.arange(len(prompts)).repeat_interleave(lengths)
        batch.start, batch.fresh, batch.direct = 0, True, False
        batch.slots_BT = torch.tensor([slot for slot, _ in prompts])[documents][None].to(self.device)
        batch.positions_BT = (torch.arange(len(documents)) - (ends - lengths)[documents])[None].to(self.device)
        tokens_1T = self._tensor([[token for _, tokens in prompts for token in tokens]])
        mask = AttentionMask(
            documents[None].to(self.device), cu_seqlens=_cu_seqlens(lengths), separate=True, backend="varlen"
        )
        hidden_1TW = self.model(tokens_1T, mask, caches=self.caches.layers)
        logits = self.model.logits(hidden_1TW[0, (ends - 1).to(self.device)])
        return {slot: row for (slot, _), row in zip(prompts, logits, strict=True)}

    def _encode(self, slot: int, tokens: list[int]) -> Tensor:
        model = self.model
        assert isinstance(model, EncoderDecoder)
        encoded = model.encode(self._tensor([tokens]))
        blocks: Any = list(model.blocks)[model.shape.layers :]
        for block, cache in zip(blocks, self.caches.layers, strict=True):
            cache.store(slot, block.cross.encoder_keys(encoded.hidden_BSW))
        return self._prefill_one(slot, [START], 0)

    def select(self, slots: Sequence[int]) -> None:
        if list(slots) != self.slots:
            self.slots, self.slots_B = list(slots), self._tensor(list(slots))

    def next_positions(self) -> Tensor:
        return self.position_S[self.slots_B] + 1

    def accept(self, tokens_B: Tensor) -> None:
        self.token_S[self.slots_B] = tokens_B
        self.position_S[self.slots_B] += 1
        for slot in self.slots:
            self.positions[slot] += 1

    def step(self) -> Tensor:
        reach = self._advance()
        if (graph := self._graph(len(self.slots), "logits")) is not None:
            return graph.run(self.slots_B)
        return self._decode(self.slots_B, self._rows(self.slots), reach)

    def drawing_step(self, settings: SamplingBatch, scored: bool) -> Tensor | None:
        self._advance()  # may drop graphs
        kind: GraphKind = "greedy" if settings.greedy and not scored else "sampled"
        if not self.draws or (graph := self._graph(len(self.slots), kind)) is None:
            return None
        drawn_B2 = graph.run(self.slots_B, settings)
        for slot in self.slots:
            self.positions[slot] += 1
        return drawn_B2

    def _advance(self) -> int:
        reach = max(self.positions[slot] for slot in self.slots) + 1
        self._allocate(reach)
        return reach

    def _rows(self, slots: Sequence[int]) -> Rows:
        first, count = slots[0], len(slots)
        adjacent = list(slots) == list(range(first, first + count))
        return slice(first, first + count) if adjacent else self._tensor(list(slots))

    def _decode(self, slots_B: Tensor, rows: Rows, reach: int) -> Tensor:
        """(B, V) after the last token of these slots."""
        if self.single_row is not None and len(slots_B) == 1 and self.caches.allocated == self.batch.allocated:
            return self.single_row.run(slots_B, self.token_S, self.position_S, self.caches.layers, reach)
        starts_B = self.position_S[slots_B]
        return self._forward(slots_B, rows, self.token_S[slots_B][:, None], starts_B, reach)[:, 0]

    def _forward(self, slots_B: Tensor, rows: Rows, tokens_BT: Tensor, starts_B: Tensor, reach: int) -> Tensor:
        batch, T = self.batch, tokens_BT.shape[1]
        batch.rows, batch.start, batch.fresh, batch.reach = rows, 0, False, reach
        batch.direct = self.direct and T == 1
        batch.slots_BT = slots_B[:, None]
        batch.positions_BT = starts_B[:, None] + torch.arange(T, device=self.device)
        mask = AttentionMask(starts_B=starts_B, keys=reach, slots_B=slots_B if batch.direct else None)
        if self.compiled is not None and batch.direct and self.caches.allocated == batch.allocated:
            return self.compiled.run(tokens_BT, mask, self.caches.layers)
        return self.model.logits(self.model(tokens_BT, mask, caches=self.caches.layers))

    def read(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        reach = max(starts) + len(tokens[0])
        self._allocate(reach)
        tokens_BT = self._tensor([list(row) for row in tokens])
        return self._forward(self._tensor(slots), self._rows(slots), tokens_BT, self._tensor(starts), reach)

    def _graph(self, count: int, kind: GraphKind) -> DecodeGraph | None:
        """A captured pass of at least `count` rows; None if the model cannot be captured."""
        if not self.captures:
            return None
        key = size, _ = min(self.batch.slots, 1 << (count - 1).bit_length()), kind
        while key not in self.graphs:
            try:
                self.graphs[key] = DecodeGraph(self, size, kind)
            except RuntimeError as error:  # no compiler, or a layer that waits for the host
                torch.cuda.synchronize()
                parts = {"the kernels of a single row": self.single_row, "compiled blocks": self.compiled}
                feature = next((name for name, part in parts.items() if part is not None), "CUDA graphs")
                warnings.warn(f"decoding runs without {feature}: {str(error).splitlines()[0]}", stacklevel=2)
                if self.single_row is not None:
                    self.single_row = None
                    continue
                if self.compiled is None:
                    self.captures = False
                    return None
                self.compiled = None
        return self.graphs[key]

    def copy(self, source: int, target: int, length: int) -> None:
        self.caches.copy(source, target, None if self.caches.has_states else length)
        self._place([target], [self.positions[source]])

    def weights_changed(self) -> None:
        """Values that changed in place need nothing; graphs and joined weights know only the addresses."""
        addresses = [parameter.data_ptr() for parameter in self.model.parameters()]
        if addresses != self.addresses:
            self._drop_graphs()
            if self.compiled is not None:
                self.compiled.join()  # which moves them again
                if not can_fuse(self.compiled):
                    self.single_row = None
            self.addresses = [parameter.data_ptr() for parameter in self.model.parameters()]


def _cu_seqlens(lengths: Tensor) -> tuple[Tensor, int]:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int(), int(lengths.max())


class DecodeGraph:
    """One token of up to `size` slots as a CUDA graph: a step costs one launch instead of hundreds. Unless the graph is
    one of logits, it also chooses the tokens and appends them to their slots."""

    def __init__(self, runner: SlotRunner, size: int, kind: GraphKind) -> None:
        self.null_slot = runner.batch.null_slot
        self.slots_B = torch.full((size,), self.null_slot, device=runner.device)  # padding until `run`
        self.selected: Tensor | None = None
        self.seed_B = torch.zeros_like(self.slots_B)
        self.heat_B, self.scored_heat_B = torch.ones(2, size, device=runner.device)
        self.settings: SamplingBatch | None = None

        def decode() -> Tensor:
            logits_BV = runner._decode(self.slots_B, self.slots_B, runner.batch.allocated)
            if kind == "logits":
                return logits_BV
            from bessemer.model.generate.draw_kernels import draw

            settings = (self.seed_B, self.heat_B, self.scored_heat_B) if kind == "sampled" else None
            overlap = size == 1 and runner.single_row is not None and runner.single_row.overlap
            state = runner.token_S, runner.position_S, self.null_slot
            return draw(logits_BV, self.slots_B, *state, settings, overlap)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # the first grows the caches, the second compiles
                decode()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=runner.pool):
            self.output = decode()
        runner.pool = runner.pool or self.graph.pool()

    def run(self, slots_B: Tensor, settings: SamplingBatch | None = None) -> Tensor:
        """Logits (B, V), or tokens and their log-probabilities (B, 2)."""
        if self.selected is not slots_B:  # rows beyond the selected ones stay on the null slot
            self.slots_B.fill_(self.null_slot)
            self.slots_B[: len(slots_B)] = slots_B
            self.selected = slots_B
        if settings is not None and self.settings is not settings:
            self.seed_B[: len(slots_B)] = settings.seed_B
            self.heat_B[: len(slots_B)] = settings.temperature_B
            self.scored_heat_B[: len(slots_B)] = settings.scored_heat_B
            self.settings = settings
        self.graph.replay()
        return self.output[: len(slots_B)]


class RowRunner:
    """Each slot has its own caches and is run alone."""

    reuses_prefixes = copies = False
    least_prefix = 1

    def __init__(self, model: Decoder) -> None:
        self.model, self.device = model, model.head_weight.device
        self.caches: dict[int, list[Any]] = {}
        self.tokens: dict[int, list[int]] = {}  # cached so far
        self.last: dict[int, int] = {}  # accepted, not cached yet
        self.slots: list[int] = []

    def first_tokens(self, prompt: list[int]) -> list[int]:
        return prompt

    def prefill(self, prompts: Sequence[tuple[int, list[int], int]]) -> Tensor:
        logits = []
        for slot, tokens, _ in prompts:
            self.caches[slot], self.tokens[slot] = self.model.new_caches(), []
            self.last.pop(slot, None)
            logits.append(self._extend(slot, tokens)[-1])
        return torch.stack(logits)

    def select(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)

    def next_positions(self) -> Tensor:
        return torch.tensor([len(self.tokens[slot]) + (slot in self.last) for slot in self.slots], device=self.device)

    def accept(self, tokens_B: Tensor) -> None:
        for slot, token in zip(self.slots, tokens_B.tolist(), strict=True):
            self.last[slot] = token

    def step(self) -> Tensor:
        return torch.stack([self._extend(slot, [self.last.pop(slot)])[-1] for slot in self.slots])

    def drawing_step(self, settings: SamplingBatch, scored: bool) -> Tensor | None:
        return None

    def _extend(self, slot: int, tokens: list[int]) -> Tensor:
        """(T, V) after each new token."""
        rope, length = self.model.shape.rope, len(self.tokens[slot])
        T = len(tokens)
        self.tokens[slot] = self.tokens[slot] + tokens
        if rope.scaling == "longrope" and 0 < length <= rope.original < length + T:
            # Beyond the original context LongRoPE uses other angles: recompute the cached keys.
            self.caches[slot], tokens = self.model.new_caches(), self.tokens[slot]
        hidden_1TW = self.model(torch.tensor([tokens], device=self.device), caches=self.caches[slot])
        return self.model.logits(hidden_1TW[0, -T:])

    def read(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        raise AssertionError("drafts need a cache that can be cut back: the generator refuses them")

    def copy(self, source: int, target: int, length: int) -> None:
        raise AssertionError("slots are not copied: `copies` is False")

    def weights_changed(self) -> None:
        pass  # every pass reads the weights where they are
