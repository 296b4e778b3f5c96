"""Plausible mistakes in the reference; the comparison with SGLang's forward must turn red on each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from glm53_mono.reference import dense, index_cache, indexer, kda, mhc, mla, moe
from glm53_mono.reference.state import Caches, StepInputs
from tests.sources import Wrap, wrapped


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Bug:
    """One mistake: functions of the reference replaced by wrong ones, wrong inputs, or a wrong commit."""

    name: str
    wraps: tuple[tuple[ModuleType, str, Wrap], ...] = ()
    inputs: Callable[[StepInputs], StepInputs] = field(default=_same)
    accepted: Callable[[Tensor], Tensor] = field(default=_same)

    concerns_extend: bool = False
    """Whether a prefill of one request shows it too, by one of the parts whose bounds are wider there."""

    def seeded(self) -> AbstractContextManager[None]:
        """The reference with the mistake, for as long as the block lasts."""
        return wrapped(self.wraps)


NO_BUG = Bug("none")


def _columns_last_but_one(_right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
        comb = logits.softmax(-1) + eps
        for _ in range(iterations):
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
        return comb

    return sinkhorn


def _transposed_comb(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda branch, streams, gate: right(branch, streams, replace(gate, comb=gate.comb.transpose(1, 2)))


def _unbounded_gate(_right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda decay, a_log, dt_bias, _bound: (
        -a_log.exp()[:, None] * torch.nn.functional.softplus(decay.float() + dt_bias)
    )


def _newest_tap_first(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda history, inputs, taps: right(history, inputs, taps.flip(-1))


def _transposed_state(right: Callable[..., Any]) -> Callable[..., Any]:
    def delta_rule(state: Tensor, inputs: kda.Inputs) -> tuple[Tensor, Tensor]:
        outputs, states = right(state.transpose(-1, -2), inputs)
        return outputs, states.transpose(-1, -2)

    return delta_rule


def _late_pool(right: Callable[..., None]) -> Callable[..., None]:
    """A pool whose last token is the last of the step is left for the next one."""

    def update(projections: Any, inputs: StepInputs, caches: Caches, ordinal: int, weights: Any, geometry: Any) -> None:
        before = caches.index[ordinal].clone()
        right(projections, inputs, caches, ordinal, weights, geometry)
        last = inputs.first_positions + inputs.tokens_per_request
        for row, end in zip(inputs.req_pool_indices.tolist(), last.tolist(), strict=True):
            if end % geometry.pool == 0:
                pool = torch.tensor([end // geometry.pool - 1])
                pages, entries = index_cache.locate(pool, inputs.req_to_token[row], geometry)
                for offsets in (
                    index_cache.key_offsets(entries, geometry, caches.layout),
                    index_cache.scale_offsets(entries, geometry),
                ):
                    caches.index[ordinal][pages[:, None], offsets] = before[pages[:, None], offsets]

    return update


def _ring_of_another(right: Callable[..., None]) -> Callable[..., None]:
    """The ring is addressed by the place in the batch instead of the request's row."""

    def update(projections: Any, inputs: StepInputs, caches: Caches, *rest: Any) -> None:
        places = torch.arange(inputs.requests)
        table = inputs.req_to_token.clone()
        table[places] = inputs.req_to_token[inputs.req_pool_indices]
        right(projections, replace(inputs, req_pool_indices=places, req_to_token=table), caches, *rest)

    return update


def _no_tail(_right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda pools, _length, geometry: (pools[:, None] * geometry.pool + torch.arange(geometry.pool)).flatten()


def _no_clamp(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda gate_up, _limit: right(gate_up, float("inf"))


def _biased_weight(right: Callable[..., Any]) -> Callable[..., Any]:
    def route(logits: Tensor, bias: Tensor, count: int) -> tuple[Tensor, Tensor]:
        ids, _ = right(logits, bias, count)
        chosen = (torch.sigmoid(logits) + bias).gather(1, ids)
        return ids, chosen / chosen.sum(-1, keepdim=True)

    return route


def _scaled_twice(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda slots, routed_scale: right(slots, routed_scale * routed_scale)


def _shared_before_rounding(right: Callable[..., Any]) -> Callable[..., Any]:
    """The shared expert is added before the routed sum is rounded: half a bf16 step at most."""

    def ffn(y: Tensor, weights: Any, geometry: Any) -> moe.Moe:
        done = right(y, weights, geometry)
        shared = dense.ffn(y, weights.shared, geometry.swiglu_limit)
        routed = done.slots.float().sum(1) * geometry.routed_scale
        return replace(done, output=(routed + shared.float()).bfloat16())

    return ffn


def _padding_latents(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Slots that stand for no token read the padding page."""
    return lambda query, cache, slots, scale, **options: right(query, cache, slots.clamp(min=0), scale, **options)


BUGS = (
    Bug("Sinkhorn ends with the rows", ((mhc, "sinkhorn", _columns_last_but_one),)),
    Bug("comb transposed", ((mhc, "write", _transposed_comb),)),
    Bug("gate without its lower bound", ((kda, "log_decay", _unbounded_gate),), concerns_extend=True),
    Bug("convolution taps reversed", ((kda, "convolve", _newest_tap_first),), concerns_extend=True),
    Bug("recurrent state as [K, V]", ((kda, "delta_rule", _transposed_state),), concerns_extend=True),
    Bug("pool closed one token late", ((indexer, "update", _late_pool),)),
    Bug("ring of another request", ((indexer, "update", _ring_of_another),)),
    Bug("tail dropped", ((indexer, "selected_tokens", _no_tail),)),
    Bug("SwiGLU without its clamp", ((dense, "clamped_swiglu", _no_clamp), (moe, "clamped_swiglu", _no_clamp))),
    Bug("router's bias in the weight", ((moe, "route", _biased_weight),)),
    Bug("routed scale applied twice", ((moe, "combine", _scaled_twice),)),
    Bug("shared expert added before rounding", ((moe, "ffn", _shared_before_rounding),)),
    Bug("padding page attended to", ((mla, "sparse_attention", _padding_latents),)),
    Bug("mamba slot of another request", inputs=lambda step: replace(step, mamba_slots=step.mamba_slots.roll(1))),
    Bug(
        "request row of another request",
        inputs=lambda step: replace(step, req_pool_indices=step.req_pool_indices.roll(1)),
    ),
    Bug("verify scratch by mamba slot", inputs=lambda step: replace(step, verify_rows=step.mamba_slots)),
    Bug("one draft too many committed", accepted=lambda accepted: (accepted + 1).clamp(max=3)),
    Bug("commits exchanged between requests", accepted=lambda accepted: accepted.roll(1)),
)
