"""What is read of a form upload: its small fields, wherever they are; never its file."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.examined import NO_OBJECT
from proxy.protocol.offloadable import asks_for_stream
from proxy.request import forms
from proxy.request.forms import (
    MOST_ALIKE,
    MOST_PARAMS,
    MOST_PARTS,
    SLICE_BYTES,
    VALUE_BYTES,
    params,
    read_form,
)

EDGE = "----form4711"
KIND = f"multipart/form-data; boundary={EDGE}"
Part = tuple[str, bytes]


def field(name: str, value: bytes) -> Part:
    return f'Content-Disposition: form-data; name="{name}"', value


def file(size: int = 10_000, value: bytes = b"RIFF") -> Part:
    head = (
        'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'
    )
    return head, (value * (size // len(value) + 1))[:size]


def form(*parts: Part, edge: str = EDGE, end: bytes = b"--\r\n") -> bytes:
    made = [b"--%b\r\n%b\r\n\r\n%b\r\n" % (edge.encode(), h.encode(), v) for h, v in parts]
    return b"".join(made) + b"--" + edge.encode() + end


def model_of(raw: bytes, kind: str = KIND) -> str:
    return read_form(raw, kind).prompt.model


@pytest.mark.parametrize("size", [0, 1, 10_000, SLICE_BYTES - 3, SLICE_BYTES, 3 * SLICE_BYTES + 7])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_model_is_found_wherever_it_is(size: int, at: int) -> None:
    parts = [file(size), field("stream", b"true")]
    parts.insert(at, field("model", b"whisper"))
    found = read_form(form(*parts), KIND)
    assert found.prompt.model == "whisper"
    assert asks_for_stream(found.fields)
    assert not found.prompt.offloadable
    assert (found.put, found.drop, found.prompt.hashes) == ({}, [], [])


def test_fields_beside_it_are_read_as_of_json() -> None:
    parts = field("model", b"w"), field("session_id", b"s-1"), field("user", b"u"), file()
    found = read_form(form(*parts), KIND)
    assert (found.session, found.fields["session_id"], found.fields["user"]) == (
        ("s-1", None),
        "s-1",
        "u",
    )


@pytest.mark.parametrize(
    ("kind", "edge"),
    [
        ('multipart/form-data; boundary="{}"', "a b:c=d"),
        ("multipart/form-data;boundary={}", "x"),
        ("Multipart/Form-Data; charset=utf-8; BOUNDARY={}", "'()+_,-./?"),
        ('multipart/form-data; x="; boundary=no"; boundary={} ', EDGE),
        ("multipart/form-data; boundary={}; charset=utf-8", "b" * 70),
    ],
)
def test_boundaries(kind: str, edge: str) -> None:
    raw = form(file(), field("model", b"whisper"), edge=edge)
    assert model_of(raw, kind.format(edge)) == "whisper"
    assert model_of(b"what precedes it\r\n" + raw, kind.format(edge)) == "whisper"


@pytest.mark.parametrize(
    ("disposition", "model"),
    [
        ('Content-Disposition: form-data; name="model"', "w"),
        ("content-disposition:form-data;name=model", "w"),
        ('Content-Disposition: form-data; NAME = "model" ', "w"),
        ('X: y\r\nContent-Disposition: form-data; name="model"\r\nContent-Type: text/plain', "w"),
        ('Content-Disposition: form-data; name="m\\odel"', "w"),
        ('Content-Disposition: form-data; name="model"; filename="model"', ""),
        ('Content-Disposition: form-data; filename="; name=\\"model\\""; name="other"', ""),
        ('X-Content-Disposition: form-data; name="model"', ""),
        ('Content-Disposition: form-data; name="models"', ""),
        ("Content-Disposition: form-data", ""),
        ("X: y", ""),
    ],
)
def test_names_of_fields(disposition: str, model: str) -> None:
    assert model_of(form((disposition, b"w"))) == model


@pytest.mark.parametrize(
    ("raw", "model"),
    [
        (b"", ""),
        (b"--" + EDGE.encode(), ""),
        (b"--" + EDGE.encode() + b"\r\n", ""),
        (form(), ""),
        (form(field("model", b"w"), end=b""), "w"),
        (form(field("model", b"w"))[:-20], ""),
        (form(field("model", b"w")) + form(field("model", b"after its end")), "w"),
        (form(field("model", b"first"), file(), field("model", b"last")), "last"),
        (form(field("model", b"x" * (VALUE_BYTES + 1))), ""),
        (form(field("model", b"x" * VALUE_BYTES)), "x" * 256),
        (form(field("model", b"\xff\xfe")), "\ufffd\ufffd"),
        (form(field("model", b"")), ""),
        (form(("X: " + "y" * 10_000, b"z"), field("model", b"w")), ""),
        (form(*[field("x", b"y")] * (MOST_PARTS - 1), field("model", b"w")), "w"),
        (form(*[field("x", b"y")] * MOST_PARTS, field("model", b"w")), ""),
        (form(file(value=b"\r\n--" + EDGE.encode()[:-1]), field("model", b"w")), "w"),
        (form(field("model", b"w")).replace(b"\r\n", b"\n"), ""),
        (form(file(value=b"\r\n--%b1\r\n" % EDGE.encode(), size=900), field("model", b"w")), "w"),
        (form(file(value=b"\r\n--%b-" % EDGE.encode()), field("model", b"w")), ""),
        (b"--%b7\r\n" % EDGE.encode() + form(field("model", b"w")), "w"),
        (b"--other\r\n" + form(field("model", b"w")), "w"),
        (form(*[(f"X: {'y' * 1000}", b"z")] * 30, field("model", b"w")), "w"),
        (form(*[(f"X: {'y' * 1000}", b"z")] * 40, field("model", b"w")), ""),
    ],
)
def test_odd_forms(raw: bytes, model: str) -> None:
    assert model_of(raw) == model


@pytest.mark.parametrize(
    "kind",
    ["multipart/form-data", "multipart/form-data; boundary=", f"multipart/x; boundary={'b' * 257}"],
)
def test_without_a_boundary_nothing_is_read(kind: str) -> None:
    assert read_form(form(field("model", b"w")), kind) is NO_OBJECT


@pytest.mark.parametrize(("lines", "model"), [(MOST_ALIKE // 4 - 1, "w"), (MOST_ALIKE // 4, "")])
def test_false_delimiters_are_counted_over_the_whole_form(lines: int, model: str) -> None:
    alike = b"\r\n--%bx" % EDGE.encode() * lines
    assert model_of(form(*[field("x", alike)] * 4, field("model", b"w"))) == model


def test_parameters_are_read_up_to_a_bound() -> None:
    many = "".join(f";p{i}={i}" for i in range(5000))
    assert list(params("form-data" + many)) == [f"p{i}" for i in range(MOST_PARAMS)]


@given(st.text(st.sampled_from('ab\\"; ='), max_size=12))
def test_a_quoted_value_is_told_as_it_was_before_it_was_quoted(value: str) -> None:
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    assert params(f'form-data; name="{quoted}"') == {"name": value}


@given(st.binary(max_size=300), st.text(max_size=60))
def test_nothing_is_raised_over_anything(raw: bytes, tail: str) -> None:
    read_form(raw, f"multipart/form-data; boundary={tail}")
    read_form(form(file(50), end=b"\r\n" + raw), KIND)
    params(tail)


names = st.sampled_from(["model", "stream", "prompt", "language"])
values = st.binary(max_size=40).filter(lambda value: b"\r\n--" not in value)


@given(st.lists(st.tuples(names, values), max_size=6), st.integers(1, 50))
def test_the_last_value_counts_whatever_stands_around(
    fields: Sequence[tuple[str, bytes]], slice_bytes: int
) -> None:
    told = [value for name, value in fields if name == "model"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "SLICE_BYTES", slice_bytes)
        found = model_of(form(*[field(*pair) for pair in fields], file(100)))
    assert found == (told[-1].decode("utf-8", "replace") if told else "")
