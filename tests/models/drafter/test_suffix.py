"""Drafts of suffix automata against a search through the request's text and the counted ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.suffix import SuffixDrafter, SuffixRequest
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import LEAST_P_VALUE, five_token_target, prompts, sampled_p_value
from tests.helpers.suffixes import longest_continued, searched

MODEL = {"_target_": "models.drafter.suffix.SuffixDrafter", "max_match": 3, "length_factor": 1.0}


@pytest.fixture(scope="module")
def target() -> Target:
    return five_token_target()


def expected_draft(text: list[int], counted: list[list[int]], num_tokens: int, factor: float) -> list[int]:
    """The better of both drafts, each as long as its match says."""
    drafts = []
    for texts in ([text], counted):
        matched, _ = longest_continued(texts, text, 3)
        length = min(num_tokens, max(1, int(factor * matched)))
        tokens, right = searched(texts, text, 3, length)
        drafts.append((right, matched, tokens))
    own, other = drafts
    return other[2] if other[:2] > own[:2] else own[2]


def features(texts: list[list[int]], new: list[int]) -> TargetFeatures:
    """The last new[b] rows of each text, padded with a token that would be found."""
    width = max(new) + 1
    rows = [text[len(text) - n - 1 :] + [text[0]] * (width - n - 1) for text, n in zip(texts, new, strict=True)]
    ids = torch.tensor(rows)
    return TargetFeatures(ids[:, :-1], ids[:, 1:], None, torch.tensor(new))


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("num_counted", [0, 3])
def test_a_batch_proposes_what_a_search_finds(num_counted: int, factor: float, target: Target) -> None:
    """Ragged rows, the very first token, requests that leave, padding that is not meant; both sources win at times."""
    rng = random.Random(1)
    counted = [[rng.randrange(5) for _ in range(12)] for _ in range(num_counted)]
    drafter = SuffixDrafter(target, DraftVocab(5), max_match=3, length_factor=factor)
    if counted:
        drafter.count(counted)
    texts: list[list[int]] = [[], [], []]
    state, lengths, others = drafter.new_state(3, 100), set(), 0
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
            wanted = expected_draft(text, counted, 4, factor)
            assert draft.token_ids[row, :length].tolist() == wanted
            lengths.add(length)
            others += wanted != expected_draft(text, [], 4, factor)
        if step == 6:
            state.select([2, 0])
            texts = [texts[2], texts[0]]
    assert lengths >= ({1} if factor < 1 else {1, 2, 3} if factor == 1 else {2, 4})
    assert (others > 3) == bool(counted)


def test_the_length_does_not_look_at_what_it_cuts(target: Target) -> None:
    """A shorter draft is the beginning of a longer one, and both are cut where the match says."""
    texts = prompts([8, 20, 30], 5)
    for text in texts:
        eager, request = SuffixRequest(3, 100.0, None), SuffixRequest(3, 1.0, None)
        eager.append(text)
        request.append(text)
        whole = eager.continuation(6)
        for num_tokens in range(1, 7):
            matched, _ = longest_continued([text], text, 3)
            assert request.continuation(num_tokens) == whole[: min(num_tokens, max(1, matched))]


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(0.8, top_k=4, top_p=0.85)])
def test_counted_drafts_keep_the_law(sampling: SamplingParams, target: Target) -> None:
    drafter = SuffixDrafter(target, DraftVocab(5), length_factor=2.0)
    drafter.count(generate(target, prompts([3] * 20, 5), DecodeSettings(12, sampling=SamplingParams(1.0))).token_ids)
    assert sampled_p_value(target, drafter, sampling) > LEAST_P_VALUE


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    drafter = native.build(MODEL, target, DraftVocab(5))
    drafter.count(prompts([20, 30, 7], 5, seed=3))
    described = native.Export("some", MODEL, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})
    native.save(drafter, described, drafter.vocab, tmp_path / "export", "card")
    return tmp_path / "export"


def test_what_was_counted_is_exported(folder: Path, target: Target) -> None:
    drafter = native.build(MODEL, target, DraftVocab(5, torch.tensor([0, 3])))
    assert not drafter.vocab.reduced and not drafter.state_dict()
    drafter.count(prompts([20, 30, 7], 5, seed=3))
    loaded = native.load(folder, target)
    assert loaded.export_arguments == drafter.export_arguments and not list(loaded.parameters())
    start = prompts([4, 9, 2], 5)
    settings = DecodeSettings(15, 4, stop_token_ids=frozenset())
    bare = native.build(MODEL, target, DraftVocab(5))
    ours, theirs, without = (generate(target, start, settings, d) for d in (drafter, loaded, bare))
    assert ours.token_ids == theirs.token_ids == generate(target, start, settings).token_ids
    assert (ours.stats.drafted == theirs.stats.drafted).all() and (ours.stats.accepted == theirs.stats.accepted).all()
    assert ours.stats.drafted.tolist() != without.stats.drafted.tolist()


def test_every_tensor_of_the_export_is_wanted(folder: Path, target: Target) -> None:
    path = folder / "model.safetensors"
    saved = load_file(path)
    assert sorted(saved) == [
        f"counted.{name}" for name in ("counts", "edge_states", "edge_tokens", "first_edge", "lengths", "links")
    ]
    for name, tensor in saved.items():
        others = {k: t for k, t in saved.items() if k != name}
        for tensors in (others, others | {name: torch.cat([tensor, tensor])}, others | {name: tensor.double()}):
            save_file(tensors, path)
            with pytest.raises(UserError, match=f"does not fit its drafter: .*{name}"):
                native.load(folder, target)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_match": 0}, "max_match is 0: it must be at least 1"),
        ({"length_factor": 0.0}, "length_factor is 0.0: it must be above 0"),
        ({"num_states": 3}, "num_states 3 and num_edges 0"),
    ],
)
def test_senseless_options_are_refused(arguments: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        native.build(MODEL | arguments, target, DraftVocab(5))
