"""The command `cache-proxy`.

The server and what it needs of other packages are imported once the options are right: `--help`,
`--version`, a wrong option or a completion need none of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from proxy import described
from proxy.config.load import Loaded, load, print_config
from proxy.config.options import Settings
from proxy.config.secrets import KEY_CHARS, entries_of, is_loopback, key_of, slips_in
from proxy.config.sources import COMMANDS, ConfigError
from proxy.core.connectors import CONNECTORS, transfer_rules
from proxy.process import signals
from proxy.process.hot_restart import InheritedSockets
from proxy.process.memory import collect_rarely, keep_big_blocks, share_the_interpreter
from proxy.process.notify import Notifier
from proxy.protocol.endpoints import is_for_operators
from proxy.telemetry import log

STDERR = 2
EXIT_SYSTEM, EXIT_OPTION, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 78, 130
NO_PARSER = "aiohttp's compiled HTTP parser is missing; install aiohttp's binary package"
"""aiohttp's parser in Python accepts other requests, so it cannot replace the compiled one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal. Exit 2: wrong option; 1: the port cannot be bound; 78: NO_PARSER."""
    given = list(sys.argv[1:] if argv is None else argv)
    command = given[0] if given and given[0] in COMMANDS else None
    if argv is None and command is None:
        signals.keep()
    fill_standard_descriptors()
    if command == "explain":
        return _explain(given[1:])
    inherited = InheritedSockets()
    try:
        inherited = InheritedSockets.read(os.environ)
        loaded = load(given[1:] if command else given, os.environ)
    except ConfigError as error:
        return _fails(inherited, str(error), EXIT_OPTION)
    if loaded.print_config:
        print(print_config(loaded), end="")
        return 0
    if command:
        return _check(loaded.settings)
    if not _has_c_parser():
        return _fails(inherited, NO_PARSER, EXIT_CONFIG)
    keep_big_blocks()
    log.set_up(loaded.settings.log_level, loaded.settings.log_format)
    share_the_interpreter()
    return _run(loaded, given, inherited)


