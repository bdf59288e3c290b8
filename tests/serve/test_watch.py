"""The server of a live run: its newest checkpoint, while requests run."""

import json
import random
import subprocess
import sys
import threading
import time

import httpx
import pytest
from tests.serve.conftest import llama_folder, running, wait_until

from bessemer.model.generate import Request, Sampling
from bessemer.serve.models import ModelOptions, RunWatcher, load_served, wait_for_checkpoint
from bessemer.train.trained import load_model

OPTIONS = ModelOptions(device="cpu", slots=2)
BODY = {"prompt": "the old smith", "max_tokens": 40, "temperature": 0, "logprobs": 0, "ignore_eos": True}


def ask(server, answers, **more):
    response = httpx.post(f"{server.url}/v1/completions", json=BODY | more, timeout=120)
    answers.append(response.raise_for_status().json())


def test_requests_that_wait_are_answered_by_the_model_they_were_sent_to(folder, tmp_path):
    """Two run and three wait on the first model; the sixth, which comes after the second model, does not."""
    newer = llama_folder(tmp_path / "newer", seed=9)
    first, second = (load_served("live", place, OPTIONS) for place in (folder, newer))
    expected = []
    for place in (folder, newer):
        loaded = load_model(place, device="cpu")
        ((sample,),) = loaded.generator(1, 128).run([Request(loaded.prompt(BODY["prompt"]), 40, Sampling(0.0))])
        expected.append(sample.text)
    step, go_on = first.backend.step, threading.Event()

    def held_step():  # the thread of the scheduler goes on to other models
        if go_on.wait(0.001):
            step()

    first.backend.step = held_step
    with running([first]) as server:
        before, after = [], []
        threads = [threading.Thread(target=ask, args=(server, before), kwargs={"ignore_eos": False}) for _ in range(5)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.scheduler.load() == {"running": 2, "waiting": 3})
        server.registry.replace(second)
        late = threading.Thread(target=ask, args=(server, after), kwargs={"ignore_eos": False})
        late.start()
        wait_until(lambda: server.scheduler.load()["running"] == 3)  # it does not wait for slots of the first model
        go_on.set()
        for thread in [*threads, late]:
            thread.join()
    assert [answer["choices"][0]["text"] for answer in before] == expected[:1] * 5
    assert {answer["system_fingerprint"] for answer in before} == {str(folder)}
    assert [(a["choices"][0]["text"], a["system_fingerprint"]) for a in after] == [(expected[1], str(newer))]


def test_a_checkpoint_that_cannot_be_loaded_is_reported_once(folder, tmp_path, monkeypatch):
    """And the watcher goes on: the next checkpoint is served."""
    from bessemer.serve import models

    good, newest, lines = load_served("live", folder, OPTIONS), ["step-1"], []

    def load(name, place, options):
        if place.name == "step-1":
            raise RuntimeError("out of memory")
        return load_served(name, folder, options)

    monkeypatch.setattr(models.Run, "existing", lambda run: run)
    monkeypatch.setattr(models, "find_checkpoint", lambda run, which: tmp_path / newest[-1])
    monkeypatch.setattr(models, "load_served", load)
    registry = models.ModelRegistry([good])
    watcher = RunWatcher(tmp_path, "live", OPTIONS, registry, 0.01, lines.append)
    watcher.start()
    wait_until(lambda: lines)
    time.sleep(0.1)
    assert lines == ["the newest checkpoint was not loaded, the one before stays: out of memory"]
    assert registry.models["live"] is good
    newest.append("step-2")
    wait_until(lambda: registry.models["live"] is not good)
    watcher.stop()
    assert lines[1] == "now serving step-2"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_live_run(tmp_path):
    """A run saves while its server answers: every answer has the numbers of the checkpoint that it names, and one that
    was being computed as the next checkpoint came ended on its own."""
    draw, words = random.Random(0), ["the", "old", "smith", "heated", "iron", "until", "it", "glowed"]
    rows = [{"text": " ".join(draw.choices(words, k=40))} for _ in range(200)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "name": "live", "runs": str(tmp_path / "runs"), "precision": "fp32",
        "model": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64}, "tokenizer": {"vocab": 300},
        "data": {"sources": {"words": str(tmp_path / "words.jsonl")}, "context": 64, "validation": 0.0},
        "budget": {"steps": 100_000, "batch": 256}, "parallel": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": 20, "keep_last": 1000},
    }  # fmt: skip
    (tmp_path / "live.yaml").write_text(json.dumps(spec))
    run, lines = tmp_path / "runs" / "live", []
    command = [sys.executable, "-m", "bessemer", "train", str(tmp_path / "live.yaml")]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: (run / "events.jsonl").exists() or training.poll() is not None, 120)
        assert training.poll() is None, training.stderr.read()
        wait_for_checkpoint(run, lines.append, 0.05)
        assert lines in ([], [f"waiting  for the first checkpoint of {run}; Ctrl-C ends"])
        first = load_served("live", run, OPTIONS)

        def watch(registry):
            return RunWatcher(run, "live", OPTIONS, registry, 0.05, lines.append)

        with running([first], watcher=watch) as server:
            answers, overtaken, end = [], 0, time.monotonic() + 200
            while overtaken < 2:
                assert time.monotonic() < end and training.poll() is None
                ask(server, answers)
                overtaken += answers[-1]["system_fingerprint"] != server.registry.models["live"].source
    finally:
        training.terminate()
        training.communicate()
    assert [line.split()[2] for line in lines if line.startswith("now serving")]
    for answer in {answer["system_fingerprint"]: answer for answer in answers}.values():
        place, _, checkpoint = answer["system_fingerprint"].rpartition("@")
        assert place == str(run)
        loaded = load_model(run, checkpoint, device="cpu")
        prompt = Request(loaded.prompt(BODY["prompt"]), 40, Sampling(0.0), top_logprobs=0)
        ((sample,),) = loaded.generator(1, 64).run([prompt])
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(sample.logprobs, abs=1e-4)
        assert answer["choices"][0]["text"] == sample.text
