"""Answers of a vLLM server, through its OpenAI-compatible HTTP API: prompts and answers are token ids.

A round's weights are written to the folder that the server was started with, as one safetensors file, and the server's
development endpoints (VLLM_SERVER_DEV_MODE=1) reload them and reset the prefix cache. A temperature
other than 1 needs --logprobs-mode processed_logprobs: log-probabilities are those of the sampling distribution.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from bessemer.endpoint import RequestFailed, environment_key, hide_key, post_json, shorten, shown_url
from bessemer.errors import UserError
from bessemer.model.families.folder import SINGLE_FILE, HfFolder, hf_tensors
from bessemer.model.families.registry import family_of
from bessemer.model.generate import Completion, Request
from bessemer.model.transformer import Decoder
from bessemer.spec.rl import GeneratorSpec
from bessemer.storage import atomic_path, backoff_s

KEY = "rl.generator"
OnStep = Callable[[int, int], None]


class VllmGenerator:
    """The client of one server. `complete` may be called from another thread than `load_weights`."""

    def __init__(self, spec: GeneratorSpec) -> None:
        self.spec, self.key = spec, environment_key(spec.key_env, shown_url(spec.vllm))
        self.folder = HfFolder(spec.folder) if spec.folder else None
        if self.folder and not (self.folder.path / SINGLE_FILE).is_file():
            raise UserError(f"{KEY}.folder: {spec.folder} has no {SINGLE_FILE}: save the model in one file")

    @property
    def root(self) -> str:
        """Where endpoints that are not OpenAI's are."""
        return self.spec.vllm.removesuffix("/v1")

    def complete(self, requests: Sequence[Request], on_step: OnStep | None = None) -> list[Completion]:
        """All samples of all requests, in order; those of a request one after another."""
        answers: dict[int, list[Completion]] = {}
        stop = threading.Event()
        with ThreadPoolExecutor(min(self.spec.parallel, max(1, len(requests)))) as pool:
            futures = {pool.submit(self._complete, request, stop): n for n, request in enumerate(requests)}
            try:
                for future in as_completed(futures):
                    answers[futures[future]] = future.result()
                    if on_step is not None:
                        on_step(len(answers), len(requests))
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [completion for number in range(len(requests)) for completion in answers[number]]

    def load_weights(self, model: Decoder) -> None:
        """Make the server use these weights. `model` holds all of them (`parallel/generate.gathered`)."""
        assert self.folder is not None
        from safetensors.torch import save_file

        family = family_of(self.folder.config)
        weights = dict(model.state_dict())
        dtypes = {name: info.dtype for name, info in self.folder.tensors.items()}
        named = {name: tensor.detach().cpu().to(dtypes.get(name, tensor.dtype)).contiguous()
                 for name, tensor in hf_tensors(weights.__getitem__, model.shape, family)}  # fmt: skip
        if set(named) != set(dtypes):
            other = sorted(set(named) ^ set(dtypes))[0]
            raise UserError(f"{KEY}.folder: {self.spec.folder} holds another model ({other}): copy the run's own")
        with atomic_path(self.folder.path / SINGLE_FILE) as temporary:
            save_file({name: tensor.clone() for name, tensor in named.items()}, temporary, {"format": "pt"})
        self._post(f"{self.root}/collective_rpc", {"method": "reload_weights"})
        self._post(f"{self.root}/reset_prefix_cache", {})

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def _complete(self, request: Request, stop: threading.Event) -> list[Completion]:
        sampling = request.sampling
        body = {
            "model": self.spec.model, "prompt": list(request.prompt), "n": request.samples,
            "max_tokens": request.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "seed": sampling.seed, "logprobs": 0, "return_token_ids": True,
            "stop_token_ids": sorted(request.stop_ids), **({"top_k": sampling.top_k} if sampling.top_k else {}),
        }  # fmt: skip
        answer = self._post(f"{self.spec.vllm}/completions", body, stop)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != request.samples:
            excerpt = shorten(json.dumps(answer))
            raise UserError(f"{KEY}: {self.spec.vllm} gave {excerpt!r}, not {request.samples} answers")
        return [self._read(choice, number, request) for number, choice in enumerate(choices)]

    def _read(self, choice: Any, number: int, request: Request) -> Completion:
        try:
            ids = [int(token) for token in choice["token_ids"]]
            logps = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        except (LookupError, TypeError, ValueError):
            raise UserError(
                f"{KEY}: {self.spec.vllm} gave no token_ids or token_logprobs: it needs return_token_ids (vLLM 0.10.2)"
            ) from None
        if len(ids) != len(logps) or not ids:
            raise UserError(f"{KEY}: {self.spec.vllm} gave {len(logps)} log-probabilities for {len(ids)} tokens")
        completion = Completion(0, number, ids, logprobs=logps, reason=choice.get("finish_reason") or "length")
        completion.prompt_tokens = len(request.prompt)
        if completion.reason == "stop":
            completion.stop, completion.stop_logprob = ids.pop(), logps.pop()
        return completion

    def _post(self, url: str, body: dict[str, Any], stop: threading.Event | None = None) -> Any:
        data = json.dumps(body).encode()
        answer = self._retried(lambda: post_json(url, data, self._headers, self.spec.timeout), stop)
        try:
            return json.loads(answer) if answer.strip() else {}
        except ValueError:
            excerpt = shorten(answer.decode(errors="replace"))
            raise UserError(f"{KEY}: {shown_url(url)} gave no JSON: {excerpt}") from None

    def _retried(self, request: Callable[[], bytes], stop: threading.Event | None = None) -> bytes:
        stop = stop or threading.Event()
        for attempt in range(self.spec.retries + 1):
            try:
                return request()
            except RequestFailed as error:
                if not error.again or attempt == self.spec.retries or stop.is_set():
                    why = hide_key(error.why, self.key)
                    raise UserError(f"{KEY}: {shown_url(self.spec.vllm)}: {why}") from None
                stop.wait(backoff_s(attempt, 1.0) if error.pause_s is None else error.pause_s)
        raise AssertionError("the last attempt returns or raises")
