"""The files of configs/, which an installation has too: options, systemd, Prometheus, Grafana.

`--print-file` writes them out.
"""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs"
"""In the sources a link, in an installation a folder of copies."""
MOST_PARTS = 2
"""Of a name: what lies deeper is of use only with its neighbours, as a kustomization is."""


def file_names() -> list[str]:
    """Their names, relative to the folder, in alphabetical order."""
    found = (path.relative_to(FOLDER) for path in FOLDER.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in found if len(path.parts) <= MOST_PARTS)


def file_text(name: str) -> str:
    """The text of one of `file_names`; ValueError, which lists them, for any other name."""
    names = file_names()
    if name not in names:
        raise ValueError(f"no such file; there are {', '.join(names)}")
    return (FOLDER / name).read_text("utf-8")
