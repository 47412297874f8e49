"""What comes with the proxy is in every installation, and is written out as it is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.config.files import file_names

ROOT = Path(__file__).parents[3]


def test_print_file_writes_each_file_and_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = ((ROOT / "configs").glob(form) for form in ("*", "*/*"))
    kept = [path for paths in found for path in paths if path.is_file()]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--print-file"])
    listed = capsys.readouterr().out.splitlines()
    assert listed == sorted(path.relative_to(ROOT / "configs").as_posix() for path in kept)
    assert {"proxy.toml", "alerts.yml", "grafana/overview.json", "cache-proxy.service"} <= {*listed}
    for name in listed:
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["--print-file", name])
        assert capsys.readouterr() == ((ROOT / "configs" / name).read_text("utf-8"), "")


@pytest.mark.parametrize("name", ["alert.yml", "../pyproject.toml", "grafana", "", "x" * 500])
def test_another_name_is_one_line_with_the_list(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--print-file", name]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("cache-proxy: --print-file ")
    assert error.endswith(f": no such file; there are {', '.join(file_names())}\n")
    assert error.count("\n") == 1
    assert len(error) < 600


def test_the_wheel_has_them() -> None:
    """`make test-install` looks into an installation; this finds a pattern that misses a file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["proxy"]
    found = {path for pattern in patterns for path in (ROOT / "proxy").glob(pattern)}
    assert {ROOT / "proxy" / "configs" / name for name in file_names()} <= found
    assert set((ROOT / "proxy").rglob("*.html")) <= found
