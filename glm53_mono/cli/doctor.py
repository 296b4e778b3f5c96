"""`glm53-mono doctor`: would the plugin work here, and if not, why not?

It imports neither torch nor SGLang itself, so it answers where either is missing or broken: versions and the contract
come from files, and `probe` tries the imports in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glm53_mono.cli import probe
from glm53_mono.cli.versions import SOFTWARE, Software, Versions, is_tested, same_release, versions_of
from glm53_mono.upstream.contract import check, each_read
from glm53_mono.upstream.launch import PLATFORMS
from glm53_mono.upstream.reads import SGLANG_READS
from glm53_mono.upstream.source import SourceError, SourceTree, installed_root

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_TARGET = "glm53_mono.plugin:register"
PLUGIN_FILTER = "SGLANG_PLUGINS"
"""SGLang's own variable (srt/plugins/__init__.py): names of the plugins to load, comma-separated; unset loads all."""

OLDEST_PYTHON = (3, 11)
PROBE_SECONDS = 180
"""Importing torch and SGLang takes 10 s from a warm disk; a cold network disk takes minutes."""


class State(StrEnum):
    """What a finding says about the plugin."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        state: a failure means that the plugin would not work.
        found: what is there.
        remark: what would be right, where it is not.
    """

    name: str
    state: State
    found: str
    remark: str = ""


@dataclass(frozen=True)
class Stage:
    """What one stage of the probe said: its facts, or the error that kept it from any."""

    facts: dict[str, Any] | None
    error: str = ""


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- LAUNCH_SERVER_ARGUMENTS]", help="Judge a server with these arguments, without starting it."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    isa: Annotated[
        str | None,
        typer.Option(help=f"Judge for this device instead of the machine's own: {', '.join(PLATFORMS)}."),
    ] = None,
) -> None:
    """Say whether the plugin would work here, and why not.

    Exit status 0: it would; 1: it would not; 2: bad arguments.
    """
    if isa is not None and isa not in PLATFORMS:
        _refuse(f"ISA {isa!r} is not one of {', '.join(PLATFORMS)}")
    with _waiting():
        findings = examine(isa)
        serving = _judge_server(arguments, isa, findings) if arguments else None
    works = all(finding.state is not State.FAILURE for finding in findings)
    if as_json:
        report = {"works": works, "findings": [asdict(finding) for finding in findings], "server": serving}
        print(json.dumps(report, indent=2))
    else:
        _print_findings(findings, works)
        if serving is not None:
            _print_server(serving)
    raise typer.Exit(0 if works and (serving is None or serving["runs"]) else 1)


def examine(isa: str | None = None) -> list[Finding]:
    """Look at everything that the plugin needs.

    Args:
        isa: take this device as given instead of looking for one.
    """
    stages = run_probe()
    versions = {software.module: versions_of(software) for software in SOFTWARE}
    return [
        _python(),
        *(_version(software, versions[software.module], stages.get(software.module)) for software in SOFTWARE),
        *_contract(),
        _entry_point(),
        _spec(stages["spec"]),
        _device(isa, stages["torch"], stages["spec"], torch_is_there=versions["torch"].origin is not None),
    ]


