"""The MonoSpec: on which devices and in which servers the monokernel runs, and every reason why it would not."""

from __future__ import annotations

from typing import Any

from glm53_mono import capabilities
from glm53_mono.geometry import MAX_ROWS, TP_SIZES, Geometry, GeometryError
from glm53_mono.isas import ISAS
from glm53_mono.numerics import named_bounds
from glm53_mono.refusals import REFUSALS, reasons
from glm53_mono.upstream.loaded import foreign_model_reason
from glm53_mono.upstream.model import embedding_shard, final_norm, model_layers, tensor_parallel_rank
from glm53_mono.upstream.monokernel import (
    BuildContext,
    DeviceLimits,
    Feature,
    MonoSpec,
    Numerics,
    NumericsKind,
    Requirements,
)
from glm53_mono.upstream.server import MissingRead, Server, read_server
from glm53_mono.upstream.tensors import UpstreamError
from glm53_mono.weights.blocks import broken_blocks
from glm53_mono.weights.descriptor import WeightError
from glm53_mono.weights.formats import Formats
from glm53_mono.weights.published import BY_QUANTIZATION

API_VERSION = 1
"""The version of SGLang's monokernel contract that this package is written against."""


def config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
    """Every reason why a server may not run the monokernel, before its weights are loaded.

    Args:
        cfg: SGLang's view of the resolved server arguments.
        hf_config: the model's HF config.

    Reasons that SGLang's own probes and `Requirements` give are not repeated here.
    """
    try:
        server = read_server(cfg, hf_config)
    except MissingRead as error:
        return [str(error)]
    return [
        *reasons(capabilities.NOT_YET_BUILT, server),
        *reasons(REFUSALS, server),
        *_geometry_reasons(server),
    ]


def model_disable_reasons(model: Any, hf_config: Any, copies: dict[tuple, Any]) -> list[str]:
    """Every reason why a loaded model's weights cannot be read.

    Args:
        model: the `torch.nn.Module` that SGLang has loaded.
        hf_config: its HF config.
        copies: weight copies taken while loading; none are, since we have no load hook.
    """
    foreign = foreign_model_reason(model)
    if foreign is not None:
        return [foreign]
    _, ranks = tensor_parallel_rank()
    geometry = Geometry.from_config(hf_config, ranks)
    found = []
    # what cannot be read in place is copied to be looked at, and for good by `build` alone
    reads = (embedding_shard, lambda *arguments: model_layers(*arguments, {}), final_norm)
    for read in reads:
        try:
            read(model, geometry)
        except (UpstreamError, WeightError) as error:
            found.append(str(error))
    return found


def build(model: Any, hf_config: Any, context: BuildContext) -> Any:
    """Build the object that runs the steps; see `glm53_mono.runtime.build`."""
    # The runtime brings the kernels with it, which a server that is refused must not need.
    from glm53_mono import runtime

    return runtime.build(model, hf_config, context)


def _geometry_reasons(server: Server) -> list[str]:
    # A TP size of which we have no kernel is SGLang's to refuse; the config is judged at 1 then.
    tp_size = server.arguments.tp_size if server.arguments.tp_size in TP_SIZES else 1
    try:
        geometry = Geometry.from_config(server.hf_config, tp_size)
    except GeometryError as error:
        return [f"config.json: {error}"]
    # a format that is refused has no blocks to judge
    return broken_blocks(geometry, BY_QUANTIZATION.get(server.quantization, Formats()))


SPEC = MonoSpec(
    name="glm53_mono",
    devices={
        name: DeviceLimits(widths=tuple(range(1, MAX_ROWS + 1)), tp_sizes=TP_SIZES, resident_blocks=isa.compute_units)
        for name, isa in ISAS.items()
    },
    features=frozenset({Feature.SPECULATIVE_DECODING}),
    requires=Requirements(
        dtypes=frozenset({"bfloat16"}),
        attention_backends=frozenset({"dsa"}),
        hf_config={"model_type": "glm5_next"},
    ),
    numerics=Numerics(kind=NumericsKind.TOLERANCE, bounds=named_bounds()),
    config_disable_reasons=config_disable_reasons,
    model_disable_reasons=model_disable_reasons,
    build=build,
    api_version=API_VERSION,
)
"""What SGLang imports when a server asks for the monokernel."""
