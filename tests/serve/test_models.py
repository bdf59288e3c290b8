"""Several models: adapters never mix, a live run's newest checkpoint, encoders and classifiers beside transformers."""

import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import save_file
from tests.serve.conftest import byte_tokenizer, llama_folder, running

from bessemer.errors import UserError
from bessemer.model.generate import Request, Sampling
from bessemer.serve.models import ModelOptions, RunWatcher, load_adapter, load_served, warm_up
from bessemer.serve.server import ServeOptions, load_models
from bessemer.train.answers import AnswerSettings, answer_all
from bessemer.train.trained import load_model

OPTIONS = ModelOptions(device="cpu", slots=8)


def adapter_folder(path: Path, base: Path, seed: int) -> Path:
    """A LoRA of query and value, strong enough to change every answer."""
    path.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16, "lora_dropout": 0.0,
              "bias": "none", "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(base)}  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(2):
        for name, rows in (("q_proj", 32), ("v_proj", 16)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(4, 32, generator=draw) / 4
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, 4, generator=draw) / 4
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_adapters_never_mix(folder, tmp_path):
    """Each answers as it does alone, whichever requests run beside it; unchanged tensors are in memory once."""
    folders = {"base": folder} | {name: adapter_folder(tmp_path / name, folder, seed) for seed, name in enumerate("ab")}
    models = load_models(ServeOptions(folder, "base", [f"{name}={folders[name]}" for name in "ab"], options=OPTIONS))
    first, second = (model.loaded.model for model in models[:2])
    assert first.embedding.weight.data_ptr() == second.embedding.weight.data_ptr()
    greedy = AnswerSettings(max_tokens=16, sampling=Sampling(temperature=0))
    prompts = [f"question {i}" for i in range(8)]
    expected = {}
    for name, place in folders.items():
        answers = answer_all(load_model(place, device="cpu"), prompts, greedy)
        expected |= {(name, p): a["samples"][0]["text"] for p, a in zip(prompts, answers, strict=True)}
    assert all(len({expected[name, p] for name in folders}) == 3 for p in prompts)
    work = [(name, prompt) for prompt in prompts for name in folders]
    with running(models) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        assert [card.id for card in client.models.list()] == ["base", "a", "b"]

        def ask(entry):
            return client.completions.create(model=entry[0], prompt=entry[1], temperature=0, max_tokens=16)

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, work))
    assert [answer.choices[0].text for answer in answers] == [expected[entry] for entry in work]
    assert [answer.model for answer in answers] == [name for name, _ in work]


def test_an_adapter_of_another_model(folder, tmp_path):
    base, wide = load_served("base", folder, OPTIONS), llama_folder(tmp_path / "wide", width=64)
    with pytest.raises(UserError, match="another shape"):
        load_adapter("x", wide, base, OPTIONS)
    with pytest.raises(UserError, match="two models have the name"), running([base, base]):
        pass


@pytest.mark.slow
def test_speculative_decoding_gives_the_same_tokens(folder, tmp_path):
    body = {"prompt": "abcabcabcabc", "max_tokens": 24, "temperature": 0}
    texts, constrained = [], []
    schema = {"schema": {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"],
                         "additionalProperties": False}}  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 200,
            "response_format": {"type": "json_schema", "json_schema": schema}}  # fmt: skip
    for draft in (None, "ngram", str(llama_folder(tmp_path / "draft", seed=3, layers=1))):
        model = load_served("m", folder, ModelOptions(device="cpu", slots=2, draft=draft))
        with running([model]) as server:
            texts.append(httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"])
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat).json()
            constrained.append(answer["choices"][0]["message"]["content"])
            penalized = httpx.post(f"{server.url}/v1/completions", json=body | {"presence_penalty": 1.0})
            assert penalized.status_code == (200 if draft is None else 400)
    assert len(set(texts)) == 1 and len(set(constrained)) == 1
    assert json.loads(constrained[0])["a"] in ("yes", "no")


def test_warming_up_leaves_nothing_behind(folder):
    served = load_served("m", folder, ModelOptions(device="cpu", slots=4))
    generator = served.backend.generator
    warm_up(generator, 0)
    assert not generator.rows and not generator.waiting and not generator.contents
    request = Request(served.loaded.prompt("x"), 8, Sampling(temperature=0))
    ((warm,),), ((cold,),) = generator.run([request]), load_model(folder, device="cpu").generator(4, 64).run([request])
    assert warm.tokens == cold.tokens


