"""The private names of aiohttp that the proxy relies on: in one file, all of them listed here."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import aiohttp
import pytest
from aiohttp import StreamReader, web, web_protocol
from aiohttp.base_protocol import BaseProtocol

ROOT = Path(__file__).parents[4]
ADAPTER = ROOT / "proxy/net/server/aiohttp_adapter.py"
OTHERS = [path for path in sorted((ROOT / "proxy").rglob("*.py")) if path != ADAPTER]
MODULE_NAMES = {"_ErrInfo"}
"""Of `aiohttp.web_protocol`."""
NAMES: dict[type, set[str]] = {
    BaseProtocol: {
        *("_loop", "_parser", "_reading_paused", "_buffer_paused", "_upgraded"),
        *("_pause_transport_reading", "_resume_transport_reading"),
    },
    web.RequestHandler: {
        *("_close", "_current_request", "_force_close", "_handle_request", "_keepalive"),
        *("_keepalive_handle", "_keepalive_timeout", "_lingering_time", "_make_error_handler"),
        *("_manager", "_messages", "_msg_queue_resume_size", "_next_keepalive_close_time"),
        *("_process_keepalive", "_request_count", "_request_factory", "_request_handler"),
        *("_resume_reading_if_drained", "_task_handler", "_waiter"),
    },
    StreamReader: {"_buffer", "_buffer_offset", "_exception", "_protocol", "_size"},
    web.Server: {"_connections", "_kwargs", "_loop"},
    web.AppRunner: {"_make_server"},
    web.BaseSite: {"_backlog", "_runner", "_server", "_ssl_context"},
    web.TCPSite: {"_host", "_port"},
    web.BaseRequest: {"_task"},
    web.StreamResponse: {
        *("_eof_sent", "_headers", "_keep_alive", "_payload_writer", "_reason", "_state"),
        "_status",
    },
}


def is_private(name: str | None) -> bool:
    """`_replace` is a named tuple's, and public."""
    return (
        name is not None
        and name.startswith("_")
        and name[1:2] not in ("", "_")
        and (name != "_replace")
    )


@cache
def has(owner: type) -> frozenset[str]:
    """The private names of a class of aiohttp: what it defines, assigns to itself or is given."""
    names = set(vars(owner))
    for node in ast.walk(ast.parse(inspect.getsource(owner))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            if isinstance(node.ctx, ast.Store):
                names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return frozenset(filter(is_private, names))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def gone(wanted: dict[type, set[str]]) -> list[str]:
    return [f"{o.__name__}.{n}" for o, names in wanted.items() for n in sorted(names - has(o))]


def private_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each private name that code uses of something, with what it is used of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiohttp"):
            yield from ((node.module or "", a.name) for a in node.names if is_private(a.name))
        elif isinstance(node, ast.Call):
            yield from (("()", k.arg) for k in node.keywords if k.arg and is_private(k.arg))
            if ast.unparse(node.func) == "_slot":
                yield from (
                    (ast.unparse(node.args[0]), ast.literal_eval(node.args[1])) for _ in "1"
                )


def test_aiohttp_has_every_private_name_that_the_adapter_uses() -> None:
    lost = gone(NAMES) + [n for n in sorted(MODULE_NAMES) if not hasattr(web_protocol, n)]
    assert not lost, f"aiohttp {aiohttp.__version__} lacks {', '.join(lost)}"


def test_what_is_gone_is_named() -> None:
    assert gone({web.BaseRequest: {"_task", "_chore"}}) == ["BaseRequest._chore"]


def test_the_list_is_complete() -> None:
    used = {name for _, name in private_names(tree(ADAPTER))}
    assert used == MODULE_NAMES.union(*NAMES.values())


@cache
def of_all_aiohttp() -> frozenset[str]:
    """Every private attribute that code of aiohttp's server side uses."""
    files = Path(aiohttp.__file__).parent
    paths = [*files.glob("web*.py"), *files.glob("http*.py"), *files.glob("*prot*.py")]
    found = {n for path in [*paths, files / "streams.py"] for _, n in private_names(tree(path))}
    return frozenset(found)


@pytest.mark.long
@pytest.mark.parametrize("path", OTHERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_other_file_touches_them(path: Path) -> None:
    uses = set(private_names(tree(path)))
    elsewhere = {(of, n) for of, n in uses if of not in ("self", "cls", "super()")}
    assert not {(of, n) for of, n in elsewhere if n in of_all_aiohttp()}
    for kind, code in classes_of_aiohttp(path):
        theirs = [b for b in kind.__mro__ if b.__module__.split(".")[0] == "aiohttp"]
        own = {n for of, n in private_names(code) if of in ("self", "super()")}
        assert not own & frozenset[str]().union(*map(has, theirs)), kind


def classes_of_aiohttp(path: Path) -> Iterator[tuple[type, ast.ClassDef]]:
    """The classes of a file that inherit from aiohttp's, with their code."""
    if "aiohttp" not in path.read_text("utf-8"):
        return
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name.removesuffix(".__init__"))
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef):
            kind = vars(module)[node.name]
            if any(base.__module__.split(".")[0] == "aiohttp" for base in kind.__mro__):
                yield kind, node
