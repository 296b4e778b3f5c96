"""The built object: it runs SGLang's routed steps as launches of the monokernel.

`build` runs after the weights are loaded and before the KV pools exist; it takes all the memory a launch needs,
compiles the kernel and loads it. The first step, which SGLang runs before it captures any graph, fills in where the
pools are. After that `forward` only hands over addresses: a captured step is one kernel node and what SGLang's
LogitsProcessor adds.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from glm53_mono.admission import admit, log_placement
from glm53_mono.bindings import Unused, bind_pools, bind_step, check_context, empty_step
from glm53_mono.capturing import settle
from glm53_mono.check import watch as check_watch
from glm53_mono.check.settings import CHECK, Settings
from glm53_mono.check.step import Check, WholeForward
from glm53_mono.counters import Fallbacks, shown
from glm53_mono.exchange import SharedBuffers, exchange_buffers, give_up
from glm53_mono.fault_watch import HostRecord, LaunchFault, Watch
from glm53_mono.geometry import Geometry
from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.metrics import StepCounter
from glm53_mono.observers import ObservedStep, StepObserver
from glm53_mono.probe.observer import InputProbe, probe_is_wanted
from glm53_mono.program.launch import BACKENDS, Launch, Variant
from glm53_mono.program.pools import Pools
from glm53_mono.program.step import step_phases
from glm53_mono.program.tiling import TILINGS
from glm53_mono.program.workspace import HEADROOM_PAGES
from glm53_mono.upstream import model as upstream
from glm53_mono.upstream.hooks import watch_steps
from glm53_mono.upstream.monokernel import BuildContext, Plan
from glm53_mono.upstream.parts import Parts
from glm53_mono.upstream.running import ServedStep, index_keys_are_tiled, longest_context, metrics_are_on, served_step
from glm53_mono.upstream.step import Backends, attention_backends, has_embeds, step_inputs
from glm53_mono.upstream.tensors import UpstreamError
from glm53_mono.weights.copies import Copies, total_bytes
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.formats import common_formats
from glm53_mono.weights.model import StepWeights

logger = logging.getLogger(__name__)

EMBEDS = "input embeddings"


def build(model: Any, hf_config: Any, context: BuildContext) -> Runtime:
    """Builds what runs the routed steps of a server.

    Args:
        model: SGLang's loaded `Glm5NextForConditionalGeneration`, its own forward still in place.
        hf_config: its HF config.
        context: the device's ISA, the widths that SGLang will route, and the deadline of a wait; gets the copies of
            weights that were needed.

    Raises:
        UpstreamError, WeightError: a weight that the kernels cannot read.
        AdmissionError: a kernel that could not run as a whole on this GPU.
        ExchangeError: another rank could not be built.
        ValueError: the environment asks for a check that means nothing, or that cannot be made.
    """
    settings = Settings.asked(os.environ)
    rank, ranks = upstream.tensor_parallel_rank()
    geometry = Geometry.from_config(hf_config, ranks)
    try:
        if settings is not None and ranks > 1:
            raise ValueError(f"{CHECK} compares whole parts, and a rank has shares: unset it, or serve with --tp 1")
        weights, launch, step = _prepared(model, hf_config, geometry, context)
    except Exception as error:
        if ranks > 1:
            give_up(str(error), upstream.gather_from_ranks)
        raise
    buffers = None
    if launch.symmetric is not None:
        buffers = exchange_buffers(launch.symmetric, rank, upstream.gather_from_ranks)
        launch.bind(step_phases(geometry, weights, Pools.missing(geometry), buffers.peers))
    check = Check(launch, settings) if settings is not None else None
    observers = wanted_observers(geometry, rank, weights.norm.device, longest_context(hf_config))
    runtime = Runtime(model, weights, launch, step, Fallbacks(step, context.widths), rank, check, observers, buffers)
    runtime.start()
    return runtime


def _prepared(
    model: Any, hf_config: Any, geometry: Geometry, context: BuildContext
) -> tuple[StepWeights[Matrix], Launch, ServedStep]:
    """What a rank builds by itself."""
    copies: Copies = {}
    weights = upstream.step_weights(model, geometry, copies)
    context.copies.update(copies)
    formats = common_formats(weights.layers)
    logger.info(
        "glm53_mono: weights are %s, read where they are but for %d copies of %d bytes (%s)",
        formats.described(),
        len(copies),
        total_bytes(copies),
        ", ".join(sorted({what for what, _ in copies})) or "none",
    )
    step = served_step()
    launch = Launch.prepare(
        geometry,
        TILINGS[context.isa],
        Variant(
            verify=step.mode == "target_verify",
            index_tiled=index_keys_are_tiled(),
            shared_fused=weights.shared_is_fused,
            backend=BACKENDS[context.isa],
        ),
        step_phases(geometry, weights, Pools.missing(geometry)),
        max_tokens=longest_context(hf_config) + HEADROOM_PAGES * geometry.page_tokens,
        deadline_s=context.deadline_s,
        formats=formats,
        device=weights.norm.device,
    )
    admit(launch, context.isa)
    log_placement(launch, context.isa)
    return weights, launch, step


def wanted_observers(geometry: Geometry, rank: int, device: torch.device, longest: int) -> tuple[StepObserver, ...]:
    """The observers that this process's environment asks for; none by default, and then steps cost what they did.

    Args:
        longest: tokens that a request may have.

    Raises:
        ValueError: a variable has a value that means nothing.
    """
    return (InputProbe(geometry, rank, device, longest),) if probe_is_wanted() else ()


class Runtime:
    """Runs routed steps, and tells how many; made by `build`."""

    def __init__(
        self,
        model: Any,
        weights: StepWeights[Matrix],
        launch: Launch,
        step: ServedStep,
        fallbacks: Fallbacks,
        rank: int,
        check: Check | None = None,
        observers: Sequence[StepObserver] = (),
        buffers: SharedBuffers | None = None,
    ) -> None:
        self._model = model
        self._observers = tuple(observers)
        # SGLang puts our forward in the place of this one after the build: calling model.forward would come back here
        self._original_forward = model.forward
        self._weights = weights
        self._launch = launch
        self._step = step
        self._fallbacks = fallbacks
        self._rank = rank
        self._buffers = buffers
        if buffers is not None:
            # SGLang ends its processes without telling us
            weakref.finalize(self, buffers.close)
        self._unused = Unused.on(launch.buffer.device)
        self._record = HostRecord(launch.host_record)
        self._counter = StepCounter(rank) if metrics_are_on(rank) else None
        self._watch = Watch(self._record, launch.phases, rank, launch.deadline_s, self._counts, self._update_metrics)
        self._check = check
        self._check_watch = None
        if check is not None:
            self._check_watch = check_watch.Watch(check.comparisons, rank, raises=check.settings.raises)
        self._bound: tuple[Backends, Pools] | None = None

    def start(self) -> None:
        """Compiles and loads the kernel, then starts to watch and to count."""
        self._warm_up()
        for target in watch_steps(self._fallbacks.see, drafts=self._step.mode == "target_verify"):
            logger.warning("glm53_mono: another plugin hooks %s, so steps that fall back there go uncounted", target)
        self._watch.start()
        if self._check_watch is not None:
            self._check_watch.start()
        launch = self._launch
        logger.info(
            "glm53_mono: active (rank %d of %d, %s, %s steps x %d tokens, %d phases, %d programs x %d warps, "
            "%s launch, workspace %.1f MiB for contexts of %d tokens, shared expert %s, index keys %s)",
            self._rank,
            launch.geometry.tp_size,
            launch.variant.backend,
            self._step.mode,
            self._step.tokens_per_request,
            len(launch.phases),
            launch.tiling.programs,
            launch.tiling.warps,
            "cooperative" if launch.cooperative else "flat",
            launch.buffer.numel() / 2**20,
            launch.workspace.max_pools * launch.geometry.pool,
            "fused" if launch.variant.shared_fused else "separate",
            "tiled" if launch.variant.index_tiled else "linear",
        )

    @torch.no_grad()
    def forward(
        self,
        plan: Plan,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Runs a routed step in place of the model's forward: same arguments after `plan`, same result.

        Raises:
            UpstreamError: the step is not what was built for, or SGLang holds something that it cannot read.
            LaunchFault: an earlier launch's wait has ended in vain.
        """
        fault = self._record.fault()
        if fault is not None:
            raise LaunchFault(self._watch.sentence(fault))
        if has_embeds(forward_batch, input_embeds):
            self._fallbacks.count(EMBEDS)
            return self._original_forward(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        if upstream.hands_out_hidden_states(self._model):
            raise UpstreamError(
                "the model must hand out hidden states of inner layers, which a step does not produce: serve without "
                "--enable-return-aux-hidden-states"
            )
        key = plan.key
        if (key.forward_mode, key.tokens_per_request) != (self._step.mode, self._step.tokens_per_request):
            raise UpstreamError(
                f"a {key.forward_mode} step of {key.tokens_per_request} tokens a request was routed to a launch of "
                f"{self._step.mode} steps of {self._step.tokens_per_request}"
            )
        step = self.observed_step(forward_batch)
        tensors, sizes = bind_step(step.inputs, self._unused, step.pools.ring_length)
        for observer in self._observers:
            observer.before(step)
        # a tensor of this forward's own: SGLang may still read the last one's when the next launch runs
        hidden = torch.empty((sizes.rows, self._launch.geometry.hidden), dtype=torch.bfloat16, device=input_ids.device)
        theirs = None
        if self._check is not None:
            arguments = input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
            whole = WholeForward(
                run=lambda: self._original_forward(*arguments),
                logits=lambda output: output.next_token_logits,
                logits_of=lambda own: upstream.logits(self._model, input_ids, own, forward_batch).next_token_logits,
            )
            keeps = self._check.settings.keeps_sglang
            parts = Parts(self._model, positions, forward_batch)
            theirs = self._check.run(parts, tensors, sizes, hidden, whole if keeps else None)
        elif self._launch.variant.backend == "interp":
            self._launch.run_by_phase(tensors, sizes, hidden)
        else:
            self._launch.run(tensors, sizes, hidden)
        for observer in self._observers:
            observer.after(step, hidden)
        if theirs is not None:
            return theirs
        return upstream.logits(self._model, input_ids, hidden, forward_batch)

    @property
    def check(self) -> Check | None:
        """What compares each step with SGLang's parts, where the environment asks for it."""
        return self._check

    @property
    def launch(self) -> Launch:
        """What runs a step; a benchmark runs parts of it by themselves."""
        return self._launch

    def arguments_of(self, forward_batch: Any) -> tuple[StepTensors, StepSizes]:
        """The arguments of a step's launch; only within SGLang's forward context of that step.

        Raises:
            UpstreamError: the step is not what was built for, or SGLang holds something that it cannot read.
        """
        step = self.observed_step(forward_batch)
        return bind_step(step.inputs, self._unused, step.pools.ring_length)

    def observed_step(self, forward_batch: Any) -> ObservedStep:
        """A step's inputs and caches; only within SGLang's forward context of that step.

        Raises:
            UpstreamError: SGLang holds something that a step cannot read.
        """
        backends = attention_backends()
        pools = self._bind(backends)
        return ObservedStep(step_inputs(forward_batch, backends), pools, backends, forward_batch)

    def served(self) -> int:
        """Steps whose launches have completed on the device, replays of graphs and SGLang's warm-up runs included."""
        launches = self._record.served()
        return launches if self._check is None else launches // self._check.launches_a_step

    def fallbacks(self) -> dict[str, int]:
        """Steps that SGLang's forward ran, by reason."""
        return self._fallbacks.by_reason()

    def close(self) -> None:
        """Ends the watching threads, and unmaps the other ranks' buffers; no step may run any more."""
        self._watch.stop()
        if self._check_watch is not None:
            self._check_watch.stop()
        for observer in self._observers:
            observer.close()
        if self._buffers is not None:
            self._buffers.close()

    def _counts(self) -> str:
        return shown(self.served(), self.fallbacks())

    def _update_metrics(self) -> None:
        if self._counter is not None:
            self._counter.update(self.served(), self.fallbacks())

    def _warm_up(self) -> None:
        """Runs no phase: before SGLang captures graphs, the kernel is compiled, loaded and known to be captured."""
        tensors, sizes = empty_step(self._unused)
        hidden = torch.empty((1, self._launch.geometry.hidden), dtype=torch.bfloat16, device=self._launch.buffer.device)
        self._launch.run(tensors, sizes, hidden, 0, 0)
        if hidden.is_cuda:
            settle(self._launch)
        self._launch.view("words").zero_()
        self._record.clear()

    def _bind(self, backends: Backends) -> Pools:
        """Fills in the addresses of the pools at the first step; later only checks that they are the same."""
        if self._bound is not None:
            bound, pools = self._bound
            if bound.request_pool is not backends.request_pool or bound.token_pool is not backends.token_pool:
                raise UpstreamError("SGLang's caches are not those of the first step, whose addresses launches keep")
            return pools
        device = self._launch.buffer.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UpstreamError("the first routed step is under graph capture, where the caches cannot be bound")
        geometry = self._launch.geometry
        pools = bind_pools(backends, geometry, self._step)
        check_context(backends, self._launch.workspace, geometry)
        peers = None if self._buffers is None else self._buffers.peers
        self._launch.bind(step_phases(geometry, self._weights, pools, peers))
        if self._check is not None:
            self._check.bind(pools, self._step.tokens_per_request)
        self._bound = backends, pools
        return pools
