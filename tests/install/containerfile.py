"""Containerfile steps, read and run without a container engine.

Every stage is built in one folder that stands for its root, so that scripts of a virtual
environment find their interpreter after a COPY from another stage. Base images are not had: the
Python that runs the tests stands for theirs. What a step names below /src and /opt is in that
folder; other paths are the machine's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

import orjson

OWN = re.compile(r"(?<![\w./:])/(?=(?:src|opt)\b)")
"""The first slash of a path that is the image's own."""
PATIENCE_S = 540.0
"""Of one step; pip may have to fetch and compile."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction and the text behind it."""

    instruction: str
    text: str


@dataclass(slots=True)
class Stage:
    """A FROM with the steps after it."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        """The text of an instruction's last step, which is the one in force; empty for none."""
        found = [step.text for step in self.steps if step.instruction == instruction]
        return found[-1] if found else ""

    @property
    def health_command(self) -> list[str]:
        """The arguments of HEALTHCHECK CMD, which must be a JSON list."""
        return words_of(self.last("HEALTHCHECK").partition("CMD ")[2])


def words_of(text: str) -> list[str]:
    """The words of an instruction in exec form, a JSON list of texts."""
    words = orjson.loads(text)
    assert isinstance(words, list)
    assert all(isinstance(word, str) for word in words)
    return words


def stages_of(text: str) -> list[Stage]:
    """The stages of a Containerfile. An ARG before the first FROM must have a default."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    given: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = Template(rest).substitute(given).partition(" AS ")
            stages.append(Stage(base, name or str(len(stages))))
        elif stages:
            stages[-1].steps.append(Step(instruction, rest.strip()))
        else:
            assert instruction == "ARG", line
            given |= dict([rest.split("=", 1)])
    return stages


@dataclass(slots=True)
class Build:
    """The build of one image in a folder, from the sources in `context`."""

    context: Path
    folder: Path
    arguments: Mapping[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder that stands for the root of the stage that is built."""
        return self.folder / "root"

    def run(self, stages: list[Stage]) -> None:
        """Run all stages in turn; the last one's files are left in `root`."""
        for number, stage in enumerate(stages):
            self.root.mkdir()
            self._run(stage)
            if number + 1 < len(stages):
                self.root.rename(self.folder / stage.name)

    def inside(self, text: str) -> str:
        """The text with the image's own paths where they are on this machine."""
        return OWN.sub(f"{self.root}/", text)

    def _run(self, stage: Stage) -> None:
        variables: dict[str, str] = {}
        work = self.root
        for step in stage.steps:
            match step.instruction:
                case "ARG":
                    name, _, default = step.text.partition("=")
                    variables[name] = self.arguments.get(name, default)
                case "ENV":
                    self.environment |= dict([step.text.split("=", 1)])
                case "WORKDIR":
                    work = Path(self.inside(step.text))
                    work.mkdir(parents=True)
                case "COPY":
                    self._copy(step.text, work)
                case "RUN":
                    self._shell(step.text, work, variables)
                case "USER" | "EXPOSE" | "HEALTHCHECK" | "ENTRYPOINT":
                    pass
                case _:
                    raise AssertionError(f"not known here: {step}")

    def _copy(self, text: str, work: Path) -> None:
        *options, target = shlex.split(text)
        origin = self.context
        if options[0].startswith("--from="):
            origin = self.folder / options.pop(0).removeprefix("--from=")
        for source in options:
            found = origin / source.lstrip("/")
            to = Path(self.inside(target)) if target.startswith("/") else work / target
            if found.is_dir():
                # Links stay links: one that leads out of what is copied must be seen here.
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(found, to, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy2(found, to)

    def _shell(self, text: str, work: Path, variables: Mapping[str, str]) -> None:
        path = f"{Path(sys.executable).resolve().parent}:/usr/local/bin:/usr/bin:/bin"
        environment = pip_settings() | {"PATH": path} | self.environment | dict(variables)
        done = subprocess.run(
            ["/bin/sh", "-ec", self.inside(text)],
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{text}:\n{done.stdout[-4000:]}"


def pip_settings() -> dict[str, str]:
    """What tells pip where packages are on this machine."""
    kept = ("PIP_", "HOME", "SSL_", "REQUESTS_", "HTTP", "http", "NO_PROXY", "no_proxy")
    return {name: value for name, value in os.environ.items() if name.startswith(kept)}