def fill_standard_descriptors() -> None:
    """Open /dev/null where the process began without stdin, stdout or stderr.

    Else the next socket has that descriptor: it would get what is meant for stdout, and libuv
    aborts the process when it closes one of these.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= STDERR:
        fd = os.dup(fd)
    os.close(fd)


def _fails(inherited: InheritedSockets, why: str, status: int) -> int:
    """Report a failed start once: to the predecessor, which logs it, or else on stderr."""
    if not inherited.tell_failure(why):
        print(f"cache-proxy: {why}", file=sys.stderr)
    return status


def _has_c_parser() -> bool:
    from proxy.net.server.connection import has_c_parser

    return has_c_parser()


def _explain(given: Sequence[str]) -> int:
    from proxy.admin import explain

    return explain.main(given, os.environ)


def _check(settings: Settings) -> int:
    """Print what each instance is and what is wrong. Exit 1: a problem; 2: wrong option."""
    from proxy.admin.fleet_check import check

    try:
        report = asyncio.run(check(settings))
    except ConfigError as error:
        print(f"cache-proxy: {error}", file=sys.stderr)
        return EXIT_OPTION
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print("\n".join(report.lines))
    return EXIT_SYSTEM if report.problems else 0


def _run(loaded: Loaded, given: Sequence[str], inherited: InheritedSockets) -> int:
    import uvloop

    try:
        if loaded.settings.workers > 1:
            return _launch(loaded.settings, given, inherited)
        uvloop.run(_serve(loaded, given, inherited))
    except ConfigError as error:
        return _fails(inherited, str(error), EXIT_OPTION)
    except OSError as error:
        return _fails(inherited, _what_failed(loaded.settings, error), EXIT_SYSTEM)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _launch(settings: Settings, given: Sequence[str], inherited: InheritedSockets) -> int:
    from proxy.process import slots
    from proxy.process.workers import Launcher

    slots.check(settings, given, inherited)
    slots.adopt()
    with slots.opened(settings) as workers:
        return Launcher(workers, Notifier(os.environ, settings.pid_file)).run()


async def _serve(loaded: Loaded, given: Sequence[str], inherited: InheritedSockets) -> None:
    from proxy.app import Proxy, seed_of
    from proxy.protocol.prompt.facts import SEED_BYTES, seed_hashes

    # A predecessor's comes with what it knew.
    seed_hashes(seed_of(loaded.settings) or secrets.randbits(8 * SEED_BYTES))
    server = Proxy(loaded.settings, lambda: load(given, os.environ).settings, inherited)
    supervisor = Notifier(os.environ, loaded.settings.pid_file)
    asyncio.get_running_loop().set_exception_handler(log.LoopFaults())
    await server.start()
    server.catch_signals()
    collect_rarely()
    logger = logging.getLogger("proxy")
    count = len(server.state.known.fleet.members())
    logger.info("cache-proxy %s, process %d", described(), os.getpid())
    logger.info("listening on %s (instances: %d)", server.url, count)
    warn_of_options(logger, loaded.settings)
    try:
        supervisor.started(replaces=inherited.has_predecessor)
    except OSError:
        await server.close()
        raise
    inherited.tell_ready()
    try:
        await server.run(supervisor.replaced_by, supervisor.carries_on)
        logger.info("process %d has stopped", os.getpid())
    finally:
        supervisor.ended()


def warn_of_options(logger: logging.Logger, settings: Settings) -> None:
    """Log settings that may surprise an operator."""
    rules = transfer_rules(CONNECTORS[settings.kv_connector])
    without = [spec for spec in settings.instances if spec.bootstrap_url is None]
    hosts = Counter(urlsplit(spec.url).hostname for spec in settings.instances)
    port = settings.bootstrap_port
    alone = [spec.name for spec in without if port and hosts[urlsplit(spec.url).hostname] == 1]
    if rules.needs_bootstrap and alone:
        text = "offloads to %s need a Mooncake bootstrap server at port %d of their hosts"
        logger.info(text, ", ".join(alone), port)
    if rules.needs_bootstrap and len(without) > len(alone):
        logger.warning(
            "no bootstrap address for %s: no prefill is offloaded to them; "
            "give 'host:port;bootstrap=PORT' (in quotes), or --kv-connector none",
            ", ".join(spec.name for spec in without if spec.name not in alone),
        )
    if "/*" in settings.extra_paths:
        logger.warning("extra_paths: /* relays an engine's operator paths too, such as /sleep")
    if never := [path for path in settings.extra_paths if is_for_operators(path)]:
        logger.warning("extra_paths: %s: never relayed, as it changes one engine", never[0])
    if len(settings.instances) == 1 and not settings.discover:
        logger.warning(
            "one instance: if more were given, put the list in quotes (a shell cuts at ;)"
        )
    blind = [spec.name for spec in settings.instances if not spec.sensors]
    blind += [str(source) for source in settings.discover]  # what it finds has no sensor
    if settings.thermal is not None and blind:
        logger.warning(
            "--thermal does not control %s: no GPU sensor is given (;gpus=0-7;dcgm=9400)",
            ", ".join(blind),
        )
    _warn_of_access(logger, settings)


def _warn_of_access(logger: logging.Logger, settings: Settings) -> None:
    """Log what is open, and which keys can be guessed."""
    is_reached = not is_loopback(settings.host)
    if is_reached and settings.admin_port is None and settings.admin_token is None:
        logger.warning(
            "admin paths are open to every client of %s: give --admin-token or --admin-port",
            settings.host,
        )
    if is_reached and settings.api_key is None:
        logger.info("no --api-key: every client that reaches %s may send requests", settings.host)
    if slips := slips_in(settings.api_key):
        logger.warning("%s", slips)
    for name, secret in (("api_key", settings.api_key), ("admin_token", settings.admin_token)):
        text = "" if secret is None else secret.get_secret_value()
        keys = map(key_of, entries_of(text)) if name == "api_key" else filter(None, [text.strip()])
        if short := sum(len(key) < KEY_CHARS for key in keys):
            logger.warning(
                "%s: %d shorter than %d characters: easy to guess, and refused by a reload",
                name,
                short,
                KEY_CHARS,
            )


def _what_failed(settings: Settings, error: OSError) -> str:
    """The error with the option that names its file; port errors have their address already."""
    why = error.strerror or str(error)
    for name in ("request_log", "access_log_file", "pid_file"):
        if error.filename is not None and str(error.filename) == str(getattr(settings, name)):
            return f"{name} = {str(error.filename)!r}: {why}"
    return why if error.filename is None else f"{error.filename}: {why}"


if __name__ == "__main__":
    sys.exit(main())
