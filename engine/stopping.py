"""Stop strings: an answer ends where its text first contains one, however the tokens cut that text.

A string may begin inside one token and end inside another, and a token may hold a part of a character. So the test is
on decoded text: after how many tokens does the decoded answer contain a string?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models.errors import UserError

_BROKEN = "\ufffd"  # what decoders show for bytes that are not (yet) text
_CHARACTER_BYTES = 4  # a character of UTF-8 has at most so many
_SLACK = 4  # characters that a tail shows beyond the longest string; 1 is needed, see StopStrings


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Finds where an answer first contains one of `strings`; `decode` turns token ids into text (`Target.decode`).

    Only the tail of the answer is decoded. What new tokens complete starts less than L characters before the end of
    the text that was there, L being the longest string's length: the tail must show L − 1 whole characters, and show
    them as the whole answer does. Decoders work from left to right, and UTF-8 says of each byte whether a character
    starts there; so a tail's text is the end of the whole text, but for up to three bytes of a character that the cut
    splits, and for a leading space, which SentencePiece drops. Up to three bytes at the end may wait for the rest of
    their character. Both show as U+FFFD, at most one for each byte, and no stop string may hold that. Four of them are
    counted as one character, since between the ends they may be the bytes of one: then ¾ at either end is lost, and a
    tail that counts L + 1 is long enough. How many tokens that takes is found by doubling: of those that decode to
    anything fewer than 8 for each character.

    A byte-fallback decoder shows a whole run of byte tokens as U+FFFD where any byte of it is not text; so the tail is
    made to start where a character does, at most three tokens further left. Raises UserError for a string that is
    empty, or that holds U+FFFD.
    """

    strings: tuple[str, ...]
    decode: Callable[[list[int]], str]

    def __post_init__(self) -> None:
        if isinstance(self.strings, str):
            raise UserError(f"The stop strings are the one string {self.strings!r}: give a list of strings.")
        for string in self.strings:
            if not string:
                raise UserError("A stop string is empty: every text contains it. Leave it out.")
            if _BROKEN in string:
                raise UserError(f"The stop string {string!r} holds U+FFFD, which stands for bytes that are no text.")

    def find(self, emitted: list[int], new: list[int]) -> int | None:
        """After how many of the tokens `new` the answer first contains a stop string; None where it does not.

        `emitted` is the answer before them, which contains none. The token that completes the string belongs to the
        answer; what its text holds beyond is for `trim` to cut.
        """
        if not self.strings:
            return None
        tail = emitted[self._tail_start(emitted) :]
        for count in range(1, len(new) + 1):
            text = self.decode(tail + new[:count])
            if any(string in text for string in self.strings):
                return count
        return None

    def trim(self, text: str) -> str:
        """The text before the stop string that is completed first (before the longest of several that end together)."""
        found = [(start + len(s), start) for s in self.strings if (start := text.find(s)) >= 0]
        return text[: min(found)[1]] if found else text

    def _tail_start(self, emitted: list[int]) -> int:
        wanted = max(map(len, self.strings)) + _SLACK
        num_tokens = wanted
        while num_tokens < len(emitted) and self._whole_characters(emitted[-num_tokens:]) < wanted:
            num_tokens *= 2  # tokens that are part of a character, or that decode to nothing
        if num_tokens >= len(emitted):
            return 0
        cut = len(emitted) - num_tokens
        further_left = range(cut, max(cut - _CHARACTER_BYTES, -1), -1)
        return next((start for start in further_left if self._starts_a_character(emitted, start)), cut)

    def _whole_characters(self, tokens: list[int]) -> float:
        text = self.decode(tokens)
        broken = text.count(_BROKEN)
        return len(text) - broken + broken / _CHARACTER_BYTES

    def _starts_a_character(self, emitted: list[int], start: int) -> bool:
        texts = (self.decode(emitted[start : start + n]) for n in range(1, _CHARACTER_BYTES + 1))
        return any(text and _BROKEN not in text for text in texts)
