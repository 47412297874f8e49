"""setup.py: when it compiles, with which flags, side by side, and which version a build has."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("setuptools", reason="a Python that has no setuptools of its own")
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parents[1]


def loaded(monkeypatch: pytest.MonkeyPatch, wish: str | None, *words: str) -> dict[str, Any]:
    """The names of setup.py, as for a build with these words and this wish."""
    monkeypatch.delenv("CACHE_PROXY_COMPILE", raising=False)
    if wish is not None:
        monkeypatch.setenv("CACHE_PROXY_COMPILE", wish)
    monkeypatch.setattr("sys.argv", ["setup.py", *words])
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py")


@pytest.mark.parametrize("wish", [None, "", "0"])
def test_nothing_is_compiled_that_was_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, wish: str | None
) -> None:
    assert loaded(monkeypatch, wish, "bdist_wheel")["extensions"]() == []
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]
    assert not any("mypy" in name for name in requires["requires"])


def test_an_edit_of_an_editable_install_has_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(monkeypatch, "1", "editable_wheel")["extensions"]() == []


def test_another_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="CACHE_PROXY_COMPILE must be 1 or 0, not 'yes'"):
        loaded(monkeypatch, "yes", "bdist_wheel")["extensions"]()


def test_each_extension_has_each_flag_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def mypycify(paths: list[str], **options: Any) -> list[Extension]:
        asked.update(options, paths=paths)
        shared = ["-O3"]
        return [Extension(name, [], extra_compile_args=shared) for name in ("a", "b", "c")]

    monkeypatch.setattr("mypyc.build.mypycify", mypycify)
    made = loaded(monkeypatch, "1", "bdist_wheel")["extensions"]()
    assert [extension.extra_compile_args for extension in made] == [
        ["-O3", "-fvisibility=hidden"]
    ] * 3
    assert asked["multi_file"], "one file for all takes several times as long"
    assert "proxy/core/accounts/ledger.py" in asked["paths"]
    assert "proxy/protocol/headers.py" not in asked["paths"]
    said = capsys.readouterr().out
    assert "compiling" in said
    assert "min" in said


def test_c_files_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)

    def compile_(sources: list[str], **_: Any) -> list[str]:
        both.wait()  # breaks where one waits for the other
        return [source.replace(".c", ".o") for source in sources]

    def build(command: Any) -> None:
        made.extend(command.compiler.compile(["a.c", "b.c"], output_dir="x"))

    made: list[str] = []
    monkeypatch.setattr(build_ext, "build_extensions", build)
    command = loaded(monkeypatch, None)["ParallelBuild"](Distribution())
    command.parallel, command.compiler = 2, SimpleNamespace(compile=compile_)
    command.build_extensions()
    assert made == ["a.o", "b.o"]


@pytest.mark.parametrize("is_editable", [False, True])
def test_a_build_has_its_version_in_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_editable: bool
) -> None:
    copy = tmp_path / "proxy" / "__init__.py"
    copy.parent.mkdir()
    text = (ROOT / "proxy" / "__init__.py").read_text("utf-8")
    copy.write_text(text, "utf-8")
    monkeypatch.setattr(build_py, "run", lambda _: None)
    command = loaded(monkeypatch, None)["StampedBuild"](
        Distribution({"name": "cache-proxy", "version": "9.8.7"})
    )
    command.build_lib, command.editable_mode = str(tmp_path), is_editable
    command.run()
    assert ('\n__version__ = "9.8.7"\n' in copy.read_text("utf-8")) is not is_editable
    assert (copy.read_text("utf-8") == text) is is_editable


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_version_is_that_of_the_last_tag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = loaded(monkeypatch, None)["version"]
    (tmp_path / "proxy").mkdir()
    noted = tmp_path / "proxy" / "__init__.py"
    noted.write_text('__version__ = "0.1.0"\n', "utf-8")
    monkeypatch.chdir(tmp_path)
    assert version() == "0.1.0", "no git"

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *who, *words], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    assert version() == "0.1.0", "no tag"
    git("tag", "v1.2.0rc1")
    git("tag", "not-a-version")
    assert version() == "1.2.0rc1"
    git("commit", "--allow-empty", "-m", "two")
    assert re.fullmatch(r"1\.2\.0rc1\.post1\+g[0-9a-f]+", version())
    noted.write_text("other\n", "utf-8")
    assert re.fullmatch(r"1\.2\.0rc1\.post1\+g[0-9a-f]+\.dirty", version())
    (tmp_path / "PKG-INFO").write_text("Name: cache-proxy\nVersion: 3.4\n\nText\n", "utf-8")
    assert version() == "3.4", "an sdist"
