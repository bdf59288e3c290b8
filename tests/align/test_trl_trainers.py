"""Advantages and losses against TRL 1.13's trainers as they run: a tiny model, its samples, its reward function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.align.advantages import group_advantages, rloo_advantages
from bessemer.align.pair_losses import PAIR_LOSSES, PairLogps
from bessemer.align.policy_losses import Clip, KlPenalty, PolicyTokens, aggregation, policy_loss
from bessemer.spec.preference import DpoSpec

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl", reason="TRL 1.13 is not installed")
SAMPLES, MAX_TOKENS = 4, 6
LOSSES = {
    "grpo": ("clip", "sequence"), "bnpo": ("clip", "token"), "dr_grpo": ("clip", "constant"), "dapo": ("clip", "token"),
    "cispo": ("cispo", "token"), "sapo": ("sapo", "sequence"), "vespo": ("vespo", "token"), "luspo": ("gspo", "sum"),
}  # fmt: skip


def train_one_step(
    trainer: type, config: type, folder: Path, look: Callable[[Any, Any, dict[str, Any]], None], **settings: Any
) -> list[float | None]:
    """Runs a trainer for a step on 3 prompts; `look` gets the trainer, model and inputs of its loss. Returns the
    rewards in the order of the samples; every fifth reward applies to nothing."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(30))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    rewards: list[float | None] = []

    def score(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        rewards[:] = [None if i % 5 == 4 else float(sum(ids) % 7) for i, ids in enumerate(completion_ids)]
        return list(rewards)

    class Watched(trainer):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            look(self, model, inputs)
            return super()._compute_loss(model, inputs)

    arguments = config(
        output_dir=str(folder), per_device_train_batch_size=3 * SAMPLES, num_generations=SAMPLES, max_steps=1,
        max_completion_length=MAX_TOKENS, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    Watched(
        model=LlamaForCausalLM(shape), reward_funcs=score, args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3", "w4 w5 w6"]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ),
    ).train()  # fmt: skip
    return rewards


def advantages_of(trainer: type, config: type, folder: Path, **settings: Any) -> tuple[Tensor, Tensor]:
    """Rewards (P, G), and TRL's advantages in order of size: it shuffles the samples."""
    theirs: list[Tensor] = []
    rewards = train_one_step(
        trainer, config, folder, lambda t, model, inputs: theirs.append(inputs["advantages"].clone()), **settings
    )
    values = [torch.nan if reward is None else reward for reward in rewards]
    return torch.tensor(values).view(-1, SAMPLES), theirs[0].sort().values


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(tmp_path: Path, scale: Any) -> None:
    rewards, theirs = advantages_of(trl.GRPOTrainer, trl.GRPOConfig, tmp_path, scale_rewards=scale)
    ours = group_advantages(rewards, scale).flatten().sort().values
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert rewards.isnan().sum() == 2 and ours.abs().max() > 1


@pytest.mark.parametrize("normalise", [False, True])
def test_rloo_advantages(tmp_path: Path, normalise: bool) -> None:
    rewards, theirs = advantages_of(trl.RLOOTrainer, trl.RLOOConfig, tmp_path, beta=0.0, normalize_advantages=normalise)
    ours = rloo_advantages(rewards, normalise).flatten().sort().values
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_losses_and_their_gradients_in_the_weights(tmp_path: Path) -> None:
    compared = []

    def look(trainer: Any, model: Any, inputs: dict[str, Any]) -> None:
        mask = inputs["completion_mask"].float()
        noise = torch.randn(2, *mask.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logps = answer_logps(model, inputs)
        inputs["old_per_token_logps"] = logps + 0.3 * noise[0]
        inputs["ref_per_token_logps"] = logps + 0.3 * noise[1]
        trainer.beta = 0.1  # set here, since TRL would load a reference model
        for trainer.loss_type, (name, way) in LOSSES.items():
            trainer.importance_sampling_level = "sequence" if name == "gspo" else "token"
            trainer.epsilon_high = 1.3 if name == "cispo" else 0.3
            tokens = PolicyTokens(
                answer_logps(model, inputs), inputs["old_per_token_logps"],
                inputs["advantages"][:, None].expand_as(mask), mask, inputs["ref_per_token_logps"],
            )  # fmt: skip
            losses, _ = policy_loss(name, tokens, Clip(0.2, 0.3), KlPenalty(0.1))
            weights, scales = aggregation(way, mask.sum(1, keepdim=True) * mask, MAX_TOKENS)  # type: ignore[arg-type]
            ours = (losses * weights * scales).sum() / weights.sum()
            theirs = super(type(trainer), trainer)._compute_loss(model, inputs)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            parameters = list(model.parameters())
            for own, other in zip(
                torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters), strict=True
            ):
                torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
            compared.append(trainer.loss_type)

    train_one_step(trl.GRPOTrainer, trl.GRPOConfig, tmp_path, look, epsilon=0.2)
    assert compared == list(LOSSES)


def answer_logps(model: Any, inputs: dict[str, Any]) -> Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    length = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
    logps = torch.log_softmax(logits.float(), -1).gather(-1, inputs["completion_ids"][..., None])
    return logps.squeeze(-1)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge"])
def test_divergences_of_dpo(tmp_path: Path, loss_type: str) -> None:
    """TRL's DPOTrainer with each f-divergence: the loss and its gradients in the weights."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(30))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    shape = LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model, reference = LlamaForCausalLM(shape), LlamaForCausalLM(shape)
    with torch.no_grad():
        for weight in (*model.parameters(), *reference.parameters()):
            weight.mul_(3)
    rows = {
        "prompt": ["w1 w2", "w3"], "chosen": [" w4 w5 w6", " w7"], "rejected": [" w8", " w9 w10"],
    }  # fmt: skip
    names = {"forward_kl": "forward_kl", "js_divergence": "js", "alpha_divergence": "alpha"}
    for theirs, ours in names.items():
        arguments = trl.DPOConfig(
            output_dir=str(tmp_path), beta=0.3, loss_type=loss_type, f_divergence_type=theirs,
            f_alpha_divergence_coef=0.3, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
        )  # fmt: skip
        trainer = trl.DPOTrainer(
            model=model, ref_model=reference, args=arguments, train_dataset=Dataset.from_dict(rows),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
            ),
        )  # fmt: skip
        batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, dict(batch))
        expected = torch.autograd.grad(loss, list(model.parameters()))
        mask = batch["completion_mask"][:, 1:].float()

        def logps(network: Any, batch: Any = batch, mask: Tensor = mask) -> Tensor:
            logits = network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            chosen = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
            return (chosen * mask).sum(1)

        own, other, tokens = logps(model), logps(reference).detach(), mask.sum(1)
        pairs = PairLogps(own[:2], own[2:], tokens[:2], tokens[2:], other[:2], other[2:], ours, 0.3)  # type: ignore[arg-type]
        spec = DpoSpec(loss=loss_type, beta=0.3, divergence=ours, alpha=0.3 if ours == "alpha" else 0.5)  # type: ignore[arg-type]
        mine = PAIR_LOSSES[loss_type](pairs, spec).mean()
        torch.testing.assert_close(mine, loss, rtol=1e-5, atol=1e-6)
        for gradient, wanted in zip(torch.autograd.grad(mine, list(model.parameters())), expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
