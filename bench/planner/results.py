"""What is read: Dynamo's report on a run, and the command's own result files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from analysis.plan.measured import Drain, Fleet, Record, Run


def record_of(row: Mapping[str, Any]) -> Record:
    """Read a row of Dynamo's report."""
    is_completed = row["terminal_status"] == "completed"
    return Record(
        arrival_s=row["arrival_time_ms"] / 1000,
        ttft_s=_seconds(row["ttft_ms"]) if is_completed else None,
        itl_s=_seconds(row["itl_ms"]),
        last_token_s=_seconds(row["last_token_ms"]),
        input_tokens=row["input_length"],
        reused_tokens=row["reused_input_tokens"],
        output_tokens=row["output_length"],
        engine=row["decode_worker_idx"],
    )


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1000


def fleet_of(summary: Mapping[str, Any], operations: Sequence[Any], changes: int) -> Fleet:
    """Read the summary and the operations on engines."""
    drains = [
        Drain(one["at_ms"] / 1000, frozenset(_engines(one, "worker_draining")))
        for one in operations
    ]
    return Fleet(
        gpu_s=summary["decode_worker_seconds"],
        duration_s=summary["duration_ms"] / 1000,
        started=sum(len(_engines(one, "worker_starting")) for one in operations),
        drains=[drain for drain in drains if drain.engines],
        changes=changes,
    )


def _engines(operation: Mapping[str, Any], transition: str) -> list[int]:
    steps = operation["transitions"]
    return [step["worker_id"] for step in steps if step["transition"] == transition]


@dataclass(frozen=True, slots=True)
class Result:
    """Runs, and what was left out with the reason."""

    runs: list[Run]
    left_out: dict[str, str]

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Result:
        """Read result files, taken together; raises ValueError for another file."""
        together = cls([], {})
        for path in paths:
            try:
                document = json.loads(path.read_text("utf-8"))
                together.runs.extend(run_of(row) for row in document["runs"])
                together.left_out.update(document["left_out"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: not a result of bench-planner: {error}") from None
        ran = {run.policy for run in together.runs} | {run.load for run in together.runs}
        return replace(
            together,
            left_out={name: why for name, why in together.left_out.items() if name not in ran},
        )

    def save(self, path: Path) -> None:
        """Write a result file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"runs": [asdict(run) for run in self.runs], "left_out": self.left_out}
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def run_of(row: Mapping[str, Any]) -> Run:
    """Read a run as `asdict` wrote it."""
    return Run(**{field.name: row[field.name] for field in fields(Run) if field.name in row})
