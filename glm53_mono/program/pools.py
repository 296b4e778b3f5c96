"""The caches of one server that a launch reads and writes, as SGLang's pools hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry


@dataclass(frozen=True)
class Pools:
    """A dense tensor for each layer that has it, in layer order; layouts as in `reference.state.Caches`."""

    conv: Sequence[Tensor]
    """[slots, history, channels] bf16"""
    state: Sequence[Tensor]
    """[slots, heads, V, K] fp32"""
    conv_scratch: Sequence[Tensor] | None
    """[scratch rows, draft tokens, history, channels] bf16; None without speculation"""
    state_scratch: Sequence[Tensor] | None
    """[scratch rows, draft tokens, heads, V, K] fp32; None without speculation"""
    latent: Sequence[Tensor]
    """[cache slots, latent] bf16"""
    index: Sequence[Tensor]
    """[pages, page bytes] uint8"""
    ring_key: Sequence[Tensor]
    """[request rows, ring length, 128] bf16"""
    ring_gate: Sequence[Tensor]
    """the same"""

    @classmethod
    def missing(cls, geometry: Geometry) -> Pools:
        """Stands for pools that do not exist yet: every address is 0."""
        nothing = torch.empty(0)
        kda, mla = [nothing] * len(geometry.kda_layers), [nothing] * len(geometry.dsa_layers)
        return cls(kda, kda, None, None, mla, mla, mla, mla)

    @property
    def ring_length(self) -> int:
        """Entries of a request's compress ring; 1 where no layer has one."""
        return self.ring_key[0].shape[1] if self.ring_key else 1
