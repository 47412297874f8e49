"""Completion scripts for bash, zsh and fish, and the man page, made from a command's flags.

`proxy.config.sources` describes the flags; this module knows none by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_FISH_ESCAPES = str.maketrans({"\\": "\\\\", "'": "\\'"})
_ZSH_ESCAPES = str.maketrans({"'": "'\\''"} | {c: f"\\{c}" for c in "\\[]:"})
_ROFF_ESCAPES = str.maketrans({"\\": "\\e", "-": "\\-"})
_FIRST_CLAUSE = re.compile(r"(.+?)[.;]( |$)")
_BASH = """\
# bash completion of {name}: source <({name} --completion bash)
{function}() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    # bash splits --flag=value into three words.
    if [[ $word == = ]]; then
        word=
    elif [[ $before == = ]]; then
        before=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case $before in
{cases}
        *)
            local words='{flags}'
            if ((COMP_CWORD == 1)); then words+=' {words}'; fi
            mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word") ;;
    esac
}}
complete -F {function} {name}
"""
_BASH_PATHS = """\
        {names})
            compopt -o filenames 2>/dev/null
            mapfile -t COMPREPLY < <(compgen -f -- "$word") ;;"""
_BASH_WORDS = """\
        {name})
            mapfile -t COMPREPLY < <(compgen -W '{words}' -- "$word") ;;"""
_ZSH = """\
#compdef {name}
# zsh completion of {name}: source <({name} --completion zsh)
{function}() {{
    _arguments \\
{specs}
}}
if [[ $funcstack[1] == {function} ]]; then
    {function} "$@"
else
    compdef {function} {name}
fi
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command, for example `--log-level`.

    `value` is the name of its value in help, empty for a flag without a value. `words` are values
    to offer. `is_path`: the value is the name of a file.
    """

    name: str
    help: str
    value: str = ""
    words: tuple[str, ...] = ()
    is_path: bool = False

    @property
    def summary(self) -> str:
        """The first clause of the help, which a shell shows beside the flag."""
        found = _FIRST_CLAUSE.match(self.help)
        return found[1] if found else self.help


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its flags by topic, and the words that may come before all flags.

    `notes` are further sections of the man page, by their headings.
    """

    name: str
    version: str
    about: str
    usage: str
    words: Mapping[str, str]
    topics: Mapping[str, Sequence[Flag]]
    notes: Mapping[str, str]

    @property
    def flags(self) -> Iterator[Flag]:
        """The flags of all topics."""
        for flags in self.topics.values():
            yield from flags

    @property
    def function(self) -> str:
        """The name of the shell function that completes the command."""
        return f"_{self.name.replace('-', '_')}"


def completion(command: Command, shell: str) -> str:
    """Return the completion script for a shell of `SHELLS`."""
    return SHELLS[shell](command)


def _bash(command: Command) -> str:
    flags = list(command.flags)
    paths = "|".join(flag.name for flag in flags if flag.is_path)
    others = "|".join(f.name for f in flags if f.value and not (f.words or f.is_path))
    cases = [_BASH_PATHS.format(names=paths)] if paths else []
    cases += [
        _BASH_WORDS.format(name=flag.name, words=" ".join(flag.words))
        for flag in flags
        if flag.words
    ]
    cases += [f"        {others}) COMPREPLY=() ;;"] if others else []
    return _BASH.format(
        name=command.name,
        function=command.function,
        cases="\n".join(cases),
        flags=" ".join(flag.name for flag in flags),
        words=" ".join(command.words),
    )


def _zsh(command: Command) -> str:
    specs = [_zsh_spec(flag) for flag in command.flags]
    if words := " ".join(command.words):
        specs.append(f"        '1:command:({words})'")
    return _ZSH.format(name=command.name, function=command.function, specs=" \\\n".join(specs))


def _zsh_spec(flag: Flag) -> str:
    summary = flag.summary.translate(_ZSH_ESCAPES)
    if not flag.value:
        return f"        '{flag.name}[{summary}]'"
    action = "_files" if flag.is_path else f"({' '.join(flag.words)})" if flag.words else " "
    return f"        '{flag.name}=[{summary}]:{flag.value}:{action}'"


def _fish(command: Command) -> str:
    start = f"complete -c {command.name}"
    lines = [
        f"# fish completion of {command.name}: {command.name} --completion fish | source",
        f"{start} -f",
    ]
    for word, about in command.words.items():
        lines.append(f"{start} -n __fish_use_subcommand -a {word} -d {_fish_quoted(about)}")
    lines += [f"{start} {_fish_spec(flag)}" for flag in command.flags]
    return "\n".join(lines) + "\n"


def _fish_spec(flag: Flag) -> str:
    spec = f"-l {flag.name.removeprefix('--')} -d {_fish_quoted(flag.summary)}"
    if not flag.value:
        return spec
    if flag.is_path:
        return f"{spec} -r -F"
    return f"{spec} -x -a {_fish_quoted(' '.join(flag.words))}" if flag.words else f"{spec} -x"


def _fish_quoted(text: str) -> str:
    return f"'{text.translate(_FISH_ESCAPES)}'"


SHELLS: Mapping[str, Callable[[Command], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""The shells by name."""


def man_page(command: Command) -> str:
    """Return the man page of a command, for section 1."""
    title, version = (_roff(text) for text in (command.name.upper(), command.version))
    lines = [
        f'.TH {title} 1 "" "{version}"',
        *(".SH NAME", f"{_roff(command.name)} \\- {_roff(command.about.rstrip('.'))}"),
        *(".SH SYNOPSIS", f".B {_roff(command.usage)}"),
        *(".SH COMMANDS" for _ in list(command.words)[:1]),
    ]
    for word, about in command.words.items():
        lines += [".TP", f".B {_roff(word)}", _roff(about)]
    lines.append(".SH OPTIONS")
    for topic, flags in command.topics.items():
        lines.append(f".SS {_roff(topic)}")
        for flag in flags:
            value = f" \\fI{_roff(flag.value)}\\fR" if flag.value else ""
            lines += [".TP", f"\\fB{_roff(flag.name)}\\fR{value}", _roff(flag.help)]
    for heading, text in command.notes.items():
        lines.append(f".SH {_roff(heading.upper())}")
        for line in text.split("\n"):
            lines += [".PP", _roff(line)]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    """The text as roff shows it; a line that begins with a point or a quote is no request."""
    escaped = text.translate(_ROFF_ESCAPES)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
