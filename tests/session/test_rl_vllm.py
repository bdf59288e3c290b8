"""Rollouts of a server that speaks vLLM's HTTP protocol: a small real server around the embedded generator, which reads
its weights again when it is told to. A run with it is the same as a run without it."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bessemer.align.rollouts import RoundStore
from bessemer.align.vllm import VllmGenerator
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.model.generate import Generator, Request, Sampling
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import load_spec
from bessemer.spec.rl import GeneratorSpec
from bessemer.spec.schema import RunSpec
from bessemer.train.trained import load_model

from .conftest import spec_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny model, and prompts beside it."""
    place = tmp_path_factory.mktemp("vllm")
    sums = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in sums]
    (place / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    model = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 64}
    sft = spec_data(
        "sft", place / "shown.jsonl", place, objective="sft", model=model, tokenizer={"kind": "char", "chat": "none"},
        data={"context": 16}, budget={"steps": 30, "batch": 16 * 32}, checkpoint={"every": 30}, evaluate={"every": 30},
    )  # fmt: skip
    sft["tokenizer"].pop("vocab")
    spec = RunSpec.model_validate(sft)
    Session(spec).train()
    to_hf(open_native(run_folder(spec)), place / "hf")
    return place


class VllmServer(ThreadingHTTPServer):
    """/v1/completions as vLLM answers them, and its development endpoints."""

    daemon_threads = True

    def __init__(self, served: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.served, self.lock, self.calls, self.failures = served, threading.Lock(), list[str](), 0
        self.load()

    def load(self) -> None:
        self.loaded = load_model(self.served, device="cpu")


class Handler(BaseHTTPRequestHandler):
    server: VllmServer

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.calls.append(self.path)
            if self.server.failures:
                self.server.failures -= 1
                self.answer(503, {"error": "busy"})
            elif self.path == "/v1/completions":
                self.answer(200, self.complete(body))
            else:
                assert self.path == "/reset_prefix_cache" or body == {"method": "reload_weights"}
                if self.path == "/collective_rpc":
                    self.server.load()
                self.answer(200, {})

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["model"] == "policy" and body["return_token_ids"] is True and body["logprobs"] == 0
        sampling = Sampling(body["temperature"], body.get("top_k", 0), body["top_p"], body["seed"])
        request = Request(
            body["prompt"], body["max_tokens"], sampling, frozenset(body["stop_token_ids"]), (), body["n"], 0, True
        )
        (samples,) = Generator(self.server.loaded.model, body["n"], 64).run([request])
        choices = []
        for sample in samples:
            ended = sample.stop is not None
            ids = [*sample.tokens, *([sample.stop] if ended else [])]
            logps = [*sample.logprobs, *([sample.stop_logprob] if ended else [])]
            choices.append({"token_ids": ids, "logprobs": {"token_logprobs": logps}, "text": "",
                            "finish_reason": "stop" if ended else "length"})  # fmt: skip
        return {"choices": choices}

    def answer(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[SimpleNamespace]:
    served = tmp_path / "served"
    shutil.copytree(folder / "hf", served)
    with VllmServer(served) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield SimpleNamespace(http=http, url=f"http://127.0.0.1:{http.server_address[1]}/v1", served=served)
        http.shutdown()


def spec_of(folder: Path, runs: Path, name: str, **rl: Any) -> RunSpec:
    settings = {"prompts": 4, "samples": 4, "max_tokens": 4, "rewards": {"right": "exact"}, **rl}
    return RunSpec.model_validate({
        "name": name, "runs": str(runs), "objective": "grpo", "model": {"hf": str(folder / "hf")}, "rl": settings,
        "data": {"sources": {"sums": {"path": [str(folder / "prompts.jsonl")]}}, "context": 12, "validation": 0.1},
        "budget": {"steps": 3}, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant", "warmup": 1},
        "precision": "fp32", "checkpoint": {"every": 3}, "evaluate": {"every": 3, "tokens": 8 * 12},
        "parallel": {"device": "cpu", "threads": 1}, "lints": {"silence": ["continued_at_the_peak"]},
    })  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_with_a_server_has_the_answers_of_a_run_without(
    folder: Path, server: SimpleNamespace, tmp_path: Path, ahead: int
) -> None:
    generator = {"vllm": server.url, "model": "policy", "folder": str(server.served)}
    specs = (
        spec_of(folder, tmp_path, "own", ahead=ahead),
        spec_of(folder, tmp_path, "remote", ahead=ahead, generator=generator),
    )
    server.http.failures = 1  # is tried again
    rounds = []
    for spec in specs:
        assert Session(spec).train().kind == "finished"
        store = RoundStore(run_folder(spec) / "rollouts")
        rounds.append([store.load(step) for step in range(3)])
    for own, remote in zip(*rounds, strict=True):
        for mine, theirs in zip(own.samples, remote.samples, strict=True):
            assert mine.tokens.tolist() == theirs.tokens.tolist() and mine.finished == theirs.finished
            assert theirs.logps == pytest.approx(mine.logps, abs=1e-4)
    calls = server.http.calls  # the first one was refused
    assert calls.count("/collective_rpc") == 4 and calls.count("/reset_prefix_cache") == 3
    assert load_spec(run_folder(specs[1]) / "spec.yaml").rl.generator == specs[1].rl.generator


def test_wrong_servers_and_folders_are_one_line(server: SimpleNamespace, tmp_path: Path) -> None:
    def client(url: str = server.url, folder: Path = server.served) -> VllmGenerator:
        return VllmGenerator(GeneratorSpec(vllm=url, model="policy", folder=str(folder), retries=0, timeout="5s"))  # type: ignore[arg-type]

    request = Request([1, 2], 3, Sampling(1.0), frozenset({0}), (), 2, 0, True)
    with pytest.raises(UserError, match=r"rl.generator: http://127.0.0.1:9/v1: no answer"):
        client("http://127.0.0.1:9/v1").complete([request])
    server.http.failures = 1
    with pytest.raises(UserError, match=r"rl.generator: http://.*/v1: status 503 \(.*busy"):
        client().complete([request])
    with pytest.raises(UserError, match="is not a model folder"):
        client(folder=tmp_path / "nothing")
    assert [len(each.tokens) for each in client().complete([request, request])][:2] == [
        len(each.tokens) for each in client().complete([request])
    ]


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("generator: {vllm: 'http://a/v1', model: m}", "name the folder that it serves"),
        ("generator: {vllm: a, model: m, folder: f}", "expected a URL such as"),
        ("ahead: 1, dynamic_sampling: true", "dynamic_sampling draws further prompts with the present weights"),
        ("ahead: 2", "expected 0 or 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, yaml: str, message: str) -> None:
    path = tmp_path / "spec.yaml"
    source = "data: {sources: {a: {path: x.jsonl, columns: {prompt: q}}}}"
    path.write_text(f"model: 1M\n{source}\nobjective: {{grpo: {{rewards: {{a: exact}}, {yaml}}}}}\n")
    with pytest.raises(UserError, match=message):
        load_spec(path)
