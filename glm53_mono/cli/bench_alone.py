"""`glm53-mono bench --alone`: the monokernel's launch on drawn weights, with no SGLang around it.

For weights that SGLang itself does not serve on the device: MXFP4 on an NVIDIA GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from glm53_mono.admission import admit
from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.checkpoint.formats import format_of_config
from glm53_mono.checkpoint.tensors import tensor_table
from glm53_mono.cli.bench_measure import copy_bandwidth, fill_pools, measure_launch
from glm53_mono.cli.bench_report import Point, Report
from glm53_mono.cli.checkpoint import DrawnTensors
from glm53_mono.cli.from_reference import pools_of, step_of
from glm53_mono.fault_watch import HostRecord
from glm53_mono.geometry import Geometry
from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.program.launch import BACKENDS, Launch, Variant
from glm53_mono.program.pools import Pools
from glm53_mono.program.step import step_phases
from glm53_mono.program.tiling import TILINGS
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.reference.weights import PREFIX, checkpoint_layers, fuse_shared_expert
from glm53_mono.weights.formats import Formats
from glm53_mono.weights.model import LayerWeights, MoeWeights, StepWeights
from glm53_mono.weights.packed import packed
from glm53_mono.weights.published import CHECKPOINTS, with_storage

if TYPE_CHECKING:
    from glm53_mono.cli.bench import Options

DEADLINE_S = 10.0
"""That a wait of a launch may last."""


@dataclass(frozen=True)
class Alone:
    """A launch on weights and caches of its own, with the shared expert fused, as SGLang has it by default."""

    geometry: Geometry
    weights: StepWeights
    launch: Launch
    pools: Pools
    req_to_token: torch.Tensor
    """[1 + requests, tokens] int32; row 0 is padding"""

    @classmethod
    def prepare(
        cls, config: dict[str, Any], *, isa: str, requests: int, max_tokens: int, seed: int, device: str
    ) -> Alone:
        """Draws weights and caches, and prepares their launch.

        Args:
            config: the contents of config.json; its `quantization_config` says how the weights are stored.
            isa: whose tiles to take, a key of TILINGS.
            requests: most of a step.
            max_tokens: of a request.
            seed: of weights and caches.
            device: that holds and runs everything.

        Raises:
            WeightError: sizes that the format cannot hold.
            AdmissionError: the kernel must not run on this GPU.
        """
        geometry = checkpoint_geometry(config)
        formats = CHECKPOINTS[format_of_config(config["text_config"])]
        weights = _drawn(config, geometry, formats, seed, device)
        pages = -(-max_tokens // geometry.page_tokens)
        tiled = BACKENDS[isa] == "hip"
        caches = Caches.empty(
            geometry,
            mamba_slots=requests,
            request_rows=requests,
            pages=1 + requests * pages,
            layout="tiled" if tiled else "linear",
            device=device,
        )
        pools = pools_of(caches)
        fill_pools(pools, geometry, torch.Generator(device).manual_seed(seed))
        launch = Launch.prepare(
            geometry,
            TILINGS[isa],
            Variant(verify=False, index_tiled=tiled, shared_fused=True, backend=BACKENDS[isa]),
            step_phases(geometry, weights, pools),
            max_tokens=pages * geometry.page_tokens,
            deadline_s=DEADLINE_S,
            formats=formats,
            device=device,
        )
        admit(launch, isa)
        places = torch.arange((1 + requests) * pages * geometry.page_tokens, dtype=torch.int32, device=device)
        # row r has the pages from 1 + (r - 1) pages on
        table = places.view(1 + requests, -1) + (1 - pages) * geometry.page_tokens
        table[0] = 0
        return cls(geometry, weights, launch, pools, table)

    def served(self) -> int:
        """Launches that have completed on the device."""
        return HostRecord(self.launch.host_record).served()

    def step(self, ids: torch.Tensor, context: int) -> tuple[StepTensors, StepSizes]:
        """A decode step of one row a request.

        Args:
            ids: [rows] int64, the tokens.
            context: tokens of each request, the step's own included.
        """
        rows = torch.arange(1, 1 + len(ids), device=ids.device)
        inputs = StepInputs(
            mode="decode",
            tokens_per_request=1,
            input_ids=ids,
            positions=torch.full_like(ids, context - 1),
            seq_lens=torch.full_like(ids, context),
            req_pool_indices=rows,
            out_cache_loc=self.req_to_token[rows, context - 1].long(),
            mamba_slots=rows.int(),
            verify_rows=rows.int() - 1,
            req_to_token=self.req_to_token,
        )
        return step_of(inputs, self.pools)


def measure_alone(built: Alone, origin: Mapping[str, Any], options: Options, say: Callable[[str], None]) -> Report:
    """Measures every step shape of the options, whose rows are given.

    Args:
        built: with room for them.
        origin: where the numbers came about.
        options: of the command.
        say: is told what begins.

    Raises:
        BenchError: launches that did not happen.
    """
    say("measuring the copy bandwidth")
    report = Report(origin, copy_bandwidth(), head_bytes=0)
    generator = torch.Generator(built.req_to_token.device).manual_seed(options.seed)
    for rows, context in product(options.rows, options.contexts):
        say(f"{rows} rows, {context} tokens")
        ids = torch.randint(built.geometry.vocab, (rows,), generator=generator, device=generator.device)
        step = built.step(ids, context)
        _, launched = measure_launch(
            built, step, {}, built.weights, built.geometry, context, options.steps, phases=options.phases
        )
        report.points.append(Point(rows, context, {}, launched))
        if options.json is not None:
            report.write(options.json)
    return report


def _drawn(config: dict[str, Any], geometry: Geometry, formats: Formats, seed: int, device: str) -> StepWeights:
    """Weights of a bf16 checkpoint, packed layer by layer: the whole of it in both formats may not fit."""
    text = {name: value for name, value in config["text_config"].items() if name != "quantization_config"}
    drawn = DrawnTensors(tensor_table(config | {"text_config": text}), seed, device)
    return StepWeights(
        embedding=packed("embedding", drawn[f"{PREFIX}embed_tokens.weight"], formats.plain),
        layers=tuple(_packed_layers(drawn, geometry, formats)),
        norm=drawn[f"{PREFIX}norm.weight"],
    )


def _packed_layers(drawn: DrawnTensors, geometry: Geometry, formats: Formats) -> Iterator[LayerWeights]:
    for index, layer in enumerate(checkpoint_layers(drawn, geometry)):
        fused = replace(layer, ffn=fuse_shared_expert(layer.ffn)) if isinstance(layer.ffn, MoeWeights) else layer
        yield with_storage(fused, formats, packed, name=f"layers.{index}")
