"""What the plugin cannot do yet, each with the sentence that refuses it. Whoever builds one deletes its row."""

from __future__ import annotations

from glm53_mono import __version__
from glm53_mono.refusals import Refusal

NOT_YET_BUILT: tuple[Refusal, ...] = (
    Refusal(
        "ranks of quantised weights",
        lambda s: s.arguments.tp_size > 1 and s.quantization not in (None, "unquant") and s.arguments.tp_size,
        f"glm53_mono {__version__} shares bf16 weights alone among ranks: serve with --tp-size 1 instead of {{found}}, "
        "or a bf16 checkpoint",
    ),
    Refusal(
        "AITER bf16 layout",
        lambda s: (
            s.environment.aiter
            and s.quantization in (None, "unquant")
            and s.arguments.moe_runner_backend in ("auto", "aiter")
        ),
        f"glm53_mono {__version__} does not read bf16 expert weights that AITER has shuffled: set "
        "--moe-runner-backend triton",
    ),
    Refusal(
        "auxiliary hidden states",
        lambda s: s.arguments.enable_return_aux_hidden_states,
        f"glm53_mono {__version__} does not return hidden states of inner layers: serve without "
        "--enable-return-aux-hidden-states",
    ),
)
