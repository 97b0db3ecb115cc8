"""Stop strings against decoding every prefix in full, for tokens that cut texts, characters and bytes anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine import stopping
from engine.stopping import StopStrings
from models.errors import UserError
from models.target import Target

Decode = Callable[[list[int]], str]
Find = Callable[[list[int], list[int]], int | None]

WORDS = [
    "a",
    "b",
    "ab",
    "stop",
    "\n",
    "\n\n",
    " ",
    " the",
    "User:",
    ".",
    " .",
    "n't",
    " n't",
    "é",
    "ñ",
    "日本",
    "語",
    "😀",
]
FOREIGN = ["日", "本", "語", "字", "😀", "é"]  # in long runs: tails that hold nothing but parts of characters
ABSENT = "zq"


@dataclass(frozen=True)
class Case:
    """An answer, the strings to look for, and after how many tokens the first is complete."""

    tokens: list[int]
    strings: tuple[str, ...]
    wanted: int | None


@dataclass(frozen=True)
class Tokens:
    """A way of decoding, and the bytes of the tokens that texts may be cut into."""

    decode: Decode
    token_of: dict[bytes, int]
    noise: list[int]  # tokens put in between: specials that decode to nothing, bytes that are not text

    def split(self, text: str, rng: random.Random) -> list[int]:
        """Cut a text into tokens at random, often inside characters."""
        data, tokens, at = text.encode(), [], 0
        while at < len(data):
            known = [n for n in range(1, 9) if at + n <= len(data) and data[at : at + n] in self.token_of]
            size = rng.choice(known)
            tokens.append(self.token_of[data[at : at + size]])
            at += size
            if self.noise and rng.random() < 0.05:
                tokens += rng.choices(self.noise, k=rng.choice([1, 1, 1, 30]))
        return tokens


def byte_level(tiny: Target) -> Tokens:
    """The bundled target's tokens."""
    assert tiny.tokenizer is not None
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    special = tiny.tokenizer.all_special_ids
    vocab = {t: i for t, i in tiny.tokenizer.get_vocab().items() if i not in special}
    token_of = {bytes(byte_of[c] for c in token): i for token, i in vocab.items()}
    return Tokens(tiny.decode, token_of, [*special, token_of[b"\xe6"], token_of[b"\x80"]])


