"""Models of transformers that have no native family: the loss, its gradients, packing and generation are theirs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.registry import read_shape
from bessemer.model.generate import Sampling, generate
from bessemer.model.transformer import build_model
from bessemer.model.wrapped import WrappedModel, check_wrapped, load_wrapped, read_wrapped, wrap
from bessemer.run.directory import Run
from bessemer.session.session import train
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.trained import load_model

transformers = pytest.importorskip("transformers")
V = 96
ROUNDING = 1e-5  # GPT-J and Gemma have parts in float32 whatever the weights are
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"vocab_size": V, "max_position_embeddings": 64, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": None}
GPTJ = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
# Heads: plain; a bias; a scale; a divisor; a cap. OPT has learned positions and an embedding narrower than the model.
CONFIGS: dict[str, dict[str, Any]] = {
    "stablelm": {**SMALL, "num_key_value_heads": 2},
    "gptj": {**GPTJ, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "bos_token_id": 0, "eos_token_id": 0},
    "cohere": {**SMALL, "num_key_value_heads": 2, "logit_scale": 0.25},
    "granite": {**SMALL, "num_key_value_heads": 2, "logits_scaling": 4.0},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.1, "attention_dropout": 0.1},
    "vaultgemma": {
        **SMALL, "num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.5, "sliding_window": 4,
        "query_pre_attn_scalar": 8,
    },
}  # fmt: skip


def save(path: Path, kind: str, settings: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms with values of their own, attention that is not even
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return path


FAST = ("gptj", "opt", "vaultgemma")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CONFIGS]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param, CONFIGS[request.param])


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, V, shape, generator=torch.Generator().manual_seed(1))


def loss_of(model: WrappedModel, tokens_BT: Tensor) -> Tensor:
    from bessemer.spec.model import LossSpec
    from bessemer.train.loss import linear_cross_entropy
    from bessemer.train.objective import loss_options

    hidden_RW = model(tokens_BT[:, :-1], AttentionMask()).flatten(0, 1)
    weights_R = hidden_RW.new_ones(len(hidden_RW))
    options = loss_options(model.shape, LossSpec())
    loss, _, _ = linear_cross_entropy(
        hidden_RW, model.head_weight, tokens_BT[:, 1:].flatten(), weights_R, 1 / len(hidden_RW), options,
        model.head_bias,
    )  # fmt: skip
    return loss


def test_loss_and_gradients_are_those_of_the_module(folder: Path) -> None:
    model, reference, tokens_BT = wrap(folder, "cpu").double(), theirs(folder), tokens(3, 20)
    model.train()  # its config's dropout must not be at work
    loss = loss_of(model, tokens_BT)
    expected = F.cross_entropy(reference(tokens_BT[:, :-1]).logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
    exact = "vaultgemma" not in str(folder)  # whose softmax and cap are float32
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10 if exact else ROUNDING)
    # Theirs is taken in float32, and the last token is read too.
    torch.testing.assert_close(loss.float(), reference(tokens_BT, labels=tokens_BT).loss.float(), rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    ours = {name.removeprefix("inner."): parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=0, atol=1e-10 if exact else ROUNDING, msg=name)


def test_packed_documents_are_as_documents_alone(folder: Path) -> None:
    model, tokens_BT = wrap(folder, "cpu").double().eval(), tokens(2, 24)
    lengths = ((9, 15), (3, 21))
    documents_BT = torch.tensor([[0] * a + [1] * b for a, b in lengths])
    together = model(tokens_BT, AttentionMask(documents_BT))
    for row, (a, b) in enumerate(lengths):
        for part, start, stop in ((together[row, :a], 0, a), (together[row, a:], a, a + b)):
            torch.testing.assert_close(part, model(tokens_BT[row : row + 1, start:stop])[0], rtol=0, atol=ROUNDING)
    assert not torch.allclose(together, model(tokens_BT))


def test_greedy_generation_is_transformers_own(folder: Path) -> None:
    model, reference, prompt = wrap(folder, "cpu").double().eval(), theirs(folder), tokens(1, 7)
    expected = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )[0, 7:]  # fmt: skip
    assert list(generate(model, prompt[0].tolist(), 20, (), Sampling(0.0))) == expected.tolist()


def test_the_shape_counts_the_module(folder: Path) -> None:
    shape, reference = read_wrapped(folder), theirs(folder)
    assert shape.wrapped_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert shape.parameters == shape.wrapped_parameters
    assert (shape.vocab, shape.width, shape.layers, shape.heads) == (V, 32, 2, 4)
    assert ModelShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    assert len(wrap(folder, "cpu").blocks) == 2


def test_it_is_built_again_from_its_shape(folder: Path) -> None:
    """As a checkpoint's weights are loaded: laid out without memory first, tables among the buffers."""
    model, tokens_BT = wrap(folder, "cpu"), tokens(1, 10)
    with torch.device("meta"):
        again = WrappedModel(model.shape)
    again.to_empty(device="cpu")
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(tokens_BT), model.eval()(tokens_BT))


