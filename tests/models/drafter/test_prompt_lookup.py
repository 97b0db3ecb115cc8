"""Prompt look-up against a search through the whole text, its cost, and the counts of whole answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.loop import DecodeSettings, generate
from models.checkpoint import native
from models.drafter.prompt_lookup import LookupText, PromptLookupDrafter
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import five_token_target, prompts

MODEL = {"_target_": "models.drafter.prompt_lookup.PromptLookupDrafter"}
OPTIONS = [(3, 1, True), (3, 1, False), (2, 2, True), (4, 2, False), (1, 1, True)]


@pytest.fixture(scope="module")
def target() -> Target:
    return five_token_target()


def searched(text: list[int], num_tokens: int, longest: int, shortest: int, latest: bool) -> list[int]:
    """Go through all earlier places for the longest ending, then for the next shorter one."""
    for size in range(longest, shortest - 1, -1):
        starts = [i for i in range(len(text) - size) if text[i : i + size] == text[len(text) - size :]]
        if starts:
            behind = (max(starts) if latest else min(starts)) + size
            return text[behind : behind + num_tokens]
    return []


def agrees(text_class: type[LookupText], longest: int, shortest: int, latest: bool) -> bool:
    """Whether random texts, which grow by random steps, always get the searched continuation."""
    rng = random.Random(0)
    found = set()
    for alphabet in (1, 2, 4, 30):
        text, whole = text_class(range(longest, shortest - 1, -1), latest), []
        for _ in range(60):
            new = [rng.randrange(alphabet) for _ in range(rng.randint(1, 5))]
            whole += new
            text.append(new)
            num_tokens = rng.randint(1, 6)
            expected = searched(whole, num_tokens, longest, shortest, latest)
            if text.continuation(num_tokens) != expected:
                return False
            found.add(len(expected))
    assert {0, 1, 2, 3, 4, 5, 6} <= found
    return True


@pytest.mark.parametrize(("longest", "shortest", "latest"), OPTIONS)
def test_a_continuation_is_what_a_search_finds(longest: int, shortest: int, latest: bool) -> None:
    assert agrees(LookupText, longest, shortest, latest)


class FindsItself(LookupText):
    """N-grams are entered as they end, so that the text's own ending is found, with nothing behind it."""

    def append(self, token_ids: list[int]) -> None:
        super().append(token_ids)
        for size in self._sizes:
            self._continued_at[tuple(self.token_ids[-size:])] = len(self.token_ids)


class ShortestFirst(LookupText):
    def __init__(self, sizes: range, latest: bool) -> None:
        super().__init__(sizes[::-1], latest)


class CopiesTheMatch(LookupText):
    def continuation(self, num_tokens: int) -> list[int]:
        copied = super().continuation(num_tokens)
        return self.token_ids[-1:] + copied[:-1] if copied else []


class OtherPlace(LookupText):
    def __init__(self, sizes: range, latest: bool) -> None:
        super().__init__(sizes, not latest)


class LosesTheSeam(LookupText):
    """N-grams across two calls are not entered."""

    def append(self, token_ids: list[int]) -> None:
        whole, self.token_ids = self.token_ids, []
        before = dict(self._continued_at)
        super().append(token_ids)
        moved = {k: v + len(whole) for k, v in self._continued_at.items() if before.get(k) != v}
        self._continued_at = before | moved
        self.token_ids = whole + self.token_ids


@pytest.mark.parametrize("mutant", [FindsItself, ShortestFirst, CopiesTheMatch, OtherPlace, LosesTheSeam])
def test_the_search_notices_mistakes(mutant: type[LookupText]) -> None:
    assert not agrees(mutant, 3, 1, True)