def run_probe() -> dict[str, Stage]:
    """Run `glm53_mono.cli.probe` in a process of its own; a stage that it did not reach has an error too."""
    ending = ""
    try:
        done = subprocess.run(
            [sys.executable, "-P", probe.__file__], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
        output = done.stdout
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            ending = f"the process that imports it ended with status {done.returncode}: {last}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        ending = f"importing it took longer than {PROBE_SECONDS} s"
    stages = {}
    for line in output.splitlines():
        said = json.loads(line)
        stages[said["stage"]] = Stage(said.get("facts"), said.get("error", ""))
    return {name: stages.get(name, Stage(None, ending or "not reached")) for name in probe.STAGES}


def _python() -> Finding:
    version = platform.python_version()
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("python", State.FAILURE, version, f"needs at least {oldest}")
    return Finding("python", State.OK, version)


def _version(software: Software, versions: Versions, stage: Stage | None) -> Finding:
    name, missing = software.module, State.FAILURE if software.required else State.OK
    if versions.installed is None and versions.origin is None:
        return Finding(name, missing, "not installed", "needed" if software.required else "used on ROCm only")
    if versions.origin is None:
        return Finding(name, missing, f"{versions.installed} installed, but nothing to import", "reinstall it")
    found = versions.installed or versions.importable or "unknown version"
    if stage is not None and stage.facts is None:
        return Finding(name, missing, found, f"does not import: {stage.error}")
    loaded = stage.facts["version"] if stage is not None else versions.importable
    if versions.installed and loaded and not same_release(versions.installed, loaded):
        remark = f"an import loads {loaded} from {versions.origin.parent}: another copy shadows the installed one"
        return Finding(name, State.WARNING, f"{versions.installed} installed", remark)
    if software.tested and not is_tested(software, found):
        return Finding(name, State.WARNING, found, f"not tested; tested: {', '.join(software.tested)}")
    return Finding(name, State.OK, found)


def _contract() -> list[Finding]:
    """The contract's verdict: one finding, or one for every read that does not hold."""
    count = sum(1 for _ in each_read(SGLANG_READS))
    try:
        tree = SourceTree(installed_root())
        drifts = check(SGLANG_READS, tree)
    except SourceError as error:
        return [Finding("contract", State.FAILURE, "not checked", str(error))]
    if not drifts:
        return [Finding("contract", State.OK, f"{count} reads hold in {tree.root}")]
    summary = f"{len(drifts)} of {count} reads do not hold in {tree.root}"
    remark = "install an SGLang that was tested, or a glm53_mono for this one"
    details = [
        Finding(
            f"contract: {drift.read}",
            State.FAILURE,
            drift.found,
            f"expected {drift.expected} ({drift.place}; {drift.purpose})",
        )
        for drift in drifts
    ]
    return [Finding("contract", State.FAILURE, summary, remark), *details]


def _entry_point() -> Finding:
    own = [point.name for point in entry_points(group=PLUGIN_GROUP) if point.value == PLUGIN_TARGET]
    if not own:
        remark = f"no entry point {PLUGIN_TARGET} in group {PLUGIN_GROUP}: pip install glm53-mono into this environment"
        return Finding("entry point", State.FAILURE, "not registered", remark)
    allowed = [name.strip() for name in os.environ.get(PLUGIN_FILTER, "").split(",") if name.strip()]
    if allowed and not set(own) & set(allowed):
        remark = f"{PLUGIN_FILTER}={','.join(allowed)} leaves {own[0]} out: add it, or unset the variable"
        return Finding("entry point", State.FAILURE, f"{own[0]}, not loaded", remark)
    return Finding("entry point", State.OK, own[0])


def _spec(stage: Stage) -> Finding:
    if stage.facts is None:
        return Finding("spec", State.FAILURE, "does not import", stage.error)
    devices = (f"{isa} ({units} compute units)" for isa, units in stage.facts["devices"].items())
    return Finding("spec", State.OK, ", ".join(devices))


def _device(isa: str | None, torch: Stage, spec: Stage, *, torch_is_there: bool) -> Finding:
    if isa is not None:
        return Finding("device", State.OK, f"{isa}, as given")
    if torch.facts is None:
        why = "does not import" if torch_is_there else "is missing"
        return Finding("device", State.FAILURE, f"unknown: torch {why}", "name one with --isa to leave it out")
    gpus = torch.facts["gpus"]
    if not gpus:
        return Finding("device", State.FAILURE, "no GPU is visible", "name one with --isa to judge for it")
    kinds = Counter(f"{gpu['isa']} ({gpu['name']}, {gpu['compute_units']} compute units)" for gpu in gpus)
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if spec.facts is None:
        return Finding("device", State.WARNING, found, "unknown whether supported: the spec does not import")
    devices = spec.facts["devices"]
    for gpu in gpus:
        needed = devices.get(gpu["isa"])
        if needed is None:
            return Finding("device", State.FAILURE, found, f"{gpu['isa']} is not one of {', '.join(devices)}")
        if gpu["compute_units"] < needed:
            remark = f"{gpu['compute_units']} compute units are visible, the launch grid needs {needed}"
            return Finding("device", State.FAILURE, found, remark)
    return Finding("device", State.OK, found)


def _judge_server(arguments: Sequence[str], isa: str | None, findings: Sequence[Finding]) -> dict[str, Any]:
    """What `serving` says of a server; where SGLang cannot be asked, a verdict that says so."""
    for finding in findings:
        # What the probe could not import is not tried again in this process, which it might not survive.
        if finding.name == "spec" and finding.state is State.FAILURE:
            return _unjudged(f"the spec does not import: {finding.remark}")
    from glm53_mono.cli.serving import ServingError, judge

    try:
        return judge(arguments, isa).as_dict()
    except ServingError as error:
        _refuse(str(error))
    except Exception as error:  # an SGLang that drifted may raise anything; the contract above says where it drifted
        text = " ".join(str(error).split())
        return _unjudged(f"{type(error).__name__}: {text}")


def _unjudged(why: str) -> dict[str, Any]:
    reasons = [f"SGLang cannot be asked: {why}"]
    return {
        "runs": False,
        "isa": None,
        "spec": None,
        "steps": None,
        "reasons": reasons,
        "not_evaluated": [],
        "weights": None,
    }


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Say on a terminal what takes so long."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status("importing torch and SGLang"):
        yield


def _refuse(sentence: str) -> NoReturn:
    print(f"glm53-mono doctor: {sentence}", file=sys.stderr)
    raise typer.Exit(2)


_STYLE = {State.OK: "green", State.WARNING: "yellow", State.FAILURE: "red"}


def _print_findings(findings: Sequence[Finding], works: bool) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        state = f"[{_STYLE[finding.state]}]{finding.state}[/]"
        text = finding.found + (f"\n{finding.remark}" if finding.remark else "")
        table.add_row(state, escape(finding.name), escape(text))
    console = Console()
    console.print(table)
    console.print("The plugin would work here." if works else "The plugin would not work here.")


def _print_server(serving: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    steps = serving["steps"]
    if serving["weights"] is not None:
        console.print(f"The checkpoint's weights: {serving['weights']}.")
    if serving["runs"]:
        console.print(f"This server would run {serving['spec']} on {serving['isa']}.")
    else:
        console.print("This server would not run the monokernel:")
        for reason in serving["reasons"]:
            console.print(f"  - {reason}", soft_wrap=True)
    if steps is not None:
        served = f"{steps['mode']} of {list(steps['batch_sizes'])} requests x {steps['tokens_per_request']} tokens"
        console.print(f"Steps {'it runs' if serving['runs'] else 'it would run otherwise'}: {served}")
    if serving["not_evaluated"]:
        console.print("Not evaluated here:")
        for sentence in serving["not_evaluated"]:
            console.print(f"  - {sentence}", soft_wrap=True)
