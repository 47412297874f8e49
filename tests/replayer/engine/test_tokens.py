"""Words, ids and hashes: what makes two runs comparable token by token."""

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.engine.tokens import (
    ASSISTANT,
    IM_END,
    IM_START,
    WORDS,
    Output,
    detokenize,
    make_prompt,
    tokenize,
)
from replayer.replay.prompts import word_vocabulary

ROOT = Path(__file__).parents[3]

TEXT = "the quick brown fox jumps over the lazy dog " * 7


def test_the_vocabulary_is_a_thousand_distinct_plain_words():
    assert len(set(WORDS)) == len(WORDS) == 1_024
    assert all(word.isascii() and word.isalpha() for word in WORDS)


@pytest.mark.parametrize(
    "path",
    [
        "LICENSE",
        "CONTRIBUTING.md",
        "docs/concepts/decisions.md",
        "proxy/app.py",
        "configs/alerts.yml",
    ],
)
def test_text_has_four_to_five_bytes_per_token_as_with_real_vocabularies(path):
    text = (ROOT / path).read_text("utf-8")
    assert 4.0 <= len(text.encode()) / len(tokenize(text)) <= 5.0


def test_words_that_prompts_and_answers_are_made_of_are_one_token_each():
    ours = [*WORDS, *(word.decode() for word in word_vocabulary().words)]
    ours += [IM_START, IM_END, ASSISTANT]
    assert [len(tokenize(word)) for word in ours] == [1] * len(ours)


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_tokens_of_a_text_stay_when_words_follow(one, other):
    assert tokenize(f"{one} {other}") == tokenize(one) + tokenize(other)
    assert len(tokenize(one)) <= len(one.encode())


@pytest.mark.parametrize(
    ("word", "tokens"),
    [("prefix", 1), ("caching", 2), ("disaggregated", 4), ("日本語", 2), ("é", 1)],
)
def test_a_long_word_is_several_tokens(word, tokens):
    assert len(tokenize(word)) == tokens
    assert tokenize("abcdefghi") != tokenize("abcdef ghi")


def test_white_space_is_nothing():
    assert tokenize("a  b\nc\t a") == tokenize("a b c a")
    assert len(tokenize(TEXT)) == 63
    assert detokenize(tokenize(" ".join(WORDS[5:9]))) == " ".join(WORDS[5:9])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100), st.integers(1, 20))
def test_block_hashes_are_chained(ids, block):
    prompt = make_prompt(array("I", ids), block)
    assert len(prompt.block_hashes) == len(ids) // block
    ids[0] ^= 1
    other = make_prompt(array("I", ids), block)
    assert not set(prompt.block_hashes) & set(other.block_hashes)


def test_a_salt_separates_blocks_but_not_outputs():
    plain, salted = (make_prompt(tokenize(TEXT), 16, salt) for salt in ("", "tenant"))
    assert not set(plain.block_hashes) & set(salted.block_hashes)
    assert Output(plain).words(0, 50) == Output(salted).words(0, 50)


@given(cut=st.integers(0, 60), block=st.integers(1, 20))
def test_a_continued_output_is_the_same_output(cut, block):
    whole = Output(make_prompt(tokenize(TEXT), block))
    expected = whole.words(0, 60)
    text = " ".join([TEXT, *expected.split()[:cut]])
    rest = Output(make_prompt(tokenize(text), block))
    assert rest.words(0, 60 - cut).split() == expected.split()[cut:]


@given(tokens=st.integers(0, 100), block=st.integers(1, 20))
def test_generated_blocks_hash_like_the_prompt_they_become(tokens, block):
    first = make_prompt(tokenize(TEXT), block)
    output = Output(first)
    following = make_prompt(tokenize(TEXT + output.words(0, tokens)), block)
    assert [*first.block_hashes, *output.hashes(tokens)] == list(following.block_hashes)


def test_outputs_end_by_themselves_where_the_text_says_so():
    lengths = []
    for number in range(200):
        prompt = make_prompt(tokenize(f"prompt {number}"), 16)
        tokens, stops = Output(prompt).natural_tokens(50, 0, 10_000)
        assert stops
        assert Output(prompt).natural_tokens(50, 0, tokens) == (tokens, True)
        assert Output(prompt).natural_tokens(50, tokens, 100_000)[0] > tokens
        assert tokens == 1 or Output(prompt).natural_tokens(50, 0, tokens - 1) == (
            tokens - 1,
            False,
        )
        lengths.append(tokens)
    assert sum(lengths) / len(lengths) == pytest.approx(50, rel=0.3)
