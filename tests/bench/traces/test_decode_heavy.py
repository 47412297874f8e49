"""The invented trace: the file is what the program writes, and is what it says."""

from pathlib import Path

from bench.traces import decode_heavy
from replayer import data
from replayer.trace.loaders import read_trace
from replayer.virtual.load import load_source

FILE = Path(data.__path__[0]) / "decode_heavy.trace.jsonl.gz"


def test_the_file_is_what_the_program_writes(tmp_path: Path) -> None:
    made = tmp_path / "made.gz"
    decode_heavy.main(made)
    assert list(read_trace(made)) == list(read_trace(FILE))


def test_answers_are_long_and_documents_come_at_once() -> None:
    source = load_source(FILE)
    assert source.replicable
    chats = [unit for unit in source.units if len({turn.session for turn in unit}) == 1]
    bursts = [unit for unit in source.units if unit not in chats]
    assert (len(chats), len(bursts)) == (30, 10)
    assert all(1_000 <= turn.output_tokens <= 3_000 for unit in chats for turn in unit)
    for _first, *documents in bursts:
        assert len(documents) == 3
        assert all(16_000 <= turn.new_tokens <= 41_000 for turn in documents)
        assert all(turn.wait_for == (0,) and turn.delay_s < 1.0 for turn in documents)
