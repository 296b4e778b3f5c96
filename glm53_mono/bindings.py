"""SGLang's caches and step inputs as a launch takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.geometry import MAX_ROWS, Geometry
from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.program.pools import Pools
from glm53_mono.program.workspace import Workspace
from glm53_mono.upstream.pools import compress_ring, index_pool, kda_layer_cache, latent_pool
from glm53_mono.upstream.running import ServedStep
from glm53_mono.upstream.step import Backends, StepBindings
from glm53_mono.upstream.tensors import UpstreamError


def bind_pools(backends: Backends, geometry: Geometry, step: ServedStep) -> Pools:
    """The caches that SGLang allocated after the build.

    Raises:
        UpstreamError: a cache of another shape, dtype or stride, or a verify step without its scratch.
    """
    kda = [kda_layer_cache(backends, layer, geometry) for layer in geometry.kda_layers]
    rings = [compress_ring(backends, layer, geometry) for layer in geometry.dsa_layers]
    conv = [_dense(f"conv state of layer {i}", c.conv) for i, c in zip(geometry.kda_layers, kda, strict=True)]
    state = [_dense(f"recurrent state of layer {i}", c.temporal) for i, c in zip(geometry.kda_layers, kda, strict=True)]
    verify = step.mode == "target_verify"
    if verify:
        for layer, cache in zip(geometry.kda_layers, kda, strict=True):
            found = None if cache.intermediate_ssm is None else cache.intermediate_ssm.shape[1]
            if found != step.tokens_per_request:
                raise UpstreamError(
                    f"the verify scratch of layer {layer} holds {found} draft tokens a request, "
                    f"the steps have {step.tokens_per_request}"
                )
    lengths = {ring.keys.shape[1] for ring in rings}
    if len(lengths) > 1:
        raise UpstreamError(f"the rings of unfinished pools have {sorted(lengths)} entries, not the same in all layers")
    return Pools(
        conv=conv,
        state=state,
        conv_scratch=[cache.intermediate_conv for cache in kda] if verify else None,
        state_scratch=[cache.intermediate_ssm for cache in kda] if verify else None,
        latent=[latent_pool(backends, layer, geometry) for layer in geometry.dsa_layers],
        index=[index_pool(backends, layer, geometry) for layer in geometry.dsa_layers],
        ring_key=[ring.keys for ring in rings],
        ring_gate=[ring.scores for ring in rings],
    )


def check_context(backends: Backends, workspace: Workspace, geometry: Geometry) -> None:
    """Refuses a server whose requests may grow longer than the workspace was laid out for.

    Raises:
        UpstreamError: likewise.
    """
    longest = backends.request_pool.req_to_token.shape[1]
    if longest // geometry.pool > workspace.max_pools:
        raise UpstreamError(
            f"HybridReqToTokenPool.req_to_token has room for {longest} tokens a request, "
            f"the launch's workspace for {workspace.max_pools * geometry.pool}"
        )


@dataclass(frozen=True)
class Unused:
    """Stand-ins for what a step does not have, so that every step compiles to the same kernel.

    Attributes:
        track_slots: [MAX_ROWS] int64, -1.
        track_mask: [MAX_ROWS] bool, False.
        scratch_rows: [MAX_ROWS] int32, 0.
    """

    track_slots: Tensor
    track_mask: Tensor
    scratch_rows: Tensor

    @classmethod
    def on(cls, device: torch.device) -> Unused:
        """Allocates them."""
        return cls(
            track_slots=torch.full((MAX_ROWS,), -1, dtype=torch.int64, device=device),
            track_mask=torch.zeros(MAX_ROWS, dtype=torch.bool, device=device),
            scratch_rows=torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
        )


def bind_step(step: StepBindings, unused: Unused, ring_length: int) -> tuple[StepTensors, StepSizes]:
    """The arguments of a step's launch; copies nothing and waits for nothing."""
    tracked = step.track_slots is not None
    tensors = StepTensors(
        input_ids=step.input_ids,
        cache_slots=step.out_cache_loc,
        seq_lens=step.seq_lens,
        request_rows=step.request_rows,
        state_slots=step.state_slots,
        track_slots=step.track_slots if tracked else unused.track_slots,
        track_mask=step.track_mask if tracked else unused.track_mask,
        scratch_rows=unused.scratch_rows if step.scratch_rows is None else step.scratch_rows,
        req_to_token=step.req_to_token,
    )
    return tensors, StepSizes(
        rows=step.rows,
        tokens=step.tokens_per_request,
        req_to_token_stride=step.req_to_token.stride(0),
        ring_length=ring_length,
    )


def empty_step(unused: Unused) -> tuple[StepTensors, StepSizes]:
    """Arguments of the types of every step's, for a launch that runs no phase."""
    int64, int32 = unused.track_slots, unused.scratch_rows
    tensors = StepTensors(
        input_ids=int64,
        cache_slots=int64,
        seq_lens=int64,
        request_rows=int64,
        state_slots=int32,
        track_slots=int64,
        track_mask=unused.track_mask,
        scratch_rows=int32,
        req_to_token=int32,
    )
    return tensors, StepSizes(rows=1, tokens=1, req_to_token_stride=1, ring_length=1)


def _dense(name: str, cache: Tensor) -> Tensor:
    if not cache.is_contiguous():
        raise UpstreamError(f"{name} has strides {cache.stride()}: its slots do not follow one another")
    return cache
