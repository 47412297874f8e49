"""Compiles `proxy/core` and `proxy/protocol` to C with mypyc where there is a C compiler.

Without one the same files are installed to be interpreted, at half as much CPU time again per
request. An editable install (`pip install -e`) always is: an edit of a compiled file would have no
effect.
`CACHE_PROXY_COMPILE=0` says never, `CACHE_PROXY_COMPILE=1` fails where it cannot be done.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

COMPILED = ("proxy/core", "proxy/protocol")
INTERPRETED = frozenset(
    {
        "proxy/core/connectors/base.py",
        "proxy/core/connectors/implicit.py",
        "proxy/core/connectors/mooncake.py",
        "proxy/core/connectors/nixl.py",
        "proxy/core/latency/slo.py",
        "proxy/protocol/errors.py",
        "proxy/protocol/headers.py",
    }
)
"""slo: it goes to other processes as a part of a load's rules, and compiled ones cannot be pickled.
connectors: tests and plug-ins inherit from them.
errors: the shell's errors inherit from them. headers: compiled, it gains nothing."""
WISH = os.environ.get("CACHE_PROXY_COMPILE", "")


def extensions() -> list[Extension]:
    """The compiled modules; none where they are not wanted or cannot be had."""
    is_editable = any(word in sys.argv for word in ("editable_wheel", "egg_info", "sdist"))
    if WISH == "0" or is_editable:
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        if WISH == "1":
            raise
        return []
    paths = [p for folder in COMPILED for p in Path(folder).rglob("*.py")]
    files = sorted(
        str(p) for p in paths if p.name != "__init__.py" and p.as_posix() not in INTERPRETED
    )
    made = mypycify(["--config-file=", "--ignore-missing-imports", *files], debug_level="0")
    for extension in made:
        extension.optional = WISH != "1"
        if sys.platform != "win32":
            # Functions that other libraries could replace are neither inlined nor called directly,
            # at a tenth of a decision's time. Python finds the modules all the same.
            extension.extra_compile_args.append("-fvisibility=hidden")
    return made


setup(ext_modules=extensions())
