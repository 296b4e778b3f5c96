"""Recorded requests: JSONL of prompts, or what SGLang itself logs of the requests that it gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm53_mono.client.tokens import Tokenizer

DEFAULT_TOKENS = 256
"""Generated for a request that names no number."""

LOGGED = "request.received"
"""SGLang's event of a request that came (--log-requests --log-requests-level 3 --log-requests-format json)."""


class RecordingError(ValueError):
    """A file of requests that cannot be read; the message names the line."""


@dataclass(frozen=True)
class Recorded:
    """A request to send again, greedily.

    Attributes:
        name: of its line.
        prompt: a text, or token ids.
        tokens: to generate at most.
        contains: what a right answer holds; None where nobody knows.
    """

    name: str
    prompt: str | tuple[int, ...]
    tokens: int
    contains: str | None = None

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt's token ids."""
        return tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else list(self.prompt)


def read_requests(file: Path) -> list[Recorded]:
    """The requests of a file: an object a line with `prompt` or `input_ids`, and perhaps `max_new_tokens`, `contains`
    and `name`; or a line of SGLang's request log. Other lines of such a log are passed over.

    Raises:
        RecordingError: no request in it, or a line that is neither.
    """
    try:
        lines = file.read_text().split("\n")
    except OSError as error:
        raise RecordingError(f"{file} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            # a log in a file has the time in brackets before each object
            record = json.loads(line[line.find("{") :] if line.startswith("[") else line)
            if not isinstance(record, dict):
                raise ValueError(f"{type(record).__name__}, not an object")
            if "event" in record and record["event"] != LOGGED:
                continue
            found.append(_request(record.get("obj", record), f"line {number}"))
        except ValueError as error:
            raise RecordingError(f"{file}, line {number} is no request: {error}") from error
    if not found:
        raise RecordingError(f"{file} holds no request")
    return found


def _request(record: Mapping[str, Any], name: str) -> Recorded:
    ids, text = record.get("input_ids"), record.get("prompt") or record.get("text")
    if ids and all(isinstance(token, int) for token in ids):
        prompt: str | tuple[int, ...] = tuple(ids)
    elif isinstance(text, str) and text:
        prompt = text
    else:
        raise ValueError("it has neither `prompt`, a text, nor `input_ids`, whole numbers")
    sampling = record.get("sampling_params") or {}
    tokens = record.get("max_new_tokens") or sampling.get("max_new_tokens") or DEFAULT_TOKENS
    return Recorded(record.get("name") or name, prompt, int(tokens), record.get("contains"))
