"""Runs tests or the benchmark on the machine, and leaves in a folder what comes back from there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from unpack import Places

CHECKOUT = Path(__file__).resolve().parents[2]

MIB = 1 << 20

LIMIT_S = 500
"""Seconds that a run may take; the rest of a call's 600 is for unpacking before it, ending it and packing after it."""

ENDING_S = 40
"""Seconds that an interrupted run has to end its servers."""

PIECE = 15 * MIB
"""Bytes of a piece of the cache; a file that comes back may have 16 MiB."""

MOST_PIECES = 4
"""Files of the cache that come back: eight may, 64 MiB together, and the logs are among them."""

SGLANG = {
    # above 0, short prefills ask for FA3, which is not carried
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
    # its operations are older than its Python layer: see pins.toml
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    # minutes, for shapes that no test has
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    # the Rust one was built for another torch, and is not carried
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
}
"""Variables that SGLang needs on this machine; what a server of the tests needs anywhere, its arguments say."""

COMMAND_LINE = (sys.executable, "-c", "from glm53_mono.cli.main import app; app()")
"""`glm53-mono`, whose script pip installs in a folder that is not on PATH."""

BENCH_LAYERS, BENCH_EXPERTS = "45", "32"

BENCH_SERVER = (
    *("--load-format", "dummy", "--enable-amd-monokernel", "--kv-cache-dtype", "bfloat16"),
    *("--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang"),
    *("--cuda-graph-bs-decode", "1", "2", "4", "8", "--disable-prefill-cuda-graph", "--disable-radix-cache"),
    *("--max-running-requests", "8", "--max-mamba-cache-size", "16", "--max-total-tokens", "131072"),
    *("--context-length", "16384", "--mem-fraction-static", "0.75"),
)
"""The server of README's benchmark, beside its model."""


class RunError(RuntimeError):
    """A run that cannot start; the message says what to do."""


@dataclass(frozen=True)
class Job:
    """What a name runs.

    Attributes:
        commands: one after another, given the folders, where results go, and the arguments from the command line.
        sglang: whether it needs SGLang.
    """

    commands: Callable[[Places, Path, Sequence[str]], list[list[str]]]
    sglang: bool = True


def tests(path: str) -> Callable[[Places, Path, Sequence[str]], list[list[str]]]:
    """The GPU tests of a file or folder; arguments are pytest's."""

    def commands(places: Places, out: Path, arguments: Sequence[str]) -> list[list[str]]:
        pytest = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", f"--basetemp={places.scratch}"]
        return [[*pytest, path, *arguments]]

    return commands


def bench(places: Places, out: Path, arguments: Sequence[str]) -> list[list[str]]:
    """`glm53-mono bench` over the full depth; arguments are its own."""
    model = str(places.scratch / "model")
    sizes = ["--layers", BENCH_LAYERS, "--experts", BENCH_EXPERTS, "--config-only"]
    measured = ["bench", "--json", str(out / "bench.json"), *arguments, "--", "--model-path", model, *BENCH_SERVER]
    return [[*COMMAND_LINE, "checkpoint", model, *sizes], [*COMMAND_LINE, *measured]]


JOBS = {
    "kernels": Job(tests("tests/kernels"), sglang=False),
    "server": Job(tests("test/e2e/test_glm53_flash_server.py")),
    "mtp": Job(tests("test/e2e/test_glm53_flash_mtp.py")),
    "speed": Job(tests("test/e2e/test_mtp_speed.py")),
    "forced": Job(tests("test/e2e/test_forced_steps.py")),
    "check": Job(tests("test/e2e/test_check.py")),
    "quality": Job(tests("test/e2e/test_glm53_flash_quality.py")),
    "bench": Job(bench),
}


