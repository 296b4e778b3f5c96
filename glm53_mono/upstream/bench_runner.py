"""A model runner in this process, without a server around it, and two sets of step graphs over its one loaded model.

The steps are decode steps, or where the arguments ask for drafts the target model's verify steps; no draft model is
loaded.

The runner starts as in SGLang's own benchmark (benchmark/one_batch.py: load_model), tokenizer left out. SGLang captures
the forward that the arguments ask for; `BenchRunner.capture_own_forward` captures its own beside it, on an attention
backend of its own, since graphs read the metadata of the backend that they were captured with.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm53_mono.upstream import launch
from glm53_mono.upstream.running import ServedStep
from glm53_mono.upstream.server import Server, read_server

if TYPE_CHECKING:
    import torch

GPU = 0
"""Index of the GPU among the visible ones; a benchmark is one rank."""

FIRST_ROW = 1
"""Row 0 of the request tables stands for padded requests (memory_pool.py: ReqToTokenPool)."""

MONOKERNEL, SGLANG = "monokernel", "sglang"
"""The arms: the monokernel's forward, and SGLang's own."""


class BenchError(RuntimeError):
    """This server, or this step of it, cannot be measured; the message is one line that says why."""


@dataclass(frozen=True)
class BenchServer:
    """A server that can start in this process.

    Attributes:
        server_args: SGLang's `ServerArgs`, resolved.
        server: what the refusals read of it.
        monokernel: whether the arguments ask for the AMD monokernel.
        model_path: the model's folder, or its name on the hub.
        mem_fraction: share of the GPU's memory for weights and caches.
    """

    server_args: Any
    server: Server
    monokernel: bool
    model_path: str
    mem_fraction: float | None


@dataclass(frozen=True)
class _Arm:
    graphs: Any
    backend: Any


Tensors = Iterable[tuple[str, "torch.Tensor"]]


def resolve(arguments: Sequence[str]) -> BenchServer:
    """Resolve the arguments of `sglang.launch_server` as a server does that then starts.

    Args:
        arguments: the command line after the module name.

    Raises:
        LaunchError: SGLang does not parse them, or refuses them, the monokernel included.
        BenchError: a server with more than one rank, or without decode graphs.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

    launch.load_plugins()
    server_args = launch.parse(arguments)
    try:
        server_args.resolve_once()
        hf_config = model_config_of(server_args).hf_config
    except Exception as error:  # whatever a handler or a config class raises, the server would not start
        raise launch.LaunchError(f"SGLang refuses these arguments: {launch.one_line(error)}") from error
    cfg = resolving_view(server_args)
    server = read_server(cfg, hf_config)
    if server.arguments.tp_size != 1:
        raise BenchError(f"--tp {server.arguments.tp_size}: the benchmark runs in one process; use --tp 1")
    if not server.captured_batch_sizes:
        raise BenchError("the server runs decode steps without CUDA graphs, which both arms are measured with")
    return BenchServer(server_args, server, cfg.enable_amd_monokernel, cfg.model_path, cfg.mem_fraction_static)


def start(server: BenchServer, draw: Callable[[], Tensors] | None, say: Callable[[str], None]) -> BenchRunner:
    """Load the model, allocate its caches, and capture the graphs of the forward that the arguments ask for.

    Args:
        server: of `resolve`.
        draw: makes checkpoint tensors for SGLang's own loader, which then replace the dummy loader's values before
            anything else sees them; None keeps what SGLang loads.
        say: told what begins.
    """
    from sglang.kernels.ops.mamba.triton_ops.ssu_dispatch import initialize_mamba_selective_state_update_backend
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish
    from sglang.srt.server_args import PortArgs
    from sglang.srt.utils.common import configure_logger

    server_args = server.server_args
    _set_envs_and_config(server_args)
    port = PortArgs.init_new(server_args).nccl_port
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=GPU))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
    initialize_fp4_gemm_config()
    configure_logger(server_args)
    say("starting the process groups")
    model_config = ModelConfig.from_server_args(server_args)
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    say("loading the model, then compiling the monokernel" if server.monokernel else "loading the model")
    with contextlib.nullcontext() if draw is None else _drawn_weights(draw):
        runner = ModelRunner(
            model_config=model_config,
            mem_fraction_static=server.mem_fraction,
            gpu_id=GPU,
            nccl_port=port,
            server_args=server_args,
        )
    say("allocating the caches")
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    initialize_mamba_selective_state_update_backend(server_args)
    say("capturing the graphs")
    runner.init_cuda_graphs()
    captured = MONOKERNEL if server.monokernel else SGLANG
    return BenchRunner(runner, {captured: _Arm(runner.decode_cuda_graph_runner, runner.attn_backend)})


