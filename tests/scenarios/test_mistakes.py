"""Typical mistakes and the message of each; docs/operate/mistakes.md shows them."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import pytest

import analysis.cli
import proxy.cli
import replayer.replay.cli
import replayer.simulator.cli
from proxy.config.load import load
from replayer.simulator.host import SimFleet
from tests.proxy.net.test_tls import tunnel
from tests.support.certificates import Certificates
from tests.support.harness import RawEngine, ServedProxy, chat, plain, proxied, says, until

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "cache-proxy": proxy.cli.main,
    "replay": replayer.replay.cli.main,
    "engine-sim": replayer.simulator.cli.main,
    "analyze": analysis.cli.main,
}
GPU = "cache-proxy --instances gpu-1"
FOLLOWS_NO_OPTION = "a value is one word, a list has commas and no spaces"
TYPED = (
    ("cache-proxy", "instances is not given: use --instances 127.0.0.1:8001,127.0.0.1:8002"),
    ("cache-proxy --instances", "argument --instances: expected one argument"),
    ("cache-proxy --instance gpu-1", "unknown argument '--instance'; did you mean --instances?"),
    ("CACHE_PROXY_INSTANCE=gpu-1 cache-proxy", "did you mean CACHE_PROXY_INSTANCES?"),
    ("cache-proxy gpu-1:8000", FOLLOWS_NO_OPTION),
    ("cache-proxy --instances gpu-1:8000 gpu-2:8000", FOLLOWS_NO_OPTION),
    ("cache-proxy --instances gpu-1:8000, gpu-2:8000", FOLLOWS_NO_OPTION),
    (
        'cache-proxy --instances "gpu-1:8000 gpu-2:8000"',
        "instances are separated by commas, without spaces",
    ),
    (
        "cache-proxy --instances gpu-1:8000 --instances gpu-2:8000",
        "--instances is given twice: join the values with commas",
    ),
    ("cache-proxy --instances gpu-1:8000,", "an entry is empty: is there a comma too many?"),
    ("cache-proxy --instances 8001,8002", "a port needs its host: 127.0.0.1:8001"),
    ("cache-proxy --instances [gpu-1:8000]", "a list has no brackets and no quotes"),
    ("cache-proxy --instances http://gpu-1", "a URL needs its port: http://host:8000"),
    (
        "cache-proxy --instances http://gpu-1:8000/v1",
        "only the server's address, without a path",
    ),
    ("cache-proxy --instances ::1:8000", "an IPv6 address is in brackets: [::1]:8000"),
    ("cache-proxy --instances tcp://gpu-1:8000", "the scheme is http or https"),
    ("cache-proxy --instances gpu-1:8000:8998", "the bootstrap port goes after ;bootstrap="),
    ("cache-proxy --instances 'gpu-1:8000;8998'", "unknown part '8998' after ';'"),
    (
        "cache-proxy --instances 'gpu-1:8000;gpu-2:8000'",
        "instances are separated by commas",
    ),
    (
        "cache-proxy --instances 'gpu-1:8000;gpus=0,1;dcgm=9400'",
        "GPUs are joined by +, as a comma ends the instance",
    ),
    (
        "cache-proxy --instances user:secret@gpu-1:8000",
        "'***@gpu-1:8000' is not host:port or http(s)://host:port; no user or password",
    ),
    ("cache-proxy --instances gpu-1:80000", "port 80000 is not within 1 to 65535"),
    ("cache-proxy --instances 10.0.0.256:8000", "Octet 256 (> 255) not permitted"),
    ("cache-proxy --instances a=gpu-1,a=gpu-2", "name 'a' is given twice"),
    ("cache-proxy --instances gpu-1:8000,gpu-1:8000", "name 'gpu-1:8000' is given twice"),
    ("cache-proxy --discover file://engines", "begins with none of: dns://, k8s://"),
    ("cache-proxy --discover k8s://vllm", "'k8s://vllm' is not k8s://NAMESPACE/SERVICE"),
    ("cache-proxy --discover dns://vllm", "'dns://vllm' is not dns://NAME:PORT"),
    ("cache-proxy --discover dns://vllm:80000", "port 80000 is not within 1 to 65535"),
    (
        "cache-proxy --instances localhost:8000",
        "'localhost:8000' is where this proxy listens (--port)",
    ),
    (f"{GPU} --prefill-throuput 20000", "did you mean --prefill-throughput?"),
    (f"{GPU} --prefill-throughput 20k", "allowed: number, >= 0.001, <= 1000000000"),
    (f"{GPU} --port 80000", "port = '80000' (flag --port); allowed: integer, >= 0, <= 65535"),
    (f"{GPU} --offload-policy on", "allowed: one of cost, seed-heuristic"),
    (
        f"{GPU} --warm-threshold 9000",
        "must not be larger than heavy_threshold = 8192 (default)",
    ),
    (f"{GPU} --tls-key key.pem", "has no effect with tls_cert = none (default)"),
    (f"{GPU} --config missing.toml", "cannot read it: No such file or directory"),
    (f"{GPU} --extra-paths v1/images", "'v1/images' does not begin with a slash"),
    (
        f"{GPU} --cors-allowed-origins https://app.example.com/",
        "is not an origin: scheme://host[:port], without a path or slash",
    ),
    (
        f"{GPU} --admin-port 9000 --admin-host 0.0.0.0",
        "must be a loopback address with admin_token = none (default)",
    ),
    (f"{GPU} --share http://redis:6379", "it is not redis://host:port, rediss://host:port or"),
    (f"{GPU} --share-key 0123456789abcdef", "has no effect with share = none (default)"),
    ("engine-sim --instances 0", "--instances 0: must be 1 to 1000"),
    ("engine-sim --port 8990 --instances 20", "20 ports from there meet those of --port"),
    ("analyze reprot run", "invalid choice: 'reprot'"),
)
"""A command line, and what it says on stderr, in one line, before it exits with status 2."""
STARTED = (
    (
        "cache-proxy --instances a=gpu-1;bootstrap=8998,b=gpu-2;bootstrap=8998",
        "one instance: if more were given, put the list in quotes (a shell cuts at ;)",
    ),
    (
        "cache-proxy --instances gpu-1:8001,gpu-1:8002",
        "no bootstrap address for gpu-1:8001, gpu-1:8002: no prefill is offloaded to them",
    ),
    (f"{GPU},gpu-2", "admin paths are open to every client of 0.0.0.0"),
    (f"{GPU},gpu-2 --extra-paths /v1/admin/batch", "/v1/admin/batch: never relayed"),
)
"""A command line that starts, and what it logs then."""
CHAT = "/v1/chat/completions"
ASKED = (
    ("POST /chat/completions", 404, f"/v1 is missing, with which a client's base URL ends: {CHAT}"),
    ("GET /models", 404, "/v1 is missing, with which a client's base URL ends: /v1/models"),
    (f"POST /v1{CHAT}", 404, f"/v1 is there twice, the base URL has it already: {CHAT}"),
    (f"POST /{CHAT}", 404, f"without the slash too many: {CHAT}"),
    (f"POST {CHAT}/", 404, f"without the slash at its end: {CHAT}"),
    ("POST /v1/chat/completion", 404, f"did you mean {CHAT}?"),
    ("GET /v1", 404, "/v1 ends a client's base URL; its requests go to paths below"),
    ("POST /api/chat", 404, "this is OpenAI's API below /v1, not Ollama's"),
    ("GET /v1/realtime", 404, "websockets are not relayed"),
    ("POST /v1/images/generations", 404, "not relayed; docs/reference/http-api.md lists what is"),
    ("POST /v1/admin/batch", 404, "changes one engine only; ask that engine itself"),
    (f"GET {CHAT}", 405, "method: GET is not allowed for this path; allowed: POST"),
    ("POST /", 405, "method: POST is not allowed for this path; allowed: GET, HEAD"),
    (
        f"OPTIONS {CHAT} from a web page",
        405,
        "cross-origin requests are refused (--cors-allowed-origins)",
    ),
    (f"POST {CHAT} with a body that is no JSON", 400, "body: not valid JSON"),
    (f"POST {CHAT} for an unknown model", 404, "The model `gpt-4o` does not exist. Known here: "),
    ("GET /v1/models/gpt-4o", 404, "The model `gpt-4o` does not exist. Known here: sim-8b."),
)
"""A request, the status of its answer, and the answer's `error.message`."""
SEEN = (
    ("a port where nobody listens", "connect: Connection refused"),
    ("a port of another web server", "GET /health answers 404: is this a vLLM server?"),
    (
        "a web server that answers /health",
        "its models could not be read: GET /v1/models answers 404: is this a vLLM server?",
    ),
    (
        "a vLLM server with --api-key",
        "GET /v1/models answers 401: does it want a key (--instance-api-key)?",
    ),
    ("https:// for a server without TLS", "unreachable: TLS: "),
    (
        "https:// of a CA that is not known",
        "TLS: its certificate is not trusted: unable to get local issuer certificate",
    ),
    ("one engine under two names", "is the same engine as localhost:"),
    ("a bootstrap port where nobody listens", "gives no engine id (Connection refused)"),
)
"""An instance, and what /health and the log say of it."""


