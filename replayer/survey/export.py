"""`replay export`: writes a trace in the form that another tool reads.

AIPerf's is a row of Mooncake's. AIPerf takes a row with a session as what is new since the turn
before, but rows here are whole prompts: they are written without their session. Only messages,
which it sends as they stand, keep theirs. An id there has one size, so a partial tail gets its own.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from replayer.arguments import InputError
from replayer.terminal import Working
from replayer.trace.loaders import PRIVATE_ID, TraceRequest, block_ids, read_trace
from replayer.trace.rows import TraceError


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own options."""
    add = parser.add_argument
    add("--for", dest="reader", choices=("aiperf",), required=True, help="the tool that is to read")
    add("--out", type=Path, required=True, metavar="FILE", help="file to write; must not exist")


def run(options: argparse.Namespace, console: Console) -> int:
    """Write the rows, then say what AIPerf needs to be told."""
    made = AiperfRows(options.trace)
    with Working("export") as working:
        requests = working.over(read_trace(options.trace, options.format), "rows")
        write_new(options.out, (orjson.dumps(made.row(one)) + b"\n" for one in requests))
    for line in made.told(options.out):
        console.print(line, soft_wrap=True, highlight=False)
    return 0


def write_new(path: Path, lines: Iterator[bytes]) -> None:
    """Write a file that does not exist, whole or not at all."""
    try:
        file = path.open("xb")
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from None
    done = False
    try:
        with file:
            file.writelines(lines)
        done = True
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from None
    finally:
        if not done:
            path.unlink(missing_ok=True)


@dataclass(slots=True)
class AiperfRows:
    """Makes AIPerf's rows, and counts what they cannot say.

    Blocks are numbered in the order in which they come, and each size of a tail is a block.
    """

    trace: Path
    rows: int = 0
    block_tokens: int | None = None
    alone: int = 0
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict)

    def row(self, request: TraceRequest) -> dict[str, Any]:
        """Make a row; raises TraceError for one that AIPerf could not send."""
        self.rows += 1
        has_session = request.messages is not None and request.session_id is not None
        row: dict[str, Any] = {"session_id": request.session_id} if has_session else {}
        if request.arrival_s is not None:
            row["timestamp"] = _ms(request.arrival_s)
        elif not (has_session and request.wait_for):
            raise self._error(request, "timestamp: must be given, since AIPerf sends prompts by it")
        if has_session and request.delay_s is not None:
            row["delay"] = _ms(request.delay_s)
        self.alone += not has_session and bool(request.session_id or request.wait_for)
        return row | self._prompt(request) | {"output_length": request.output_tokens}

    def _prompt(self, request: TraceRequest) -> dict[str, Any]:
        if request.messages is not None:
            return {"messages": request.messages}
        return self._blocks(request) if request.prompt is None else {"text_input": request.prompt}

    def _blocks(self, request: TraceRequest) -> dict[str, Any]:
        block = request.block_tokens
        if block != (self.block_tokens or block):
            raise self._error(
                request, f"block_size: must be {self.block_tokens} as before, not {block}: AIPerf "
                "has one for all rows"
            )  # fmt: skip
        self.block_tokens = block
        row = {"input_length": request.input_tokens, "block_size": block}
        if request.runs[0][0] >= PRIVATE_ID:  # no block has an id
            return row
        tokens, numbers = request.input_tokens or 0, self._numbers
        sizes = [block] * request.full_blocks + [tokens % block] * bool(tokens % block)
        ids = zip(block_ids(request.runs), sizes, strict=True)
        return row | {"hash_ids": [numbers.setdefault(one, len(numbers)) for one in ids]}

    def _error(self, request: TraceRequest, text: str) -> TraceError:
        return TraceError(f"{self.trace}:{request.line}: {text}")

    def told(self, out: Path) -> Iterator[str]:
        """Say what was written, what it lacks, and how AIPerf reads it."""
        yield f"written: {out}, {self.rows:,} rows"
        if self.alone:
            yield (
                f"note: {self.alone:,} rows are of a session or wait for others; AIPerf sends them "
                "by their timestamps alone"
            )
        size = f" --isl-block-size {self.block_tokens}" if self.block_tokens else ""
        yield (
            f"aiperf profile --input-file {out} --custom-dataset-type mooncake_trace "
            f"--fixed-schedule --fixed-schedule-auto-offset{size} ..."
        )


def _ms(seconds: float) -> float:
    """Milliseconds as a trace writes them, without what the division left behind."""
    value = round(seconds * 1e3, 3)
    return int(value) if value.is_integer() else value
