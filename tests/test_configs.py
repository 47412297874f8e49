"""The files in configs/ and the README's option table say what the code says."""

from pathlib import Path

from proxy.config import default_toml, load

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"


def test_proxy_toml_is_what_the_declarations_give():
    # To renew it: python -c "from proxy.config import *; print(default_toml(), end='')"
    path = CONFIGS / "proxy.toml"
    assert path.read_text("utf-8") == default_toml()
    loaded = load(["--instances", "a:1", "--config", str(path)], {})
    assert {
        origin for name, origin in loaded.origins.items() if name not in ("config", "instances")
    } == {"default"}
