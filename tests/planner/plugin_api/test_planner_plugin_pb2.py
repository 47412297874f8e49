"""The generated code is what the protocol's file gives, and nobody has it who has no plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_layers import ROOT

PROTO = "planner/plugin_api/planner_plugin.proto"


def test_the_committed_code_is_what_is_generated(tmp_path: Path) -> None:
    # python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. PROTO
    outs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outs, str(ROOT / PROTO)]
    subprocess.run(command, check=True)
    made = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 3
    for path in made:
        kept = ROOT / path.relative_to(tmp_path)
        assert kept.read_text("utf-8") == path.read_text("utf-8"), f"generate {PROTO} anew"
