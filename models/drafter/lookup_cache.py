"""A look-up cache: what followed the last few tokens before, in this text or in any that was remembered.

The last k tokens are looked up, for several k, the longest first: in the request's own text, and then in a memory that
all requests of the drafter share. What followed most often is drafted (of several, the latest), and looked up from in
turn. Drafts are point masses, accepted with p(x).

The shared memory learns by `remember` alone, from texts that are finished: `engine.loop.generate` calls it at its end
where it is told to (`remember=True`; `python -m engine ... remember=true` also writes the memory back to the export). A
proposal reads the memory and leaves it as it was. So a request's draft depends on its own text and on what was
remembered before, not on its neighbours in the batch, nor on how often anything was asked or measured; and prompts that
are answered twice to be compared are not known the second time. Remembering while others run changes their later
drafts, never what comes out. The memory has a capacity, and is saved with the drafter as it is at that time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from models.continuations import Continuations, empty
from models.errors import UserError
from models.target import Target
from models.text_drafting import DraftsFromText, TextState
from models.vocab import DraftVocab

EVICT = ("lru", "lfu")


class LookupCacheRequest:
    """One request's text, and what followed its own n-grams; `sizes` are their lengths, longest first."""

    def __init__(self, sizes: list[int], shared: Continuations) -> None:
        self.token_ids: list[int] = []
        self.started, self.matched = False, 0
        self._sizes, self._memories = sizes, (Continuations(), shared)

    def __deepcopy__(self, memo: dict[int, Any]) -> LookupCacheRequest:
        """A request that goes on by itself, and shares what requests share."""
        own, shared = self._memories
        twin = LookupCacheRequest(self._sizes, shared)
        twin.started = self.started
        twin.token_ids, twin._memories = list(self.token_ids), (copy.deepcopy(own, memo), shared)
        return twin

    def append(self, token_ids: list[int]) -> None:
        """Take in the next tokens."""
        self.started = True
        own, _ = self._memories
        for token in token_ids:
            own.learn(self.token_ids[-self._sizes[0] :], token, self._sizes)
            self.token_ids.append(token)

    def continuation(self, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens, each the best known behind those before it."""
        context = self.token_ids[-self._sizes[0] :]
        known = len(context)
        while len(context) < known + num_tokens:
            token, size = self._best(context)
            if len(context) == known:
                self.matched = size
            if token is None:
                break
            context.append(token)
        return context[known:]

    def _best(self, context: list[int]) -> tuple[int | None, int]:
        """The token that is best known behind the longest known ending, and that ending's length."""
        for size in self._sizes:
            if size <= len(context):
                for memory in self._memories:
                    token = memory.best(tuple(context[-size:]))
                    if token is not None:
                        return token, size
        return None, 0


class LookupCacheDrafter(DraftsFromText, nn.Module):
    """Copies from the request's own text and from remembered ones; a module without parameters.

    `ngrams` are the numbers of last tokens that are looked up. The memory holds `capacity` n-grams; `evict` says which
    goes when it is full, the least recently ("lru") or the least frequently ("lfu") remembered one. The draft
    vocabulary is left alone: whatever stands in a text can be proposed. `num_entries` is written by an export.
    Raises UserError for sizes that make no memory.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        ngrams: list[int],
        capacity: int = 65536,
        evict: str = "lru",
        max_continuations: int = 4,
        num_entries: int = 0,
    ) -> None:
        super().__init__()
        if not ngrams or len(set(ngrams)) < len(ngrams) or min(ngrams) < 1:
            raise UserError(f"drafter.model.ngrams is {list(ngrams)}: give different lengths of at least 1, [3, 2, 1].")
        for name, value in (("capacity", capacity), ("max_continuations", max_continuations)):
            if value < 1:
                raise UserError(f"drafter.model.{name} is {value}: it must be at least 1.")
        if evict not in EVICT:
            raise UserError(f"drafter.model.evict is {evict!r}: choose {' or '.join(EVICT)}.")
        if not 0 <= num_entries <= capacity:
            raise UserError(f"drafter.model.num_entries is {num_entries}, but capacity is {capacity}: leave it out.")
        self.capture_layers: tuple[int, ...] = ()
        self.vocab = DraftVocab(target.vocab_size)
        self._sizes = sorted(ngrams, reverse=True)
        self._memory = Continuations(capacity, evict == "lfu", max_continuations)
        self._packed = True  # whether the buffers hold what the memory does
        if num_entries:
            for name, tensor in empty(num_entries, self._sizes[0], max_continuations).items():
                self.register_buffer(name, tensor)
        self.register_state_dict_pre_hook(_pack)
        self.register_load_state_dict_post_hook(_unpack)

    @property
    def export_arguments(self) -> dict[str, int]:
        """How much is remembered, for which a loaded drafter makes room."""
        return {"num_entries": len(self._memory)}

    def remember(self, token_ids: list[int]) -> None:
        """Learn from a finished text: a prompt and its answer, as token ids."""
        self._packed = False
        longest = self._sizes[0]
        for end, token in enumerate(token_ids):
            self._memory.learn(token_ids[max(0, end - longest) : end], token, self._sizes)

    def count(self, texts: Iterable[list[int]]) -> None:
        """Remember all texts: what training is for this drafter."""
        for text in texts:
            self.remember(text)

    def new_state(self, batch_size: int, max_len: int) -> TextState:
        """Empty texts."""
        return TextState([LookupCacheRequest(self._sizes, self._memory) for _ in range(batch_size)])


def _pack(drafter: LookupCacheDrafter, prefix: str, keep_vars: bool) -> None:
    """Before the buffers are saved, they get what was remembered since."""
    if not drafter._packed and len(drafter._memory):
        for name, tensor in drafter._memory.pack(drafter._sizes[0]).items():
            drafter.register_buffer(name, tensor)
    drafter._packed = True


def _unpack(drafter: LookupCacheDrafter, incompatible_keys: Any) -> None:
    """Once the buffers are loaded, the memory holds what they do."""
    if buffers := dict(drafter.named_buffers()):
        drafter._memory.unpack(buffers)
    drafter._packed = True
