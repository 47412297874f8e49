"""The agents: how each is told of the proxy, given a task, and sent on in its last session."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from tests.clients.install import AGENTS, WANTED

MODEL = "claude-sim"
"""opencode marks the prompts of a model with such a name for Anthropic's cache."""
MODULES = AGENTS / "node_modules"
BIN = MODULES / ".bin"
AGENT_S = 120.0
"""An agent that is not done by then has lost its way."""
_VERSIONS = orjson.loads(WANTED.read_bytes())["dependencies"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one session of an agent is: its home, its work, the proxy, and its key there."""

    home: Path
    work: Path
    url: str
    key: str


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent: its program, below node_modules, and what tells it of the proxy and its task.

    `command`: its words for a task; `goes_on`: the same in its last session. `variables` are of
    its environment, `files` of its home. `names`: what in its requests names a session; None:
    nothing does.
    """

    name: str
    package: str
    api: str
    command: tuple[str, ...]
    goes_on: tuple[str, ...]
    variables: Callable[[Place], Mapping[str, str]]
    files: Callable[[Place], Mapping[str, str]] = lambda _place: {}
    names: str | None = None

    @property
    def version(self) -> str:
        """The version that is installed."""
        return str(_VERSIONS[self.package]).rpartition("@")[2]


def _claude(place: Place) -> dict[str, str]:
    models = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL")
    return {
        **{f"ANTHROPIC_{name}": MODEL for name in (*models, "DEFAULT_OPUS_MODEL")},
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": place.key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }


def _codex(place: Place) -> dict[str, str]:
    settings = f"""model = "{MODEL}"
model_provider = "sim"
[model_providers.sim]
name = "sim"
base_url = "{place.url}/v1"
wire_api = "responses"
env_key = "SIM_KEY"
[projects."{place.work}"]
trust_level = "trusted"
"""
    return {".codex/config.toml": settings}


def _opencode(place: Place) -> dict[str, str]:
    limit = {"context": 200_000, "output": 32_000}
    model = {"name": MODEL, "reasoning": True, "tool_call": True, "limit": limit}
    options = {"baseURL": f"{place.url}/v1", "apiKey": place.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Sim", "options": options}
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "small_model": f"sim/{MODEL}",
        "permission": {"*": "allow"},
        "provider": {"sim": provider | {"models": {MODEL: model}}},
    }
    return {".config/opencode/opencode.json": orjson.dumps(settings).decode()}


_CLAUDE = (
    "@anthropic-ai/claude-code/bin/claude.exe",
    "--output-format",
    "json",
    "--allowedTools",
    "Bash,Read",
)
_CLAUDE_WITH_HASH = ("claude-code-with-hash/bin/claude.exe", *_CLAUDE[1:])
"""A version that tells a hash of its own in each request, in the line that engines drop."""
_CODEX = (
    ".bin/codex",
    "exec",
    "--skip-git-repo-check",
    "--dangerously-bypass-approvals-and-sandbox",
)
_OPENCODE = (".bin/opencode", "run", "-m", f"sim/{MODEL}")
_QWEN = (".bin/qwen", "--auth-type", "openai", "-y")

ALL = (
    Agent(
        "claude-code",
        "@anthropic-ai/claude-code",
        "messages",
        (*_CLAUDE, "-p"),
        (*_CLAUDE, "-c", "-p"),
        _claude,
        names="`x-claude-code-session-id`",
    ),
    Agent(
        "claude-code-with-hash",
        "claude-code-with-hash",
        "messages",
        (*_CLAUDE_WITH_HASH, "-p"),
        (*_CLAUDE_WITH_HASH, "-c", "-p"),
        _claude,
        names="`x-claude-code-session-id`",
    ),
    Agent(
        "codex",
        "@openai/codex",
        "responses",
        _CODEX,
        (*_CODEX, "resume", "--last"),
        lambda place: {"SIM_KEY": place.key},
        _codex,
        names="`session-id`",
    ),
    Agent(
        "opencode",
        "opencode-ai",
        "chat",
        _OPENCODE,
        (*_OPENCODE, "-c"),
        lambda _place: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        _opencode,
        names="`x-session-id`",
    ),
    Agent(
        "qwen-code",
        "@qwen-code/qwen-code",
        "chat",
        (*_QWEN, "-p"),
        (*_QWEN, "-c", "-p"),
        lambda place: {
            "OPENAI_API_KEY": place.key,
            "OPENAI_BASE_URL": f"{place.url}/v1",
            "OPENAI_MODEL": MODEL,
            "QWEN_TELEMETRY_ENABLED": "0",
        },
    ),
)


class Session:
    """One session of an agent, in a home and a folder of its own; the block ends its processes."""

    def __init__(self, agent: Agent, folder: Path, url: str, key: str) -> None:
        self.agent = agent
        self.place = Place(folder / "home", folder / "work", url, key)
        self._said = folder / "said.txt"
        self._groups: list[int] = []

    def __enter__(self) -> Session:
        self.place.work.mkdir(parents=True)
        (self.place.work / "README.md").write_text("It adds numbers.\n" * 40)
        for name, text in self.agent.files(self.place).items():
            path = self.place.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.place.home.mkdir(exist_ok=True)
        return self

    def __exit__(self, *exc: object) -> None:
        for group in self._groups:
            kill(group)

    async def start(self, task: str, *, goes_on: bool = False) -> asyncio.subprocess.Process:
        """Begin a task, as a process that leads a group of its own."""
        words = self.agent.goes_on if goes_on else self.agent.command
        with self._said.open("ab") as said:
            process = await asyncio.create_subprocess_exec(
                str(MODULES / words[0]),
                *words[1:],
                task,
                cwd=self.place.work,
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self._groups.append(process.pid)
        return process

    async def work(self, task: str, *, goes_on: bool = False) -> None:
        """Do a task to its end, which must be a good one."""
        process = await self.start(task, goes_on=goes_on)
        try:
            async with asyncio.timeout(AGENT_S):
                status = await process.wait()
        except TimeoutError:
            raise AssertionError(f"{self.agent.name} does not end\n{self.tail()}") from None
        assert status == 0, f"{self.agent.name} ended with {status}\n{self.tail()}"

    def tail(self) -> str:
        """The end of what its processes said."""
        return self._said.read_text(errors="replace")[-4000:]

    def _environment(self) -> dict[str, str]:
        home = self.place.home
        fixed = {
            "HOME": str(home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "CI": "1",
            "DO_NOT_TRACK": "1",
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local" / "share"),
            "XDG_CACHE_HOME": str(home / ".cache"),
        }
        return fixed | dict(self.agent.variables(self.place))


def kill(group: int) -> None:
    """Kill a process and what it has started, as far as it is still there."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
