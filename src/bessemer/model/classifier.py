"""A class for each text, or for each token, on a native model's hidden states.

Legend: B batch, T time, W width, D documents in the batch, L labels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import Decoder
from bessemer.spec.shape import ModelShape

Kind = Literal["sequence", "token"]
Pool = Literal["first", "last", "mean"]


def headless(shape: ModelShape) -> ModelShape:
    """The same network without what turns hidden states into words."""
    return replace(shape, tied=True, head_transform=False, head_bias=False)


class Classifier(nn.Module):
    """`body` has a `headless` shape. `hidden` is BERT's pooler: a layer and a tanh before the classes. As in
    transformers, classes have a bias except those from a text's last token."""

    def __init__(
        self, body: Decoder, labels: int, kind: Kind = "sequence", pool: Pool = "last", hidden: bool = False
    ) -> None:
        super().__init__()
        self.body, self.shape, self.kind, self.pool, self.dropout = body, body.shape, kind, pool, 0.0
        width = body.shape.width
        self.pooler = nn.Linear(width, width) if hidden else None
        self.score = nn.Linear(width, labels, bias=kind == "token" or pool != "last")

    def forward(self, tokens_BT: Tensor, sight: AttentionMask | None = None, types_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, L) of tokens, or (D, L) of texts: one for each document of the sight, row by row, and for each
        row where it has none. Padding must have the document number -1."""
        x = self.body(tokens_BT, sight, types_BT=types_BT)
        if self.kind == "sequence":
            x = pooled(x, sight.documents_BT if sight else None, self.pool)
        if self.pooler is not None:
            x = torch.tanh(self.pooler(x))
        return self.score(F.dropout(x, self.dropout, self.training))


def pooled(x_BTW: Tensor, documents_BT: Tensor | None, pool: Pool) -> Tensor:
    """(D, W): the first or last hidden state of each document, or their mean."""
    if documents_BT is None:
        documents_BT = torch.zeros(x_BTW.shape[:2], dtype=torch.int64, device=x_BTW.device)
    change_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
    edge_B1 = torch.ones_like(documents_BT[:, :1], dtype=torch.bool)
    real_BT, begins_BT = documents_BT >= 0, torch.cat((edge_B1, change_BT), dim=1)
    if pool == "first":
        return x_BTW[begins_BT & real_BT]
    if pool == "last":
        return x_BTW[torch.cat((change_BT, edge_B1), dim=1) & real_BT]
    number_R = begins_BT.flatten().cumsum(0) - 1  # of the document, padding counted too
    lengths_D = number_R.bincount()
    sums_DW = x_BTW.new_zeros(len(lengths_D), x_BTW.shape[-1]).index_add(0, number_R, x_BTW.flatten(0, 1))
    return (sums_DW / lengths_D[:, None].to(x_BTW.dtype))[real_BT[begins_BT]]
