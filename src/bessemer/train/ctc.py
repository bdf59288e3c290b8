"""Connectionist temporal classification (Graves et al. 2006): the loss of labels not aligned to their sequence.

A layer over F.ctc_loss that gives sums with counts. It names the rows for which torch gives infinity, and the labels
outside of the head, for which torch reads beyond its memory. An objective of your own calls it (docs/classify.md).
Legend: B rows, T columns, W width, V labels with the blank, S labels of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.errors import UserError


def ctc_loss(
    hidden_BTW: Tensor,
    head_VW: Tensor,
    targets_BS: Tensor,
    input_lengths_B: Tensor,
    target_lengths_B: Tensor,
    blank: int = 0,
    bias_V: Tensor | None = None,
    skip_infeasible: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Nats of each row, its number of labels, and a mask of the rows that no alignment fits.

    Such a row is refused by name, or with `skip_infeasible` counts for nothing and gets no gradient. All (B, T, V)
    logits are materialised, since label sets are small. Give lengths on the CPU: F.ctc_loss copies them there.
    """
    lengths_B = target_lengths_B.to(targets_BS.device)
    used_BS = torch.arange(targets_BS.shape[1], device=targets_BS.device) < lengths_B[:, None]
    wrong_BS = used_BS & ((targets_BS < 0) | (targets_BS >= head_VW.shape[0]) | (targets_BS == blank))
    if wrong_BS.any():
        row, place = wrong_BS.nonzero()[0].tolist()
        problem = f"row {row}, label {place} is {int(targets_BS[row, place])}"
        raise UserError(f"ctc: {problem}; write labels from 0 to {head_VW.shape[0] - 1} other than the blank, {blank}")
    # Equal neighbours need a blank between them.
    needed_B = lengths_B + ((targets_BS[:, 1:] == targets_BS[:, :-1]) & used_BS[:, 1:]).sum(dim=1)
    infeasible_B = needed_B > input_lengths_B.to(needed_B.device)
    if infeasible_B.any() and not skip_infeasible:
        row = int(infeasible_B.nonzero()[0])
        problem = f"row {row} has {int(input_lengths_B[row])} steps and its labels need {int(needed_B[row])}"
        raise UserError(f"ctc: {problem} ({int(infeasible_B.sum())} such rows); drop them or shorten their labels")
    logits_TBV = F.linear(hidden_BTW, head_VW, bias_V).transpose(0, 1)
    log_TBV = logits_TBV.to(torch.promote_types(logits_TBV.dtype, torch.float32)).log_softmax(dim=-1)
    # An empty target stands in for an infeasible one: the gradient of an infinite loss is not a number even times zero,
    # and torch's zero_infinity would also hide infinities that are the model's own, which the guard must see.
    fitting_B = lengths_B.masked_fill(infeasible_B, 0)
    loss_B = F.ctc_loss(log_TBV, targets_BS, input_lengths_B, fitting_B.to(target_lengths_B.device), blank, "none")
    return loss_B.masked_fill(infeasible_B.to(loss_B.device), 0.0), fitting_B, infeasible_B
