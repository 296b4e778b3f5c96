"""The process that runs SGLang on a CPU: its environment, published configuration and process groups."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PAGE_TOKENS = 256
"""Tokens of an allocator page: 64 pools of 4 (arg_groups/model_overrides/deepseek_v2.py:169-172)."""


@dataclass(frozen=True)
class Setting:
    """One environment variable that must hold before SGLang or Triton is imported."""

    name: str
    value: str
    reason: str


SETTINGS = (
    Setting("TRITON_INTERPRET", "1", "SGLang's Triton kernels run on the CPU"),
    Setting("CUDA_VISIBLE_DEVICES", "", "SGLang must not find a GPU beside the CPU tensors"),
    Setting(
        "TORCHDYNAMO_DISABLE", "1", "functions under @torch.compile run eagerly: compiling them would cost minutes"
    ),
    Setting("SGLANG_OPT_USE_TOPK_V2", "0", "the planned top-k is JIT CUDA (dsa_backend.py:975)"),
    Setting("SGLANG_DSA_FUSE_TOPK", "0", "the unfused top-k returns positions, from SGLang's own PyTorch code"),
    Setting("SGLANG_OPT_USE_TILELANG_MHC_PRE", "0", "the PyTorch tier of mHC (mhc.py:1900)"),
    Setting("SGLANG_OPT_USE_TILELANG_MHC_POST", "0", "the same for hc_post"),
    Setting("SGLANG_NCCL_SO_PATH", "/no/nccl", "ranks on the CPU reduce over gloo: SGLang goes on without NCCL"),
)


@dataclass(frozen=True)
class Place:
    """A process among those that share the model, each of them a rank of its own."""

    rank: int
    ranks: int
    rendezvous: str
    """URI of a file that does not exist yet, the same for all ranks."""


class ContextError(RuntimeError):
    """The process cannot run SGLang on the CPU; the message says why and what to do."""


def prepare_environment() -> None:
    """Set what SGLang and Triton read when they are imported.

    Raises:
        ContextError: Triton was imported already, and compiles its kernels instead of interpreting them.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise ContextError(
            "Triton was imported before TRITON_INTERPRET=1 was set: start SGLang's CPU forward in a process of its own"
        )
    for setting in SETTINGS:
        os.environ[setting.name] = setting.value


@contextmanager
def cpu_server(draft_tokens: int, place: Place | None = None) -> Iterator[None]:
    """Publish the configuration and process groups of a CPU server; the end of the block withdraws them.

    Args:
        draft_tokens: tokens a verify step checks for each request, the bonus token included (MTP3: 4).
        place: of this process; left out, it has the whole model.
    """
    prepare_environment()
    from sglang.srt.distributed import parallel_state
    from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
    from sglang.srt.runtime_context import SpawnRanks, get_context, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    logging.getLogger("sglang").setLevel(logging.ERROR)
    chosen = {
        "tp_size": place.ranks if place else 1,
        "attention_backend": "dsa",
        "dsa_prefill_backend": "tilelang",
        "dsa_decode_backend": "tilelang",
        "dsa_topk_backend": "torch",
        "linear_attn_backend": "triton",
        "kv_cache_dtype": "bfloat16",
        "page_size": PAGE_TOKENS,
        "disable_radix_cache": True,
        "speculative_num_draft_tokens": draft_tokens,
        "speculative_num_steps": draft_tokens - 1,
        "speculative_eagle_topk": 1,
    }
    no_graphs = PhaseConfig(backend=Backend.DISABLED)
    with tempfile.TemporaryDirectory() as directory:
        place = place or Place(rank=0, ranks=1, rendezvous=Path(directory, "rendezvous").as_uri())
        parallel_state.init_distributed_environment(
            world_size=place.ranks,
            rank=place.rank,
            local_rank=place.rank,
            backend="gloo",
            distributed_init_method=place.rendezvous,
        )
        publish(
            ServerArgs(model_path="dummy", device="cpu", **chosen),
            role="test",
            ranks=SpawnRanks(world_rank=place.rank),
        )
        get_parallel().override_permanently(world_group=parallel_state._WORLD)
        parallel_state.initialize_model_parallel(backend="gloo")
        # SGLang resolves arguments for a CPU away from the DSA backend; the override restores what the GPU server has.
        override = get_context().override_server_args(
            cuda_graph_config=CudaGraphConfig(decode=no_graphs, prefill=no_graphs), _mamba_cache_chunk_size=64, **chosen
        )
        override.install()
        try:
            yield
        finally:
            override.restore()
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            reset_context()
