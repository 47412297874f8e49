"""The command `cache-proxy`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import orjson
import uvloop

from proxy.app import Server
from proxy.config import ConfigError, Loaded, Settings, load, print_config
from proxy.edge import has_c_parser
from proxy.plain import printable
from proxy.tuning import collect_rarely, keep_big_blocks, share_the_interpreter

EXIT_CONFIG = 78
NO_PARSER = "aiohttp's compiled HTTP parser is missing; install aiohttp's binary package"
"""The parser written in Python is no substitute, see `edge`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal. Exit 2 for a bad option, 1 when the port cannot be had, 78 as said."""
    if not has_c_parser():
        print(f"cache-proxy: {NO_PARSER}", file=sys.stderr)
        return EXIT_CONFIG
    try:
        loaded = load(sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"cache-proxy: {error}", file=sys.stderr)
        return 2
    if loaded.print_config:
        print(print_config(loaded), end="")
        return 0
    _set_up_logging(loaded.settings)
    keep_big_blocks()
    share_the_interpreter()
    try:
        uvloop.run(_serve(loaded))
    except OSError as error:
        print(f"cache-proxy: {_what_failed(loaded.settings, error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(loaded: Loaded) -> None:
    server = Server(loaded.settings)
    await server.start()
    server.catch_signals()
    collect_rarely()
    logger = logging.getLogger("proxy")
    count = len(loaded.settings.instances)
    logger.info("listening on %s (instances: %d)", server.url, count)
    _warn(logger, loaded.settings)
    await server.run()


def _warn(logger: logging.Logger, settings: Settings) -> None:
    """What an operator may not expect, said once."""
    without = [spec.name for spec in settings.instances if spec.bootstrap_url is None]
    if settings.kv_connector != "none" and without:
        logger.warning(
            "no bootstrap address for %s: they take no offloaded prefill; "
            "give host:port;bootstrap=PORT, or --kv-connector none",
            ", ".join(without),
        )


def _what_failed(settings: Settings, error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": printable(record.getMessage()),
        }
        return orjson.dumps(line).decode()


class _TextFormatter(logging.Formatter):
    """One line per message, whatever of it came from outside."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))


def _set_up_logging(settings: Settings) -> None:
    handler = logging.StreamHandler()
    text = _TextFormatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonFormatter() if settings.log_format == "json" else text)
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger("aiohttp").setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
