"""The logit processor that the servers of the tests load; it runs in their processes and imports nothing of ours."""

from __future__ import annotations

from typing import Any


class Forced:
    """Leaves one token possible: the next of the request's list.

    It counts its own calls: with overlapped scheduling the request does not know its last token yet.
    """

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
        for row, params in enumerate(custom_param_list):
            step = params.get("forced_step", 0)
            params["forced_step"] = step + 1
            tokens = params["forced_tokens"]
            logits[row] = -float("inf")
            logits[row, tokens[min(step, len(tokens) - 1)]] = 0.0
        return logits
