"""Reads of the caches: KDA state, latent, index keys and the ring of unfinished pools."""

from __future__ import annotations

from glm53_mono.upstream.contract import Kind, OneOf, Read
from glm53_mono.upstream.reads.groups import assigned, classes, fields, method
from glm53_mono.upstream.reads.step import KDA

MEMORY = "sglang.srt.mem_cache.memory_pool"
INDEX_CACHE = "sglang.srt.mem_cache.index_key_cache"

_STATE = "the KDA state of a layer"

POOL_READS = (
    OneOf(
        "KDA layer cache",
        (
            (Read(KDA, "KDAAttnBackend", "state_layer_cache", Kind.METHOD, _STATE, signature="layer_id"),),
            (Read(MEMORY, "HybridReqToTokenPool", "mamba2_layer_cache", Kind.METHOD, _STATE, signature="layer_id"),),
        ),
    ),
    *fields(MEMORY, "MambaPool.State", _STATE, "conv", "temporal"),
    *fields(
        MEMORY,
        "MambaPool.SpeculativeState",
        "the state after each draft token",
        "intermediate_ssm",
        "intermediate_conv_window",
    ),
    *classes(MEMORY, "the pools of the hybrid model", "HybridReqToTokenPool", "HybridLinearKVPool"),
    *assigned(MEMORY, "HybridReqToTokenPool", "the number of KDA layers", "mamba_map"),
    *assigned(MEMORY, "HybridLinearKVPool", "the pool of the DSA layers", "full_kv_pool"),
    *assigned(MEMORY, "HybridLinearKVPool", "the place of a layer in its pool", "full_attention_layer_id_mapping"),
    *assigned(MEMORY, "HybridReqToTokenPool", "the slots of a request's tokens", "req_to_token"),
    *classes(MEMORY, "the pool of the DSA layers", "DSATokenToKVPool"),
    *assigned(MEMORY, "DSATokenToKVPool", "the latent cache", "kv_buffer", "page_size"),
    *assigned(MEMORY, "DSATokenToKVPool", "the ring of unfinished pools", "kpool_use_compress"),
    method(MEMORY, "DSATokenToKVPool", "get_compress_tail_buffers", "layer_id", "the ring of unfinished pools"),
    Read(MEMORY, "DSATokenToKVPool", "index_k_with_scale_buffer", Kind.PROPERTY, "the index keys"),
    *assigned(INDEX_CACHE, "IndexKeyCache", "the index keys behind the property", "buffer"),
)
