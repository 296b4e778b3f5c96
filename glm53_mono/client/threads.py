"""The same work for many items, some at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(work: Callable[[Any], object], items: Iterable[Any], threads: int) -> None:
    """Do the work for each item, in so many threads; after an exception nothing begins, and the first is raised."""
    failed = threading.Event()

    def unless_failed(item: Any) -> None:
        if failed.is_set():
            return
        try:
            work(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(unless_failed, item) for item in items]
        for future in futures:
            future.result()
