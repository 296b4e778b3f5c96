"""Reads of a step: the batch, the attention backends and what they prepared for it."""

from __future__ import annotations

from glm53_mono.upstream.contract import Kind, Read
from glm53_mono.upstream.reads.groups import assigned, classes, fields, function

BATCH = "sglang.srt.model_executor.forward_batch_info"
CONTEXT = "sglang.srt.model_executor.forward_context"
HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
KDA = "sglang.srt.layers.attention.linear.kda_backend"
DSA = "sglang.srt.layers.attention.dsa_backend"
KPOOL_PLAN = "sglang.srt.layers.attention.dsa.kpool_plan"
MAMBA_METADATA = "sglang.srt.layers.attention.mamba.mamba2_metadata"
LINEAR_UTILS = "sglang.srt.layers.attention.linear.utils"

_BINDINGS = "the inputs of a step"


STEP_READS = (
    *classes(BATCH, _BINDINGS, "ForwardBatch"),
    *fields(
        BATCH,
        "ForwardBatch",
        _BINDINGS,
        "forward_mode",
        "batch_size",
        "input_ids",
        "req_pool_indices",
        "seq_lens",
        "out_cache_loc",
        "positions",
        "mamba_track_mask",
    ),
    Read(BATCH, "ForwardMode", "is_decode", Kind.METHOD, "the mode of a step", signature=""),
    Read(BATCH, "ForwardMode", "is_target_verify", Kind.METHOD, "the mode of a step", signature=""),
    Read(BATCH, "ForwardMode", "DECODE", Kind.FIELD, "the name of a step's mode"),
    Read(BATCH, "ForwardMode", "TARGET_VERIFY", Kind.FIELD, "the name of a step's mode"),
    Read(
        BATCH,
        "ForwardBatch",
        "contains_mm_inputs",
        Kind.METHOD,
        "telling embeddings of the caller from those of images",
        signature="",
    ),
    function(CONTEXT, "get_attn_backend", "", "the backend that the current step runs on"),
    # the hybrid backend and its two halves
    *classes(HYBRID, "the backend that the current step runs on", "HybridLinearAttnBackend"),
    *assigned(HYBRID, "HybridLinearAttnBackend", "the two halves", "full_attn_backend", "linear_attn_backend"),
    *assigned(HYBRID, "HybridLinearAttnBackend", "the pools", "token_to_kv_pool", "req_to_token_pool"),
    Read(
        HYBRID,
        "HybridLinearAttnBackend",
        "update_mamba_state_after_mtp_verify",
        Kind.METHOD,
        "the commit that consumes the verify scratch",
        signature="last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, model, req_pool_indices=None",
    ),
    *classes(KDA, "the linear half", "KDAAttnBackend"),
    # eagerly one method prepares it, for a captured graph the other
    *(
        Read(KDA, "KDAAttnBackend", "forward_metadata", Kind.ASSIGNED, "the step's state slots", within=within)
        for within in ("init_forward_metadata", "init_forward_metadata_out_graph")
    ),
    *assigned(KDA, "KDAAttnBackend", "the verify scratch rows of a batch", "verify_intermediate_state_indices"),
    Read(
        KDA,
        "KDAAttnBackend",
        "accept_lens_pool",
        Kind.FIELD,
        "refusing a commit that leaves the state behind",
        value=None,
    ),
    function(
        LINEAR_UTILS,
        "select_verify_intermediate_state_indices",
        "default_indices, req_pool_indices, valid, pool_size",
        "the scratch row of a request being its place in the batch",
    ),
    *fields(
        MAMBA_METADATA,
        "ForwardMetadata",
        "the step's state slots",
        "mamba_cache_indices",
        "mamba_track_indices",
    ),
    # the sparse half
    *classes(DSA, "the sparse half", "DeepseekSparseAttnBackend"),
    *(
        Read(DSA, "DeepseekSparseAttnBackend", "forward_metadata", Kind.ASSIGNED, "the plan of pools", within=within)
        for within in ("init_forward_metadata", "init_forward_metadata_out_graph")
    ),
    *fields(DSA, "DSAMetadata", "the plan of pools", "kpool_write_plan"),
    *fields(KPOOL_PLAN, "KPoolWritePlan", "the plan of pools", "write_start", "pool_seqlens_per_q"),
)