class CountedText(list[int]):
    """Counts the tokens that are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        got = super().__getitem__(index)
        CountedText.read += len(got) if isinstance(index, slice) else 1
        return got

    def __iter__(self) -> Any:
        CountedText.read += len(self)
        return super().__iter__()


def test_a_round_costs_what_its_new_tokens_cost() -> None:
    rng, costs = random.Random(0), []
    text = LookupText(range(3, 0, -1), latest=True)
    text.token_ids = CountedText()
    for size in (10, 100, 5000):
        text.append([rng.randrange(8) for _ in range(size)])
        CountedText.read = 0
        text.append([1, 2, 3, 4])
        assert text.continuation(5)
        costs.append(CountedText.read)
    assert max(costs) <= 4 * (1 + 2 + 3) + (1 + 2 + 3) + 5


def features(texts: list[list[int]], new: list[int]) -> TargetFeatures:
    """The last new[b] rows of each text, padded with a token that would be found."""
    width = max(new) + 1
    rows = [text[len(text) - n - 1 :] + [text[0]] * (width - n - 1) for text, n in zip(texts, new, strict=True)]
    ids = torch.tensor(rows)
    return TargetFeatures(ids[:, :-1], ids[:, 1:], None, torch.tensor(new))


def test_a_batch_proposes_what_each_text_continues_with(target: Target) -> None:
    """Ragged rows, the very first token, requests that leave, padding that is not meant."""
    drafter = PromptLookupDrafter(target, DraftVocab(5))
    rng, texts = random.Random(1), [[], [], []]
    state = drafter.new_state(3, 100)
    lengths = set()
    for step in range(12):
        new = [rng.randint(1, 4) for _ in texts]
        for text, count in zip(texts, new, strict=True):
            text += [rng.randrange(5) for _ in range(count + (step == 0))]
        draft = drafter.propose(
            state, features(texts, new), num_speculative_tokens=4, sampling=SamplingParams(1.0),
            random=RequestRandom([0] * len(texts), 4),
        )  # fmt: skip
        assert draft.probs is None and draft.token_ids.shape == draft.parents.shape == (len(texts), 4)
        assert (draft.parents == torch.arange(4) - 1).all()
        for row, text in enumerate(texts):
            length = int(draft.lengths[row])
            assert draft.token_ids[row, :length].tolist() == searched(text, 4, 3, 1, True)
            lengths.add(length)
        if step == 6:
            state.select([2, 0])
            texts = [texts[2], texts[0]]
    assert lengths == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 6])
def test_whole_answers_are_counted_as_a_loop_counts_them(num_speculative_tokens: int, target: Target) -> None:
    start = prompts([3, 9, 1, 14, 6, 2], 5)
    settings = DecodeSettings(1000, num_speculative_tokens, stop_token_ids=frozenset())
    plain = generate(target, start, settings).token_ids
    made = generate(target, start, settings, PromptLookupDrafter(target, DraftVocab(5)))
    assert made.token_ids == plain
    for request, (prompt, answer) in enumerate(zip(start, plain, strict=True)):
        done, rounds, drafted, accepted = 1, 0, 0, 0
        while done < len(answer):
            room = min(num_speculative_tokens, len(answer) - done - 1)
            draft = searched(prompt + answer[:done], room, 3, 1, True)
            right = next((i for i, token in enumerate(draft) if token != answer[done + i]), len(draft))
            done, rounds = done + right + 1, rounds + 1
            drafted, accepted = drafted + len(draft), accepted + right
        found = made.stats
        assert (found.rounds[request], found.drafted[request].sum()) == (rounds, drafted)
        assert found.accepted[request].sum() == accepted
    assert 0 < made.stats.acceptance_rate < 1


def test_it_has_nothing_to_learn_and_proposes_any_token(target: Target) -> None:
    drafter = native.build(MODEL, target, DraftVocab(5, torch.tensor([0, 3])))
    assert not list(drafter.parameters()) and not drafter.state_dict()
    assert drafter.capture_layers == () and not drafter.vocab.reduced


def test_an_export_without_tensors_is_checked_as_others_are(target: Target, tmp_path: Any) -> None:
    model = MODEL | {"max_ngram": 5, "prefer": "earliest"}
    described = native.Export("some", model, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})
    native.save(native.build(model, target, DraftVocab(5)), described, DraftVocab(5), tmp_path / "e", "card")
    loaded = native.load(tmp_path / "e", target)
    assert (loaded._sizes, loaded._latest, loaded.training) == (range(5, 0, -1), False, False)
    weights = tmp_path / "e" / "model.safetensors"
    assert native.read_tensors(weights) == {}
    weights.write_bytes(weights.read_bytes() + b" ")
    with pytest.raises(UserError, match=r"damaged or cut short|altered after the export"):
        native.load(tmp_path / "e", target)
    weights.unlink()
    with pytest.raises(UserError, match="is missing"):
        native.load(tmp_path / "e", target)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_ngram": 2, "min_ngram": 3}, "min_ngram is 3 and max_ngram 2"),
        ({"min_ngram": 0}, "min_ngram is 0 and max_ngram 3"),
        ({"prefer": "longest"}, "prefer is 'longest': choose latest or earliest"),
    ],
)
def test_senseless_options_are_refused(arguments: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        native.build(MODEL | arguments, target, DraftVocab(5))
