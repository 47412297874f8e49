"""Builds the project: its version, and where it is asked for the path of a request compiled to C.

`CACHE_PROXY_COMPILE=1` compiles the path of a request with mypyc, and fails where there is no C
compiler. Without it the same files are installed as Python: a request then costs half as much CPU
time again. An editable install never compiles, since an edit of a compiled file would have
no effect.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, LinkError

COMPILED = (
    "proxy/core",
    "proxy/fleet/instances.py",
    "proxy/net/timeouts.py",
    "proxy/net/upstream",
    "proxy/protocol",
    "proxy/request",
    "proxy/state",
    "proxy/telemetry",
)
INTERPRETED = frozenset(
    {
        "proxy/core/connectors/base.py",
        "proxy/core/connectors/implicit.py",
        "proxy/core/connectors/mooncake.py",
        "proxy/core/connectors/nixl.py",
        "proxy/core/latency/slo.py",
        "proxy/protocol/errors.py",
        "proxy/protocol/headers.py",
        "proxy/request/content_coding.py",
        "proxy/request/large_bodies.py",
        "proxy/state/detached.py",
        "proxy/state/replicas.py",
        "proxy/state/thermal_caps.py",
        "proxy/telemetry/log.py",
        "proxy/telemetry/record.py",
        "proxy/telemetry/tracing/otlp.py",
        "proxy/telemetry/tracing/spans.py",
    }
)
"""slo: it goes to other processes as a part of a load's rules, and compiled ones cannot be pickled.
connectors: tests and plug-ins inherit from them.
errors: the shell's errors inherit from them. headers: compiled, it gains nothing.
content_coding, detached, large_bodies, replicas, thermal_caps: they wait while they handle an
exception or within a time limit, or are asynchronous generators. log: its text of a byte that is no
character. record: orjson reads it, and a process crashed where it read a compiled one. otlp,
spans: they build on OpenTelemetry's classes, in a thread of their own."""
COMPILER = "mypy[mypyc]>=2.4,<3"
FLAGS = ("-fvisibility=hidden",)
"""Functions that other libraries could replace are neither inlined nor called directly, at a tenth
of a decision's time. Python finds the modules all the same."""
ACROSS = "-flto=auto"
"""When it links, the compiler sees all C files at once and inlines mypyc's own functions. A request
takes one instruction in seventy less."""
CPU_S = 330
"""CPU time of a compilation, for the message."""
NOTED_IN = Path("proxy/__init__.py")
NOTED = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
STATED = re.compile(r"^Version: (.+)$", re.MULTILINE)
DIRTY = "dirty"
DESCRIBE = ["git", "describe", "--tags", "--match", "v[0-9]*", "--long", f"--dirty=-{DIRTY}"]
WISH = os.environ.get("CACHE_PROXY_COMPILE", "")
NO_BUILD = ("editable_wheel", "egg_info", "dist_info", "sdist")


def is_compiled() -> bool:
    """Whether this build compiles; SystemExit for a wish that is neither 1 nor 0."""
    if WISH not in ("", "0", "1"):
        raise SystemExit(f"CACHE_PROXY_COMPILE must be 1 or 0, not {WISH!r}")
    return WISH == "1" and not any(word in sys.argv for word in NO_BUILD)


def jobs() -> int:
    """The number of compilers that run at the same time: one per core that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def extensions() -> list[Extension]:
    """The compiled modules; none where they are not asked for."""
    if not is_compiled():
        return []
    from mypyc.build import mypycify

    paths = [p for place in COMPILED for p in modules(Path(place))]
    files = sorted(
        str(p) for p in paths if p.name != "__init__.py" and p.as_posix() not in INTERPRETED
    )
    minutes = max(1, round(CPU_S / jobs() / 60))
    told = f"cache-proxy: compiling {len(files)} modules to C, {jobs()} at a time: "
    sys.stdout.write(f"{told}about {minutes} min\n")
    sys.stdout.flush()
    # One C file for all of them takes several times as long to compile, and gigabytes of memory.
    options = ["--config-file=", "--ignore-missing-imports"]
    made = mypycify([*options, *files], debug_level="0", multi_file=True)
    for extension in made:
        # mypycify gives all of them one list; each has its own from here on.
        extension.extra_compile_args = [*extension.extra_compile_args, *own_flags()]
    return made


def modules(place: Path) -> list[Path]:
    """A module, or all of a folder."""
    return [place] if place.suffix else list(place.rglob("*.py"))


def own_flags() -> tuple[str, ...]:
    """The compiler's flags beside those of mypyc."""
    return () if sys.platform == "win32" else FLAGS


