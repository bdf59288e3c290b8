# short run: --updates 3
"""Packed pre-training: compiled model, loss divided by the tokens of the whole update, resumable, EMA weights."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, BLOCK, ACCUMULATE = 128, 24, 3


class TinyLM(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, depth, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB)

    def forward(self, input_ids):
        hidden, _ = self.rnn(self.tok(input_ids))
        return self.lm_head(self.norm(hidden))


class LMTrainer:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.raw_model = TinyLM().to(self.device)
        self.model = torch.compile(self.raw_model, backend="eager")
        self.ema = torch.optim.swa_utils.AveragedModel(self.raw_model)
        self.optim = torch.optim.AdamW(self.raw_model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.update = 0

    def batches(self):
        generator = torch.Generator().manual_seed(self.update)
        for _ in range(ACCUMULATE):
            tokens = torch.randint(0, VOCAB, (4, BLOCK + 1), generator=generator)
            lengths = torch.randint(BLOCK // 2, BLOCK + 1, (4, 1), generator=generator)
            weight = (torch.arange(BLOCK)[None] < lengths).float()
            yield tokens.to(self.device), weight.to(self.device)

    def loss_sum(self, tokens, weight):
        logits = self.model(tokens[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (losses * weight.flatten()).sum()

    def train_update(self):
        micro_batches = list(self.batches())
        total_tokens = sum(weight.sum() for _, weight in micro_batches)
        self.optim.zero_grad(set_to_none=True)
        update_loss = 0.0
        for tokens, weight in micro_batches:
            loss = self.loss_sum(tokens, weight) / total_tokens
            loss.backward()
            update_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.raw_model.parameters(), 1.0)
        self.optim.step()
        self.ema.update_parameters(self.raw_model)
        self.update += 1
        return update_loss

    @torch.no_grad()
    def perplexity(self):
        self.model.eval()
        tokens = torch.randint(0, VOCAB, (4, BLOCK + 1), device=self.device)
        loss = self.loss_sum(tokens, torch.ones(4, BLOCK, device=self.device)) / (4 * BLOCK)
        self.model.train()
        return loss.exp().item()

    def save(self, path):
        state = {"model": self.raw_model.state_dict(), "optimizer": self.optim.state_dict(), "step": self.update}
        torch.save(state, path)

    def resume(self, path):
        state = torch.load(path, map_location=self.device)
        self.raw_model.load_state_dict(state["model"])
        self.optim.load_state_dict(state["optimizer"])
        self.update = state["step"]

    def run(self):
        if os.path.exists("lm.pt"):
            self.resume("lm.pt")
        self.model.train()
        while self.update < self.args.updates:
            loss = self.train_update()
            if self.update % 3 == 0:
                print(f"update {self.update} loss {loss.item():.3f} perplexity {self.perplexity():.1f}")
        self.save("lm.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=1000)
    LMTrainer(parser.parse_args()).run()
