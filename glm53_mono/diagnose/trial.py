"""Running the arms: each one's server starts, answers the requests and ends; every answer is recorded as it comes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm53_mono.client.http import Client, Generation, ServerError
from glm53_mono.client.process import last_lines, running
from glm53_mono.client.threads import in_threads
from glm53_mono.client.tokens import tokenizer_of
from glm53_mono.diagnose.arms import CONTROL, Arm, Changes, Others
from glm53_mono.diagnose.command import Command
from glm53_mono.diagnose.requests import Recorded
from glm53_mono.quality.detectors import Suspicion, suspicions
from glm53_mono.quality.divergence import MOST_APART, mean_distance
from glm53_mono.quality.journal import Journal

ANSWER, STATE = "answer", "state"
"""Kinds of records: one answer; how an arm ended."""


class Ended:
    """How an arm ended: the values of a state record's `ended`."""

    DONE = "done"
    FAILED = "failed"
    NOTHING = "nothing to change"


@dataclass(frozen=True)
class Settings:
    """How arms run.

    Attributes:
        repeats: how often each request is sent in an arm.
        parallel: requests at once, where the arm does not say one.
        deadline: by time.monotonic, after which nothing new begins.
        start_s: seconds that a server may take to start.
        tokenizer: a folder with a tokenizer.json, for servers without a tokenizer.
        scored: whether each answer is compared with the same server's prefill.
        logs: folder of the servers' logs.
    """

    repeats: int
    parallel: int
    deadline: float
    start_s: float
    tokenizer: Path | None
    scored: bool
    logs: Path


class OutOfTime(Exception):
    """The deadline has passed; what was answered is in the journal."""


