"""SGLang's real pools and attention backends on the CPU, held by a `ModelRunner` that was never started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from glm53_mono.reference.state import Caches

from .context import PAGE_TOKENS


def build_runner(config: Any, *, requests: int, max_context: int, pages: int, draft_tokens: int) -> Any:
    """A `ModelRunner` with the pools of a server and the fields that the attention backends read, and nothing else.

    Args:
        config: SGLang's `Glm5NextConfig`.
        requests: request rows and mamba slots, the padding ones not counted.
        max_context: tokens a request may have.
        pages: KV pages of 256 tokens, the padding page 0 not counted.
        draft_tokens: tokens a verify step checks for each request.
    """
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, HybridReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import get_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    text = config.text_config
    runner = object.__new__(ModelRunner)
    runner.server_args = get_server_args()
    runner.device = "cpu"
    runner.kv_cache_dtype = torch.bfloat16
    runner.page_size = PAGE_TOKENS
    runner.is_draft_worker = False
    runner.use_mla_backend = True
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    runner.hisparse_coordinator = None
    runner.model_config = SimpleNamespace(
        hf_config=config,
        hf_text_config=text,
        context_len=max_context,
        attention_arch=AttentionArch.MLA,
        num_attention_heads=text.num_attention_heads,
        qk_nope_head_dim=text.qk_nope_head_dim,
        qk_rope_head_dim=text.qk_rope_head_dim,
        kv_lora_rank=text.kv_lora_rank,
        quantization=None,
        is_draft_model=False,
        linear_attn_registry_result=None,
    )
    runner.req_to_token_pool = HybridReqToTokenPool(
        size=requests,
        mamba_size=requests,
        mamba_spec_state_size=requests,
        max_context_len=max_context,
        device="cpu",
        enable_memory_saver=False,
        cache_params=text.mamba2_cache_params,
        mamba_layer_ids=text.linear_layer_ids,
        enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=draft_tokens,
        speculative_eagle_topk=1,
        enable_overlap_schedule=False,
    )
    latent = text.kv_lora_rank + text.qk_rope_head_dim
    runner.token_to_kv_pool = HybridLinearKVPool(
        size=pages * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        device="cpu",
        head_num=1,
        head_dim=text.kv_lora_rank,
        full_attention_layer_ids=text.full_attention_layer_ids,
        mamba_pool=runner.req_to_token_pool.mamba_pool,
        use_mla=True,
        kv_lora_rank=text.kv_lora_rank,
        qk_rope_head_dim=text.qk_rope_head_dim,
        use_dsa=True,
        kv_cache_dim=latent,
        index_head_dim=text.index_head_dim,
        index_kpool=text.index_kpool,
        index_kpool_compress=text.index_kpool_compress,
        tail_extra_slots=draft_tokens,
        max_running_requests=requests,
        skip_topk_layers=[False] * len(text.full_attention_layer_ids),
        full_kv_pool_class=DSATokenToKVPool,
    )
    runner.token_to_kv_pool_allocator = SimpleNamespace(page_size=PAGE_TOKENS)
    runner.init_kv_index_translator()
    return runner


def build_backend(runner: Any) -> Any:
    """SGLang's hybrid attention backend: DSA for the full-attention layers, KDA for the linear ones."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, attn_backend_wrapper

    return attn_backend_wrapper(runner, ATTENTION_BACKENDS["dsa"](runner))


def caches_of(runner: Any) -> Caches:
    """The runner's own pools, not copies, under the names of our reference."""
    mamba = runner.req_to_token_pool.mamba_pool.mamba_cache
    pool = runner.token_to_kv_pool.full_kv_pool
    return Caches(
        conv=mamba.conv[0],
        temporal=mamba.temporal,
        intermediate_ssm=mamba.intermediate_ssm,
        intermediate_conv=mamba.intermediate_conv_window[0],
        latent=list(pool.kv_buffer),
        index=list(pool.index_k_with_scale_buffer),
        ring_key=list(pool._compress_tail_k),
        ring_gate=list(pool._compress_tail_score),
    )
