"""What evaluation asks of a model, in text: likelihoods of continuations and of texts, and answers.

Prompts are encoded as lm-eval's Hugging Face backend encodes them on the exported folder, so that both give the same
numbers: the tokenizer's own prefix unless the text begins with it, and special tokens parsed in chat prompts alone.
Ranks all ask the same; the work is divided among them below, and each gets all results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from bessemer.data.curate.engine import available_cores
from bessemer.data.tokenizer.chat import message_text
from bessemer.errors import UserError
from bessemer.evaluate.scoring import Gather, Likelihood, Scorer
from bessemer.model.generate import Request, Sampling
from bessemer.observe.progress import ProgressReport, silent
from bessemer.train.trained import LoadedModel

CONTEXT = 2048  # tokens, if the model states none; as in lm-eval
NEW_TOKENS = 256  # of an answer, if the task states none; as in lm-eval
ENCODED_AT_ONCE = 512
SLOTS_CPU, SLOTS_GPU = 8, 128


MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of the same setting


class LanguageModel:
    """`chat`: prompts come from `chat_text`. `share` divides the work over ranks, as in `Scorer`."""

    def __init__(
        self, loaded: LoadedModel, chat: bool = False, report: ProgressReport = silent, seed: int = 0,
        compiled: bool = False, share: tuple[int, int, Gather] | None = None, slots: int | None = None,
    ) -> None:  # fmt: skip
        self.loaded, self.chat, self.report, self.seed, self.share = loaded, chat, report, seed, share
        self.max_length = loaded.context or CONTEXT
        self.scorer = Scorer(loaded.model, self.max_length, compiled=compiled, share=share)
        on_gpu = loaded.model.head_weight.device.type == "cuda"
        self.slots = slots or (SLOTS_GPU if on_gpu else SLOTS_CPU)
        self.start_text = loaded.tokenizer.decode([loaded.format.start])

    @property
    def prefix_rule(self) -> str:
        """The rule of the prefix, for the record of results: it changes perplexities."""
        prefix = self.loaded.tokenizer.decode(self.loaded.format.prefix) or "nothing"
        return f"texts begin with {prefix}; an empty context is {self.start_text}"

    def chat_text(self, history: Sequence[Mapping[str, str]], answers: bool = True) -> str:
        """The text of a conversation, with the beginning of an answer, or ending in the middle of the last message."""
        messages, rest = list(history), ""
        if not answers:
            rest = message_text(messages.pop())
        text = self.loaded.tokenizer.decode(self.loaded.chat_prompt(messages))
        prefix = self.loaded.tokenizer.decode(self.loaded.format.prefix)
        return (text.removeprefix(prefix) if prefix else text) + rest

    def encode(self, texts: Sequence[str], prefix: bool = True) -> list[np.ndarray[Any, Any]]:
        tokenizer, begin = self.loaded.tokenizer, np.array(self.loaded.format.prefix, np.uint32)
        if self.chat:
            ids = [np.array(tokenizer.encode_with_special(text), np.uint32) for text in texts]
        else:
            # The library takes 50 times the memory of a text. tiktoken uses one core and lets other threads run.
            parts = [texts[start : start + ENCODED_AT_ONCE] for start in range(0, len(texts), ENCODED_AT_ONCE)]
            with ThreadPoolExecutor(available_cores() if tokenizer.fast is not None else 1) as pool:
                ids = [row for rows in pool.map(tokenizer.encode_arrays, parts) for row in rows]
        if not prefix or not len(begin):
            return ids
        return [
            row if text.startswith(self.start_text) else np.concatenate((begin, row))
            for text, row in zip(texts, ids, strict=True)
        ]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Any, Any]]:
        """Ids of contexts and of their continuations, which are what both together have beyond the context alone.
        Each different text is encoded once."""
        moved = [_move_spaces(*pair) for pair in pairs]
        plain = {pair for pair in moved if pair[0]}
        contexts = list(dict.fromkeys(context for context, _ in plain))
        joined = list(dict.fromkeys(context + continuation for context, continuation in plain))
        alone = list(dict.fromkeys(continuation for context, continuation in moved if not context))
        ids = dict(zip((*contexts, *joined), self.encode([*contexts, *joined]), strict=True))
        bare = dict(zip(alone, self.encode(alone, prefix=False), strict=True))
        results: list[tuple[Any, Any]] = []
        for context, continuation in moved:
            if context:
                before, full = ids[context], ids[context + continuation]
                after = full[len(before) :]
                if not len(after):  # both merge into fewer tokens than the context has
                    after = self.encode([continuation], prefix=False)[0]
            else:
                before, after = np.array([self.loaded.format.start], np.uint32), bare[continuation]
                if len(after) > 1 and after[0] == self.loaded.format.start:
                    before, after = after[:1], after[1:]
            if not len(after):
                raise UserError(f"an empty choice after {context[-60:]!r}: correct the task's choices")
            results.append((before, after))
        return results

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        return self.scorer.score(self.encode_pairs(pairs), self.report)

    def score_texts(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of complete texts, in windows of the model's context that follow each other."""
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, row in enumerate(self.encode(texts)):
            for window in rolling_windows(row.tolist(), self.loaded.format.start, self.max_length):
                windows.append(window)
                owners.append(number)
        totals = [0.0] * len(texts)
        for number, likelihood in zip(owners, self.scorer.score(windows, self.report), strict=True):
            totals[number] += likelihood.logp
        return totals

    def answer(self, cases: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """A text for each prompt and its settings (until, max_gen_toks, do_sample, temperature, top_p, top_k)."""
        rank, ranks, gather = self.share or (0, 1, lambda value: [value])
        prompts = [self._request(*case, number) for number, case in enumerate(cases)]
        own = prompts[rank::ranks]
        texts: list[str] = []
        if own:
            longest = max(len(request.prompt) + request.max_tokens for request in own)
            generator = self.loaded.generator(min(self.slots, len(own)), longest)
            queued = [generator.submit(request)[0] for request in own]
            while generator.step():
                self.report("answering", sum(each.reason is not None for each in queued), len(queued))
            texts = [completion.text for completion in queued]
        if ranks == 1:
            return texts
        by_rank = dict(gather((rank, texts)))  # tensor-parallel ranks have the same texts
        return [by_rank[number % ranks][number // ranks] for number in range(len(cases))]

    def _request(self, text: str, settings: Mapping[str, Any], number: int) -> Request:
        most_new = next((settings[name] for name in MAX_TOKENS if settings.get(name) is not None), NEW_TOKENS)
        most = min(int(most_new), self.max_length - 1)
        ids = self.encode([text])[0].tolist()[-(self.max_length - most) :] or [self.loaded.format.start]
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        seed = xxhash.xxh3_64_intdigest(f"{self.seed} {number}".encode()) >> 2
        temperature = float(settings.get("temperature") or 0.0)
        if (samples := settings.get("do_sample")) is not None:
            temperature = (temperature or 1.0) if samples else 0.0
        sampling = Sampling(temperature, int(settings.get("top_k") or 0), float(settings.get("top_p") or 1.0), seed)
        return Request(ids, most, sampling, self.loaded.stop_ids, tuple(filter(None, stops)))


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Spaces at the end of a context belong to the first token of the continuation."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def rolling_windows(ids: list[int], start: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Contexts and continuations that cover a text once, as lm-eval cuts it: the last window begins earlier."""
    for first in range(0, len(ids), length):
        end = min(first + length, len(ids))
        yield ids[max(0, end - length - 1) : first] if first else [start], ids[first:end]
