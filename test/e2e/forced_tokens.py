"""The logit processor that the servers of the tests load; it runs in their processes and imports nothing of ours."""

from __future__ import annotations

from typing import Any


class Forced:
    """Leaves one token possible: the next of the request's list.

    With overlapped scheduling a decode step's request does not know its last token yet, so decode steps count from the
    prefill before them. A prefill does know: it makes the first token, or after a retraction the first that was lost.
    """

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
        for row, params in enumerate(custom_param_list):
            request = params["__req__"]
            if request.decode_batch_idx == 0:
                params["forced_from"] = len(request.output_ids)
            tokens = params["forced_tokens"]
            step = min(params["forced_from"] + request.decode_batch_idx, len(tokens) - 1)
            logits[row] = -float("inf")
            logits[row, tokens[step]] = 0.0
        return logits
