"""Reads option values from flags, environment and TOML file, and describes options in `--help`.

This module works on any `Model` whose fields carry an `Option`, and knows no option by name. Every
source gives text or a list of texts, so a value means the same in each of them.
"""

import argparse
import difflib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from msgspec import Meta

from proxy import described
from proxy.config import shell
from proxy.config.files import file_names, file_text
from proxy.config.model import FieldInfo, Model
from proxy.config.regular_files import read_regular
from proxy.config.secrets import SecretStr
from proxy.config.values import ByteSize, value_text

ENV_PREFIX = "CACHE_PROXY_"
# Kubernetes sets these variables in every pod next to a Service named cache-proxy.
_KUBERNETES = re.compile(rf"{ENV_PREFIX}(SERVICE_(HOST|PORT)|PORT_[0-9]+_)")
_NOT_OPTIONS = frozenset({f"{ENV_PREFIX}COMPILE"})
"""Variables of the installation, which somebody may have exported."""
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<="}
NOT_A_FLAG = (
    "; it follows no option: a value is one word, a list has commas and no spaces (--option a,b)"
)
_KINDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text without spaces",
    Path: "path",
    bool: "true or false",
    ByteSize: "integer, or with KiB, MiB, GiB",
    SecretStr: "text, never shown",
}
_METAVARS: dict[Any, str] = {
    int: "N",
    float: "X",
    str: "TEXT",
    Path: "PATH",
    ByteSize: "BYTES",
    SecretStr: "TEXT",
}


COMMANDS = {
    "check": "ask every instance once, tell what each is and what is wrong, and exit",
    "explain": "say why a request went where it went, and exit (explain --help)",
}
"""The words that may come before all flags."""
SOURCES = (
    "An option is also a key of the --config file (--a-b: a_b) and an environment variable "
    f"(--a-b: {ENV_PREFIX}A_B). Precedence: flag, environment, file, default."
)
EXIT_STATUS = """\
0: stopped by a signal, or all is well (check).
1: the port cannot be bound, or there is a problem (check), or no proxy answers (explain).
2: an option is wrong, or a request is not known (explain).
78: a package that the proxy needs is not usable."""


class ConfigError(Exception):
    """A message of one line: option, value, allowed values, and where the value came from."""


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option, beside its type."""

    topic: str
    """Its group in help and documentation."""
    help: str
    unit: str = ""
    allowed: str = ""
    """Text that replaces the range derived from the type."""
    in_file: bool = True
    reloadable: bool = False
    """The option is read for each request or probe, or can be replaced; any other option needs a
    restart."""


@dataclass(frozen=True, slots=True)
class Given:
    """Raw values with their origins ("flag --x", "env CACHE_PROXY_X", "file PATH")."""

    values: dict[str, str | list[str]]
    origins: dict[str, str]


def options(model: type[Model]) -> Iterator[tuple[str, FieldInfo, Option]]:
    """Every field with its description, in the order of declaration."""
    for name, field in model.model_fields.items():
        yield name, field, next(item for item in field.metadata if isinstance(item, Option))


def grouped(model: type[Model]) -> dict[str, list[tuple[str, FieldInfo, Option]]]:
    """`options` by topic, in the model's order of topics; a topic that it does not list comes last.

    Within a topic the options keep the order of their declaration.
    """
    groups: dict[str, list[tuple[str, FieldInfo, Option]]] = {topic: [] for topic in model.topics}
    for member in options(model):
        groups.setdefault(member[2].topic, []).append(member)
    return groups


def flag_of(name: str) -> str:
    """`ttft_timeout` -> `--ttft-timeout`."""
    return f"--{name.replace('_', '-')}"


def env_of(name: str) -> str:
    """`ttft_timeout` -> `CACHE_PROXY_TTFT_TIMEOUT`."""
    return f"{ENV_PREFIX}{name.upper()}"


def allowed_of(field: FieldInfo, option: Option) -> str:
    """The allowed values in words, derived from the field's type and bounds."""
    if option.allowed:
        return option.allowed
    kind = field.kind
    if get_origin(kind) is Literal:
        words = "one of " + ", ".join(str(choice) for choice in get_args(kind))
    else:
        words = ", ".join((_KINDS[kind], *_bounds(field)))
    return words + (", or none" if field.is_optional else "")


