"""A server as it would be launched: SGLang resolves the arguments and answers as its monokernel binding does.

Resolution asks the machine what it is. For an ISA that the machine does not have, the answers are given here, within
`platform_of`, through SGLang's own override of its platform facts.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm53_mono.upstream.server import Server, read_server


class LaunchError(RuntimeError):
    """SGLang would not start with these arguments; the message is one line."""


@dataclass(frozen=True)
class Platform:
    """What SGLang asks of the machine about its GPU (srt/runtime_context.py:1821)."""

    facts: Mapping[str, object]

    @property
    def capability(self) -> tuple[int, int]:
        """What `torch.cuda.get_device_capability` says there."""
        return self.facts["device_capability"]


def _platform(capability: tuple[int, int], **true_facts: bool) -> Platform:
    false_facts = dict.fromkeys(
        (
            "is_cuda",
            "is_hip",
            "is_npu",
            "is_xpu",
            "is_musa",
            "is_mps",
            "is_sm90",
            "is_sm100",
            "is_sm100_or_sm110",
            "is_sm110",
            "is_sm120",
            "is_blackwell",
            "is_hopper_with_cuda_12_3",
        ),
        False,
    )
    major, minor = capability
    return Platform({**false_facts, "device_capability": capability, "device_sm": 10 * major + minor, **true_facts})


PLATFORMS: Mapping[str, Platform] = {
    "gfx950": _platform((9, 5), is_hip=True),
    "sm_90": _platform((9, 0), is_cuda=True, is_sm90=True, is_hopper_with_cuda_12_3=True),
}
"""Machines that SGLang can be told it runs on, by ISA."""


@dataclass(frozen=True)
class Launch:
    """A server whose arguments SGLang has resolved, without starting it.

    Attributes:
        monokernel: whether the arguments ask for the AMD monokernel; they are resolved as if they did not, since the
            handler of that flag stops at the first refusal.
        cfg: SGLang's view of the resolved arguments.
        model_config: SGLang's configuration of the model.
        graph_sizes_are_explicit: whether the arguments list the batch sizes of the decode graphs.
    """

    monokernel: bool
    cfg: Any
    model_config: Any
    graph_sizes_are_explicit: bool

    @property
    def server(self) -> Server:
        """The server as refusals see it."""
        return read_server(self.cfg, self.model_config.hf_config)


@dataclass(frozen=True)
class Steps:
    """The steps that a server would route to a spec.

    Attributes:
        mode: "decode" or "target_verify".
        batch_sizes: requests, as padded to the decode graphs where there are any.
        tokens_per_request: rows of one request.
    """

    mode: str
    batch_sizes: tuple[int, ...]
    tokens_per_request: int

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of a step, for each batch size."""
        return tuple(size * self.tokens_per_request for size in self.batch_sizes)


def device_isa() -> str | None:
    """The ISA of this machine's GPU as SGLang names it, or None without a GPU."""
    from sglang.srt.kernel_plugins.amd import binding

    return binding.device_isa()


def load_plugins() -> None:
    """Let SGLang find and call its plugins, ours among them; a second call does nothing."""
    from sglang.srt import plugins

    with _quiet():
        plugins.load_plugins()


def parse(arguments: Sequence[str]) -> Any:
    """SGLang's `ServerArgs`, not yet resolved, from the arguments of `sglang.launch_server`.

    Raises:
        LaunchError: SGLang does not parse them.
    """
    from sglang.srt.server_args import prepare_server_args

    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage), contextlib.redirect_stdout(usage):
            return prepare_server_args(list(arguments))
    except SystemExit as error:
        said = usage.getvalue().strip().splitlines()
        raise LaunchError(f"SGLang does not parse these arguments: {said[-1] if said else error}") from error
    except Exception as error:  # a --config file that is missing or malformed
        raise LaunchError(f"SGLang does not parse these arguments: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """What an error of SGLang says, its lines joined, behind its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(line.strip() for line in lines)}" if lines else type(error).__name__


