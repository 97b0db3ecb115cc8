"""Chains that a rule ends, against chains drawn request by request; and what the rule is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.chain_drafting import draft_chain
from models.sampling import RequestRandom, SamplingParams, draw
from models.vocab import DraftVocab
from tests.helpers.laws import law_by_loop

VOCAB = DraftVocab(9, torch.tensor([0, 1, 3, 4, 5, 8]))
GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.8, top_k=4)
MOST = 4


def logits_behind(request: int, path: list[int]) -> Tensor:
    """Draft logits (Vd,) that depend on the request and on every token of the path, in order."""
    seed = hash((request, *path)) % 2**31
    return 2 * torch.randn(VOCAB.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class PathExpander:
    """Knows nothing but each request's path, and how often it was asked."""

    def __init__(self, batch_size: int, room: Tensor | None = None) -> None:
        self.paths: list[list[int]] = [[] for _ in range(batch_size)]
        self.room, self.asked = room, 0

    def root(self) -> Tensor:
        self.asked += 1
        return torch.stack([logits_behind(b, path) for b, path in enumerate(self.paths)])[:, None]

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        assert (parents == 0).all()
        for path, token in zip(self.paths, token_ids[:, 0].tolist(), strict=True):
            path.append(token)
        return self.root()


class Scripted:
    """Draws before depth before[b], goes on until depth behind[b]; keeps what it is told."""

    def __init__(self, limits: list[int], before: list[int], behind: list[int]) -> None:
        self.limits, self._before, self._behind = limits, torch.tensor(before), torch.tensor(behind)
        self.laws: list[Tensor] = []
        self.chances: list[Tensor] = []

    def draws(self, law: Tensor) -> Tensor:
        assert len(self.laws) == len(self.chances)
        self.laws.append(law)
        return len(self.laws) - 1 < self._before

    def goes_on(self, chance: Tensor) -> Tensor:
        self.chances.append(chance)
        return len(self.chances) - 1 < self._behind


def alone(request: int, sampling: SamplingParams, uniforms: list[float]) -> tuple[list[int], list[Tensor], list[float]]:
    """A whole chain of one request: tokens, the laws that a rule is told, and the tokens' chances in them."""
    tokens: list[int] = []
    laws, chances = [], []
    for uniform in uniforms:
        logits = logits_behind(request, tokens)
        options = () if sampling.greedy else (sampling.temperature, sampling.top_k)
        law = torch.tensor(law_by_loop(logits.tolist(), *options), dtype=torch.float64)
        token = int(logits.argmax()) if sampling.greedy else int(draw(law, torch.tensor(uniform)))
        tokens.append(int(VOCAB.to_target(torch.tensor(token))))
        laws.append(law)
        chances.append(float(law[token]))
    return tokens, laws, chances


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("limits", "before", "behind", "lengths", "drawn"),
    [
        ([4, 4, 4], [9, 9, 9], [9, 9, 9], [4, 4, 4], 4),
        ([4, 4, 4], [9, 1, 9], [1, 9, 2], [2, 1, 3], 3),  # the token that ends a chain from behind is kept
        ([4, 4, 4], [0, 0, 0], [9, 9, 9], [0, 0, 0], 1),
        ([2, 0, 9], [9, 9, 9], [9, 9, 2], [2, 0, 3], 3),
        ([1, 1, 0], [9, 9, 9], [9, 9, 9], [1, 1, 0], 1),
        ([0, 0, 0], [9, 9, 9], [9, 9, 9], [0, 0, 0], 0),
    ],
)
def test_a_rule_ends_each_chain_where_it_says(
    sampling: SamplingParams, limits: list[int], before: list[int], behind: list[int], lengths: list[int], drawn: int
) -> None:
    expander, rule = PathExpander(3), Scripted(limits, before, behind)
    draft = draft_chain(expander, VOCAB, MOST, sampling=sampling, random=RequestRandom([5, 6, 7], 8), stop=rule)
    assert draft.lengths is not None and draft.lengths.tolist() == lengths
    assert expander.asked == drawn == draft.token_ids.shape[1] == len(rule.laws)
    uniforms = RequestRandom([5, 6, 7], 8).uniform(MOST).tolist()
    for request in range(3):
        tokens, laws, chances = alone(request, sampling, uniforms[request])
        assert draft.token_ids[request].tolist() == tokens[:drawn]
        for depth in range(drawn):
            torch.testing.assert_close(rule.laws[depth][request], laws[depth])
            assert rule.chances[depth][request] == pytest.approx(chances[depth])
            if sampling.greedy:
                assert draft.probs is None
            else:
                assert draft.probs is not None
                torch.testing.assert_close(draft.probs[request, depth], VOCAB.widen(laws[depth]))


def test_room_limits_a_rule() -> None:
    rule = Scripted([4, 4, 2], [9, 9, 9], [9, 9, 9])
    expander = PathExpander(3, torch.tensor([1, 9, 9]))
    draft = draft_chain(expander, VOCAB, 3, sampling=GREEDY, random=RequestRandom([0, 1, 2], 8), stop=rule)
    assert draft.lengths is not None and draft.lengths.tolist() == [1, 3, 2]


def test_without_a_rule_nothing_is_asked_of_the_device() -> None:
    draft = draft_chain(PathExpander(2), VOCAB, 3, sampling=SAMPLED, random=RequestRandom([0, 1], 8))
    assert draft.lengths is None and draft.token_ids.shape == (2, 3)
