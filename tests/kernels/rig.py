"""A step on random weights and caches, by the kernels and by the reference, for comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glm53_mono.checkpoint.config import Scale, checkpoint_geometry, model_config, order_layers
from glm53_mono.checkpoint.tensors import tensor_table
from glm53_mono.cli.checkpoint import DrawnTensors
from glm53_mono.cli.from_reference import pools_of, step_of
from glm53_mono.geometry import Geometry
from glm53_mono.program.launch import Launch, Variant
from glm53_mono.program.step import step_phases
from glm53_mono.program.tiling import TILINGS, Tiling
from glm53_mono.reference.state import PADDED_SLOT, Caches, StepInputs
from glm53_mono.reference.weights import from_checkpoint, fuse_shared_expert
from glm53_mono.weights import bf16
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.formats import common_formats
from glm53_mono.weights.model import ModelWeights

TINY = Scale(
    hidden=256,
    vocab=256,
    heads=2,
    q_rank=64,
    latent=128,
    index_heads=4,
    index_topk=64,
    experts_per_token=2,
    expert_width=64,
    dense_width=128,
)
"""Sizes for the interpreter, which pays by the operation: a row that sees 17 pools, 68 tokens, must select."""


@dataclass(frozen=True)
class Pattern:
    """Which layers are KDA (the others MLA), and how many at the start have a dense FFN."""

    kda_layers: tuple[int, ...]
    layers: int
    dense_layers: int


EVERY_PAIR = Pattern(kda_layers=(0, 2), layers=4, dense_layers=2)
"""Each attention before each FFN, two layers of either attention: a wrong place in a cache of many layers shows."""

EVERY_PHASE = Pattern(kda_layers=(0,), layers=2, dense_layers=1)
"""The shortest model with every kind of phase."""

ONE_KDA = Pattern(kda_layers=(0,), layers=1, dense_layers=0)
ONE_MLA = Pattern(kda_layers=(), layers=1, dense_layers=0)


@dataclass(frozen=True)
class Model:
    """A small random model; `fused` has the shared expert among the routed ones."""

    geometry: Geometry
    weights: ModelWeights
    stored: ModelWeights[Matrix] | None = None
    """As the kernels read them, where that is not `weights` in place."""


def random_model(
    layers: int, *, seed: int, experts: int = 8, fused: bool = False, scale: str | Scale = "small", device: str = "cpu",
    pattern: Pattern | None = None, sinkhorn_iterations: int | None = None,
) -> Model:  # fmt: skip
    """Weights of a model of the real structure: dense KDA layers first, then sparse ones, every fourth MLA.

    `pattern` orders the layers otherwise; fewer Sinkhorn iterations than the model's save the interpreter's time.
    """
    config = model_config(layers, experts, scale, mtp=False)
    if pattern is not None:
        order_layers(config, pattern.kda_layers, pattern.dense_layers)
    geometry = checkpoint_geometry(config)
    if sinkhorn_iterations is not None:
        geometry = replace(geometry, sinkhorn_iterations=sinkhorn_iterations)
    weights = from_checkpoint(DrawnTensors(tensor_table(config), seed, device), geometry)
    if fused:
        layers_ = tuple(
            layer if geometry.is_dense(i) else replace(layer, ffn=fuse_shared_expert(layer.ffn))
            for i, layer in enumerate(weights.layers)
        )
        weights = replace(weights, layers=layers_)
    return Model(geometry, weights)


def tiny_model(
    pattern: Pattern, *, seed: int, fused: bool = False, experts: int = 6, scale: Scale = TINY,
    sinkhorn_iterations: int | None = None,
) -> Model:  # fmt: skip
    """A model for the interpreter, loud enough that the SwiGLU's clamp and the Sinkhorn iterations count."""
    model = random_model(
        pattern.layers, seed=seed, experts=experts, fused=fused, scale=scale, pattern=pattern,
        sinkhorn_iterations=sinkhorn_iterations,
    )  # fmt: skip
    for layer in model.weights.layers:
        layer.ffn.gate_up.mul_(8)
        layer.attention_mhc.base.mul_(4)
        layer.ffn_mhc.base.mul_(4)
    return model


