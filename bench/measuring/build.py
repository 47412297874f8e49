"""The C programs of the bench, compiled at first use and again when a source is newer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "c"
PROGRAMS = {
    "upstream": ("upstream.c", "upstream_request.c", "upstream_answer.c", "chunked.c"),
    "loadgen": ("loadgen.c", "loadgen_setup.c", "loadgen_answer.c", "procfs.c", "chunked.c"),
}
FLAGS = ("-O2", "-Wall", "-Wextra")


class BenchError(Exception):
    """The bench cannot run, or what it measured is not what it says; one line for the user."""


def compiler() -> str | None:
    """The C compiler, if there is one."""
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("cc") or shutil.which("gcc")


def build(folder: Path) -> None:
    """Compile what is missing or older than any source."""
    folder.mkdir(parents=True, exist_ok=True)
    newest_s = max(path.stat().st_mtime for path in SOURCES.iterdir())
    for name, sources in PROGRAMS.items():
        target = folder / name
        if not target.exists() or target.stat().st_mtime < newest_s:
            _compile(target, [str(SOURCES / source) for source in sources])


def _compile(target: Path, sources: list[str]) -> None:
    found = compiler()
    if found is None:
        raise BenchError("no C compiler: install gcc and libc6-dev, or set CC")
    # Renamed at the end: whoever else runs this program keeps its own.
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    command = [found, *FLAGS, "-o", str(partial), *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{target.name} does not compile:\n{done.stderr}")
    partial.replace(target)
