"""The Containerfile says what an image must: no root, a health check, sources that are there."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.install.containerfile import stages_of, words_of

ROOT = Path(__file__).parents[1]
STAGES = stages_of((ROOT / "Containerfile").read_text("utf-8"))


def test_the_last_stage_runs_the_proxy_without_root_and_has_a_health_check() -> None:
    last = STAGES[-1]
    assert last.base.endswith("-slim")
    assert all(int(number) > 0 for number in last.last("USER").split(":"))
    assert words_of(last.last("ENTRYPOINT")) == ["/opt/cache-proxy/bin/cache-proxy"]
    assert last.health_command[0] == "/opt/cache-proxy/bin/python"
    assert not last.last("RUN"), "nothing of the build is left in it"


def test_the_sources_that_are_copied_exist_and_no_link_leads_out_of_them() -> None:
    copied = [step.text for step in STAGES[0].steps if step.instruction == "COPY"]
    sources = {ROOT / source for text in copied for source in shlex.split(text)[:-1]}
    assert all(source.exists() for source in sources)
    links = [path for source in sources for path in source.rglob("*") if path.is_symlink()]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    assert {source.name for source in sources} == sent
    assert all({link.resolve(), *link.resolve().parents} & sources for link in links)