def parse_flags(model: type[Model], argv: Iterable[str]) -> tuple[Given, bool]:
    """Flags of `argv` (without the program's name), and whether `--print-config` is among them."""
    parsed, unknown = _parser(model).parse_known_args(list(argv))
    if unknown:
        known = [flag_of(name) for name in model.model_fields]
        word = unknown[0].partition("=")[0]  # the value may be a secret
        hint = _closest(word, known) if word.startswith("-") else NOT_A_FLAG
        raise ConfigError(f"unknown argument {word!r}{hint}")
    found = vars(parsed)
    print_config = found.pop("print_config")
    values: dict[str, str | list[str]] = {name: value_text(found[name]) for name in found}
    return Given(values, {name: f"flag {flag_of(name)}" for name in values}), print_config


def read_env(model: type[Model], environ: Mapping[str, str]) -> Given:
    """Options of the environment; an empty variable is ignored."""
    known = {env_of(name): name for name in model.model_fields}
    given = Given({}, {})
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or not text or _is_of_others(variable, text):
            continue
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{_closest(variable, known)}")
        given.values[known[variable]] = text
        given.origins[known[variable]] = f"env {variable}"
    return given


def read_file(model: type[Model], path: str, path_origin: str) -> Given:
    """Options of the TOML file at `path`; `path_origin` says where `path` was given."""
    known = [name for name, _, option in options(model) if option.in_file]
    given = Given({}, {})
    for key, value in _load_toml(path, path_origin).items():
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in file {path}{_closest(key, known)}")
        given.values[key] = _file_text(key, value, path)
        given.origins[key] = f"file {path}"
    return given


def _load_toml(path: str, path_origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"config = {path!r} ({path_origin}): cannot read it: {reason}") from error
    except RecursionError as error:
        raise ConfigError(f"config = {path!r} ({path_origin}): nested too deep") from error
    except ValueError as error:  # bad TOML (its text has the line), bad UTF-8, NUL in the path
        raise ConfigError(f"config = {path!r} ({path_origin}): not valid TOML: {error}") from error


def _file_text(key: str, value: object, path: str) -> str | list[str]:
    try:
        return _plain_text(key, value, path)
    except (RecursionError, ValueError) as error:  # nested, or an integer of thousands of digits
        raise ConfigError(f"{key} (file {path}): too long or too deep to be read") from error


def _plain_text(key: str, value: object, path: str) -> str | list[str]:
    if isinstance(value, dict):
        raise ConfigError(f"{key} (file {path}): a table, but options are single values")
    return [value_text(item) for item in value] if isinstance(value, list) else value_text(value)


def _is_of_others(variable: str, text: str) -> bool:
    """Whether a variable is Kubernetes' or the installation's, so no option."""
    if variable == f"{ENV_PREFIX}PORT":
        return text.startswith(("tcp://", "udp://", "sctp://"))
    return variable in _NOT_OPTIONS or bool(_KUBERNETES.match(variable))


def _closest(word: str, known: Iterable[str]) -> str:
    bare = {_bare(name): name for name in known}  # their common prefix would make all similar
    close = difflib.get_close_matches(_bare(word), bare, n=1)
    return f"; did you mean {bare[close[0]]}?" if close else ""


def _bare(name: str) -> str:
    return name.removeprefix("--").removeprefix(ENV_PREFIX)


def _bounds(field: FieldInfo) -> Iterator[str]:
    for item in (item for item in field.metadata if isinstance(item, Meta)):
        for key, sign in _BOUNDS.items():
            if (bound := getattr(item, key)) is not None:
                yield f"{sign} {value_text(field.kind(bound))}"


class _Once(argparse.Action):
    """Stores the value of a list, which may be given once: a second one would replace it unseen."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} is given twice: join the values with commas")
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _PrintFile(argparse.Action):
    """Writes a file of `file_names` to stdout, or their list where none is named, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        del namespace
        try:
            text = "".join(f"{name}\n" for name in file_names())
            sys.stdout.write(text if values is None else file_text(str(values)))
        except ValueError as error:
            raise ConfigError(f"{option_string} {str(values)[:40]!r}: {error}") from error
        parser.exit()


