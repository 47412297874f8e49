"""The command `cache-proxy`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import uvloop

from proxy import logs
from proxy.app import Server
from proxy.build import described
from proxy.config import ConfigError, Loaded, Settings, load, print_config
from proxy.edge import has_c_parser
from proxy.keys import is_loopback
from proxy.tuning import collect_rarely, keep_big_blocks, share_the_interpreter

EXIT_CONFIG = 78
NO_PARSER = "aiohttp's compiled HTTP parser is missing; install aiohttp's binary package"
"""The parser written in Python is no substitute, see `edge`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal. Exit 2 for a bad option, 1 when the port cannot be had, 78 as said."""
    if not has_c_parser():
        print(f"cache-proxy: {NO_PARSER}", file=sys.stderr)
        return EXIT_CONFIG
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        loaded = load(given, os.environ)
    except ConfigError as error:
        print(f"cache-proxy: {error}", file=sys.stderr)
        return 2
    if loaded.print_config:
        print(print_config(loaded), end="")
        return 0
    logs.set_up(loaded.settings.log_level, loaded.settings.log_format)
    keep_big_blocks()
    share_the_interpreter()
    return _run(loaded, given)


def _run(loaded: Loaded, given: Sequence[str]) -> int:
    try:
        uvloop.run(_serve(loaded, given))
    except ConfigError as error:
        print(f"cache-proxy: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cache-proxy: {_what_failed(loaded.settings, error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(loaded: Loaded, given: Sequence[str]) -> None:
    server = Server(loaded.settings, lambda: load(given, os.environ).settings)
    await server.start()
    server.catch_signals()
    collect_rarely()
    logger = logging.getLogger("proxy")
    count = len(loaded.settings.instances)
    logger.info("cache-proxy %s", described())
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
    is_open = settings.admin_port is None and settings.admin_token is None
    if is_open and not is_loopback(settings.host):
        logger.warning(
            "admin paths are open to whoever reaches %s: give --admin-token or --admin-port",
            settings.host,
        )


def _what_failed(settings: Settings, error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"


if __name__ == "__main__":
    sys.exit(main())