@dataclass(frozen=True)
class BenchRunner:
    """SGLang's `ModelRunner` with the step graphs of one arm or of both; made by `start`."""

    _runner: Any
    _arms: dict[str, _Arm]

    @property
    def model(self) -> Any:
        """SGLang's loaded model."""
        return self._runner.model

    @property
    def hf_config(self) -> Any:
        """The model's HF config."""
        return self._runner.model_config.hf_config

    @property
    def captured_requests(self) -> tuple[int, ...]:
        """Requests of the captured steps, ascending."""
        return tuple(self._arms[next(iter(self._arms))].graphs.capture_bs)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head's matrix, which SGLang's LogitsProcessor reads in a step of either arm."""
        return self.model.lm_head.weight.nbytes

    @property
    def built(self) -> Any:
        """What our spec's `build` returned; SGLang's dispatch in front of the model's forward holds it.

        (kernel_plugins/amd/binding.py: _install_forward)
        """
        return inspect.getclosurevars(self.model.forward).nonlocals["built"]

    def capture_own_forward(self) -> None:
        """Capture SGLang's own forward of the same model as a second set of graphs, the monokernel out of its way.

        Only for a runner that was started with the monokernel.
        """
        dispatch = self.model.forward
        # functools.wraps left the forward that it stands for (binding.py: _install_forward)
        self.model.forward = dispatch.__wrapped__
        try:
            self._runner.init_attention_backends()
            self._runner.init_decode_cuda_graph()
        finally:
            self.model.forward = dispatch
        self._arms[SGLANG] = _Arm(self._runner.decode_cuda_graph_runner, self._runner.attn_backend)

    def step_batch(self, step: ServedStep, input_ids: torch.Tensor, context: int | Sequence[int]) -> Any:
        """A step of this server: of `decode_batch` or of `verify_batch`.

        Args:
            step: what the server's steps are.
            input_ids: [requests x tokens a request] int64 on the GPU.
            context: tokens that the first row of each request sees, its own included; one number for all of one length.
        """
        if step.mode == "decode":
            return self.decode_batch(input_ids, context)
        return self.verify_batch(input_ids, step.tokens_per_request, context)

    def decode_batch(self, input_ids: torch.Tensor, context: int | Sequence[int], *, longest: int | None = None) -> Any:
        """A decode step whose rows, cache slots and state slots come from SGLang's pools.

        No prompt is run: the caches hold what they held. Every earlier batch's places are given back; a request gets
        the same ones again where `longest` is the same and as many requests or more stand before it.

        Args:
            input_ids: [rows] int64 on the GPU, one token a request.
            context: tokens of each request, the step's own included; one number for all of one length.
            longest: tokens to which the requests may grow in later steps; by default they do not.

        Returns:
            SGLang's `ForwardBatch`.

        Raises:
            BenchError: the pools have no room for it.
        """
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

        lengths = _lengths(context, input_ids.shape[0])
        slots = self._places(len(lengths), longest or int(lengths.max()), input_ids.device)
        seq_lens = lengths.to(input_ids.device)
        positions = seq_lens - 1
        out_cache_loc = slots.gather(1, positions[:, None])[:, 0]
        mode, hidden = ForwardMode.DECODE, CaptureHiddenMode.NULL
        return self._batch(mode, input_ids, seq_lens, lengths, positions, out_cache_loc, hidden)

    def verify_batch(self, input_ids: torch.Tensor, tokens: int, context: int | Sequence[int]) -> Any:
        """A verify step of one chain of drafts a request, as SGLang prepares it (eagle_utils.py:305).

        Its places come from SGLang's pools as those of `decode_batch` do.

        Args:
            input_ids: [requests x tokens] int64 on the GPU: of each request its last token, then its drafts.
            tokens: rows of a request, as the server's graphs were captured.
            context: tokens that the first row of each request sees, its own included, so that a decode step of the same
                context sees as many; one number for all of one length.

        Returns:
            SGLang's `ForwardBatch`.

        Raises:
            BenchError: the pools have no room for it, or a request would have nothing committed before the step.
        """
        import torch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        device = input_ids.device
        committed = _lengths(context, input_ids.shape[0] // tokens) - 1
        if committed.min() < 1:
            raise BenchError("a context of 1 token: before a verify step a token must be committed; use 2 or more")
        requests = len(committed)
        slots = self._places(requests, int(committed.max()) + tokens, device)
        seq_lens = committed.to(device)
        places = seq_lens[:, None] + torch.arange(tokens, device=device)
        mode, hidden = ForwardMode.TARGET_VERIFY, CaptureHiddenMode.FULL
        out_cache_loc = slots.gather(1, places).view(-1)
        batch = self._batch(mode, input_ids, seq_lens, committed, places.view(-1), out_cache_loc, hidden)
        no_links = torch.full((requests, tokens), -1, dtype=torch.int64, device=device)
        batch.spec_info = EagleVerifyInput(
            draft_token=input_ids,
            custom_mask=None,
            positions=batch.positions,
            retrieve_index=torch.arange(requests * tokens, device=device).view(requests, tokens),
            retrieve_next_token=no_links,
            retrieve_next_sibling=no_links,
            retrieve_cum_len=None,
            spec_steps=tokens - 1,
            topk=1,
            draft_token_num=tokens,
            capture_hidden_mode=hidden,
            seq_lens_sum=batch.seq_lens_sum,
            seq_lens_cpu=committed,
        )
        return batch

    def _places(self, requests: int, longest: int, device: torch.device) -> torch.Tensor:
        """Cache slots of the first `longest` tokens of each request, [requests, longest] int64; enters the tables."""
        import torch

        pool, allocator = self._runner.req_to_token_pool, self._runner.token_to_kv_pool_allocator
        table = pool.req_to_token
        if longest > table.shape[1]:
            raise BenchError(f"a context of {longest} tokens: the server's longest is {table.shape[1]}")
        pool.clear()
        allocator.clear()
        whole_pages = -(-longest // allocator.page_size) * allocator.page_size
        free_tokens, free_states = allocator.available_size(), pool.mamba_allocator.available_size()
        slots = allocator.alloc(requests * whole_pages)
        states = pool.mamba_allocator.alloc(requests)
        if slots is None:
            need = f"{requests} requests of {longest} tokens take {requests * whole_pages} cache slots"
            raise BenchError(f"{need} of {free_tokens}: raise --max-total-tokens or --mem-fraction-static")
        if states is None:
            found = f"{requests} requests take {requests} state slots of {free_states}"
            raise BenchError(f"{found}: raise --max-mamba-cache-size")
        slots = slots.view(requests, whole_pages)[:, :longest]
        own = slice(FIRST_ROW, FIRST_ROW + requests)
        table[own, :longest] = slots.to(table.dtype)
        pool.req_index_to_mamba_index_mapping[own] = states.to(torch.int32)
        return slots.to(device=device, dtype=torch.int64)

    def _batch(
        self, mode: Any, input_ids: torch.Tensor, seq_lens: torch.Tensor, lengths: torch.Tensor,
        positions: torch.Tensor, out_cache_loc: torch.Tensor, hidden: Any,
    ) -> Any:  # fmt: skip
        """SGLang's `ForwardBatch` of requests in the first rows of its tables; `lengths` is `seq_lens` on the host."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        requests = len(lengths)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=requests,
            input_ids=input_ids,
            req_pool_indices=torch.arange(FIRST_ROW, FIRST_ROW + requests, dtype=torch.int64, device=input_ids.device),
            seq_lens=seq_lens,
            orig_seq_lens=seq_lens,
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=out_cache_loc,
            positions=positions,
            spec_algorithm=self._runner.spec_algorithm,
            capture_hidden_mode=hidden,
        )
        self._runner.kv_index_translator.bind_own_plan(batch)
        return batch

    def prepare(self, arm: str, batch: Any) -> Callable[[], object]:
        """Run a step once as a server does, and return what replays its graph on the same inputs.

        Args:
            arm: MONOKERNEL or SGLANG, whichever was captured.
            batch: of `step_batch`; not one that another arm has run.

        Raises:
            BenchError: no captured graph has exactly these requests.
        """
        self.run(arm, batch)
        graphs = self._arms[arm].graphs
        key = graphs._replay_graph_key
        return lambda: graphs.backend.replay(key, batch)

    def run(self, arm: str, batch: Any) -> Any:
        """Run a step as a server does.

        Args:
            arm: MONOKERNEL or SGLANG, whichever was captured.
            batch: of `step_batch`; not one that another arm has run.

        Returns:
            SGLang's `LogitsProcessorOutput`, whose tensors the next step of the same rows overwrites.

        Raises:
            BenchError: no captured graph has exactly these requests.
        """
        graphs = self._arms[arm].graphs
        self._runner.decode_cuda_graph_runner, self._runner.attn_backend = graphs, self._arms[arm].backend
        output = self._runner.forward(batch)
        if not output.can_run_graph or graphs.bs != batch.batch_size:
            raise BenchError(f"{batch.batch_size} requests have no graph of their own; captured: {graphs.capture_bs}")
        return output.logits_output

    @contextlib.contextmanager
    def context(self, arm: str) -> Iterator[None]:
        """SGLang's forward context of the step that `prepare` has last run on that arm."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=self._arms[arm].backend)):
            yield


def _lengths(context: int | Sequence[int], requests: int) -> torch.Tensor:
    """Tokens of each request, [requests] int64 on the host."""
    import torch

    return torch.tensor([context] * requests if isinstance(context, int) else list(context), dtype=torch.int64)


@contextlib.contextmanager
def _drawn_weights(draw: Callable[[], Tensors]) -> Iterator[None]:
    """Have the dummy loader fill a model through its `load_weights`; what no tensor fills keeps the dummy's values.

    That way the values pass through everything that SGLang does to a checkpoint's, in its order.
    """
    from sglang.srt.model_loader import loader

    dummy = loader.initialize_dummy_weights

    def fill(model: Any) -> None:
        dummy(model)
        model.load_weights(iter(draw()))

    with launch.replaced(loader, "initialize_dummy_weights", fill):
        yield
