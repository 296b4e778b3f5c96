"""The inputs of one step, as SGLang prepared them for the current forward.

Under graph capture every tensor here is a static buffer that SGLang refreshes before each replay, so its address may be
baked into the graph. `req_to_token` is the pool's own table: unlike the page tables that the backends derive from it,
its shape never changes. With overlapped scheduling a row of it may pass to a new request while the launch of one that
has just ended still runs (base_attn_backend.py: SharedReadEnds). That is harmless to a launch that writes by its rows'
`out_cache_loc` alone: what it reads by the table then reaches only the ended request's output, which is discarded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm53_mono.upstream.tensors import UpstreamError, expect

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Backends:
    """The attention backends of one runner, and the pools behind them.

    Attributes:
        linear: the KDA half (`KDAAttnBackend`).
        sparse: the DSA half (`DeepseekSparseAttnBackend`).
        request_pool: `HybridReqToTokenPool`, owner of the KDA state.
        token_pool: `HybridLinearKVPool`, owner of the latent cache and the index keys.
    """

    linear: Any
    sparse: Any
    request_pool: Any
    token_pool: Any


@dataclass(frozen=True)
class StepBindings:
    """Device tensors of a step of `requests` x `tokens_per_request` rows; row r belongs to request r // tokens.

    Attributes:
        mode: "decode" or "target_verify".
        requests: padded to the graph's batch size.
        tokens_per_request: 1, or the draft tokens of a chain.
        input_ids: [rows] int64; stale in padded rows.
        positions: [rows] int64.
        request_rows: [requests] int64, row of a request in `req_to_token` and in the ring of unfinished pools; 0 pads.
        seq_lens: [requests] int64, tokens committed before the step, in decode the step's own token included.
        out_cache_loc: [rows] int64, slot of each row's token in the latent cache; 0 pads.
        req_to_token: [request rows, longest context] int32, slot of each token of a request; rows may lie apart.
        state_slots: [requests] int32, slot of a request's KDA state; 0 or -1 pads.
        track_slots: [requests] int64, where to save the KDA state for the prefix cache; None: nowhere.
        track_mask: [requests] bool, the requests to save; None: none.
        scratch_rows: [at least requests] int32, row of a request in the verify scratch; None in decode.
    """

    mode: str
    requests: int
    tokens_per_request: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    request_rows: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    req_to_token: torch.Tensor
    state_slots: torch.Tensor
    track_slots: torch.Tensor | None
    track_mask: torch.Tensor | None
    scratch_rows: torch.Tensor | None

    @property
    def rows(self) -> int:
        """Tokens of the step."""
        return self.requests * self.tokens_per_request


def attention_backends() -> Backends:
    """The backends of the forward in progress.

    Raises:
        UpstreamError: they are not the pair that SGLang builds for this model with DSA and KDA.
    """
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
    from sglang.srt.model_executor.forward_context import get_attn_backend

    hybrid = _expect_instance(get_attn_backend(), HybridLinearAttnBackend, "the attention backend")
    linear = _expect_instance(hybrid.linear_attn_backend, KDAAttnBackend, "its linear half")
    sparse = _expect_instance(hybrid.full_attn_backend, DeepseekSparseAttnBackend, "its full-attention half")
    if linear.accept_lens_pool is not None:
        raise UpstreamError(
            "KDAAttnBackend.accept_lens_pool is set: the commit after verify would leave the state where it was; "
            "use --linear-attn-verify-backend triton"
        )
    return Backends(linear, sparse, hybrid.req_to_token_pool, hybrid.token_to_kv_pool)


def step_inputs(forward_batch: Any, backends: Backends) -> StepBindings:
    """Bind the inputs of a decode or verify step; copies nothing and waits for nothing.

    Args:
        forward_batch: SGLang's `ForwardBatch`, its metadata already prepared by the backends.
        backends: of the same forward.

    Raises:
        UpstreamError: another mode, rows that are not whole requests, or a tensor of another shape or dtype.
    """
    import torch

    mode = _mode_name(forward_batch.forward_mode)
    if mode is None:
        raise UpstreamError(
            f"forward_batch.forward_mode is {forward_batch.forward_mode!r}, not DECODE or TARGET_VERIFY"
        )
    requests = int(forward_batch.batch_size)
    rows = int(forward_batch.input_ids.shape[0])
    if requests <= 0 or rows % requests or (mode == "decode" and rows != requests):
        raise UpstreamError(f"forward_batch has {rows} rows for {requests} requests in a {mode} step")
    metadata = backends.linear.forward_metadata
    track_slots = metadata.mamba_track_indices
    track_mask = forward_batch.mamba_track_mask
    if mode != "decode" or track_slots is None or track_mask is None:
        track_slots = track_mask = None
    scratch_rows = backends.linear.verify_intermediate_state_indices if mode == "target_verify" else None
    int64 = torch.int64
    return StepBindings(
        mode=mode,
        requests=requests,
        tokens_per_request=rows // requests,
        input_ids=expect(forward_batch.input_ids, "forward_batch.input_ids", (rows,), int64),
        positions=expect(forward_batch.positions, "forward_batch.positions", (rows,), int64),
        request_rows=expect(forward_batch.req_pool_indices, "forward_batch.req_pool_indices", (requests,), int64),
        seq_lens=expect(forward_batch.seq_lens, "forward_batch.seq_lens", (requests,), int64),
        out_cache_loc=expect(forward_batch.out_cache_loc, "forward_batch.out_cache_loc", (rows,), int64),
        req_to_token=expect(
            backends.request_pool.req_to_token,
            "HybridReqToTokenPool.req_to_token",
            (None, None),
            torch.int32,
            any_outer_stride=True,
        ),
        state_slots=expect(
            metadata.mamba_cache_indices, "ForwardMetadata.mamba_cache_indices", (requests,), torch.int32
        ),
        track_slots=track_slots
        if track_slots is None
        else expect(track_slots, "ForwardMetadata.mamba_track_indices", (requests,), int64),
        track_mask=track_mask
        if track_mask is None
        else expect(track_mask, "forward_batch.mamba_track_mask", (requests,), torch.bool),
        scratch_rows=scratch_rows
        if scratch_rows is None
        else expect(scratch_rows, "KDAAttnBackend.verify_intermediate_state_indices", (None,), torch.int32),
    )


@dataclass(frozen=True)
class PoolPlan:
    """What SGLang's DSA backend has planned for the index keys of a step (dsa/kpool_plan.py: KPoolWritePlan).

    Attributes:
        starts: [requests] int32, position of each request's first token in the step.
        pools: [rows] int32, closed pools that each row sees; None where SGLang plans none, as in a decode step.
    """

    starts: torch.Tensor
    pools: torch.Tensor | None


def pool_plan(backends: Backends, inputs: StepBindings) -> PoolPlan | None:
    """SGLang's plan of a step's pools, None where its backend has made none.

    Raises:
        UpstreamError: a plan of another shape or dtype.
    """
    import torch

    plan = backends.sparse.forward_metadata.kpool_write_plan
    if plan is None:
        return None
    pools = plan.pool_seqlens_per_q
    return PoolPlan(
        starts=expect(plan.write_start, "KPoolWritePlan.write_start", (inputs.requests,), torch.int32),
        pools=pools
        if pools is None
        else expect(pools, "KPoolWritePlan.pool_seqlens_per_q", (inputs.rows,), torch.int32),
    )


def has_embeds(forward_batch: Any, input_embeds: torch.Tensor | None) -> bool:
    """Whether a step gets its embeddings from the caller instead of its token ids (glm5_next.py: forward)."""
    return input_embeds is not None and not forward_batch.contains_mm_inputs()


def _mode_name(forward_mode: Any) -> str | None:
    """SGLang's own name of a served mode (binding.py: shape_key)."""
    if forward_mode.is_decode():
        return "decode"
    return "target_verify" if forward_mode.is_target_verify() else None


def _expect_instance(found: Any, wanted: type, what: str) -> Any:
    if not isinstance(found, wanted):
        raise UpstreamError(f"{what} is {type(found).__name__}, not {wanted.__name__}")
    return found
