"""The wheel in an empty environment, with no C compiler, and no network once all is fetched."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.install.containerfile import PATIENCE_S, pip_settings
from tests.install.installed import answered, proxied

ROOT = Path(__file__).parents[2]
MOST_BYTES = 80 << 20
"""Of the environment of the proxy alone, without pip."""
NO_COMPILER = {"CC": "false", "CXX": "false", "PATH": "/nowhere"}
PIP = ("-m", "pip", "--disable-pip-version-check")
pytestmark = pytest.mark.timeout(600)


class Environment:
    """A virtual environment, and the packages that it is installed from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        done([sys.executable, "-m", "venv", str(folder)])

    @property
    def bin(self) -> str:
        """The folder of its commands."""
        return str(self.folder / "bin")

    @property
    def site(self) -> Path:
        """The folder of its packages."""
        return next(self.folder.glob("lib/python*/site-packages"))

    def install(self, packages: Path, name: str) -> None:
        """Install from a folder of packages and from nowhere else."""
        offline = ("--no-index", "--find-links", str(packages), "--only-binary", ":all:")
        done([f"{self.bin}/python", *PIP, "install", "--no-cache-dir", *offline, name])

    def command(self, *words: str, **variables: str) -> dict[str, Any]:
        """Arguments for `subprocess`."""
        environment = NO_COMPILER | variables
        return {"args": words, "env": environment, "cwd": self.folder, "text": True}

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment to its end."""
        command = self.command(f"{self.bin}/{name}", *words)
        return subprocess.run(**command, capture_output=True, check=False, timeout=120)


def done(words: list[str], **variables: str) -> str:
    """Run a command without a compiler at hand, which must not fail; return what it prints."""
    environment = pip_settings() | NO_COMPILER | variables
    run = subprocess.run(
        words,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, f"{words}:\n{run.stdout[-4000:]}"
    return run.stdout


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """The sources and the wheel as `make dist` builds them, with what they need."""
    with tempfile.TemporaryDirectory() as folder:
        # git tells the version.
        done([sys.executable, "-m", "build", "--outdir", folder], PATH=os.environ["PATH"])
        (wheel,) = Path(folder).glob("*.whl")
        wanted = ("download", "--only-binary", ":all:", "-c", "constraints.txt", "--dest", folder)
        done([sys.executable, *PIP, *wanted, f"{wheel}[replay]"])
        yield Path(folder)


@pytest.fixture(scope="module")
def alone(packages: Path) -> Iterator[Environment]:
    """The proxy without any extra."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(Path(folder) / "alone")
        environment.install(packages, "cache-proxy")
        yield environment


def test_there_are_the_sources_and_a_wheel_for_every_machine(packages: Path) -> None:
    (sources,) = packages.glob("cache_proxy-*.tar.gz")
    (wheel,) = packages.glob("cache_proxy-*.whl")
    version = sources.name.removeprefix("cache_proxy-").removesuffix(".tar.gz")
    assert wheel.name == f"cache_proxy-{version}-py3-none-any.whl"


def test_the_version_is_that_of_the_wheel(
    packages: Path, alone: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.run("cache-proxy", "--version")  # compiles the modules to bytecode
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    told = alone.run("cache-proxy", "--version").stdout
    spent_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s
    with capsys.disabled():
        print(f"\ncache-proxy --version: {spent_s:.2f} s of CPU time")
    (wheel,) = packages.glob("cache_proxy-*.whl")
    version = wheel.name.split("-")[1]
    assert told == f"cache-proxy {version} (interpreted)\n"
    assert alone.run("engine-sim", "--version").stdout == f"engine-sim {version}\n"


def test_it_is_small(alone: Environment, capsys: pytest.CaptureFixture[str]) -> None:
    others = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
    sizes: dict[str, int] = {}
    for path in alone.site.rglob("*"):
        top = path.relative_to(alone.site).parts[0]
        if path.is_file() and not top.startswith(others):
            sizes[top] = sizes.get(top, 0) + path.stat().st_size
    whole = sum(sizes.values())
    with capsys.disabled():
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        print(f"\nsite-packages: {whole >> 20} MiB, most of it {', '.join(largest)}")
    assert whole <= MOST_BYTES
    assert not {"numpy", "pandas", "mypy", "mypyc"} & sizes.keys()


def test_it_serves_and_its_check_finds_nothing_wrong(alone: Environment) -> None:
    with proxied(alone, alone.bin) as (_, url, engine):
        assert answered(url) == 4
        checked = alone.run("cache-proxy", "check", "--instances", engine)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "vLLM" in checked.stdout
    assert "complete -F" in alone.run("cache-proxy", "--completion", "bash").stdout
    assert "alerts.yml" in alone.run("cache-proxy", "--print-file").stdout
    assert alone.run("replay", "x.jsonl").returncode == 2, "needs the extra"


def test_a_checkout_is_installed_as_the_readme_says(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    done([f"{environment.bin}/python", *PIP, "install", "-c", "constraints.txt", "."])
    assert "(interpreted)" in environment.run("cache-proxy", "--version").stdout


def test_replay_works_with_its_extra(packages: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "replay")
    environment.install(packages, "cache-proxy[replay]")
    trace = environment.site / "replayer" / "data" / "agentic_sample.trace.jsonl.gz"
    out = tmp_path / "out"
    with proxied(environment, environment.bin) as (_, url, _):
        options = ("--target", url, "--limit", "3", "--max-output", "4", "--speedup", "1000")
        run = environment.run("replay", str(trace), *options, "--no-progress", "--out", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    assert orjson.loads((out / "summary.json").read_bytes())
    assert (out / "report.html").exists()
