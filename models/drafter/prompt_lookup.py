"""Prompt look-up: what followed the last few tokens earlier in the same text, copied.

The last n tokens are looked for in the request's own prompt and answer, n from `max_ngram` down to `min_ngram`, and the
tokens behind the first n that is found are the draft. Nothing is learnt, and the target's states are not read. The
draft is a point mass, so it is accepted with p(x) (recipes of prompt look-up and n-gram decoding; 2411.04975, section
2). Every request keeps an index from n-grams to places, so that a round costs what its new tokens cost, however long
the text is.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from models.errors import UserError
from models.target import Target
from models.text_drafting import DraftsFromText, TextState
from models.vocab import DraftVocab

PREFER = ("latest", "earliest")


class LookupText:
    """One request's text, and where each of its n-grams was continued.

    An n-gram is entered when the token behind it has come. So the text's own ending is not in the index, unless it
    occurred before.
    """

    def __init__(self, sizes: range, latest: bool) -> None:
        self.token_ids: list[int] = []
        self.started, self.matched = False, 0
        self._sizes = sizes  # lengths of n-grams, longest first
        self._latest = latest
        self._continued_at: dict[tuple[int, ...], int] = {}

    def append(self, token_ids: list[int]) -> None:
        """Take in the next tokens."""
        self.started = True
        text = self.token_ids
        for token in token_ids:
            end = len(text)
            for size in self._sizes:
                if size <= end:
                    ngram = tuple(text[end - size :])
                    if self._latest or ngram not in self._continued_at:
                        self._continued_at[ngram] = end
            text.append(token)

    def continuation(self, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens that followed the longest known ending of the text; none where none is known."""
        text, self.matched = self.token_ids, 0
        for size in self._sizes:
            if size <= len(text):
                start = self._continued_at.get(tuple(text[-size:]))
                if start is not None:
                    self.matched = size
                    return text[start : start + num_tokens]
        return []


class PromptLookupDrafter(DraftsFromText, nn.Module):
    """Copies from the request's own text; a module without parameters.

    Of several places where the longest match occurred, `prefer` takes the latest or the earliest. The draft vocabulary
    is left alone: there is no head to make smaller, and whatever stands in the text can be proposed.
    Raises UserError for n-gram lengths that are not 1 ≤ min_ngram ≤ max_ngram, and for another `prefer`.
    """

    def __init__(
        self, target: Target, vocab: DraftVocab, *, max_ngram: int = 3, min_ngram: int = 1, prefer: str = "latest"
    ) -> None:
        super().__init__()
        if not 1 <= min_ngram <= max_ngram:
            raise UserError(
                f"drafter.model.min_ngram is {min_ngram} and max_ngram {max_ngram}: "
                "the shorter must be at least 1, and the longer no less."
            )
        if prefer not in PREFER:
            raise UserError(f"drafter.model.prefer is {prefer!r}: choose {' or '.join(PREFER)}.")
        self.capture_layers: tuple[int, ...] = ()
        self.vocab = DraftVocab(target.vocab_size)
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._latest = prefer == "latest"

    def transformers_options(self, num_tokens: int) -> dict[str, Any]:
        """What makes transformers' `generate` draft in the same way, to be compared with."""
        return {"prompt_lookup_num_tokens": num_tokens, "max_matching_ngram_size": self._sizes[0]}

    def check_transformers(self) -> None:
        """Raise UserError where `transformers_options` make drafts that are not the same."""
        other = ["prefer=earliest"] if self._latest else []
        other += ["min_ngram=1"] if self._sizes[-1] != 1 else []
        if other:
            raise UserError(
                "transformers copies from the earliest place of a match, which may be of one token: make the drafter "
                f"with {' '.join(f'drafter.model.{setting}' for setting in other)} to compare the two."
            )

    def vllm_options(self, num_tokens: int) -> dict[str, Any]:
        """vLLM's `speculative_config` for the same drafts. Raises UserError where it would copy from another place."""
        if self._latest:
            raise UserError(
                "vLLM copies from the earliest place of a match: use drafter.model.prefer=earliest, or format=native, "
                "by which vLLM runs this project's own look-up."
            )
        longest, shortest = self._sizes[0], self._sizes[-1]
        lengths = {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}
        return {"method": "ngram", "num_speculative_tokens": num_tokens, **lengths}

    def new_state(self, batch_size: int, max_len: int) -> TextState:
        """Empty texts."""
        return TextState([LookupText(self._sizes, self._latest) for _ in range(batch_size)])
