"""The boards of configs/grafana: what each shows; `tests.support.renew` writes the files."""

from tests.support.boards import heat, instances, itself, latency, offload, planner, wrong
from tests.support.boards.drawing import Labels, board_json

BOARDS = tuple(
    module.BOARD for module in (wrong, latency, offload, instances, itself, heat, planner)
)


def board_files(labels: Labels) -> dict[str, bytes]:
    """The files' bytes, by name."""
    return {f"{board.name}.json": board_json(board, labels) for board in BOARDS}
