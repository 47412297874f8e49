"""What a demo run was made of, in its folder's `run.json`: for whoever replays it in virtual time.

The proxy's options are those that it says itself that it has (`--print-config`), so that defaults
and the environment are in it.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from replayer.sim_options import SimOptions

RECORD = "run.json"


def write_record(
    folder: Path,
    proxy_flags: Sequence[str],
    engines: Sequence[Mapping[str, Any]],
    load: Sequence[str],
) -> None:
    """Write `run.json`: the engines' options, the proxy's, and the arguments of `replay`.

    `engines`: what each engine was given beside the defaults of `engine-sim`.
    """
    command = [sys.executable, "-m", "proxy.cli", *proxy_flags, "--print-config"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    record = {
        "engines": [asdict(SimOptions(**given)) for given in engines],
        "proxy": tomllib.loads(said),
        "replay": list(load),
    }
    (folder / RECORD).write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")