def resolve(arguments: Sequence[str]) -> Launch:
    """Resolve the arguments of `sglang.launch_server` as SGLang does before it starts anything.

    Args:
        arguments: the command line after the module name.

    Raises:
        LaunchError: SGLang does not parse them, or refuses them itself.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Phase

    with _quiet():
        server_args = parse(arguments)
        monokernel = server_args.enable_amd_monokernel
        server_args.enable_amd_monokernel = False
        # SGLang looks for a device where none is named; there may be none.
        server_args.device = server_args.device or "cuda"
        try:
            server_args.resolve_once()
            model_config = model_config_of(server_args)
        except Exception as error:  # whatever a handler or a config class raises, the server would not start
            raise LaunchError(f"SGLang refuses these arguments: {one_line(error)}") from error
    locked = server_args._cuda_graph_config_locked
    return Launch(monokernel, resolving_view(server_args), model_config, (Phase.DECODE, "bs") in locked)


def disable_reasons(launch: Launch, isa: str | None) -> tuple[Any, list[str]]:
    """The spec that SGLang finds for a server, or None, and every reason why the server would be refused.

    Args:
        launch: of `resolve`.
        isa: the device, None for none.
    """
    from sglang.srt.kernel_plugins.amd import binding

    with _quiet():
        return binding.monokernel_disable_reasons(cfg=launch.cfg, model_config=launch.model_config, isa=isa)


def served_steps(launch: Launch, widths: tuple[int, ...]) -> Steps:
    """The steps that SGLang would route to a spec (kernel_plugins/amd/binding.py:395-404).

    Args:
        launch: of `resolve`.
        widths: rows that the spec's launches can have, ascending.
    """
    from sglang.srt.kernel_plugins.amd import binding

    server = launch.server
    tokens = server.tokens_per_request
    sizes = tuple(width // tokens for width in widths if width % tokens == 0)
    captured = server.captured_batch_sizes
    if captured and not launch.graph_sizes_are_explicit:
        captured = binding.covered_capture_sizes(widths=widths, tokens_per_request=tokens, sizes=list(captured))
    if captured:
        sizes = tuple(size for size in sizes if size in captured)
    mode = "decode" if server.arguments.speculative_algorithm is None else "target_verify"
    return Steps(mode, sizes, tokens)


@contextlib.contextmanager
def platform_of(isa: str) -> Iterator[None]:
    """Have SGLang resolve as on a machine with such a GPU, AITER's pre-shuffled index keys included on ROCm.

    Args:
        isa: a key of `PLATFORMS`.
    """
    with _quiet():
        # Its modules import what this machine has, and must not be told otherwise.
        import sglang.srt.model_loader  # noqa: F401
    import torch
    from sglang.srt.layers.attention.dsa import utils as dsa_utils
    from sglang.srt.runtime_context import override_platform

    platform = PLATFORMS[isa]
    with contextlib.ExitStack() as stack:
        stack.enter_context(override_platform(**platform.facts))
        stack.enter_context(replaced(torch.cuda, "get_device_capability", lambda device=None: platform.capability))
        if platform.facts["is_hip"]:
            ask = "aiter_can_use_preshuffle_paged_mqa"
            stack.enter_context(replaced(dsa_utils, ask, _preshuffle_is_not_forbidden))
        yield


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Undo what resolution writes into this process's environment variables."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _preshuffle_is_not_forbidden() -> bool:
    """SGLang's own question (dsa/utils.py:34) without the parts that only a ROCm machine can answer."""
    from sglang.srt.environ import envs

    aiter = envs.SGLANG_USE_AITER.get() or not envs.SGLANG_USE_AITER.is_set()
    return aiter and not envs.SGLANG_DSA_HIP_DISABLE_PRESHUFFLE.get()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep SGLang's progress messages, and the logging it sets up while it parses, out of this process."""
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Put another function in the place of an owner's, for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