def byte_fallback() -> Tokens:
    """SentencePiece as in Llama 2: the leading space is dropped; a run of bytes is text as a whole or not at all."""
    pieces = ["a", "b", "ab", "st", "op", "stop", "▁", "▁the", "▁s", "User", ":", ".", "n", "'", "t", "é"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {piece: 257 + i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    token_of = {bytes([byte]): byte + 1 for byte in range(256)}
    token_of |= {piece.replace("▁", " ").encode(): vocab[piece] for piece in pieces}
    return Tokens(tokenizer.decode, token_of, [])


@pytest.fixture(scope="module")
def kinds(tiny: Target) -> dict[str, Tokens]:
    return {"byte level": byte_level(tiny), "byte fallback": byte_fallback()}


def first_by_decoding_every_prefix(tokens: list[int], strings: tuple[str, ...], decode: Decode) -> int | None:
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        if any(string in text for string in strings):
            return count
    return None


def first_in_rounds(tokens: list[int], find: Find, rng: random.Random) -> int | None:
    at = 0
    while at < len(tokens):
        new = tokens[at : at + rng.randint(1, 6)]
        count = find(tokens[:at], new)
        if count is not None:
            return at + count
        at += len(new)
    return None


def cases(kind: Tokens, num_cases: int, seed: int = 0) -> list[Case]:
    """Random answers; the strings are stretches of them, of 1 to 25 characters, or do not occur."""
    rng, made = random.Random(seed), []
    for _ in range(num_cases):
        words = rng.choice([WORDS, FOREIGN])
        text = "".join(rng.choices(words, k=rng.randint(1, 60)))
        starts = [rng.randrange(len(text)) for _ in range(rng.randint(1, 3))]
        strings = (ABSENT, *(text[s : s + rng.choice([1, 2, 3, 5, 12, 25])] for s in starts if rng.random() < 0.8))
        tokens = kind.split(text, rng)
        made.append(Case(tokens, strings, first_by_decoding_every_prefix(tokens, strings, kind.decode)))
    return made


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_answers_end_where_decoding_every_prefix_in_full_says(name: str, kinds: dict[str, Tokens]) -> None:
    kind, rng = kinds[name], random.Random(1)
    made = cases(kind, 250)
    for case in made:
        found = first_in_rounds(case.tokens, StopStrings(case.strings, kind.decode).find, rng)
        assert found == case.wanted, (kind.decode(case.tokens), case)
    ends = [case.wanted for case in made]
    assert sum(end is None for end in ends) > 10  # some must run to the end,
    assert sum(end is not None and end > 60 for end in ends) > 20  # and some stop far behind the tail's length


def last_tokens_only(strings: tuple[str, ...], decode: Decode) -> Find:
    """As many tokens as the longest string has characters."""
    longest = max(map(len, strings))

    def find(emitted: list[int], new: list[int]) -> int | None:
        tail = emitted[-longest:]
        texts = [decode(tail + new[:n]) for n in range(1, len(new) + 1)]
        return next((n for n, text in enumerate(texts, 1) if any(s in text for s in strings)), None)

    return find


def new_tokens_only(strings: tuple[str, ...], decode: Decode) -> Find:
    return lambda emitted, new: StopStrings(strings, decode).find([], new)


def token_by_token(strings: tuple[str, ...], decode: Decode) -> Find:
    return StopStrings(strings, lambda tokens: "".join(decode([token]) for token in tokens)).find


def end_of_the_round(strings: tuple[str, ...], decode: Decode) -> Find:
    return lambda emitted, new: len(new) if StopStrings(strings, decode).find(emitted, new) else None


@pytest.mark.parametrize("wrong", [last_tokens_only, new_tokens_only, token_by_token, end_of_the_round])
@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_the_well_known_mistakes_are_caught(
    wrong: Callable[[tuple[str, ...], Decode], Find], name: str, kinds: dict[str, Tokens]
) -> None:
    kind, rng = kinds[name], random.Random(1)
    made = cases(kind, 120)
    assert any(first_in_rounds(c.tokens, wrong(c.strings, kind.decode), rng) != c.wanted for c in made)


@pytest.mark.parametrize(
    ("name", "part", "left_out"),
    [
        ("byte level", "_SLACK", -2),  # a tail that is too short
        ("byte fallback", "_SLACK", -2),
        ("byte fallback", "_starts_a_character", lambda self, emitted, start: True),
        ("byte fallback", "_whole_characters", lambda self, tokens: len(self.decode(tokens))),
    ],
)
def test_no_part_of_the_bound_can_be_left_out(
    name: str, part: str, left_out: Any, kinds: dict[str, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, rng = kinds[name], random.Random(1)
    made = cases(kind, 250)
    monkeypatch.setattr(stopping if part == "_SLACK" else StopStrings, part, left_out)
    found = [first_in_rounds(c.tokens, StopStrings(c.strings, kind.decode).find, rng) for c in made]
    assert found != [c.wanted for c in made]


@pytest.mark.parametrize("text", ["plain words, over and over. " * 300, "日本語😀" * 400])
def test_only_a_bounded_tail_is_decoded(text: str, tiny: Target) -> None:
    kind, decoded = replace(byte_level(tiny), noise=[]), list[int]()

    def decode(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return tiny.decode(tokens)

    tokens, stop = kind.split(text, random.Random(0)), StopStrings(("12345", "\n"), decode)
    assert len(tokens) > 2000
    for at in range(0, len(tokens), 400):
        decoded.clear()
        assert stop.find(tokens[:at], tokens[at : at + 5]) is None
        # doubled until they hold 5 + 4 characters of up to 4 bytes; 3 further left; 5 new
        assert max(decoded) <= 2 * 4 * (5 + 4) + 3 + 5
        assert len(decoded) <= 5 + 5 + 4 * 4


def test_where_strings_lie_in_tokens(tiny: Target) -> None:
    def ids(*texts: str | bytes) -> list[int]:
        known = byte_level(tiny).token_of
        return [known[t if isinstance(t, bytes) else t.encode()] for t in texts]

    smile = [bytes([byte]) for byte in "😀".encode()]
    find = StopStrings((" the", "th", "😀"), tiny.decode).find
    assert find([], ids("a", " the", "a")) == 2  # inside one token
    assert find(ids("a", "t"), ids("h")) == 1  # across the border of the rounds
    assert find(ids("a", "t"), ids("a", "t", "h", "t", "h")) == 3  # the first of two
    assert find([], ids("a", *smile, "a")) == 5  # a character is there with its last byte
    assert find(ids(*smile[:3]), ids(smile[3], "a")) == 1
    assert find(ids(*smile[:3]), ids("a", smile[3])) is None
    assert find(ids("t") + [0] * 100, [0, *ids("h")]) == 2  # special tokens are no text
    assert find(ids("a"), []) is None
    assert StopStrings((), tiny.decode).find([], ids("a")) is None


@pytest.mark.parametrize(
    ("strings", "text", "wanted"),
    [
        (("b", "c"), "xacb", "xa"),
        (("\n\n",), "one\n\ntwo\n\n", "one"),
        (("abcd", "bc"), "xabcd", "xa"),  # "bc" is complete before "abcd", and so whatever the tokens
        (("cd", "abcd"), "xabcd", "x"),  # together: the longest
        (("😀",), "é😀", "é"),
        (("no",), "text", "text"),
        ((), "text", "text"),
        (("text",), "text", ""),
    ],
)
def test_trimmed_text_ends_before_the_string_that_is_complete_first(
    strings: tuple[str, ...], text: str, wanted: str
) -> None:
    assert StopStrings(strings, str).trim(text) == wanted


def test_strings_that_cannot_be_looked_for_are_refused() -> None:
    with pytest.raises(UserError, match="stop string is empty"):
        StopStrings(("a", ""), str)
    with pytest.raises(UserError, match=r"holds U\+FFFD"):
        StopStrings(("a\ufffd",), str)
    with pytest.raises(UserError, match="one string 'stop': give a list"):
        StopStrings("stop", str)  # type: ignore[arg-type]