class _Completion(argparse.Action):
    """Writes the completion script of a shell to stdout, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        del namespace, option_string
        sys.stdout.write(shell.completion(_command(parser, self.const), str(values)))
        parser.exit()


class _Man(argparse.Action):
    """Writes the man page to stdout, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        del namespace, values, option_string
        sys.stdout.write(shell.man_page(_command(parser, self.const)))
        parser.exit()


def _command(parser: argparse.ArgumentParser, model: type[Model]) -> shell.Command:
    """Describe the command to a shell and to man, from its parser and its options."""
    topics = {
        (group.title or "").capitalize(): [
            flag for action in group._group_actions for flag in _flags(action, model)
        ]
        for group in parser._action_groups
    }
    return shell.Command(
        parser.prog,
        f"{parser.prog} {described()}",
        parser.description or "",
        (parser.usage or "").replace("%(prog)s", parser.prog),
        COMMANDS,
        {topic: flags for topic, flags in topics.items() if flags},
        {"Environment and file": SOURCES, "Exit status": EXIT_STATUS},
    )


def _flags(action: argparse.Action, model: type[Model]) -> Iterator[shell.Flag]:
    """Describe each long name of a flag; `--no-x` is a flag of its own."""
    field = model.model_fields.get(action.dest)
    words = tuple(map(str, action.choices or ())) or _words(field)
    if isinstance(action, _PrintFile):
        words = tuple(file_names())
    text = (action.help or "").replace("%%", "%")
    value = "" if action.nargs == 0 else str(action.metavar)
    for name in (name for name in action.option_strings if name.startswith("--")):
        yield shell.Flag(name, text, value, words, field is not None and field.kind is Path)


def _words(field: FieldInfo | None) -> tuple[str, ...]:
    """The values of an option that has only these, to be offered by a shell."""
    if field is None or get_origin(field.kind) is not Literal:
        return ()
    return (*map(str, get_args(field.kind)), *(["none"] if field.is_optional else ()))


def _parser(model: type[Model]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cache-proxy",
        usage="%(prog)s [check] --instances HOST:PORT,HOST:PORT [options], or explain REQUEST_ID",
        description=(model.__doc__ or "").strip(),
        epilog=SOURCES,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    words = parser._positionals  # the section above the options; else empty, so not shown
    words.title = "commands"
    words.description = " ".join(f"{word}: {about}." for word, about in COMMANDS.items())
    parser.add_argument("--version", action="version", version=f"cache-proxy {described()}")
    parser.add_argument(
        "--print-config",
        action="store_true",
        default=False,
        help="print every value with its origin",
    )
    parser.add_argument(
        "--print-file",
        action=_PrintFile,
        nargs="?",
        metavar="NAME",
        help="print a file shipped with the proxy (alerts, dashboard, systemd unit, ...); "
        "without NAME: list them",
    )
    parser.add_argument(
        "--completion",
        action=_Completion,
        choices=tuple(shell.SHELLS),
        metavar="SHELL",
        const=model,
        help=f"print the completion script of a shell: {', '.join(shell.SHELLS)}",
    )
    parser.add_argument("--man", action=_Man, nargs=0, const=model, help="print the man page")
    for topic, members in grouped(model).items():
        group = parser.add_argument_group(topic)
        for member in members:
            add_flag(group, *member)
    return parser


def add_flag(group: Any, name: str, field: FieldInfo, option: Option) -> None:
    """Declare an option's flag, with its unit, range and default in the help."""
    shown = value_text(field.default) or "empty"
    default = "required" if field.is_required else f"default {shown}"
    notes = "; ".join(note for note in (option.unit, allowed_of(field, option), default) if note)
    text = f"{option.help} [{notes}]".replace("%", "%%")
    if field.kind is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(flag_of(name), dest=name, action=action, help=text)
    else:
        metavar = _METAVARS.get(field.kind, "VALUE")
        once = _Once if get_origin(field.kind) is tuple else None
        group.add_argument(flag_of(name), dest=name, metavar=metavar, help=text, action=once)