def test_a_newer_checkpoint_is_served_while_requests_run(folder, tmp_path, monkeypatch):
    """The watcher hands over the next model; a request that runs ends on the one it began with."""
    newer = llama_folder(tmp_path / "newer", seed=9)
    body = {"prompt": "watch", "max_tokens": 60, "temperature": 0}
    expected = [
        next(answer_all(load_model(place, device="cpu"), ["watch"], AnswerSettings(60, 1, Sampling(temperature=0))))
        for place in (folder, newer)
    ]
    first, second = (load_served("live", place, OPTIONS) for place in (folder, newer))
    with running([first]) as server:
        answers = []

        def ask():
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json())

        thread = threading.Thread(target=ask)
        thread.start()
        while not server.scheduler.load()["running"]:
            pass
        server.registry.replace(second)
        thread.join()
        ask()
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [answer["samples"][0]["text"] for answer in expected] and texts[0] != texts[1]
    assert [answer["system_fingerprint"] for answer in answers] == [str(folder), str(newer)]


def bert(kind, path, **config):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = transformers.BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128, **config,
    )  # fmt: skip
    model = getattr(transformers, kind)(made).eval()
    model.save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return model


TEXTS = ["a", "some more text", "the third is longer than the others"]


def test_embeddings_equal_transformers(tmp_path):
    model = bert("BertForMaskedLM", tmp_path)
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            vector = model.bert(torch.tensor([byte_tokenizer().encode(text).ids])).last_hidden_state[0].mean(0)
        expected.append((vector / vector.norm()).tolist())
    with running([load_served("bert", tmp_path, OPTIONS)]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        answer = client.embeddings.create(model="bert", input=TEXTS)
        np.testing.assert_allclose([entry.embedding for entry in answer.data], expected, atol=1e-6)
        assert answer.usage.prompt_tokens == sum(map(len, TEXTS))
        one = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
        decoded = np.frombuffer(base64.b64decode(one["data"][0]["embedding"]), np.float32)
        np.testing.assert_allclose(decoded, expected[0], atol=1e-6)
        for bad in ("", [], "x" * 200, [[300]]):
            assert httpx.post(f"{server.url}/v1/embeddings", json={"input": bad}).status_code == 400
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 400


@pytest.mark.parametrize(
    "problem",
    ["single_label_classification"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("multi_label_classification", "regression", "token")],
)
def test_labels_equal_transformers(problem, tmp_path):
    names = {0: "good", 1: "bad", 2: "odd"} if problem != "regression" else {0: "LABEL_0"}
    kind = "Token" if problem == "token" else "Sequence"
    options = {} if problem == "token" else {"problem_type": problem}
    model = bert(f"BertFor{kind}Classification", tmp_path, id2label=names, label2id={v: k for k, v in names.items()},
                 **options)  # fmt: skip
    with running([load_served("bert", tmp_path, OPTIONS)]) as server:
        answer = httpx.post(f"{server.url}/v1/classify", json={"input": TEXTS}).json()
    for text, entry in zip(TEXTS, answer["data"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([byte_tokenizer().encode(text).ids])).logits[0]
        if problem == "token":
            assert [token["label"] for token in entry["tokens"]] == [names[i] for i in logits.argmax(-1).tolist()]
            assert [(token["start"], token["end"]) for token in entry["tokens"]] == [
                (i, i + 1) for i in range(len(text))
            ]
            continue
        if problem == "regression":
            assert entry["value"] == pytest.approx(float(logits[0]), abs=1e-5)
            continue
        shares = logits.sigmoid() if problem.startswith("multi") else logits.softmax(-1)
        assert list(entry["probabilities"].values()) == pytest.approx(shares.tolist(), abs=1e-5)
        if problem.startswith("multi"):
            assert entry["labels"] == [names[i] for i in range(3) if shares[i] > 0.5]
        else:
            assert entry["label"] == names[int(logits.argmax())]


def test_watcher_loads_each_checkpoint_once(tmp_path, monkeypatch):
    from bessemer.serve import models

    committed, loads = ["step-1"], []

    def load(name, place, options):
        loads.append(place.name)
        return SimpleNamespace(name=name, checkpoint=place.name)

    monkeypatch.setattr(models.Run, "existing", lambda run: run)
    monkeypatch.setattr(models, "find_checkpoint", lambda run, which: tmp_path / committed[-1])
    monkeypatch.setattr(models, "load_served", load)
    registry = SimpleNamespace(models={"live": SimpleNamespace(checkpoint="step-1")})
    registry.replace = lambda model: registry.models.update({model.name: model})
    watcher = RunWatcher(tmp_path, "live", OPTIONS, registry)
    assert not watcher.check()
    committed += ["step-2", "step-3"]
    assert watcher.check() and not watcher.check() and loads == ["step-3"]