class ParallelBuild(build_ext):
    """Compiles the C files of all extensions side by side; setuptools takes them in turn."""

    def finalize_options(self) -> None:
        """Let as many extensions be built at the same time as there are cores."""
        super().finalize_options()
        self.parallel = self.parallel or jobs()

    def build_extensions(self) -> None:
        """Build all extensions, with a pool of compilers that they share."""
        compile_these = self.compiler.compile
        with ThreadPoolExecutor(self.parallel) as pool:

            def compile_each(sources: list[str], **given: Any) -> list[str]:
                made = pool.map(lambda source: compile_these([source], **given), sources)
                return [name for names in made for name in names]

            if self._links_across():
                for extension in self.extensions:
                    extension.extra_compile_args.append(ACROSS)
                    extension.extra_link_args.append(ACROSS)
            self.compiler.compile = compile_each
            super().build_extensions()

    def _links_across(self) -> bool:
        """Whether compiler and linker can do so here; some linkers cannot read clang's form."""
        if not self.extensions or sys.platform == "win32":
            return False
        with TemporaryDirectory() as folder:
            source = Path(folder, "tried.c")
            source.write_text("int tried(void) { return 0; }\n", "utf-8")
            flags = {"extra_postargs": [ACROSS]}
            try:
                made = self.compiler.compile([str(source)], output_dir=folder, **flags)
                self.compiler.link_shared_object(made, str(Path(folder, "tried.so")), **flags)
            except (CompileError, LinkError):
                return False
        return True


class StampedBuild(build_py):
    """Writes the version of the build into the copy of `proxy/__init__.py`."""

    def run(self) -> None:
        """Copy the modules, then write the version into the copy."""
        super().run()
        copy = Path(self.build_lib, NOTED_IN)
        if not self.editable_mode and copy.exists():
            line = f'__version__ = "{self.distribution.get_version()}"'
            text = NOTED.sub(lambda _: line, copy.read_text("utf-8"))
            copy.unlink()  # it may be a link to the source
            copy.write_text(text, "utf-8")


def version() -> str:
    """The version of this build: by git's last tag; of an sdist, its own; else as it is noted.

    Four commits after the tag v1.2.3 it is 1.2.3.post4+gCOMMIT.
    """
    about = Path("PKG-INFO")
    if about.exists():
        return found_in(about, STATED)
    if not Path(".git").exists():
        return found_in(NOTED_IN, NOTED)
    try:
        run = subprocess.run(DESCRIBE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no tag
        return found_in(NOTED_IN, NOTED)
    tag, commits, commit, *dirty = run.stdout.strip().rsplit("-", 3 if DIRTY in run.stdout else 2)
    release = tag.removeprefix("v")
    is_release = commits == "0" and not dirty
    return release if is_release else f"{release}.post{commits}+{'.'.join([commit, *dirty])}"


def found_in(path: Path, pattern: re.Pattern[str]) -> str:
    """The first group of a pattern that the file has."""
    found = pattern.search(path.read_text("utf-8"))
    if found is None:
        raise SystemExit(f"{path}: no line like {pattern.pattern}")
    return found[1]


if __name__ == "__main__":
    setup(
        version=version(),
        ext_modules=extensions(),
        cmdclass={"build_ext": ParallelBuild, "build_py": StampedBuild},
        # pip fetches the compiler only for a build that needs it.
        setup_requires=[COMPILER] if WISH == "1" else [],
    )
