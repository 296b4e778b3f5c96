"""Builds `.bundle/`: SGLang and what it needs, for a machine with torch and no network, in parts."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from needs import asked_for, complaints
from pins import CHECKOUT, HERE, Pins, read_pins
from unpack import DIGESTS

MIB = 1 << 20

TRANSFER = 64 * MIB
"""Bytes of one call: the working tree and what is carried beside it."""

PARTS = 2
"""Parts of equal size: the first travels with the kernel tests, the second with an earlier run's compiled kernels."""

CACHE = 16 * MIB
"""Bytes that the second call leaves for those."""

LARGE = MIB
"""Bytes from which equal files are stored once."""


class BundleError(RuntimeError):
    """A bundle that would not do; the message says why."""


def build(folder: Path) -> None:
    """Fetch the packages, check them and write the parts; takes some minutes, most of them for xz.

    Raises:
        BundleError: a requirement is met by nothing, or a part is too large to travel.
    """
    pins = read_pins()
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        install(pins, site)
        take_operations(pins, site, Path(scratch))
        leave_out(pins.left_out, site)
        link_equal_files(site)
        wrong = complaints(asked_for(site), pins)
        if wrong:
            raise BundleError("\n".join(wrong))
        shutil.copytree(HERE / "stubs", site, dirs_exist_ok=True)
        archive = Path(scratch) / "site.tar.xz"
        subprocess.run(["tar", "-C", site, "-I", "xz -T0 -3", "-cf", archive, "."], check=True)
        write_parts(archive.read_bytes(), folder)
    print(sizes(folder))


def pip(command: str, pins: Pins, *arguments: str | Path) -> None:
    """Run pip for the target's Python, without dependencies."""
    platforms = (argument for platform in pins.platforms for argument in ("--platform", platform))
    target = ("--no-deps", "--only-binary=:all:", "--python-version", pins.python, *platforms)
    subprocess.run([sys.executable, "-m", "pip", "--quiet", command, *target, *arguments], check=True)


def install(pins: Pins, site: Path) -> None:
    """Install every carried package in a folder."""
    wanted = (f"{name}=={version}" for name, version in pins.carried.items())
    pip("install", pins, "--no-compile", "--target", site, *wanted)


def take_operations(pins: Pins, site: Path, scratch: Path) -> None:
    """Replace sglang-kernel's compiled operations by those of a wheel for the machine's torch."""
    for library in (site / "sgl_kernel").rglob("*.so"):
        library.unlink()
    pip("download", pins, "--dest", scratch / "operations", pins.operations)
    (wheel,) = (scratch / "operations").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if fnmatch(name, pins.operation_files)]
        if not names:
            raise BundleError(
                f"{wheel.name} holds no {pins.operation_files}: correct the wheel or the files in pins.toml"
            )
        packed.extractall(site, names)


def leave_out(patterns: tuple[str, ...], site: Path) -> None:
    """Remove what is not carried.

    Raises:
        BundleError: a pattern matches nothing, so that it says nothing any more.
    """
    for pattern in patterns:
        found = list(site.glob(pattern))
        if not found:
            raise BundleError(f"nothing matches {pattern!r} of left_out in pins.toml: remove it")
        for path in found:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def link_equal_files(site: Path) -> None:
    """Store equal large files once: tar keeps hard links, and wheels keep no symbolic ones."""
    first: dict[str, Path] = {}
    for path in sorted(site.rglob("*")):
        if path.is_file() and path.stat().st_size >= LARGE:
            kept = first.setdefault(digest(path.read_bytes()), path)
            if kept != path:
                path.unlink()
                path.hardlink_to(kept)


def write_parts(archive: bytes, folder: Path) -> None:
    """Cut an archive into equal parts beside their digests; parts of an earlier bundle are removed.

    Raises:
        BundleError: a part does not fit into one transfer.
    """
    folder.mkdir(exist_ok=True)
    for old in folder.glob("part-*"):
        old.unlink()
    size = -(-len(archive) // PARTS)
    lines = []
    for number in range(PARTS):
        part = archive[number * size : (number + 1) * size]
        (folder / f"part-{number}").write_bytes(part)
        lines.append(f"{digest(part)}  part-{number}\n")
    (folder / DIGESTS).write_text("".join(lines))
    needed = size + tree_bytes() + CACHE
    if needed > TRANSFER:
        raise BundleError(
            f"a part of {size / MIB:.1f} MiB, the working tree and {CACHE // MIB} MiB of compiled kernels are "
            f"{needed / MIB:.1f} MiB, and a transfer takes {TRANSFER // MIB}: cut into more parts"
        )


def tree_bytes() -> int:
    """Bytes of the working tree that every call sends: tracked files, and untracked ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    paths = (CHECKOUT / name for name in listed.split("\0") if name)
    return sum(path.stat().st_size for path in paths if path.is_file())


def sizes(folder: Path) -> str:
    """What would travel, one line each."""
    parts = sorted(folder.glob("part-*"))
    lines = [f"{path.name}: {path.stat().st_size / MIB:.1f} MiB" for path in parts]
    return "\n".join([*lines, f"working tree: {tree_bytes() / MIB:.1f} MiB"])


def digest(content: bytes) -> str:
    """SHA-256, as sha256sum prints it."""
    return hashlib.sha256(content).hexdigest()
