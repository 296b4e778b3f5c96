"""Experts and pools that the launch and SGLang choose differently: near-ties, or wrong choices.

A near-tie may fall either way: then SGLang's part goes on with the launch's choice, so that what follows is compared
all the same. How far a choice is from a tie is measured by the launch's own scores, in their standard deviations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXPERT_TIE = 1e-3
"""Scores of experts, whose sums SGLang's kernels add in another order."""

POOL_TIE = 5e-2
"""Scores of pools: their queries and keys are fp8, where one rounding the other way moves an element by 2^-3."""


SWAPPED = 16
"""Of so many chosen, one may be another by a near-tie, two at least: scores that are all alike are no tie but wrong. Of
512 pools among 65,000, about ten have others within a hundredth of a standard deviation."""


@dataclass(frozen=True)
class Choice:
    """The outcome for each row.

    Attributes:
        apart: [rows] bool, the choices differ.
        beyond: [rows] fp32, how far the worst wrongly chosen or left out is from the threshold; 0 where all agree.
    """

    apart: Tensor
    beyond: Tensor


def compared(launch: Tensor, sglang: Tensor, scores: Tensor, known: Tensor) -> Choice:
    """Compares choices among scored candidates.

    Args:
        launch, sglang: [rows, candidates] bool.
        scores: [rows, candidates] fp32, the launch's.
        known: [rows, candidates] bool, candidates that exist.

    A choice of another size, of what does not exist, or with more than a few others, is infinitely far.
    """
    chosen = launch.sum(1)
    wrong = (chosen != sglang.sum(1)) | ((launch | sglang) & ~known).any(1)
    wrong |= (launch & ~sglang).sum(1) > (chosen // SWAPPED).clamp(min=2)
    threshold = scores.masked_fill(~(launch & known), torch.inf).amin(1, keepdim=True)
    count = known.sum(1, keepdim=True).clamp(min=2)
    mean = scores.masked_fill(~known, 0.0).sum(1, keepdim=True) / count
    deviation = ((scores - mean).masked_fill(~known, 0.0).square().sum(1, keepdim=True) / (count - 1)).sqrt()
    differ = launch != sglang
    distance = ((scores - threshold).abs() / deviation.clamp(min=1e-30)).masked_fill(~(differ & known), 0.0)
    beyond = distance.amax(1).masked_fill(wrong, torch.inf)
    return Choice(differ.any(1), torch.where(differ.any(1), beyond, 0.0))


def expert_mask(ids: Tensor, experts: int) -> Tensor:
    """[rows, experts] bool of chosen ids [rows, chosen]; ids out of range (shared or padding) are left out."""
    inside = torch.where((ids >= 0) & (ids < experts), ids.long(), experts)
    mask = torch.zeros((ids.shape[0], experts + 1), dtype=torch.bool, device=ids.device)
    return mask.scatter_(1, inside, True)[:, :experts]


def with_experts(
    weights: Tensor, ids: Tensor, wanted: Tensor, count: int, rows: Tensor, experts: int
) -> tuple[Tensor, Tensor]:
    """SGLang's weights and ids, in some rows replaced by the launch's.

    Args:
        weights, ids: [rows, count or more]; shared experts, whose ids are `experts` and up, come last and stay.
        wanted: [rows, experts] fp32, the launch's weights, 0 for those not chosen.
        count: routed experts of a row.
        rows: [rows] bool, which to replace.
    """
    best, own = wanted.topk(count, 1)
    scale = weights[:, :count].sum(1, keepdim=True) / best.sum(1, keepdim=True).clamp(min=1e-30)
    new_weights = torch.cat(((best * scale).to(weights.dtype), weights[:, count:]), 1)
    new_ids = torch.cat((own.to(ids.dtype), ids[:, count:]), 1)
    return torch.where(rows[:, None], new_weights, weights), torch.where(rows[:, None], new_ids, ids)


def normalised_weights(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """[rows, experts] fp32, the weights of the routed experts, whose sum is 1 in each row."""
    inside = torch.where((ids >= 0) & (ids < experts), ids.long(), experts)
    dense = torch.zeros((ids.shape[0], experts + 1), dtype=torch.float32, device=ids.device)
    dense = dense.scatter_(1, inside, weights.float())[:, :experts]
    return dense / dense.sum(1, keepdim=True).clamp(min=1e-30)


def mask_of(pools: Tensor, count: int) -> Tensor:
    """[rows, count] bool of chosen pools [rows, chosen] int64; those out of range are left out."""
    inside = torch.where((pools >= 0) & (pools < count), pools, count)
    mask = torch.zeros((pools.shape[0], count + 1), dtype=torch.bool, device=pools.device)
    return mask.scatter_(1, inside, True)[:, :count]


def contained(wanted: Tensor, among: Tensor) -> Tensor:
    """Which of `wanted` [rows, n] are among each row's [rows, m]: bool [rows, n]; both int64."""
    ordered = among.sort(1).values
    place = torch.searchsorted(ordered, wanted.contiguous()).clamp(max=ordered.shape[1] - 1)
    return ordered.gather(1, place) == wanted


def tokens_of_pools(pools: Tensor, length: Tensor, pool: int, width: int) -> Tensor:
    """Positions of the tokens that a row attends: those of its chosen pools, then of its unfinished one; -1 for none.

    Args:
        pools: [rows, chosen] int64, -1 for none.
        length: [rows] int64, tokens that each row sees.
        pool: tokens of a pool.
        width: of the result, [rows, width] int64.
    """
    inner = torch.arange(pool, device=pools.device)
    tokens = torch.where(pools[..., None] >= 0, pools[..., None] * pool + inner, -1).flatten(1)
    tail = length[:, None] // pool * pool + inner[: pool - 1]
    tail = torch.where(tail < length[:, None], tail, -1)
    joined = torch.cat((tokens, tail), 1)
    return torch.nn.functional.pad(joined, (0, width - joined.shape[1]), value=-1)
