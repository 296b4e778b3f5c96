"""The reference's caches and step inputs as a launch reads them; no tensor is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.program.pools import Pools
from glm53_mono.reference.state import PADDED_SLOT, Caches, StepInputs


def pools_of(caches: Caches) -> Pools:
    """The caches as a launch sees them; the verify scratch is there if they hold drafts."""
    speculative = caches.intermediate_ssm.shape[2] > 0
    return Pools(
        conv=caches.conv,
        state=caches.temporal,
        conv_scratch=caches.intermediate_conv if speculative else None,
        state_scratch=caches.intermediate_ssm if speculative else None,
        latent=caches.latent,
        index=caches.index,
        ring_key=caches.ring_key,
        ring_gate=caches.ring_gate,
    )


def step_of(inputs: StepInputs, pools: Pools, track_slots: Tensor | None = None) -> tuple[StepTensors, StepSizes]:
    """A step as a launch sees it.

    Args:
        inputs: of the step.
        pools: the launch's own.
        track_slots: [requests] i64, where a decode step keeps copies for the prefix cache; nowhere if not given.
    """
    nowhere = torch.full_like(inputs.mamba_slots, PADDED_SLOT, dtype=torch.int64)
    tensors = StepTensors(
        input_ids=inputs.input_ids,
        cache_slots=inputs.out_cache_loc,
        seq_lens=inputs.seq_lens,
        request_rows=inputs.req_pool_indices,
        state_slots=inputs.mamba_slots,
        track_slots=nowhere if track_slots is None else track_slots,
        track_mask=torch.full_like(inputs.mamba_slots, track_slots is not None, dtype=torch.bool),
        scratch_rows=inputs.verify_rows,
        req_to_token=inputs.req_to_token,
    )
    return tensors, StepSizes(
        rows=inputs.rows,
        tokens=inputs.tokens_per_request,
        req_to_token_stride=inputs.req_to_token.stride(0),
        ring_length=pools.ring_length,
    )
