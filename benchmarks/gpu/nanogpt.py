"""A plain loop in the style of modded-nanogpt on the rows that a run of a spec would read, for `time_to_loss.py`.

A decoder with ReLU^2, norms of queries and keys, norms without weights, a norm behind the embedding, a mix of the
embedding into every block, zero output projections and head, a soft cap of the logits; Muon for the hidden matrices,
Adam with rates of their own for embedding, head and scalars; a constant rate, then a linear decay to zero. Left out of
the record: value embeddings, windows, fp8, several GPUs. Data order, tokenizer and held-out rows are Bessemer's.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
MUON_LR, EMBEDDING_LR, HEAD_LR, SCALAR_LR = 0.02, 0.3, 0.006, 0.015
WEIGHT_DECAY, MOMENTUM, MOMENTUM_WARMUP = 0.1, (0.85, 0.95), 300
DECAY_SHARE = 0.8  # of the run, in which the rate falls to zero
CAP = 15.0
HEAD_DIM = 128


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.type_as(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_DIM)
        self.qkv = nn.ParameterList(nn.Parameter(torch.empty(width, width)) for _ in range(3))
        self.out = nn.Parameter(torch.zeros(width, width))
        self.up, self.down = nn.Parameter(torch.empty(4 * width, width)), nn.Parameter(torch.zeros(width, 4 * width))
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0]))
        for weight in (*self.qkv, self.up):
            bound = 3**0.5 * 0.5 * width**-0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x_BTW: Tensor, start_BTW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, width = x_BTW.shape
        x_BTW = self.mix[0].to(x_BTW.dtype) * x_BTW + self.mix[1].to(x_BTW.dtype) * start_BTW
        inner = norm(x_BTW)
        q, k, v = (linear(inner, w).view(rows, length, self.heads, -1).transpose(1, 2) for w in self.qkv)
        q, k = turn(norm(q), cos, sin), turn(norm(k), cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
        x_BTW = x_BTW + linear(mixed.transpose(1, 2).reshape(rows, length, width), self.out)
        return x_BTW + linear(F.relu(linear(norm(x_BTW), self.up)).square(), self.down)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).type_as(x)


class Network(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(vocab, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Parameter(torch.zeros(vocab, width))
        half = min(HEAD_DIM, width) // 2
        angles = torch.outer(torch.arange(context), 10_000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, weights_BT: Tensor) -> Tensor:
        """The sum of the weighted losses."""
        compute = torch.bfloat16 if tokens_BT.is_cuda else torch.float32
        x = start = norm(F.embedding(tokens_BT, self.embedding).to(compute))
        for block in self.blocks:
            x = block(x, start, self.cos, self.sin)
        logits = linear(norm(x), self.head).float()
        losses = F.cross_entropy((CAP * torch.tanh(logits / CAP)).flatten(0, 1), targets_BT.flatten(), reduction="none")
        return (losses * weights_BT.flatten()).sum()


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices: list[nn.Parameter]) -> None:
        super().__init__(matrices, {"lr": MUON_LR, "base": MUON_LR, "momentum": MOMENTUM[1]})
        shapes = {p.shape: [q for q in matrices if q.shape == p.shape] for p in matrices}
        self.stacks = [(same, torch.zeros(len(same), *shape, device=same[0].device)) for shape, same in shapes.items()]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for same, buffer in self.stacks:
            grads = torch.stack([p.grad for p in same])
            buffer.lerp_(grads, 1 - group["momentum"])
            update = orthogonalized(grads.lerp(buffer, group["momentum"]))
            scale = max(1.0, same[0].shape[0] / same[0].shape[1]) ** 0.5
            torch._foreach_mul_(same, 1 - group["lr"] * WEIGHT_DECAY)
            torch._foreach_add_(same, [u.to(same[0].dtype) for u in update], alpha=-group["lr"] * scale)


def orthogonalized(matrices: Tensor) -> Tensor:
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def optimizers(network: Network) -> list[torch.optim.Optimizer]:
    width = network.embedding.shape[1]
    by_width = (width / 768) ** -0.5
    rates = ((network.embedding, EMBEDDING_LR), (network.head, HEAD_LR), *((b.mix, SCALAR_LR) for b in network.blocks))
    groups = [{"params": [p], "lr": lr * by_width, "base": lr * by_width} for p, lr in rates]
    fused = network.embedding.is_cuda
    adam = torch.optim.Adam(groups, betas=(0.8, 0.95), eps=1e-10, fused=fused)
    return [adam, Muon([p for block in network.blocks for p in block.parameters() if p.ndim == 2])]


def train(spec: Any, skipped: int) -> dict[str, Any]:
    """Trains on the rows of the spec's run. The seconds leave out the first `skipped` steps."""
    from bessemer.data.stream.batches import Prefetch
    from bessemer.data.stream.order import Segment
    from bessemer.session.data import build_stream
    from bessemer.session.start import complete_spec, dry_run
    from bessemer.train.device import pick_device, synchronize
    from bessemer.train.evaluate import Evaluator

    spec = complete_spec(spec)
    device = pick_device(spec.parallel)
    found = dry_run(spec, device)
    plan, shape = found.training, found.shape
    stream = build_stream(spec, found.data, found.rows, plan, [Segment(0, 0)])
    torch.manual_seed(spec.seed)
    with torch.device(device):
        network = Network(shape.vocab, shape.width, shape.layers, plan.context)
    cuda = device.type == "cuda"
    loss_of: Any = torch.compile(network, dynamic=False) if cuda else network
    both = optimizers(network)
    micro = plan.micro_rows if not cuda else min(64, plan.batch_rows[0][1])

    def sum_of(batch: Any) -> Tensor:
        arrays = (torch.from_numpy(a) for a in (batch.tokens, batch.targets, batch.weights))
        return loss_of(*(array.to(device, non_blocking=True) for array in arrays))

    losses, total, began_s = list[Tensor](), plan.total_steps, 0.0
    with Prefetch(stream, micro, depth=2, pin=cuda) as prefetch:
        for step in range(total):
            if step == skipped:
                synchronize(device)
                began_s = time.perf_counter()
            batches = prefetch.get(step)
            count, step_loss = sum(batch.count for batch in batches), torch.zeros((), device=device)
            for batch in batches:
                loss = sum_of(batch) / count
                loss.backward()
                step_loss += loss.detach()
            factor = min(1.0, (total - step) / (DECAY_SHARE * total))
            warm = min(1.0, step / MOMENTUM_WARMUP)
            for optimizer in both:
                for group in optimizer.param_groups:
                    group["lr"] = group["base"] * factor
                    if "momentum" in group:
                        group["momentum"] = MOMENTUM[0] + warm * (MOMENTUM[1] - MOMENTUM[0])
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(step_loss)
    synchronize(device)
    seconds = (time.perf_counter() - began_s) * total / max(1, total - skipped)
    held = Evaluator(found.held_out, plan.context, plan.evaluate_tokens, micro, plan.precision, device)
    nll = tokens = 0.0
    with torch.no_grad():
        for rows, steps in held.parts.values():
            for step in range(steps):
                batch = rows.batch(step)
                nll, tokens = nll + float(sum_of(batch)), tokens + batch.count
    values = torch.stack(losses).tolist()
    trained = stream.steps.range(total - 1)[1] * plan.context
    return {
        "outcome": "finished" if math.isfinite(values[-1]) else "diverged", "steps": total, "tokens": trained,
        "validation_loss": round(nll / tokens, 5), "train_loss": round(sum(values[-10:]) / len(values[-10:]), 5),
        "seconds": round(seconds, 2), "tokens_per_s": round(trained / seconds), "lr": MUON_LR,
        "parameters": sum(p.numel() for p in network.parameters()),
        "losses": [round(value, 4) for value in values[:: total // 50 or 1]],
    }  # fmt: skip