def page() -> str:
    """The tables of docs/operate/mistakes.md."""
    blocks = []
    for title, head, rows in (
        ("A command line that is refused", ("typed", "says"), TYPED),
        ("A command line that starts", ("typed", "logs"), STARTED),
        ("A request", ("request", "status", "`error.message`"), ASKED),
        ("An instance", ("given", "`/health` and the log say"), SEEN),
    ):
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for row in rows:
            cells = [str(cell) if isinstance(cell, int) else f"``{cell}``" for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append(f"## {title}\n\n" + "\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def as_a_shell(typed: str) -> tuple[dict[str, str], str, list[str]]:
    """Environment, program and arguments of a command line; a shell ends one at `;`."""
    lexer = shlex.shlex(typed, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words = list(lexer)
    words = words[: words.index(";")] if ";" in words else words
    count = next(i for i, word in enumerate(words) if word in PROGRAMS)
    return dict(word.split("=", 1) for word in words[:count]), words[count], words[count + 1 :]


def test_there_are_fifty_and_the_page_shows_them() -> None:
    # To renew it: python -c "from tests.scenarios.test_mistakes import *; print(page(), end='')"
    assert len({row[0] for rows in (TYPED, STARTED, ASKED, SEEN) for row in rows}) >= 50
    parts = (ROOT / "docs/operate/mistakes.md").read_text("utf-8").split("<!-- mistakes -->")
    assert parts[1].strip() == page().strip()


@pytest.mark.parametrize(("typed", "said"), TYPED, ids=lambda text: text[:60])
def test_a_command_line_that_is_refused(
    typed: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env, program, given = as_a_shell(typed)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(proxy.cli, "_run", lambda *_: 0)  # it would listen where it took one
    status: object
    try:
        status = PROGRAMS[program](given)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith(f"{program}: ")
    assert said in err
    assert err.count("\n") == 1
    assert "secret" not in err


@pytest.mark.parametrize(("typed", "logged"), STARTED)
def test_a_command_line_that_starts(
    typed: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _, _, given = as_a_shell(typed)
    proxy.cli.warn_of_options(logging.getLogger("proxy"), load(given, {}).settings)
    assert any(logged in message for message in caplog.messages)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_says_its_version(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program](["--version"])
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.startswith(f"{program} {proxy.__version__}")


async def test_a_request(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (served, _):
        for asked, status, said in ASKED:
            method, path, *how = asked.split(" ", 2)
            manner = how[0] if how else ""
            model = {"model": "gpt-4o"} if "model" in manner else {}
            page_headers = {
                "Origin": "https://app.example.com",
                "Access-Control-Request-Method": "POST",
            }
            async with served.http.request(
                method,
                served.server.url + path,
                data=b"{model: x}" if "JSON" in manner else None,
                json=None if "JSON" in manner or method == "GET" else chat("hi") | model,
                headers=page_headers if "page" in manner else {},
            ) as answer:
                error = (await answer.json(content_type=None))["error"]
                assert (answer.status, said in error["message"]) == (status, True), (asked, error)


async def test_the_root_says_what_this_is(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, admin_port=0) as (served, _):
        for url in (served.server.url, served.server.admin_url):
            async with served.http.get(f"{url}/") as answer:
                assert (answer.status, answer.content_type) == (200, "text/plain")
                text = await answer.text()
                assert text.startswith(f"cache-proxy {proxy.__version__}: ")
                for path in ("/v1/chat/completions", "/v1/models", "/health", "/instances"):
                    assert path in text


async def test_an_instance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One proxy in front of all of them: each is told for itself, in /health and in the log."""
    async with (
        RawEngine(says(b"")) as site,
        RawEngine(says(b"")) as healthy_site,
        RawEngine(says(b"")) as keyed,
        SimFleet(1) as fleet,
        tunnel(fleet.engines[0].port, Certificates(tmp_path / "ca").server("127.0.0.1")) as secured,
    ):
        site.gets["/health"] = absent = plain(b"", "404 Not Found")
        healthy_site.tells(absent)
        keyed.tells(plain(b"", "401 Unauthorized"))
        port = fleet.engines[0].port
        instances = [
            "nobody=127.0.0.1:1",
            f"site={site.address}",
            f"healthy_site={healthy_site.address}",
            f"keyed={keyed.address}",
            f"tls=https://127.0.0.1:{port}",
            f"ca=https://127.0.0.1:{secured}",
            f"localhost:{port};bootstrap=1",
            f"twin=127.0.0.1:{port};bootstrap=1",
        ]
        names = ("nobody", "site", "healthy_site", "keyed", "tls", "ca", "twin", "twin")
        async with ServedProxy(tmp_path / "log", instances) as served:

            async def all_are_told() -> bool:
                async with served.http.get("/health") as answer:
                    rows = (await answer.json())["instances"]
                told = {n: (row["last_error"] or "", *row["warnings"]) for n, row in rows.items()}
                told_twin.append(told[f"localhost:{port}"])
                return all(
                    any(said in text for text in told[name])
                    for name, (_, said) in zip(names, SEEN, strict=True)
                )

            told_twin: list[tuple[str, ...]] = []
            await until(all_are_told, "all are told")
            for name, (_, said) in zip(names, SEEN, strict=True):
                assert any(name in m and said in m for m in caplog.messages), (name, said)
            assert not any("same engine" in text for text in told_twin[-1]), "told of one only"
            assert sum("is the same engine as" in m for m in caplog.messages) == 1, "and once"
