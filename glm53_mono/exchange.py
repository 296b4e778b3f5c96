"""The ranks' symmetric buffers made known to one another, at the build: each is mapped into every process once.

The handles are torch's own IPC handles of CUDA and HIP memory, sent through the ranks' CPU group. Ranks fail together:
one that could not prepare its launch says so, and no other one waits for its buffer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from glm53_mono.program.symmetric import Peers

Gather = Callable[[Any], list[Any]]
"""Gives every rank's value, in the order of the ranks; a collective of all of them."""


class ExchangeError(RuntimeError):
    """Not every rank has its buffer; the message names the ranks and what each of them met."""


@dataclass
class SharedBuffers:
    """The buffers of all ranks, as long as this process maps them."""

    peers: Peers
    _mapped: list[Tensor] = field(repr=False)

    def close(self) -> None:
        """Unmaps the peers' buffers; no launch may run any more. A second call does nothing."""
        self._mapped.clear()
        if self.peers.table.is_cuda:
            torch.cuda.ipc_collect()


def exchange_buffers(own: Tensor, rank: int, gather: Gather) -> SharedBuffers:
    """Shares this rank's buffer and maps those of the others. A collective: every rank calls it, or `give_up`.

    Args:
        own: uint8, this rank's symmetric buffer, zeroed; it must outlive the peers' mappings.
        rank: of this process.

    Raises:
        ExchangeError: a rank gave up, has a buffer of another size, or could not map one.
    """
    if own.is_cuda:
        # a peer may raise its first flag as soon as it has the handle
        torch.cuda.synchronize(own.device)
    offers = gather((None, own.numel(), reduce_tensor(own)))
    _refuse([failure for failure, *_ in offers])
    sizes = [size for _, size, _ in offers]
    mapped, failure = [], None
    if len({*sizes}) > 1:
        failure = f"its buffer has {own.numel()} bytes, where the ranks' have {sizes}: are all GPUs of one kind?"
    else:
        try:
            mapped = [own if peer == rank else _mapped(handle, own) for peer, (_, _, handle) in enumerate(offers)]
        except RuntimeError as error:
            failure = f"it cannot map a peer's buffer: {error}"
    _refuse(gather(failure))
    return SharedBuffers(Peers.of_addresses(rank, [buffer.data_ptr() for buffer in mapped], own.device), mapped)


def give_up(failure: str, gather: Gather) -> None:
    """Tells the ranks that wait in `exchange_buffers` that this one has nothing to share; a collective with theirs."""
    gather((failure, 0, None))


def _refuse(failures: list[str | None]) -> None:
    found = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
    if found:
        raise ExchangeError("the ranks cannot share their buffers: " + "; ".join(found))


def _mapped(handle: tuple[Callable[..., Tensor], tuple[Any, ...]], own: Tensor) -> Tensor:
    """A peer's buffer in this process.

    It lies on the peer's GPU and is opened on ours, which is what lets our kernels reach it: CUDA enables the access
    between the two devices when it opens a handle.
    """
    rebuild, values = handle
    given = inspect.signature(rebuild).bind(*values)
    if "storage_device" in given.arguments:
        given.arguments["storage_device"] = own.device.index
    return rebuild(*given.args, **given.kwargs)
