"""What is compared in a step, in the order in which the step computes it, and how far apart it may be."""

from __future__ import annotations

from glm53_mono.check.choices import EXPERT_TIE, POOL_TIE
from glm53_mono.check.comparisons import Comparison
from glm53_mono.geometry import Geometry
from glm53_mono.numerics import BOUNDS, Distance, beside_rounded_activations
from glm53_mono.weights.descriptor import Storage
from glm53_mono.weights.formats import Formats

SAME_BITS = Distance(0.0, 0.0)

ANY = Distance(3e38, 3e38)
"""Of what is measured and not judged; a NaN is beyond it all the same."""

EMBEDDING, FINAL, LAUNCH, FORWARD = "embedding", "final norm", "launch", "whole forward"
ATTENTION, FFN = "attention", "ffn"


def comparisons(geometry: Geometry, formats: Formats, *, verify: bool, whole: bool = False) -> list[Comparison]:
    """Every comparison of a step.

    Args:
        geometry: of the rank.
        formats: of the weights.
        verify: it is a verify step.
        whole: SGLang's whole forward runs too.

    The part `launch` compares the one launch that the server goes on with, bit for bit, with the same phases launched
    one by one, whose parts the other comparisons hold against SGLang's: what a missing barrier spoils is seen there.
    """
    found = [Comparison(-1, EMBEDDING, "streams", SAME_BITS)]
    for layer in range(geometry.layers):
        found += _input(layer, ATTENTION)
        found += _mla(layer, formats) if layer in geometry.dsa_layers else _kda(layer, verify=verify)
        found += [Comparison(layer, ATTENTION, "streams", BOUNDS["mhc", "streams"]), *_input(layer, FFN)]
        sparse = not geometry.is_dense(layer)
        if sparse:
            found += [
                Comparison(layer, FFN, "chosen experts", Distance(EXPERT_TIE, EXPERT_TIE)),
                Comparison(layer, FFN, "expert weights", BOUNDS["router", "weights"]),
            ]
        found += [
            Comparison(layer, FFN, "output", _experts_bound(formats) if sparse else _dense_bound(formats)),
            Comparison(layer, FFN, "streams", BOUNDS["mhc", "streams"]),
        ]
    found.append(Comparison(geometry.layers, FINAL, "hidden", BOUNDS["head", "hidden"]))
    for layer in range(geometry.layers):
        found += [
            Comparison(layer, LAUNCH, region, SAME_BITS, per_request=region != "latent" and region != "index keys")
            for region in _regions(layer, geometry, verify=verify)
        ]
    found.append(Comparison(geometry.layers, LAUNCH, "hidden", SAME_BITS))
    if whole:
        found.append(Comparison(geometry.layers, FORWARD, "logits", ANY))
    return found


def _regions(layer: int, geometry: Geometry, *, verify: bool) -> list[str]:
    if layer in geometry.dsa_layers:
        return ["latent", "ring keys", "ring gates", "index keys"]
    if verify:
        return ["window", "state", "draft windows", "draft states"]
    return ["window", "state", "tracked window", "tracked state"]


def _input(layer: int, part: str) -> list[Comparison]:
    return [
        Comparison(layer, part, "input", BOUNDS["mhc", "layer_input"]),
        Comparison(layer, part, "post", BOUNDS["mhc", "post"]),
        Comparison(layer, part, "comb", BOUNDS["mhc", "comb"]),
    ]


def _kda(layer: int, *, verify: bool) -> list[Comparison]:
    window, state = BOUNDS["kda", "window"], BOUNDS["kda", "state"]
    if verify:
        regions = [
            # SGLang's own verify step overwrites the committed windows before the commit: held to what they were
            Comparison(layer, ATTENTION, "window", SAME_BITS, per_request=True),
            Comparison(layer, ATTENTION, "state", SAME_BITS, per_request=True),
            Comparison(layer, ATTENTION, "draft windows", window, per_request=True),
            Comparison(layer, ATTENTION, "draft states", state, per_request=True),
        ]
    else:
        regions = [
            Comparison(layer, ATTENTION, "window", window, per_request=True),
            Comparison(layer, ATTENTION, "state", state, per_request=True),
            # SGLang copies all layers' at the last one (hybrid_linear_attn_backend.py: _track_mamba_state_decode)
            Comparison(layer, ATTENTION, "tracked window", SAME_BITS, per_request=True),
            Comparison(layer, ATTENTION, "tracked state", SAME_BITS, per_request=True),
        ]
    return [*regions, Comparison(layer, ATTENTION, "output", BOUNDS["kda", "output"])]


def _beside(bound: Distance, *products: Storage) -> Distance:
    return beside_rounded_activations(bound, *(storage.format.name.lower() for storage in products))


def _dense_bound(formats: Formats) -> Distance:
    """Gate and up are two factors of what goes down."""
    return _beside(BOUNDS["dense", "output"], formats.dense_up, formats.dense_up, formats.dense_down)


def _experts_bound(formats: Formats) -> Distance:
    return _beside(BOUNDS["experts", "output"], formats.experts_up, formats.experts_up, formats.down)


def _mla(layer: int, formats: Formats) -> list[Comparison]:
    scores = (formats.latents, formats.index_query, formats.index_key)
    # the latents of the query and of the keys
    path = (formats.latents, formats.latents, formats.query, formats.attention_output)
    pools = _beside(Distance(POOL_TIE, POOL_TIE), *scores)
    key = _beside(BOUNDS["indexer", "key"], formats.index_key)
    ring = _beside(BOUNDS["indexer", "ring"], formats.index_key)
    return [
        Comparison(layer, ATTENTION, "latent", _beside(BOUNDS["mla", "latent"], formats.latents)),
        Comparison(layer, ATTENTION, "ring keys", ring, per_request=True),
        Comparison(layer, ATTENTION, "ring gates", BOUNDS["indexer", "ring"], per_request=True),
        Comparison(layer, ATTENTION, "index keys", key),
        Comparison(layer, ATTENTION, "chosen pools", pools),
        Comparison(layer, ATTENTION, "output", _beside(BOUNDS["mla", "output"], *path)),
    ]