def test_a_state_space_model_trains_alone_but_not_packed(tmp_path: Path) -> None:
    settings = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    model = wrap(save(tmp_path, "mamba", settings), "cpu").eval()
    documents_BT = torch.tensor([[0] * 4 + [1] * 6])
    with pytest.raises(UserError, match=r"mamba cannot separate packed documents: write packing: pad"):
        model(tokens(1, 10), AttentionMask(documents_BT))
    prompt = tokens(1, 7)
    said = list(generate(model, prompt[0].tolist(), 5, (), Sampling(0.0)))  # without a cache
    expected = theirs(tmp_path).float().generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert said == expected[0, 7:].tolist()


def test_llama_4_trains_alone_but_not_packed(tmp_path: Path) -> None:
    """Its body has another name than transformers looks for; its chunks begin where the row begins."""
    settings = {
        "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 8,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
        "attention_chunk_size": 16, "max_position_embeddings": 128, "pad_token_id": None,
    }  # fmt: skip
    folder = save(tmp_path, "llama4_text", settings)
    with pytest.raises(UserError, match=r"Llama4ForCausalLM is not supported .*wrap: true"):
        read_shape(json.loads((folder / "config.json").read_text()))
    model, reference, tokens_BT = wrap(folder, "cpu").eval(), theirs(folder).float(), tokens(1, 40)
    torch.testing.assert_close(model.logits(model(tokens_BT)), reference(tokens_BT).logits)
    expected = reference.generate(tokens_BT, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(generate(model, tokens_BT[0].tolist(), 5, (), Sampling(0.0))) == expected[0, 40:].tolist()
    with pytest.raises(UserError, match=r"llama4_text cannot separate packed documents: write packing: pad"):
        model(tokens_BT, AttentionMask(torch.tensor([[0] * 20 + [1] * 20])))


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        ({"architectures": ["XyzForCausalLM"]}, "wrap: true"),
        ({"model_type": "xyz"}, "wrap: true"),
        ({"architectures": ["RobertaForMaskedLM"]}, "only models that predict the next token"),
        ({"architectures": ["Llama4ForConditionalGeneration"], "text_config": {}}, "save its text model"),
    ],
)
def test_wrapping_is_recommended_only_where_it_works(config: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError) as refused:
        read_shape(config)
    assert fix in str(refused.value) and ("wrap: true" in str(refused.value)) == (fix == "wrap: true")


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", "stablelm", CONFIGS["stablelm"])
    shape = read_wrapped(folder)
    with pytest.raises(UserError, match="120 tokens exceed the model's vocabulary of 96"):
        check_wrapped(shape, 120, 32)
    with pytest.raises(UserError, match="65 exceeds the model's 64"):
        check_wrapped(shape, V, 65)
    with pytest.raises(UserError, match="is causal only; remove the prefix task"):
        wrap(folder, "cpu")(tokens(1, 8), AttentionMask(prefix_BT=torch.ones(1, 8, dtype=torch.bool)))
    ahead = save(tmp_path / "b", "electra", {**SMALL, "embedding_size": 32, "pad_token_id": 0})
    with pytest.raises(UserError, match=r"with a linear head|attends to later tokens"):
        wrap(ahead, "cpu")


