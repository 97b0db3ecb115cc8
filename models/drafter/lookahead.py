"""Lookahead decoding: the target's own n-grams, from Jacobi iterations in its verification passes (2402.02057).

Beside the draft, every target pass carries a window of guesses about W positions ahead, at N − 1 ages. The oldest level
is a chain behind the last committed token, at the positions 1 .. W; the next one, at the positions 2 .. W + 1, hangs
below it column by column, and so on: a guess sees the oldest guesses up to its own column and the younger ones of that
column before it, and neither sees the draft nor is seen by it (figure 2 there). So window and draft are two trees below
one root, and an ancestor mask is the method's two-branch mask. What the target would choose behind the youngest level
makes the next level, and with the column above it an n-gram, which goes into the request's pool. The oldest level is
dropped, and the window moves on by as many positions as were committed; what is new at its end is filled with tokens of
the prompt. The draft are the n-grams of the pool that begin with the last committed token, the latest first, as a tree
of point masses, accepted with p(x).

All of that depends on the committed text and on choices of the target, never on a drafted token, so sampling stays
exact too. Nothing is trained.

B batch, W window, N n-gram length, G candidates, M = W · (N − 1) probes, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.text_drafting import TextState, take_in
from models.types import Draft, Probes, TargetFeatures
from models.vocab import DraftVocab

Tail = tuple[int, ...]  # an n-gram without its first token


class Pool:
    """N-grams by their first token: at most `candidates` for each, and the one that was found longest ago goes."""

    def __init__(self, candidates: int) -> None:
        self._candidates = candidates
        self._tails: dict[int, OrderedDict[Tail, None]] = {}

    def add(self, first: int, tail: Tail) -> None:
        """Remember an n-gram."""
        known = self._tails.setdefault(first, OrderedDict())
        known[tail] = None
        known.move_to_end(tail)
        if len(known) > self._candidates:
            known.popitem(last=False)

    def behind(self, first: int) -> list[Tail]:
        """What may follow a token, the latest first."""
        return list(reversed(self._tails.get(first, ())))


class LookaheadRequest:
    """One request's window and pool. `levels[a][j]` is the guess of age N − 1 − a about position j + 1 + a ahead."""

    def __init__(self, window: int, ngram: int, candidates: int) -> None:
        self.started = False
        self.pool = Pool(candidates)
        self.levels: list[list[int]] = []
        self._window, self._num_levels = window, ngram - 1
        self._choices: list[int] = []
        self._last = 0
        self._prompt: list[int] = []
        self._filled = 0  # tokens of the prompt, over and over, that have filled the window

    def observe(self, choices: list[int]) -> None:
        """Take in what the target chose behind the youngest level: (W,)."""
        self._choices = choices

    def append(self, token_ids: list[int]) -> None:
        """Take in the next tokens: n-grams are complete, and the window moves on."""
        self._last = token_ids[-1]
        if not self.started:
            self.started = True
            self._prompt = token_ids[:-1]  # the last one is the target's answer
            self.levels = [self._filler(self._window) for _ in range(self._num_levels)]
            return
        moved = len(token_ids)
        if self._choices:
            grams = [*self.levels, self._choices]
            for first, *tail in zip(*grams, strict=True):
                self.pool.add(first, tuple(tail))
            self.levels, self._choices, moved = grams[1:], [], moved - 1
        self.levels = [level[moved:] + self._filler(min(moved, self._window)) for level in self.levels]

    def _filler(self, count: int) -> list[int]:
        """The prompt's next tokens, which are as good a guess as any: from its end it goes on at its start."""
        start, self._filled = self._filled, self._filled + count
        return [self._prompt[place % len(self._prompt)] for place in range(start, start + count)]

    def candidates(self, num_tokens: int) -> list[Tail]:
        """The first tokens of each n-gram behind the text, the latest first."""
        return [tail[:num_tokens] for tail in self.pool.behind(self._last)]


class LookaheadDrafter(nn.Module):
    """Drafts n-grams that the target itself made; a module without parameters.

    `window` (W) guesses are made at once, `ngram` (N) tokens make an n-gram, of which N − 1 are drafted, and up to
    `candidates` (G) are tried. The target reads (N − 1) · (W + G) rows more in a pass, which pays where it has
    arithmetic to spare. Raises UserError for sizes that make no window or no n-gram.
    """

    def __init__(
        self, target: Target, vocab: DraftVocab, *, window: int = 5, ngram: int = 4, candidates: int = 5
    ) -> None:
        super().__init__()
        for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("candidates", candidates, 1)):
            if value < least:
                raise UserError(f"drafter.model.{name} is {value}: it must be at least {least}.")
        self.capture_layers: tuple[int, ...] = ()
        self.vocab = DraftVocab(target.vocab_size)
        self.num_rows = (window + candidates) * (ngram - 1)
        self._window, self._ngram, self._candidates = window, ngram, candidates

    def new_state(self, batch_size: int, max_len: int) -> TextState:
        """Empty pools."""
        sizes = self._window, self._ngram, self._candidates
        return TextState([LookaheadRequest(*sizes) for _ in range(batch_size)])

    def observe(self, state: TextState, choices: Tensor) -> None:
        """Take in the target's choices (B, W) behind the youngest level of the window."""
        for request, row in zip(state.texts, choices.tolist(), strict=True):
            request.observe(row)

    def propose(
        self,
        state: TextState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """Take in the confirmed rows, then draft a tree of up to min(N − 1, `num_speculative_tokens`) levels."""
        depth = min(self._ngram - 1, num_speculative_tokens)
        tries, windows = [], []
        take_in(state.texts, committed)
        for request in state.texts:
            tries.append(trie(request.candidates(depth)))
            windows.append([token for level in request.levels for token in level])
        num_nodes = max(len(tokens) for tokens, _ in tries)
        device = committed.token_ids.device
        nodes = torch.tensor([padded(t, num_nodes) for t in tries], dtype=torch.int64, device=device)  # (B, 2, nodes)
        lengths = torch.tensor([depth if tokens else 0 for tokens, _ in tries])
        above = torch.tensor(window_parents(self._window, self._ngram), device=device)
        probes = Probes(torch.tensor(windows, device=device), above.expand(len(windows), -1), self._window)
        return Draft(nodes[:, 0], nodes[:, 1], None, lengths, branches=num_nodes > 0, probes=probes)


def window_parents(window: int, ngram: int) -> list[int]:
    """Parents of the window's guesses, level by level: −1 is the last committed token."""
    oldest = list(range(-1, window - 1))
    return oldest + list(range(window * (ngram - 2)))


def trie(tails: list[Tail]) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree that holds every path of `tails` once; siblings in the order of their first one.

    Level by level, so that a tree of shorter paths is the beginning of it, and its nodes meet the same random numbers.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    nodes: dict[Tail, int] = {(): -1}
    for end in range(1, max(map(len, tails), default=0) + 1):
        for tail in tails:
            if tail[:end] not in nodes:
                nodes[tail[:end]] = len(token_ids)
                token_ids.append(tail[end - 1])
                parents.append(nodes[tail[: end - 1]])
    return token_ids, parents


def padded(tree: tuple[list[int], list[int]], num_nodes: int) -> tuple[list[int], list[int]]:
    """A tree of N nodes. Padding hangs below the last one, which is a leaf: deeper than what `lengths` lets count."""
    token_ids, parents = tree
    more = num_nodes - len(token_ids)
    return token_ids + [0] * more, parents + [len(token_ids) - 1] * more
