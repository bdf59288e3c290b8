"""The generator: requests of any lengths share one model, and a waiting request takes a finished one's slot at once.

`Generator.step` admits waiting requests (reading their prompts), then computes one token of every active row. A prompt
that starts like the contents of a slot copies these instead of reading them again; samples of one prompt read it once.
On a GPU the host is one step behind: it reads the tokens of a pass while the next one runs.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
import xxhash
from torch import Tensor

from bessemer.dtensor import is_dtensor
from bessemer.errors import UserError
from bessemer.model.generate.runner import PACKED_TOKENS, SPARE, Runner, SlotRunner, make_runner
from bessemer.model.generate.sampling import Sampling, SamplingBatch
from bessemer.model.generate.speculate import Draft, Drafter, ModelDrafter, verify
from bessemer.model.generate.text import StreamDecoder
from bessemer.model.transformer import Decoder

_SAMPLE_SEED = 0x9E3779B9  # seeds of several samples are this far apart
Decode = Callable[[list[int]], str]


class Constraint(Protocol):
    """Limits the tokens of one answer, for example to a grammar."""

    def fork(self) -> Self:
        """A copy in the initial state, for one sample."""
        ...

    def allowed(self, vocab: int) -> Tensor:
        """(V,) bool on the CPU: the tokens that may follow."""
        ...

    def accept(self, token: int) -> None:
        """Append a token."""
        ...


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    prompt: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    samples: int = 1
    top_logprobs: int | None = None  # log-probabilities of the chosen token and of this many most likely ones
    tempered_logprobs: bool = False  # of the distribution at the request's temperature, before top-k, top-p and min-p
    max_seconds: float | None = None
    constraint: Constraint | None = None  # log-probabilities are of the unconstrained distribution


@dataclass
class Completion:
    """One sample of a request. `tokens` excludes the stop id; `text` ends before the stop string."""

    request: int
    sample: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""  # as far as it cannot change, if the generator can decode
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    reason: str | None = None  # stop, length, time, cancelled; None while it runs
    stop: int | str | None = None
    stop_logprob: float | None = None  # of the stop id, with `top_logprobs`
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, not read again


@dataclass(eq=False)
class _Row:
    """An active sample in its slot."""

    request: Request
    completion: Completion
    slot: int
    context: list[int]  # prompt and answer so far
    started: float
    decoder: StreamDecoder | None


@dataclass
class _Drawn:
    """Tokens that the device has drawn or is about to, with what the host needs of them."""

    rows: Sequence[_Row]
    tokens: Tensor  # (B,), or (B, 2) with their log-probabilities if a decoding graph has drawn them
    logprobs: tuple[Tensor, Tensor, Tensor] | None  # of the chosen tokens; the most likely ones and their ids
    ready: torch.cuda.Event | None

    def read(self) -> tuple[list[int], list[list[Any]] | None]:
        """Tokens, and `logprobs` of each row."""
        if self.ready is not None:
            self.ready.synchronize()
        if self.tokens.dim() == 2:
            tokens, chosen = self.tokens.T.tolist()
            return [int(token) for token in tokens], [chosen, [[]] * len(chosen), [[]] * len(chosen)]
        return self.tokens.tolist(), None if self.logprobs is None else [x[:, 0].tolist() for x in self.logprobs]


class Generator:
    """Continuous batching over `slots` slots of at most `max_length` positions.

    `decode` turns tokens into text, for stop strings and `Completion.text`. `compiled` compiles the model's blocks for
    decoding on a GPU: half a minute once, then faster steps. Call `weights_changed` after the weights have changed.
    """

    def __init__(
        self, model: Decoder, slots: int = 16, max_length: int | None = None, decode: Decode | None = None,
        drafter: Drafter | None = None, compiled: bool = False,
    ) -> None:  # fmt: skip
        if type(model).__module__.startswith("torch.distributed") or any(map(is_dtensor, model.parameters())):
            raise UserError(
                "the model is distributed over processes: create the generator inside `with gathered(model, world) as "
                "local_model` of bessemer.parallel.generate"
            )
        self.model, self.decode_text, self.drafter = model, decode, drafter
        self.max_length = max_length or model.shape.max_positions or 2048
        if limit := model.shape.position_limit:
            self.max_length = min(self.max_length, limit)
        if slots < 1 or self.max_length < 2:
            raise UserError(f"a generator of {slots} slots of {self.max_length} positions: give at least 1 and 2")
        self.slots = slots
        self.runner: Runner = make_runner(model, slots, self.max_length + SPARE, compiled)
        if drafter is not None and not self.runner.reuses_prefixes:
            raise UserError(
                "speculative decoding needs a cache that can be cut back: this model has none, use no draft"
            )
        if isinstance(drafter, ModelDrafter):
            drafter.reserve(slots, self.max_length + SPARE)
        self.in_flight = 1 if model.head_weight.device.type == "cuda" and drafter is None else 0
        self.rows: dict[int, _Row] = {}
        self.waiting: deque[tuple[Request, Completion]] = deque()
        self.contents: dict[int, list[int]] = {}  # by slot: tokens whose keys it holds, but for the last
        self.drawn: deque[_Drawn] = deque()
        self.forwards = 0
        self._requests = 0
        self._settings: tuple[list[_Row], SamplingBatch] | None = None
        self._counts_2SV: Tensor | None = None  # of tokens in prompts and answers, for penalties

    def submit(self, request: Request) -> list[Completion]:
        """Queue a request. Its completions, one per sample, fill as `step` is called."""
        self._check_lockstep([request])
        return self._queue(request)

    def _check_lockstep(self, requests: Sequence[Request]) -> None:
        """Refuse requests with which tensor-parallel ranks would diverge: each would wait for another's pass."""
        if not self.model.lockstep:
            return
        if not self.model.equal_on_all_ranks(xxhash.xxh3_64_intdigest(repr(requests).encode()) >> 1):
            raise UserError("tensor-parallel ranks got different requests: give each the same, in the same order")
        if any(request.max_seconds is not None for request in requests):
            raise UserError("max_seconds: the clocks of tensor-parallel ranks differ: limit max_tokens instead")

    def _queue(self, request: Request) -> list[Completion]:
        longest = self.max_length - len(self.runner.first_tokens(list(request.prompt)))
        if not request.prompt:
            raise UserError("an empty prompt: give at least one token, such as the begin-of-text token")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.model.shape.vocab:
            raise UserError(
                f"a prompt with tokens outside of 0 to {self.model.shape.vocab - 1}: use the model's own ids"
            )
        if longest < 1:
            raise UserError(f"a prompt of {len(request.prompt)} tokens leaves no room in {self.max_length}")
        if request.stop_strings and self.decode_text is None:
            raise UserError("stop strings need a generator that can decode: give `decode`")
        if not all(request.stop_strings):
            raise UserError("an empty stop string would end every answer at once: leave it out")
        if self.drafter is not None and request.sampling.penalizes:
            raise UserError("speculative decoding has no penalties: remove them or the draft")
        self._requests += 1
        completions = []
        for i in range(request.samples):
            seeded = replace(request.sampling, seed=request.sampling.seed + i * _SAMPLE_SEED)
            sample = replace(
                request, sampling=seeded, max_tokens=min(request.max_tokens, longest),
                constraint=None if request.constraint is None else request.constraint.fork(),
            )  # fmt: skip
            completions.append(Completion(self._requests, i, prompt_tokens=len(request.prompt)))
            if sample.max_tokens < 1:
                completions[-1].reason = "length"
            else:
                self.waiting.append((sample, completions[-1]))
        return completions

    def cancel(self, request: int) -> None:
        """End every sample of a request."""
        if self.model.lockstep:
            raise UserError("cancel: tensor-parallel ranks must end in the same step: use stop_ids or max_tokens")
        for row in list(self.rows.values()):
            if row.completion.request == request:
                self._end(row, "cancelled")
        for _, completion in self.waiting:
            if completion.request == request:
                completion.reason = "cancelled"
        self.waiting = deque(entry for entry in self.waiting if entry[1].request != request)

    @torch.inference_mode()
    def reserve(self) -> None:
        """Take the memory for slots of full length now."""
        if isinstance(self.runner, SlotRunner):
            self.runner.reserve()

    def weights_changed(self) -> None:
        """Forget what slots hold of earlier weights. No request may be active."""
        assert not self.rows, "weights changed while requests are active"
        self.contents.clear()
        self.runner.weights_changed()

    def run(self, requests: Iterable[Request]) -> list[list[Completion]]:
        """All samples of all requests, in order."""
        requests = list(requests)
        self._check_lockstep(requests)
        completions = [self._queue(request) for request in requests]
        while self.step():
            pass
        return completions

    def stream(self, request: Request) -> Iterator[str]:
        """Text of one sample, in pieces that do not change any more."""
        (completion,) = self.submit(replace(request, samples=1))
        return self._pieces(completion)

    def _pieces(self, completion: Completion) -> Iterator[str]:
        shown = 0
        try:
            while completion.reason is None:
                self.step()
                if len(completion.text) > shown:
                    yield completion.text[shown:]
                    shown = len(completion.text)
        finally:  # the reader may leave early
            if completion.reason is None and not self.model.lockstep:
                self.cancel(completion.request)

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit, then one token of every active row (several with a drafter); False when nothing is left to do."""
        self._admit()
        rows = list(self.rows.values())
        if rows and self.drafter is not None:
            self._speculate(rows)
        elif rows:
            self.runner.select([row.slot for row in rows])
            if not self._step_at_once(rows):
                self._draw(rows, self.runner.step())
            self.forwards += 1
        self._settle(self.in_flight if rows else 0)
        return bool(self.rows or self.waiting or self.drawn)

    def _admit(self) -> None:
        """Fill free slots from the queue and read the prompts, in batches that do not stall active rows for long."""
        free = [slot for slot in range(self.slots) if slot not in self.rows]
        admitted: list[_Row] = []
        reads: list[tuple[int, list[int], int]] = []
        copies: list[tuple[int, int, int]] = []  # (source, target, length) of samples whose prompt is being read
        readers: dict[int, int] = {}  # the slot that reads the prompt of a request
        budget = PACKED_TOKENS if self.rows else None
        while self.waiting and free and (budget is None or not reads or budget > 0):
            request, completion = self.waiting.popleft()
            context, number = self.runner.first_tokens(list(request.prompt)), completion.request
            if number in readers and self.runner.copies:
                slot, shared = free[0], len(context)
                copies.append((readers[number], slot, shared))
            else:
                source, shared = self._longest_prefix(context)
                slot = source if source in free else free[0]
                if source is not None and slot != source:
                    self.runner.copy(source, slot, shared)
                reads.append((slot, context if shared else list(request.prompt), shared))
                readers[number] = slot
                budget = None if budget is None else budget - len(context) + shared
            free.remove(slot)
            self.contents.pop(slot, None)
            completion.cached_tokens = shared
            decoder = None if self.decode_text is None else StreamDecoder(self.decode_text, request.stop_strings)
            self.rows[slot] = _Row(request, completion, slot, context, time.monotonic(), decoder)
            admitted.append(self.rows[slot])
        if not admitted:
            return
        logits = dict(zip((slot for slot, _, _ in reads), self.runner.prefill(reads), strict=True))
        self.forwards += 1
        for source, target, length in copies:
            self.runner.copy(source, target, length)
            logits[target] = logits[source]
        for row in admitted:
            self.contents[row.slot] = row.context
            self._count_prompt(row)
        self.runner.select([row.slot for row in admitted])
        self._draw(admitted, torch.stack([logits[row.slot] for row in admitted]))
        self._settle(self.in_flight)

    def _longest_prefix(self, tokens: list[int]) -> tuple[int | None, int]:
        """The slot that holds the longest beginning of these tokens, and its length, which leaves at least the last
        token to be read for its logits."""
        best, length = None, 0
        if not self.runner.reuses_prefixes:
            return best, length
        for slot, cached in self.contents.items():
            limit = min(len(cached) - 1, len(tokens) - 1)  # the last token's keys may not be written yet
            shared = next((i for i in range(limit) if cached[i] != tokens[i]), limit)
            if shared > length:
                best, length = slot, shared
        return (best, length) if length >= self.runner.least_prefix else (None, 0)

    def _count_prompt(self, row: _Row) -> None:
        """Count the prompt's tokens if the request has penalties."""
        if not row.request.sampling.penalizes:
            return
        device, vocab = self.model.head_weight.device, self.model.shape.vocab
        if self._counts_2SV is None:
            self._counts_2SV = torch.zeros(2, self.slots, vocab, device=device)
        self._counts_2SV[:, row.slot] = 0
        ids = torch.tensor(row.context, device=device)
        self._counts_2SV[0, row.slot].index_add_(0, ids, torch.ones(len(ids), device=device))

    def _batch_settings(self, rows: list[_Row], device: torch.device) -> SamplingBatch:
        if self._settings is None or self._settings[0] != rows:
            tempered = [row.request.tempered_logprobs for row in rows]
            self._settings = rows, SamplingBatch.of([row.request.sampling for row in rows], device, tempered)
        return self._settings[1]

    def _step_at_once(self, rows: list[_Row]) -> bool:
        """Compute and draw the next tokens in one call, where every row's distribution is the model's own."""
        settings = self._batch_settings(rows, self.model.head_weight.device)
        if settings.penalty_3B is not None or (settings.filters and not settings.greedy):
            return False
        if any(row.request.top_logprobs or row.request.constraint is not None for row in rows):
            return False
        scored = any(row.request.top_logprobs is not None for row in rows)
        drawn_B2 = self.runner.drawing_step(settings, scored)
        if drawn_B2 is not None:
            self._record_draw(rows, drawn_B2, None)
        return drawn_B2 is not None

    def _draw(self, rows: list[_Row], logits_BV: Tensor) -> None:
        """Draw the next token of the selected rows on the device. `_settle` reads it later."""
        settings, penalized_BV = self._batch_settings(rows, logits_BV.device), logits_BV
        slots = [row.slot for row in rows]
        if settings.penalty_3B is not None:
            assert self._counts_2SV is not None
            penalized_BV = settings.penalize(logits_BV, *self._counts_2SV[:, slots].to(logits_BV.dtype))
        if any(row.request.constraint is not None for row in rows):
            self._settle(0)  # a constraint needs the token before
            penalized_BV = _constrain(rows, penalized_BV)
        tokens_B = settings.draw(penalized_BV, self.runner.next_positions())
        self.runner.accept(tokens_B)
        if settings.penalty_3B is not None and self._counts_2SV is not None:
            self._counts_2SV[1, slots, tokens_B] += 1
        self._record_draw(rows, tokens_B, _logprobs(rows, tokens_B[:, None], logits_BV[:, None]))

    def _record_draw(self, rows: list[_Row], tokens_B: Tensor, logprobs: tuple[Tensor, Tensor, Tensor] | None) -> None:
        """Start copying drawn tokens to the host."""
        ready = None
        if tokens_B.is_cuda:
            tokens_B = tokens_B.to("cpu", non_blocking=True)
            logprobs = None if logprobs is None else tuple(x.to("cpu", non_blocking=True) for x in logprobs)  # type: ignore[assignment]
            ready = torch.cuda.Event()
            ready.record()
        self.drawn.append(_Drawn(rows, tokens_B, logprobs, ready))

    def _settle(self, in_flight: int) -> None:
        """Read drawn tokens until only the last `in_flight` draws are left."""
        while len(self.drawn) > in_flight:
            drawn = self.drawn.popleft()
            tokens, values = drawn.read()
            for i, (row, token) in enumerate(zip(drawn.rows, tokens, strict=True)):
                if row.completion.reason is None:
                    self._append(row, token)
                    if values is not None and len(row.completion.tokens) > len(row.completion.logprobs):
                        _record_logprobs(row, values[0][i], values[1][i], values[2][i])
                    elif values is not None and row.completion.stop == token and row.request.top_logprobs is not None:
                        row.completion.stop_logprob = values[0][i]

    def _append(self, row: _Row, token: int) -> None:
        """Take a drawn token into a row, and end the row if it was the last one."""
        completion, request = row.completion, row.request
        if request.constraint is not None:
            request.constraint.accept(token)
        if token in request.stop_ids:
            completion.stop = token
            self._end(row, "stop")
            return
        completion.tokens.append(token)
        row.context.append(token)
        if row.decoder is not None:
            completion.stop = row.decoder.push(token)
            completion.text = row.decoder.text
            if completion.stop is not None:
                self._end(row, "stop")
                return
        if len(completion.tokens) >= request.max_tokens:
            self._end(row, "length")
        elif request.max_seconds is not None and time.monotonic() - row.started >= request.max_seconds:
            self._end(row, "time")

    def _end(self, row: _Row, reason: str) -> None:
        row.completion.reason = reason
        if row.decoder is not None and not isinstance(row.completion.stop, str):
            row.completion.text = row.decoder.finish()
        del self.rows[row.slot]

    def _speculate(self, rows: Sequence[_Row]) -> None:
        """Several tokens of every row: drafts are read in one pass, and kept as far as the model agrees."""
        assert self.drafter is not None
        drafts = [
            Draft([]) if row.request.constraint is not None
            else _shorten(self.drafter.propose(row.slot, row.context, row.request.sampling), SPARE - 1)
            for row in rows
        ]  # fmt: skip
        longest = max(len(draft.tokens) for draft in drafts)
        fed = [[row.context[-1], *draft.tokens, *[0] * (longest - len(draft.tokens))]
               for row, draft in zip(rows, drafts, strict=True)]  # fmt: skip
        starts = [len(row.context) - 1 for row in rows]
        logits_BTV = self.runner.read([row.slot for row in rows], fed, starts)
        self.forwards += 1
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            logits_TV = logits_BTV[i] if row.request.constraint is None else _constrain([row], logits_BTV[i, :1])
            new = verify(draft, logits_TV, row.request.sampling, len(row.context))
            logprobs = _logprobs(
                [row], torch.tensor([new], device=logits_BTV.device), logits_BTV[i : i + 1, : len(new)]
            )
            for at, token in enumerate(new):
                self._append(row, token)
                if logprobs is not None and len(row.completion.tokens) > len(row.completion.logprobs):
                    values: list[Any] = [x[0, at].tolist() for x in logprobs]
                    _record_logprobs(row, *values)
                if row.completion.reason is not None:
                    break


