"""Keys and secrets as options: where they come from, and that no message shows one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.load import load
from proxy.config.secrets import SecretStr, slips_in, tenants_of
from proxy.config.sources import ConfigError
from proxy.state.access import salt_of
from tests.support.tenants import SECRET

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


keys = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters=",:#"), min_size=1
)


@pytest.mark.long
@given(st.dictionaries(keys, names, min_size=1, max_size=8), st.sampled_from([",", "\n", " , \n"]))
def test_keys_are_read_back_whatever_parts_them(given_: dict[str, str], comma: str) -> None:
    found = tenants_of(comma.join(f"{tenant}:{key}" for key, tenant in given_.items()))
    assert sorted(found.values()) == sorted(given_.values())


@given(st.text(max_size=40), st.text(max_size=40))
def test_two_tenants_never_share_a_salt(one: str, other: str) -> None:
    if one != other:
        a, b = (salt_of(SECRET.encode(), t) for t in (one, other))
        assert a != b
        assert re.fullmatch(r"[A-Za-z0-9_-]{43}", a)


@pytest.mark.parametrize(
    ("flags", "words_"),
    [
        (["--api-key", ""], "empty"),
        (["--api-key", "@/nonexistent/keys"], "No such file"),
        (["--api-key", "a:hidden1,b:hidden1"], "key 2 is given to two tenants"),
        (["--api-key", "a/b:hidden1"], "the tenant of key 1"),
        (["--api-key", "a:hid den1"], "key 1"),
        (["--api-key", "a:hidden1", "--cache-salt-secret", "hidden1"], "shorter than 16"),
        (["--cache-salt-secret", "hidden1" * 4], "with api_key = none"),
        (["--admin-token", "@/nonexistent/token"], "No such file"),
        (
            ["--admin-port", "0", "--admin-host", "0.0.0.0"],
            "a loopback address with admin_token = none",
        ),
        (["--tls-key", "k.pem"], "with tls_cert = none"),
        (["--allow-cidr", "10.0.0.1/8"], "host bits"),
        (["--allow-cidr", ""], "allow_cidr"),
    ],
)
def test_bad_options_say_so_without_the_secret(flags: list[str], words_: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words_)) as caught:
        load(["--instances", "x:1", *flags], {})
    assert "hidden" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["instance-api-key", "thermal-token", "admin-token"])
@pytest.mark.parametrize("text", ["old-key\nnew-key", "a\rb: c", "k\u00e9y", "k\0"])
def test_a_key_that_is_sent_is_one_line(tmp_path: Path, name: str, text: str) -> None:
    """A second line would be a header of its own in every probe and request."""
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not one line of printable ASCII") as error:
        load(["--instances", "x:1", f"--{name}", f"@{path}"], {})
    assert "old-key" not in str(error.value)


def test_secrets_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nacme:k1\n\nzeta:k2\n")
    token = tmp_path / "token"
    token.write_text("an-admin-token\n")
    given = ["--instances", "x:1", "--api-key", f"@{path}", "--admin-token", f"@{token}"]
    settings = load(given, {}).settings
    assert settings.api_key
    assert set(tenants_of(settings.api_key.get_secret_value()).values()) == {"acme", "zeta"}
    assert "k1" not in repr(settings)


@pytest.mark.parametrize(
    ("keys", "which"),
    [
        ("al=0123456789abcdef", "1"),
        ("al:0123456789abcdef,bo=0123456789abcdef==", "2"),
        ("\n".join(f"t{n}=0123456789abcdef" for n in range(7)), "1, 2, 3, 4, 5 and 2 more"),
        ("al:ab=cd,c2VjcmV0c2VjcmV0cw==,sk-0123456789abcdef", None),
    ],
)
def test_a_key_that_seems_to_have_a_tenant_is_told(keys: str, which: str | None) -> None:
    told = slips_in(SecretStr(keys)) or ""
    assert "0123" not in told
    assert told.startswith("" if which is None else f"api_key: key {which}: ")
    assert bool(told) == (which is not None)