def run(name: str, arguments: Sequence[str], places: Places, out: Path, *, limit_s: float, tail: int) -> int:
    """Install the project, run a job, and leave its log, the servers' logs and the compiled kernels in `out`.

    Args:
        name: of `JOBS`.
        arguments: for pytest or the benchmark.
        limit_s: seconds after which the job is ended; what it left until then is kept.
        tail: lines of the log to print.

    Returns:
        The job's status, 124 if it was ended.

    Raises:
        RunError: SGLang is needed and not unpacked.
    """
    job = JOBS[name]
    if job.sglang and not places.stamp("site").exists():
        raise RunError(f"{name} needs SGLang, not unpacked in {places.site}: carry the bundle, and unpack first")
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(places.scratch, ignore_errors=True)
    for folder in (places.scratch, places.home):
        folder.mkdir(parents=True, exist_ok=True)
    install(places.project, places.scratch / "source")
    log, started, status = out / f"{name}.log", time.monotonic(), 0
    log.unlink(missing_ok=True)
    for command in job.commands(places, out, arguments):
        left_s = limit_s - (time.monotonic() - started)
        status = run_one(command, environment(places, os.environ), log, left_s)
        if status != 0:
            break
    print("\n".join(log.read_text(errors="replace").splitlines()[-tail:]))
    print(f"{name}: status {status} after {time.monotonic() - started:.0f} s")
    keep_logs(places.scratch, out / f"{name}-servers.tar.xz")
    keep_cache(places.home, out / "cache")
    return status


def install(project: Path, source: Path) -> None:
    """Install the project with its entry point, as users do; its dependencies are there.

    Args:
        source: a folder for a copy, since setuptools builds beside what it builds from.
    """
    shutil.rmtree(project, ignore_errors=True)
    shutil.copytree(CHECKOUT / "glm53_mono", source / "glm53_mono", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(CHECKOUT / name, source / name)
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", "install", *quiet, "--target", project, source], check=True)


def environment(places: Places, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of a run: ours before the machine's packages, and a home folder that is saved."""
    caches = {name for name in base if name.endswith("_CACHE_DIR") or name == "XDG_CACHE_HOME"}
    kept = {name: value for name, value in base.items() if name not in caches}
    path = os.pathsep.join([str(places.project), str(places.site), *filter(None, [base.get("PYTHONPATH")])])
    return kept | SGLANG | {"PYTHONPATH": path, "HOME": str(places.home), "PYTHONUNBUFFERED": "1"}


def run_one(command: Sequence[str], variables: Mapping[str, str], log: Path, limit_s: float) -> int:
    """Run a command with its output in a log; interrupt it at the limit, and end what it started if it does not end.

    Returns:
        Its status, 124 if it was ended.
    """
    with log.open("a") as file:
        process = subprocess.Popen(command, cwd=CHECKOUT, env=dict(variables), stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(max(limit_s, 0))
        except subprocess.TimeoutExpired:
            file.write(f"\nended after its {limit_s:.0f} s\n")
    # servers are in sessions of their own, where no signal to a group reaches them
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(started, ENDING_S)
    return 124


def keep_logs(scratch: Path, archive: Path) -> None:
    """Pack the logs that tests wrote, the servers' among them."""
    logs = [str(path.relative_to(scratch)) for path in sorted(scratch.rglob("*.log")) if path.is_file()]
    if logs:
        subprocess.run(["tar", "-C", scratch, "-I", "xz -T0", "-cf", archive, *logs], check=True)


def keep_cache(home: Path, folder: Path) -> None:
    """Pack what compilers have kept, in pieces that come back; a later call carries the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    whole = folder / "cache.tar.xz"
    subprocess.run(["tar", "-C", home, "-I", "xz -T0 -3", "-cf", whole, "."], check=True)
    packed = whole.read_bytes()
    whole.unlink()
    starts = range(0, len(packed), PIECE)
    if len(starts) > MOST_PIECES:
        print(f"the compiled kernels are {len(packed) / MIB:.0f} MiB, more than comes back: they are left out")
        return
    for number, start in enumerate(starts):
        (folder / f"cache.tar.xz.{number}").write_bytes(packed[start : start + PIECE])
    print(f"compiled kernels: {len(packed) / MIB:.1f} MiB in {len(starts)} files")