def random_caches(
    geometry: Geometry, *, requests: int, pages: int, seed: int, draft_tokens: int = 0, layout: str = "linear",
    device: str = "cpu",
) -> Caches:  # fmt: skip
    """Caches full of plausible values, as if long requests had run before."""
    caches = Caches.empty(
        geometry,
        mamba_slots=requests,
        request_rows=requests,
        pages=pages,
        draft_tokens=draft_tokens,
        verify_rows=requests if draft_tokens else 0,
        layout=layout,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in caches.tensors():
        if tensor.dtype == torch.uint8:
            _random_index_pages(tensor, geometry, generator)
        elif not name.startswith("intermediate"):
            tensor.normal_(0, 0.3 if name == "temporal" else 1.0, generator=generator)
    return caches


def _random_index_pages(pages: Tensor, geometry: Geometry, generator: torch.Generator) -> None:
    split = geometry.page_pools * geometry.index_head_dim
    keys = torch.randn((pages.shape[0], split), generator=generator, device=pages.device)
    pages[:, :split] = (keys * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    exponents = torch.randint(-9, -6, (pages.shape[0], geometry.page_pools), generator=generator, device=pages.device)
    pages[:, split:] = torch.exp2(exponents.float()).view(torch.uint8)


def decode_inputs(
    geometry: Geometry, lengths: list[int], *, seed: int, max_tokens: int, padded: int = 0, device: str = "cpu"
) -> StepInputs:
    """A decode step of requests of these lengths (the current token counted), slots and rows permuted, then padding."""
    return step_inputs(geometry, lengths, tokens=1, seed=seed, max_tokens=max_tokens, padded=padded, device=device)


def step_inputs(
    geometry: Geometry, lengths: list[int], *, tokens: int, seed: int, max_tokens: int, padded: int = 0,
    verify: bool = False, first_page: int = 1, compact: bool = False, device: str = "cpu",
) -> StepInputs:  # fmt: skip
    """A decode step, or a verify step of `tokens` drafts after `lengths` committed tokens.

    Pages from `first_page` on are dealt out at random: to every request as many as `max_tokens` takes, or, `compact`,
    what this step needs and one more.
    """
    generator = torch.Generator().manual_seed(seed)
    requests = len(lengths)
    pages_each = -(-max_tokens // geometry.page_tokens)
    needed = [(length + tokens) // geometry.page_tokens + 2 if compact else pages_each for length in lengths]
    pages = (first_page + torch.randperm(sum(needed), generator=generator)).split(needed)
    rows = 1 + torch.randperm(requests, generator=generator)
    slots = 1 + torch.randperm(requests, generator=generator)
    table = torch.zeros((requests + 1, pages_each * geometry.page_tokens), dtype=torch.int32)
    inside = torch.arange(geometry.page_tokens)
    for i, row in enumerate(rows.tolist()):
        own = (pages[i][:, None] * geometry.page_tokens + inside).flatten().int()
        table[row, : len(own)] = own[: table.shape[1]]
    firsts = torch.tensor(lengths) if verify else torch.tensor(lengths) - 1
    positions = (firsts[:, None] + torch.arange(tokens)).flatten()
    locations = table[rows.repeat_interleave(tokens), positions].long()
    ids = torch.randint(0, geometry.vocab, (requests * tokens,), generator=generator)
    stale = torch.full((padded * tokens,), 2**40 + 7)
    inputs = StepInputs(
        mode="target_verify" if verify else "decode",
        tokens_per_request=tokens,
        input_ids=torch.cat((ids, stale)),
        positions=torch.cat((positions, torch.zeros(padded * tokens, dtype=torch.int64))),
        seq_lens=torch.cat((torch.tensor(lengths), torch.ones(padded, dtype=torch.int64))),
        req_pool_indices=torch.cat((rows, torch.zeros(padded, dtype=torch.int64))),
        out_cache_loc=torch.cat((locations, torch.zeros(padded * tokens, dtype=torch.int64))),
        mamba_slots=torch.cat((slots.int(), torch.full((padded,), PADDED_SLOT, dtype=torch.int32))),
        verify_rows=torch.arange(requests + padded, dtype=torch.int32),
        req_to_token=table,
    )
    moved = {name: value.to(device) for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    return replace(inputs, **moved)


def pages_of(inputs: StepInputs, geometry: Geometry) -> int:
    """Pages of the smallest pool that holds every slot of the step's requests."""
    return int(inputs.req_to_token.max()) // geometry.page_tokens + 1


def of_requests(inputs: StepInputs, requests: list[int]) -> StepInputs:
    """The step of some of its requests, in that order."""
    tokens = inputs.tokens_per_request
    rows = [request * tokens + token for request in requests for token in range(tokens)]
    by_row = ("input_ids", "positions", "out_cache_loc")
    return replace(
        inputs,
        **{
            name: value[rows if name in by_row else requests].contiguous()
            for name, value in vars(inputs).items()
            if isinstance(value, Tensor) and name != "req_to_token"
        },
    )


ISAS = {"interp": "interp", "cuda": "sm_90", "hip": "gfx950"}
"""The ISA that a launch for each backend is tiled for."""


def prepare_launch(
    model: Model, caches: Caches, inputs: StepInputs, *, backend: str = "interp", tiling: Tiling | None = None,
    timed: bool = False,
) -> Launch:  # fmt: skip
    """A launch over these caches, its workspace full of NaN.

    `backend` is "interp" or, as torch calls a GPU of either vendor, "cuda".
    """
    if backend == "cuda" and torch.version.hip:
        backend = "hip"
    weights = model.stored or bf16.described(model.weights)
    launch = Launch.prepare(
        model.geometry,
        tiling or TILINGS[ISAS[backend]],
        Variant(
            verify=inputs.mode == "target_verify",
            index_tiled=caches.layout == "tiled",
            shared_fused=weights.shared_is_fused,
            backend=backend,
            timed=timed,
        ),
        step_phases(model.geometry, weights, pools_of(caches)),
        max_tokens=inputs.req_to_token.shape[1],
        deadline_s=5.0,
        formats=common_formats(weights.layers),
        device=inputs.input_ids.device,
    )
    launch.poison()
    return launch


def run_step(launch: Launch, caches: Caches, inputs: StepInputs) -> Tensor:
    """Hidden states bf16 [rows, hidden] on a poisoned workspace; one launch, in the interpreter one a phase."""
    hidden = torch.full(
        (inputs.rows, launch.geometry.hidden), float("nan"), dtype=torch.bfloat16, device=inputs.input_ids.device
    )
    launch.poison()
    step = step_of(inputs, pools_of(caches))
    if launch.variant.backend == "interp":
        launch.run_by_phase(*step, hidden)
    else:
        launch.run(*step, hidden)
    return hidden
