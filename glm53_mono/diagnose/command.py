"""A server's command line and environment, with one thing changed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

LAUNCHER = (sys.executable, "-m", "sglang.launch_server")


@dataclass(frozen=True)
class Command:
    """What starts a server.

    Attributes:
        words: program and arguments.
        environment: variables beside this process's.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, words: Sequence[str]) -> Command:
        """From what stands behind `--`: a whole command, or the arguments of `sglang.launch_server` alone."""
        return cls(tuple(words) if words and not words[0].startswith("-") else (*LAUNCHER, *words))

    def with_options(self, *words: str) -> Command:
        """Options more; SGLang's parser takes the last of an option that is given twice."""
        return replace(self, words=(*self.words, *words))

    def without_options(self, *patterns: str) -> Command:
        """Without the options that a regular expression names as a whole, and without their values."""
        kept, dropping = [], False
        for word in self.words:
            if _is_option(word):
                name = word.partition("=")[0]
                dropping = any(re.fullmatch(pattern, name) for pattern in patterns)
            if not dropping:
                kept.append(word)
        return replace(self, words=tuple(kept))

    def with_variable(self, name: str, value: str) -> Command:
        """An environment variable more."""
        return replace(self, environment={**self.environment, name: value})

    def value(self, *names: str) -> str | None:
        """The value of an option by any of its names, None where it is not given."""
        found = None
        for place, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name in names:
                following = self.words[place + 1 : place + 2]
                found = value if equals else next(iter(following), None)
        return found

    def has(self, pattern: str) -> bool:
        """Whether an option is given that the regular expression names as a whole."""
        return any(_is_option(word) and re.fullmatch(pattern, word.partition("=")[0]) for word in self.words)


def _is_option(word: str) -> bool:
    """Not a value: negative numbers are values."""
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)
