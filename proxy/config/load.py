"""Load the configuration: flags over environment over file over defaults, checked once at start.

The options are declared in `proxy.config.options`. This module knows three of them by name:
`config`, which names the file, and `instances` and `discover`, of which one is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.config.model import FieldInfo, Model, OptionError
from proxy.config.options import Settings
from proxy.config.secrets import SecretStr
from proxy.config.sources import (
    ConfigError,
    Given,
    Option,
    allowed_of,
    env_of,
    flag_of,
    grouped,
    options,
    parse_flags,
    read_env,
    read_file,
)
from proxy.config.values import USERINFO, to_toml, value_text

EXAMPLES = {"instances": ("127.0.0.1:8001", "127.0.0.1:8002")}
"""What stands in the file of defaults for an option whose default is nothing."""
TABLE_HEAD = (
    "| option | default | unit | allowed | reload | meaning |",
    "|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Valid settings, and the origin of each option's value."""

    settings: Settings
    origins: dict[str, str]
    print_config: bool


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Loaded:
    """Merge flags (`argv` without the program's name), environment, file and defaults.

    Raises `ConfigError` for anything wrong; `--help`, `--version` and `--print-file` print and
    raise `SystemExit`.
    """
    flags, print_wanted = parse_flags(Settings, argv)
    given = _merged(flags, read_env(Settings, environ))
    path = given.values.get("config")
    if isinstance(path, str) and path != "none":
        given = _merged(given, read_file(Settings, path, given.origins["config"]))
    if not {"instances", "discover"} & given.values.keys():
        raise ConfigError(
            "instances is not given: use --instances 127.0.0.1:8001,127.0.0.1:8002, "
            f"{env_of('instances')} or instances in the --config file; or --discover"
        )
    origins = {name: given.origins.get(name, "default") for name in Settings.model_fields}
    try:
        settings = Settings(**_with_none(given.values))
    except OptionError as error:
        raise ConfigError(_explain(error, given)) from error
    return Loaded(settings, origins, print_wanted)


def print_config(loaded: Loaded) -> str:
    """The settings as a TOML file that `--config` accepts, each with its origin as a comment."""
    lines = []
    for name, _, option in options(Settings):
        origin = "".join(c if c.isprintable() else "?" for c in loaded.origins[name])
        value = getattr(loaded.settings, name)
        line = f"{name} = {to_toml(value)}  # {origin}"
        # A secret is written as asterisks, so the line would set another secret.
        reads_back = option.in_file and not isinstance(value, SecretStr)
        lines.append(line if reads_back else f"# {line}")
    return "\n".join(lines) + "\n"


def default_toml() -> str:
    """The text of configs/proxy.toml: every option with help, commented out at its default."""
    blocks = [
        "# Options of cache-proxy, each commented out at its default. Of instances and discover\n"
        "# one is needed; an example stands for instances.\n"
        f"# A flag (--some-option), then an environment variable ({env_of('some_option')}), wins.\n"
    ]
    for topic, members in grouped(Settings).items():
        blocks.append(f"\n# ---- {topic} ----\n")
        for name, field, option in (member for member in members if member[2].in_file):
            notes = "; ".join(note for note in (option.unit, allowed_of(field, option)) if note)
            default = EXAMPLES.get(name, field.default)
            blocks.append(f"\n# {option.help}\n# [{notes}]\n# {name} = {to_toml(default)}\n")
    return "".join(blocks)


def option_tables(model: type[Model] = Settings) -> str:
    """The tables of docs/reference/options.md, or of another command's options, one per topic.

    TOML key and variable follow from the flag.
    """
    blocks = []
    for topic, members in grouped(model).items():
        rows = [_table_row(*member) for member in members]
        blocks.append("\n".join((f"## {topic}\n", *TABLE_HEAD, *rows)))
    return "\n\n".join(blocks) + "\n"


def _table_row(name: str, field: FieldInfo, option: Option) -> str:
    default = "required" if field.is_required else _quoted(value_text(field.default))
    flag = flag_of(name) if field.kind is not bool else f"--[no-]{flag_of(name)[2:]}"
    reload = "yes" if option.reloadable else ""
    cells = (f"`{flag}`", default, option.unit, allowed_of(field, option), reload, option.help)
    return f"| {' | '.join(cells)} |"


def _quoted(text: str) -> str:
    return f"`{text}`" if text else "empty"


def _merged(first: Given, second: Given) -> Given:
    return Given(second.values | first.values, second.origins | first.origins)


def _with_none(values: Mapping[str, str | list[str]]) -> dict[str, str | list[str] | None]:
    # `none` unsets an option that need not have a value, so a flag can undo a value of the file.
    fields = Settings.model_fields
    return {k: None if v == "none" and fields[k].is_optional else v for k, v in values.items()}


def _explain(error: OptionError, given: Given) -> str:
    if error.pair is not None:
        low, high = (_stated(name, given) for name in error.pair)
        return f"{low} {error.reason} {high}"
    name = error.name
    option = next(option for key, _, option in options(Settings) if key == name)
    reason = f": {error.reason}" if error.reason else ""
    allowed = allowed_of(Settings.model_fields[name], option)
    # A password in an instance's address must not be printed or logged.
    return USERINFO.sub("***@", f"{_stated(name, given)}{reason}; allowed: {allowed}")


def _stated(name: str, given: Given) -> str:
    if name not in given.values:
        return f"{name} = {value_text(Settings.model_fields[name].default)} (default)"
    if Settings.model_fields[name].kind is SecretStr:
        return f"{name} ({given.origins[name]})"
    shown = USERINFO.sub("***@", repr(given.values[name]))  # before it is cut to 100
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    return f"{name} = {shown} ({given.origins[name]})"
