"""Text and tokens: characters cut between tokens, bytes that are none, tokenizers of any folder."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hal_models.text import BYTE_VOCAB, Bytes, Text, Tokenizer, text_of

from hal.errors import CheckpointError

TEXT = "plain, é, 日本語, 𝄞🙂, e\u0301; \u200d\ufeffthe end\n"


def streamed(text: Text, ids: list[int]) -> list[str]:
    stream = text.stream()
    return [*map(stream.add, ids), stream.end()]


def test_bytes_there_and_back() -> None:
    ids = Bytes().encode(TEXT)
    assert ids == list(TEXT.encode())
    assert "".join(streamed(Bytes(), ids)) == TEXT


@pytest.mark.parametrize("character", ["é", "日", "🙂"])
def test_a_character_is_said_with_its_last_byte(character: str) -> None:
    ids = list(character.encode())
    assert streamed(Bytes(), ids) == [""] * (len(ids) - 1) + [character, ""]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"\x80", "\ufffd"),
        (b"a\xe6\x97", "a\ufffd"),
        (b"\xe6\x97a", "\ufffda"),
        (b"\xc0\xaf", "\ufffd\ufffd"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"\xf0\x9f\x99", "\ufffd"),
        ("\ufffd".encode(), "\ufffd"),
        (b"", ""),
    ],
)
def test_bytes_that_are_no_text_become_the_replacement_sign(data: bytes, text: str) -> None:
    assert "".join(streamed(Bytes(), list(data))) == text


@pytest.mark.parametrize("other", [256, 257, 319])
def test_tokens_beyond_bytes_are_no_text(other: int) -> None:
    first, *rest = "é".encode()
    assert "".join(streamed(Bytes(), [other, first, other, *rest, other])) == "é"


def test_random_bytes_stream_as_they_decode() -> None:
    data = random.Random(5).randbytes(5000)
    assert "".join(streamed(Bytes(), list(data))) == data.decode(errors="replace")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer as the published ones are, with few merges, and an end marker."""
    tokenizers = pytest.importorskip("tokenizers")
    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the cat and the hat and the end " * 3], trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    fast.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("repeat", [1, 40])
def test_a_tokenizer_streams_what_it_decodes(repeat: int, folder: Path) -> None:
    tokenizer = Tokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode(TEXT * repeat)
    assert len(ids) < len((TEXT * repeat).encode())
    assert "".join(streamed(tokenizer, ids)) == TEXT * repeat


@pytest.mark.parametrize("text", ["日", "🙂", "the 🙂"])
def test_a_tokenizer_never_says_half_a_character(text: str, folder: Path) -> None:
    tokenizer = Tokenizer(folder / "tokenizer.json")
    said = streamed(tokenizer, tokenizer.encode(text * 12))
    assert "\ufffd" not in "".join(said)
    assert sum(map(bool, said)) >= 12, "text comes piece by piece"


@pytest.mark.parametrize("seed", range(12))
def test_any_tokens_stream_as_they_decode(seed: int, folder: Path) -> None:
    from tokenizers import Tokenizer as Fast

    pick = random.Random(seed)
    high = pick.choice([290, 290, 40])  # many bytes that are no text, or mostly letters
    ids = [pick.randrange(high) for _ in range(300)]
    whole = Fast.from_file(str(folder / "tokenizer.json")).decode(ids)
    assert "".join(streamed(Tokenizer(folder / "tokenizer.json"), ids)) == whole


def test_an_end_marker_is_no_text(folder: Path) -> None:
    tokenizer = Tokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode("the end<|end|>")
    assert ids[-1] == 0
    assert "".join(streamed(tokenizer, ids)) == "the end"


def test_which_way_a_folder_writes_text(folder: Path, tmp_path: Path) -> None:
    assert isinstance(text_of(folder, 290), Tokenizer)
    assert isinstance(text_of(folder, 248320), Tokenizer)
    assert isinstance(text_of(tmp_path, BYTE_VOCAB), Bytes)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, and a vocabulary of 1025 tokens"):
        text_of(tmp_path, BYTE_VOCAB + 1)


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"\xff\xfe", b'{"model": {"type": "none"}}'])
def test_a_malformed_tokenizer_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        text_of(tmp_path, 320)