def test_a_head_that_was_misread_is_found_out(tmp_path: Path) -> None:
    from dataclasses import replace

    folder = save(tmp_path, "cohere", CONFIGS["cohere"])
    shape = read_wrapped(folder)
    assert shape.logit_scale == 0.25
    with pytest.raises(UserError, match="cohere computes its logits in an unsupported way"):
        load_wrapped(WrappedModel(replace(shape, logit_scale=1.0)), folder)


def test_tables_that_no_file_holds_have_their_values(tmp_path: Path) -> None:
    """A model is built without memory first; rotary frequencies are in no checkpoint."""
    folder = save(tmp_path, "stablelm", CONFIGS["stablelm"])
    built, expected = build_model(read_wrapped(folder), "cpu", 0), dict(theirs(folder).named_buffers())
    buffers = dict(built.inner.named_buffers())
    assert buffers.keys() == expected.keys() and "model.rotary_emb.inv_freq" in buffers
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name]), name


def test_missing_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path, "stablelm", CONFIGS["stablelm"])
    file = folder / "model.safetensors"
    state = load_file(file)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing or has another shape"):
        wrap(folder, "cpu")


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}})
    )
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="transformers cannot build this model"):
        read_wrapped(tmp_path)


def test_a_run_trains_it_goes_on_and_generates(tmp_path: Path) -> None:
    corpus = Path(__file__).parents[2] / "src" / "bessemer" / "spec"
    tokenizer = Tokenizer.train([file.read_text() for file in sorted(corpus.glob("*.py"))], 300)
    folder = save(tmp_path / "hf", "stablelm", {**CONFIGS["stablelm"], "vocab_size": tokenizer.vocab_size})
    tokenizer.save(folder / "tokenizer.json")
    sections = {
        "name": "run", "runs": str(tmp_path), "model": {"hf": str(folder), "wrap": True},
        "data": {"context": 32, "sources": {"code": {"path": str(corpus), "format": "source"}}},
        "precision": "fp32", "parallel": {"device": "cpu", "threads": 1}, "evaluate": {"tokens": 512},
        "guard": {"look_every": 2}, "optimizer": {"lr": 1e-3},
    }  # fmt: skip
    for steps in (12, 20):  # the second time from its own checkpoint
        spec = RunSpec.model_validate({**sections, "budget": {"steps": steps, "batch": 256}})
        outcome = train(spec)
        assert outcome.kind == "finished", outcome.reason
    run = Run(tmp_path / "run")
    records = list(run.metrics())
    assert [record["step"] for record in records] == list(range(20))
    losses = [record["loss"] for record in records]
    assert sum(losses[-5:]) < sum(losses[:5])
    decisions = {item["key"]: item for item in json.loads((run.folder / "plan.json").read_text())["decisions"]}
    assert "run by transformers: no tensor or pipeline parallel" in decisions["model.wrap"]["reason"]
    loaded = load_model(run.folder, device="cpu")
    model, _ = loaded.model, loaded.tokenizer
    assert isinstance(model, WrappedModel)
    said = list(generate(model, [1, 2, 3], 5, (), Sampling(0.0)))
    done = to_hf(open_native(run.folder), tmp_path / "out")  # and transformers goes on with what was learnt
    assert done.family == "wrapped" and done.comparison is not None and done.comparison.logits == 0.0
    assert (tmp_path / "out" / "tokenizer.json").exists()
    out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    asked = torch.tensor([[1, 2, 3]])
    assert said == out.generate(asked, max_new_tokens=5, do_sample=False, eos_token_id=None)[0, 3:].tolist()


def test_packing_holds_in_bf16(folder: Path) -> None:
    """Which the probe does not see: it is taken in float32, and training multiplies in bf16."""
    model, tokens_BT = wrap(folder, "cpu").eval(), tokens(1, 24)
    documents_BT = torch.tensor([[0] * 9 + [1] * 15])
    with torch.autocast("cpu", torch.bfloat16):
        together, alone = model(tokens_BT, AttentionMask(documents_BT))[0, 9:], model(tokens_BT[:, 9:])[0]
        mixed = model(tokens_BT)[0, 9:]
    gap = (together - alone).norm() / alone.norm()
    assert gap < 0.03
    assert (mixed - alone).norm() / alone.norm() > 5 * gap
