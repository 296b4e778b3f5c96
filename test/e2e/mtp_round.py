"""How long a round of drafts takes in a server: the kernel beside SGLang's own forward, one server after another.

`python -m test.e2e.mtp_round` serves dummy weights at the real widths to one request. A round is a verify step, and
beside it the draft model's steps and whatever the server does between them; SGLang simulates the accept length, so
that both arms give as many tokens a round. `--drafts 0,3` measures decode steps of servers without drafts too, and
tells from which accept length drafts pay. Dummy weights are so small that a router's bias chooses its experts, the same
ones for nearly every token: the arms read the same bytes, but fewer than a model whose tokens differ. `--model` names
a folder with weights.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from glm53_mono.checkpoint.config import model_config
from glm53_mono.cli.checkpoint import write_checkpoint
from glm53_mono.geometry import MAX_ROWS
from test.e2e.server import MONOKERNEL, Answer, Generation, Server, ServerError, drafting, grown, running

KERNEL, SGLANG = "kernel", "sglang"
ARMS: Mapping[str, tuple[str, ...]] = {SGLANG: (), KERNEL: MONOKERNEL}
"""Arguments of each arm, in the order in which the servers run."""

SHORT = 16
"""Tokens of the answer whose time is taken off a long one's: prompt, first rounds and the way through the server."""

FIRST_TOKEN = 16
"""Ids below are special tokens."""

SAME_LENGTH = 0.05
"""Part of an accept length by which a measured one may miss it: the last round of an answer may be cut short."""


class RoundError(RuntimeError):
    """A server whose rounds cannot be told; the message is one sentence."""


@dataclass(frozen=True)
class Pace:
    """How fast a server generates at one request.

    Attributes:
        step_ms: of a round, or of a decode step where the server does not draft: median over pairs of answers.
        least_ms: of the fastest pair.
        most_ms: of the slowest pair.
        steps: of all answers, those that warm up included.
        tokens_per_step: that a round gives: its accept length.
    """

    step_ms: float
    least_ms: float
    most_ms: float
    steps: int
    tokens_per_step: float


Paces = Mapping[int, Mapping[str, Pace]]
"""Of each arm, by number of drafts; 0 is a server without."""


def steps_of(answer: Answer, drafts: int) -> int:
    """Rounds of an answer, or its decode steps; the first token comes from the prompt.

    Raises:
        RoundError: a server that drafts does not tell its verify steps.
    """
    if not drafts:
        return len(answer.tokens) - 1
    if not answer.verify_steps:
        raise RoundError("the server's answers do not tell their verify steps (meta_info: spec_verify_ct)")
    return answer.verify_steps


