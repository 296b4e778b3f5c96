"""Text and token ids of a server's model: by the server itself, or by a tokenizer's file where the server has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as FastTokenizer

from glm53_mono.client.http import Client, ServerError

FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """Text to token ids and back; special tokens are shown in the text, and none are added to the ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""


@dataclass(frozen=True)
class ServerTokenizer:
    """The server's own, over HTTP."""

    client: Client

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self.client.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        if not tokens:
            return ""
        return self.client.post("/detokenize", {"tokens": list(tokens), "skip_special_tokens": False})["text"]


class FileTokenizer:
    """A tokenizer.json.

    Args:
        folder: that holds it.

    Raises:
        FileNotFoundError: it does not.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder} holds no {FILE}")
        self._tokenizer = FastTokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def tokenizer_of(client: Client, folder: Path | None) -> Tokenizer:
    """The tokenizer to use with a server.

    Args:
        client: of the server.
        folder: with a tokenizer.json, to use instead of the server's own.

    Raises:
        ServerError: no folder was named, and the server has no tokenizer.
        FileNotFoundError: a folder without the file.
    """
    if folder is not None:
        return FileTokenizer(folder)
    tokenizer = ServerTokenizer(client)
    try:
        tokenizer.encode("a")
    except ServerError as error:
        raise ServerError(
            f"{error}; a server without a tokenizer (--skip-tokenizer-init) needs --tokenizer with the folder of its "
            f"{FILE}"
        ) from error
    return tokenizer
