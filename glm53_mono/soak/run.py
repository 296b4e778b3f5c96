"""Running the sessions: each turn's prompt is the whole session so far, so that all but its end is in the prefix cache.

With two arms both answer every prompt, and the leading arm's answers are what the session goes on with: the arms differ
in nothing but themselves. An arm may be a recorded run; then it leads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm53_mono.client.http import Client, Generation, ServerError
from glm53_mono.client.threads import in_threads
from glm53_mono.client.tokens import Tokenizer
from glm53_mono.quality.detectors import FOREIGN_TOKENS, suspicions
from glm53_mono.quality.journal import Journal
from glm53_mono.soak.plan import Plan

TURN, FAILED, STARTED = "turn", "failed", "started"
"""Kinds of records: an answer; a server that gave none; a run that begins or goes on."""

EARLIER_CHARACTERS = 8000
"""Of a session's answers, the last ones that an answer's characters are compared with."""

PASSING_PAUSE_S = (0.05, 1.0)
"""Seconds between passers-by, at least and at most."""

ABORTED_EVERY = 3
"""Of so many passers-by one leaves before its end."""


@dataclass(frozen=True)
class Arm:
    """Who answers.

    Attributes:
        name: in the records: a URL, or a file.
        client: of the server; None for a recorded run.
        tokenizer: of the server; None likewise.
        recorded: answers by session and turn, of a recorded run.
    """

    name: str
    client: Client | None = None
    tokenizer: Tokenizer | None = None
    recorded: Mapping[tuple[int, int], Mapping[str, Any]] | None = None


class Soak:
    """One run.

    Args:
        plan: what to ask.
        arms: one or two; the first one leads. One at least is a server.
        journal: takes the answers, and has those of an earlier run.
        suspects: file that takes the requests whose answers look wrong.
        deadline: by time.monotonic, after which no turn begins.
        say: told what is going on.
    """

    def __init__(
        self,
        plan: Plan,
        arms: Sequence[Arm],
        journal: Journal,
        suspects: Path,
        deadline: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._plan = plan
        self._arms = tuple(arms)
        self._journal = journal
        self._suspects = suspects
        self._lock = threading.Lock()
        self._deadline = deadline
        self._say = say
        self._known = {
            (record["arm"], record["session"], record["turn"]): record
            for record in journal.records
            if record["kind"] == TURN
        }
        self._ended = threading.Event()
        self._complete = True

    def run(self) -> bool:
        """Run what is left.

        Returns:
            Whether every session came to its end: in time, and with an answer to every turn.
        """
        self._journal.add({"kind": STARTED})
        live = [arm for arm in self._arms if arm.client is not None]
        with ThreadPoolExecutor(len(live)) as pool:
            passing = [pool.submit(self._pass_by, arm, number) for number, arm in enumerate(live)]
            try:
                in_threads(self._session, range(self._plan.sessions), self._plan.parallel)
            finally:
                self._ended.set()
            for future in passing:
                future.result()
        return self._complete

    def _session(self, session: int) -> None:
        prompt: list[int] = []
        earlier: dict[str, str] = {}
        lead = self._arms[0]
        encode = next(arm.tokenizer for arm in self._arms if arm.tokenizer is not None).encode
        for turn in range(self._plan.turns):
            prompt = prompt + self._plan.turn(session, turn, encode)
            if len(prompt) + self._plan.answer > self._plan.depth:
                return
            if lead.recorded is not None and (session, turn) not in lead.recorded:
                return
            if time.monotonic() > self._deadline:
                self._complete = False
                return
            try:
                records = [self._answer(arm, session, turn, prompt, earlier.get(arm.name, "")) for arm in self._arms]
            except ServerError as error:
                self._complete = False
                self._say(f"session {session}, turn {turn}: {error}")
                self._journal.add({"kind": FAILED, "reason": f"session {session}, turn {turn}: {error}"})
                return
            for arm, record in zip(self._arms, records, strict=True):
                earlier[arm.name] = (earlier.get(arm.name, "") + record["text"])[-EARLIER_CHARACTERS:]
            prompt = prompt + _without_end(records[0])
        self._say(f"session {session}: {len(prompt)} tokens deep")

    def _answer(self, arm: Arm, session: int, turn: int, prompt: list[int], earlier: str) -> Mapping[str, Any]:
        if arm.recorded is not None:
            return arm.recorded[session, turn]
        known = self._known.get((arm.name, session, turn))
        if known is not None:
            return known
        assert arm.client is not None and arm.tokenizer is not None
        began = time.monotonic()
        answer = arm.client.generate(Generation(prompt, self._plan.answer, logprobs=True, ignore_eos=False))
        seconds = time.monotonic() - began
        text = arm.tokenizer.decode(answer.tokens)
        record = {
            "kind": TURN,
            "arm": arm.name,
            "session": session,
            "turn": turn,
            "prompt": digest(prompt),
            "prompt_tokens": len(prompt),
            "cached": answer.cached,
            "tokens": answer.tokens,
            "gaps": [round(gap, 3) for gap in answer.top_gaps],
            "text": text,
            "ended": answer.finished,
            "seconds": round(seconds, 3),
            "suspicions": [asdict(suspicion) for suspicion in suspicions(answer.tokens, text, earlier)],
        }
        self._journal.add(record)
        if record["suspicions"]:
            self._suspect(record, prompt)
        return record

    def _suspect(self, record: Mapping[str, Any], prompt: list[int]) -> None:
        """Keep the request of an answer that looks wrong, as `glm53-mono diagnose` reads it."""
        name = f"session {record['session']}, turn {record['turn']} of {record['arm']}"
        request = {"name": name, "input_ids": prompt, "max_new_tokens": self._plan.answer}
        with self._lock, self._suspects.open("a") as file:
            file.write(json.dumps(request) + "\n")

    def _pass_by(self, arm: Arm, number: int) -> None:
        """Short requests that join the sessions' batches and leave them, every third before its end."""
        assert arm.client is not None and arm.tokenizer is not None
        source = random.Random(f"{self._plan.seed} passing {number}")
        for count in itertools.count(1):
            if self._ended.wait(source.uniform(*PASSING_PAUSE_S)) or time.monotonic() > self._deadline:
                return
            prompt, tokens = self._plan.passer_by(source, arm.tokenizer.encode)
            generation = Generation(prompt, tokens)
            try:
                if count % ABORTED_EVERY:
                    arm.client.generate(generation)
                else:
                    arm.client.abort(generation, f"soak-{number}-{count}-{time.monotonic_ns()}")
            except ServerError as error:
                self._complete = False
                self._say(f"passer-by {count}: {error}")
                self._journal.add({"kind": FAILED, "reason": f"passer-by {count}: {error}"})
                return


def digest(prompt: Sequence[int]) -> str:
    """Tells prompts apart."""
    return hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8).hexdigest()


def _without_end(record: Mapping[str, Any]) -> list[int]:
    """An answer's tokens as the session goes on with them: the next turn has the token that begins it."""
    tokens = list(record["tokens"])
    ends = record["ended"] and record["text"].rstrip().endswith(FOREIGN_TOKENS)
    return tokens[:-1] if ends else tokens