@dataclass
class Trial:
    """The arms of one diagnosis.

    Attributes:
        base: the server's command, or the URL of one that runs.
        requests: sent in each arm.
        others: what the arms of several choices change to.
        settings: how.
        journal: takes the answers, and has those of an earlier run.
        say: told what is going on.
    """

    base: Command | str
    requests: Sequence[Recorded]
    others: Others
    settings: Settings
    journal: Journal
    say: Callable[[str], None] = lambda line: None

    def run(self, arms: Sequence[Arm], again: Collection[str] = ()) -> bool:
        """Run the control and the arms, as far as the time goes; what has ended in an earlier run is not run again.

        Arms that leave the server as it is run on one server.

        Args:
            again: names of arms to run again if they failed, as the control always is.

        Returns:
            Whether all have ended.
        """
        retried = {CONTROL.name, *again}
        states = {record["arm"]: record["ended"] for record in self.journal.records if record["kind"] == STATE}
        ended = {arm for arm, state in states.items() if state != Ended.FAILED or arm not in retried}
        left = [arm for arm in (CONTROL, *arms) if arm.name not in ended]
        try:
            asking = [arm for arm in left if arm.changes is Changes.ASKING]
            if asking:
                self._run_on_one_server(asking)
            for arm in left:
                if arm.changes is not Changes.ASKING:
                    self._run_on_one_server([arm])
        except OutOfTime:
            return False
        return True

    def _run_on_one_server(self, arms: Sequence[Arm]) -> None:
        command = self.base
        if isinstance(command, Command):
            changed = arms[0].apply(command, self.others)
            if changed is None:
                self._end(arms[0], Ended.NOTHING, "the server already is so")
                return
            command = changed
        self._check_time()
        log, left = self._log_of(arms[0]), list(arms)
        try:
            with self._server(command, arms[0]) as client:
                while left:
                    self._ask(left[0], client)
                    arm = left.pop(0)
                    self._end(
                        arm, Ended.DONE, "", _lines_with(arm.mark, log), watched=bool(_lines_with(arm.active, log))
                    )
        except (ServerError, FileNotFoundError) as error:
            self._check_time()
            self._fail(left, str(error), log)

    def _fail(self, arms: Sequence[Arm], reason: str, log: Path) -> None:
        """Arms whose server is gone; the end of its log says more than that no answer came."""
        if log.exists() and "\n" not in reason:
            reason = f"{reason}\n{last_lines(log)}"
        for arm in arms:
            self._end(arm, Ended.FAILED, reason, _lines_with(arm.mark, log))

    def _log_of(self, arm: Arm) -> Path:
        return self.settings.logs / f"{arm.name.replace(' ', '-')}.log"

    @contextmanager
    def _server(self, command: Command | str, arm: Arm) -> Iterator[Client]:
        if isinstance(command, str):
            yield Client(command)
            return
        self.say(f"{arm.name}: starting {' '.join(command.words)}")
        # a server that takes longer than what is left would end with nothing
        start_s = min(self.settings.start_s, self.settings.deadline - time.monotonic())
        with running(command.words, self._log_of(arm), environment=command.environment, start_s=start_s) as started:
            yield started.client

    def _ask(self, arm: Arm, client: Client) -> None:
        done = {(record["request"], record["repeat"]) for record in self._answers(arm)}
        wanted = [(place, repeat) for repeat in range(self.settings.repeats) for place in range(len(self.requests))]
        wanted = [pair for pair in wanted if pair not in done]
        self.say(f"{arm.name}: {len(wanted)} requests")
        tokenizer = tokenizer_of(client, self.settings.tokenizer)

        def answer(pair: tuple[int, int]) -> None:
            self._check_time()
            place, repeat = pair
            request = self.requests[place]
            if arm.cold:
                client.flush_cache()
            prompt = request.ids(tokenizer)
            began = time.monotonic()
            found = client.generate(Generation(prompt, request.tokens, logprobs=self.settings.scored, ignore_eos=False))
            seconds = time.monotonic() - began
            text = tokenizer.decode(found.tokens)
            symptoms = suspicions(found.tokens, text, "")
            if self.settings.scored and found.tokens:
                symptoms += _unlike_prefill(found.logprobs, client.score(prompt, found.tokens))
            if request.contains is not None and request.contains not in text:
                symptoms.append(Suspicion("content", f"{request.contains!r} is not in the answer"))
            self.journal.add(
                {
                    "kind": ANSWER,
                    "arm": arm.name,
                    "request": place,
                    "repeat": repeat,
                    "tokens": found.tokens,
                    "text": text,
                    "cached": found.cached,
                    "seconds": round(seconds, 3),
                    "symptoms": [asdict(symptom) for symptom in symptoms],
                }
            )

        in_threads(answer, wanted, 1 if arm.alone else self.settings.parallel)

    def _answers(self, arm: Arm) -> list[dict[str, Any]]:
        return [record for record in self.journal.records if record["kind"] == ANSWER and record["arm"] == arm.name]

    def _check_time(self) -> None:
        if time.monotonic() > self.settings.deadline:
            raise OutOfTime

    def _end(self, arm: Arm, ended: str, reason: str, findings: Sequence[str] = (), *, watched: bool = False) -> None:
        if reason:
            self.say(f"{arm.name}: {ended}: {reason}")
        record: Mapping[str, Any] = {
            "kind": STATE,
            "arm": arm.name,
            "ended": ended,
            "reason": reason,
            "findings": list(findings[:MOST_FINDINGS]),
            "finding_count": len(findings),
            "watched": watched,
        }
        self.journal.add(record)


MOST_FINDINGS = 20
"""Lines of a server's log that are kept."""


def _lines_with(pattern: str | None, log: Path) -> list[str]:
    """Lines of a server's log in which a regular expression is found; none without one."""
    if pattern is None or not log.exists():
        return []
    return [line for line in log.read_text(errors="replace").splitlines() if re.search(pattern, line)]


def _unlike_prefill(decoded: Sequence[float], scored: Sequence[float]) -> list[Suspicion]:
    if len(decoded) != len(scored):
        raise ServerError(f"the server gave {len(scored)} log-probabilities for an answer of {len(decoded)} tokens")
    apart = mean_distance(decoded, scored)
    if apart <= MOST_APART:
        return []
    place = max(range(len(decoded)), key=lambda i: abs(decoded[i] - scored[i]))
    detail = f"log-probabilities of decode and prefill are {apart:.2f} apart, most at token {place}"
    return [Suspicion("unlike its prefill", detail, place)]
