"""The image of the Containerfile: what is in it, and that it serves without a right to write."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replayer.arguments import REPORTS_NEED
from tests.install.containerfile import PATIENCE_S, Build, Stage, stages_of, words_of
from tests.install.installed import answered, proxied

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


class Image:
    """A built image, and commands run in it as its user, who may write nowhere."""

    def __init__(self, build: Build, stage: Stage) -> None:
        self.build, self.stage = build, stage
        self.entry = words_of(stage.last("ENTRYPOINT"))
        user, _, group = stage.last("USER").partition(":")
        self._user: dict[str, Any] = {"user": int(user), "group": int(group), "extra_groups": []}
        if os.geteuid() != 0 or not _may_run_python(self._user):
            self._user = {}

    def command(self, *words: str, **variables: str) -> dict[str, Any]:
        """Arguments for `subprocess`."""
        environment = {"PATH": "/usr/bin:/bin"} | self.build.environment | variables
        args = [self.build.inside(word) for word in words]
        return {"args": args, "env": environment, "cwd": "/", "text": True, **self._user}

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        command = self.command(*words, **variables)
        return subprocess.run(**command, capture_output=True, check=False, timeout=60)

    def files(self) -> dict[str, tuple[int, int]]:
        """Size and time of change of everything in it."""
        found = {str(path): path.lstat() for path in self.build.root.rglob("*")}
        return {path: (about.st_size, about.st_mtime_ns) for path, about in found.items()}


def _may_run_python(user: dict[str, Any]) -> bool:
    try:
        return subprocess.run([sys.executable, "-c", ""], check=False, **user).returncode == 0
    except PermissionError:
        return False


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    stages = stages_of((ROOT / "Containerfile").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        build = Build(ROOT, Path(folder), {"CACHE_PROXY_COMPILE": "0"})
        build.run(stages)
        writable = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
        everything = [build.root, *build.root.rglob("*")]
        for path in everything:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~writable)
        yield Image(build, stages[-1])
        for path in everything:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)


def test_it_has_the_proxy_alone(image: Image) -> None:
    site = next(image.build.root.glob("opt/cache-proxy/lib/python*/site-packages"))
    installed = {path.name for path in site.iterdir()}
    assert {"proxy", "aiohttp", "uvloop"} <= installed
    assert not {*REPORTS_NEED} & installed
    assert not (image.build.root / "src").exists()


def test_its_files_are_written_out(image: Image) -> None:
    configs = ROOT / "configs"
    kept = {p for p in [*configs.glob("*"), *configs.glob("*/*")] if p.is_file()}
    names = image.run(*image.entry, "--print-file").stdout.split()
    assert {ROOT / "configs" / name for name in names} == kept
    for name in names:
        assert image.run(*image.entry, "--print-file", name).stdout == (
            (ROOT / "configs" / name).read_text("utf-8")
        )


def test_it_serves_is_healthy_and_stops(image: Image) -> None:
    before = image.files()
    bin_ = "/opt/cache-proxy/bin"
    with proxied(image, bin_) as (child, url, _):
        port = url.rpartition(":")[2]
        assert image.run(*image.stage.health_command, CACHE_PROXY_PORT=port).returncode == 0
        assert answered(url) == 4
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    assert image.run(*image.stage.health_command, CACHE_PROXY_PORT=port).returncode == 1
    lacking = image.run(f"{bin_}/replay", "x.jsonl")
    assert (lacking.returncode, lacking.stderr.count("\n")) == (2, 1)
    assert "pip install" in lacking.stderr
    assert image.files() == before, "nothing was written"


@pytest.mark.skipif(shutil.which("podman") is None, reason="no podman here")
def test_podman_builds_it() -> None:
    name = "localhost/cache-proxy-test"
    build = ("build", "--format", "docker", "--build-arg", "CACHE_PROXY_COMPILE=0", "-t", name, ".")
    try:
        subprocess.run(["podman", *build], cwd=ROOT, check=True, timeout=PATIENCE_S)
        command = ["podman", "run", "--rm", "--read-only", name, "--version"]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert "(interpreted)" in run.stdout
    finally:
        subprocess.run(["podman", "rmi", "--ignore", name], check=False, timeout=60)
