"""Plausible mistakes in the device code; the comparison with the reference must turn red on each.

In the interpreter a device function is a Python object that its callers look up in their module, so a mistake is a
function that stands in for the right one. A name that no longer exists raises.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import triton.language as tl

from glm53_mono.kernels import indexer, kda, mhc, mla, moe, monokernel
from glm53_mono.kernels.memory import private, region
from glm53_mono.kernels.record import Word
from tests.kernels.rig import ONE_KDA, ONE_MLA, Pattern
from tests.sources import Wrap, wrapped

TWO_SPARSE = Pattern(kda_layers=(0, 1), layers=2, dense_layers=0)


@dataclass(frozen=True)
class Bug:
    """Device functions replaced by wrong ones, and the model and step that must notice."""

    name: str
    pattern: Pattern
    wraps: tuple[tuple[ModuleType, str, Wrap], ...]
    verify: bool = False

    def seeded(self) -> AbstractContextManager[None]:
        """The kernels with the mistake, for as long as the block lasts."""
        return wrapped(self.wraps)


def _identity(_right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *_rest: x


def _window_newest_first(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda window, h1, h2, u, *rest: right(window, u, h2, h1, *rest)


def _taps_reversed(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda u, window, row, token, tap, *rest: right(u, window, row, token, 2 - tap, *rest)


def _committed_taps_alone(right: Callable[..., Any]) -> Callable[..., Any]:
    """An earlier draft's input is not seen: a row convolves over the committed window, shifted."""

    def tap_input(u: Any, window: Any, row: Any, token: Any, tap: int, *rest: Any) -> Any:
        return right(u, window, row, token * 0, tap, *rest)

    return tap_input


def _state_written_in_verify(right: Callable[..., Any]) -> Callable[..., Any]:
    def kda_delta(workspace: Any, record: Any, step: Any, rows: Any, _verify: bool, *rest: Any) -> None:
        right(workspace, record, step, rows, True, *rest)
        right(workspace, record, step, rows, False, *rest)

    return kda_delta


def _comb_transposed(right: Callable[..., Any]) -> Callable[..., Any]:
    def mix_coefficients(workspace: Any, record: Any, row: Any, W: Any, G: Any) -> None:
        right(workspace, record, row, W, G)
        lane = tl.arange(0, mhc.GROUP.value)
        comb = region(workspace, W.coefficients, tl.float32) + row * mhc.SLOTS.value + mhc.GROUP.value
        there = comb + lane[:, None] * mhc.GROUP.value + lane[None, :]
        back = comb + lane[None, :] * mhc.GROUP.value + lane[:, None]
        tl.store(there, tl.load(back))

    return mix_coefficients


def _no_clamp(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda gate, up, _limit: right(gate, up, 1e30)


def _stale_experts(right: Callable[..., Any]) -> Callable[..., Any]:
    """The second sparse layer runs the experts that the first one chose."""

    def route(workspace: Any, record: Any, state_slots: Any, tokens: Any, rows: Any, W: Any, *rest: Any) -> Any:
        if int(tl.load(record + int(Word.LAYER))) == 0:
            return right(workspace, record, state_slots, tokens, rows, W, *rest)
        return tl.load(private(workspace, W.expert_list, W.expert_list_bytes, tl.int32) + W.distinct_count_at)

    return route


def _ring_off_by_one(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda record, step, row, ring, *rest: right(record, step, row, ring + 1, *rest)


def _halved(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda absmax: right(absmax) * 0.5


def _without_tail(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda row, length, *rest: right(row, length // 4 * 4, *rest)


def _one_token_short(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda step, row, verify: right(step, row, verify) - int(verify)


def _slot_of_row_before(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda workspace, record, step, row, *rest: right(workspace, record, step, max(int(row) - 1, 0), *rest)


def _layout(tiled: bool) -> Wrap:
    return lambda right: lambda entry, channel, _tiled, geometry: right(entry, channel, tiled, geometry)


def _length_by_place(right: Callable[..., Any]) -> Callable[..., Any]:
    """A row's length depends on where in the batch it stands."""
    return lambda step, row, verify: right(step, row, verify) + row % 2


def _mirrored(_right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: 1.0 / (1.0 + tl.exp(x))


def edited(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A module of device code with one place in its source changed, for mistakes inside a function."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, f"{module.__name__} has {old!r} {source.count(old)} times, once was expected"
    path = folder / f"edited_{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


BUGS = (
    Bug("convolution taps reversed", ONE_KDA, ((kda, "tap_input", _taps_reversed),)),
    Bug("convolution without SiLU", ONE_KDA, ((kda, "silu", _identity),)),
    Bug("window stored newest first", ONE_KDA, ((kda, "store_window", _window_newest_first),)),
    Bug("keys and queries not normalised", ONE_KDA, ((kda, "unit", _identity),)),
    Bug("gate's sigmoid mirrored", ONE_KDA, ((kda, "sigmoid", _mirrored),)),
    Bug("comb transposed", ONE_KDA, ((mhc, "mix_coefficients", _comb_transposed),)),
    Bug("SwiGLU without its clamp", ONE_KDA, ((moe, "clamped_swiglu", _no_clamp),)),
    Bug("stale expert list", TWO_SPARSE, ((moe, "route", _stale_experts),)),
    Bug("earlier drafts not convolved", ONE_KDA, ((kda, "tap_input", _committed_taps_alone),), verify=True),
    Bug("verify writes the state", ONE_KDA, ((monokernel, "kda_delta", _state_written_in_verify),), verify=True),
    Bug("ring entry off by one", ONE_MLA, ((indexer, "close_pool", _ring_off_by_one),)),
    Bug("fp8 scale halved", ONE_MLA, ((indexer, "fp8_scale", _halved),)),
    Bug("keys in the other layout", ONE_MLA, ((indexer, "key_offset", _layout(tiled=True)),)),
    Bug("tail dropped", ONE_MLA, ((mla, "attend_tokens", _without_tail),)),
    Bug("latent of the row before", ONE_MLA, ((mla, "write_latent", _slot_of_row_before),)),
    Bug("a row does not see itself", ONE_MLA, ((mla, "row_length", _one_token_short),), verify=True),
)
"""Each must be found by comparing one step, part by part, with the reference."""

PLACE_IN_BATCH = Bug("length by place in the batch", ONE_MLA, ((mla, "row_length", _length_by_place),))
"""What row invariance must find."""

DRAFTS_APART = Bug("earlier drafts not convolved", ONE_KDA, ((kda, "tap_input", _committed_taps_alone),), verify=True)
"""What comparing a verify step with decode steps must find."""