def pace(
    generate: Callable[[Generation], Answer],
    prompt: Sequence[int],
    *,
    tokens: int,
    pairs: int,
    drafts: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Pace:
    """Times a long answer less a short one to the same prompt, over the steps that it has more.

    Args:
        generate: sends a request and waits for its answer; the first two warm up what the server compiles and caches.
        tokens: of the long answer.
        pairs: of a short and a long answer.
        drafts: of the server; 0 if it does not draft.

    Raises:
        RoundError: the long answer has no more steps than the short one.
    """

    def timed(count: int) -> tuple[float, Answer]:
        before = clock()
        answer = generate(Generation(prompt, count))
        return clock() - before, answer

    everything = sum(steps_of(timed(count)[1], drafts) for count in (SHORT, tokens))
    milliseconds, steps, gained = [], 0, 0
    for _ in range(pairs):
        (short_s, short), (long_s, long) = timed(SHORT), timed(tokens)
        more = steps_of(long, drafts) - steps_of(short, drafts)
        if more < 1:
            raise RoundError(f"an answer of {tokens} tokens took no more steps than one of {SHORT}")
        milliseconds.append(1e3 * (long_s - short_s) / more)
        steps += more
        gained += len(long.tokens) - len(short.tokens)
        everything += steps_of(long, drafts) + steps_of(short, drafts)
    return Pace(median(milliseconds), min(milliseconds), max(milliseconds), everything, gained / steps)


def check_accept_length(found: Pace, expected: float) -> None:
    """Refuses a pace at another accept length than the one that SGLang was to simulate.

    Raises:
        RoundError: likewise.
    """
    if abs(found.tokens_per_step - expected) > SAME_LENGTH * expected:
        raise RoundError(
            f"a step gave {found.tokens_per_step:.2f} tokens, not {expected:g}: SGLang did not simulate the accept "
            "length, or the answers are too short to tell (--tokens)"
        )


def check_kernel(counted: Mapping[tuple[str, str], int], steps: int) -> None:
    """Refuses a pace whose steps SGLang's forward ran.

    Args:
        counted: steps by path and reason while the pace was taken.
        steps: that the answers took; an overlapped step behind an answer's end comes on top.

    Raises:
        RoundError: likewise.
    """
    served = counted.get(("kernel", ""), 0)
    if served < steps:
        raise RoundError(f"the kernel ran {served} steps while the server took {steps}: {dict(counted)}")


def pays_from(paces: Paces, drafts: int, arm: str) -> float | None:
    """Accept length from which a round costs less a token than a decode step; None where no decode step was timed."""
    if not drafts or 0 not in paces:
        return None
    return paces[drafts][arm].step_ms / paces[0][arm].step_ms


def table(paces: Paces) -> Table:
    """The paces, a line for each number of drafts."""
    result = Table(title="one request: a round, or a decode step where the server does not draft")
    columns = ("MTP", "tokens\na round", "SGLang\nms", "kernel\nms", "SGLang /\nkernel")
    for name in (*columns, "pays from,\nSGLang", "pays from,\nkernel"):
        result.add_column(name, justify="right")
    for drafts, arms in paces.items():
        own, other = arms[KERNEL], arms[SGLANG]
        result.add_row(
            str(drafts) if drafts else "-",
            f"{own.tokens_per_step:.2f}",
            f"{other.step_ms:.2f}",
            f"{own.step_ms:.2f}",
            f"{other.step_ms / own.step_ms:.3f}",
            *(_two_places(pays_from(paces, drafts, arm)) for arm in (SGLANG, KERNEL)),
        )
    return result


def as_dict(paces: Paces) -> dict[str, Any]:
    """The paces as plain values, for JSON."""
    return {
        str(drafts): {
            arm: asdict(found) | {"pays_from_accept_length": pays_from(paces, drafts, arm)}
            for arm, found in arms.items()
        }
        for drafts, arms in paces.items()
    }


def arguments_of(arm: str, drafts: int) -> tuple[str, ...]:
    """Arguments of a server beside those that all share; both arms count steps, so that both pay for it."""
    return (*ARMS[arm], "--enable-metrics", *(drafting(drafts) if drafts else ()))


def environment_of(accept_length: float) -> dict[str, str]:
    """Variables by which SGLang accepts so many tokens a round, whatever was drafted (srt/environ.py)."""
    return {"SGLANG_SIMULATE_ACC_LEN": str(accept_length), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}


def parse_drafts(text: str) -> tuple[int, ...]:
    """Numbers of drafts, as in `0,3`.

    Raises:
        ValueError: something else, or more drafts than a launch has rows for.
    """
    words = text.split(",")
    if not all(word.isdecimal() and int(word) < MAX_ROWS for word in words):
        raise ValueError(f"--drafts {text!r} is not a list of numbers from 0 to {MAX_ROWS - 1}, such as 0,3")
    return tuple(dict.fromkeys(map(int, words)))


def main(
    drafts: Annotated[str, typer.Option(help="Drafts of a round, e.g. 0,3; 0 serves without drafts.")] = "3",
    accept_length: Annotated[float, typer.Option(help="Tokens that a round gives.")] = 3.0,
    layers: Annotated[int, typer.Option(help="Of the model with dummy weights.")] = 45,
    experts: Annotated[int, typer.Option(help="Of each of its layers that routes.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens of a long answer.")] = 512,
    pairs: Annotated[int, typer.Option(help="Of a short and a long answer; the median counts.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the prompt.")] = 0,
    model: Annotated[Path | None, typer.Option(help="Serve this folder, its weights included.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for the servers' logs; it must exist.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the numbers there too.")] = None,
    at_most: Annotated[
        float | None, typer.Option(help="Exit with 1 if a round on the kernel takes more milliseconds.")
    ] = None,
) -> None:
    """Time rounds of drafts at one request, SGLang's own forward and the kernel one after the other."""
    try:
        numbers = parse_drafts(drafts)
    except ValueError as error:
        _refuse(str(error))
    if accept_length < 1:
        _refuse(f"--accept-length {accept_length:g} is less than 1: a round gives at least the token after its drafts")
    if tokens <= SHORT or pairs < 1 or context < 1:
        _refuse(f"--tokens must be more than {SHORT}, --pairs and --context at least 1")
    if logs is not None and not logs.is_dir():
        _refuse(f"--logs {logs} is not a folder")
    with tempfile.TemporaryDirectory() as scratch:
        folder = model or Path(scratch) / "model"
        if model is None:
            write_checkpoint(folder, model_config(layers, experts), seed, weights=False)
        vocab = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
        source = random.Random(seed)
        prompt = [source.randrange(FIRST_TOKEN, vocab) for _ in range(context)]
        loading = () if model else ("--load-format", "dummy")
        paces: dict[int, dict[str, Pace]] = {}
        for count in numbers:
            paces[count] = {}
            for arm in ARMS:
                log = (logs or Path(scratch)).resolve() / f"round-{arm}-{count}.log"
                length = min(accept_length, count + 1)
                variables = environment_of(length) if count else {}
                try:
                    with running(folder, log, *arguments_of(arm, count), *loading, environment=variables) as server:
                        found = _pace_of(server, arm, prompt, tokens=tokens, pairs=pairs, drafts=count)
                    check_accept_length(found, length)
                except (RoundError, ServerError) as error:
                    print(f"mtp_round: {arm}, {count} drafts: {error}", file=sys.stderr)
                    raise typer.Exit(1) from error
                paces[count][arm] = found
                print(f"{arm}, {count} drafts: {found}", file=sys.stderr, flush=True)
    Console(highlight=False, markup=False).print(table(paces))
    if as_json is not None:
        as_json.write_text(json.dumps(as_dict(paces), indent=2) + "\n")
    slow = [count for count in numbers if count and at_most is not None and paces[count][KERNEL].step_ms > at_most]
    if slow:
        print(f"mtp_round: a round of {slow[0]} drafts on the kernel takes more than {at_most} ms", file=sys.stderr)
        raise typer.Exit(1)


def _pace_of(server: Server, arm: str, prompt: Sequence[int], *, tokens: int, pairs: int, drafts: int) -> Pace:
    before = server.steps()
    found = pace(server.generate, prompt, tokens=tokens, pairs=pairs, drafts=drafts)
    if arm == KERNEL:
        check_kernel(grown(server.steps(), before), found.steps)
    return found


def _two_places(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _refuse(sentence: str) -> NoReturn:
    print(f"mtp_round: {sentence}", file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