def _constrain(rows: Sequence[_Row], logits_BV: Tensor) -> Tensor:
    """The logits with -inf for the tokens that the constraints of the rows exclude."""
    allowed_BV = torch.ones(logits_BV.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        if row.request.constraint is not None and row.completion.reason is None:
            allowed_BV[i] = row.request.constraint.allowed(logits_BV.shape[1])
    return logits_BV.masked_fill(~allowed_BV.to(logits_BV.device), -math.inf)


def _shorten(draft: Draft, length: int) -> Draft:
    shares = draft.probabilities
    return Draft(draft.tokens[:length], None if shares is None else shares[:length])


def _logprobs(rows: Sequence[_Row], tokens_BT: Tensor, logits_BTV: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Log-probabilities (B, T) of the tokens, and those of the most likely tokens with their ids (B, T, k). None if no
    row asks for them. They are of the raw logits: before penalties, and before the temperature unless `tempered`."""
    wanted = [row.request.top_logprobs for row in rows]
    if all(count is None for count in wanted):
        return None
    heat = [r.sampling.temperature if r.tempered_logprobs and r.sampling.temperature > 0 else 1.0
            for r in (row.request for row in rows)]  # fmt: skip
    exact = torch.promote_types(logits_BTV.dtype, torch.float32)
    logits_BTV = logits_BTV.to(exact) / torch.tensor(heat, dtype=exact, device=logits_BTV.device)[:, None, None]
    logprobs_BTV = logits_BTV.log_softmax(dim=-1)
    top = logprobs_BTV.topk(min(max(count or 0 for count in wanted), logits_BTV.shape[-1]), dim=-1)
    return logprobs_BTV.gather(-1, tokens_BT[..., None])[..., 0], top.values, top.indices


def _record_logprobs(row: _Row, chosen: float, likely: list[float], ids: list[int]) -> None:
    count = row.request.top_logprobs
    if count is not None:
        row.completion.logprobs.append(chosen)
        row.completion.top.append(dict(zip(ids[:count], likely[:count], strict=True)))
