"""Drafts of the look-up cache against a search, what is shared and when, and what is saved."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.lookup_cache import LookupCacheDrafter
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.text_drafting import TextState
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import LEAST_P_VALUE, five_token_target, prompts, sampled_p_value

SIZES = [3, 1]
MODEL = {"_target_": "models.drafter.lookup_cache.LookupCacheDrafter", "ngrams": [1, 3]}


@pytest.fixture(scope="module")
def target() -> Target:
    return five_token_target()


def build(target: Target, **options: Any) -> LookupCacheDrafter:
    drafter: LookupCacheDrafter = native.build(MODEL | options, target, DraftVocab(target.vocab_size))
    return drafter


def searched(text: list[int], remembered: list[list[int]], num_tokens: int) -> list[int]:
    """For each size, the longest first: what most often followed in the text, or else in the remembered ones."""
    drafted: list[int] = []
    while len(drafted) < num_tokens:
        context, token = text + drafted, None
        for size in SIZES:
            for texts in ([text], remembered):
                ending, seen = context[len(context) - size :], {}
                for number, one in enumerate(texts):
                    for i in range(len(one) - size):
                        if one[i : i + size] == ending:
                            count, _ = seen.get(one[i + size], (0, ()))
                            seen[one[i + size]] = (count + 1, (number, i))
                if token is None and seen and size <= len(context):
                    token = max(seen, key=lambda t: seen[t])
        if token is None:
            break
        drafted.append(token)
    return drafted


def features(texts: list[list[int]], new: list[int]) -> TargetFeatures:
    """The last new[b] rows of each text, padded with a token that would be found."""
    width = max(new) + 1
    rows = [text[len(text) - n - 1 :] + [text[0]] * (width - n - 1) for text, n in zip(texts, new, strict=True)]
    ids = torch.tensor(rows)
    return TargetFeatures(ids[:, :-1], ids[:, 1:], None, torch.tensor(new))


def proposed(drafter: Any, state: TextState, committed: TargetFeatures) -> list[list[int]]:
    batch_size = len(committed.token_ids)
    draft = drafter.propose(
        state, committed, num_speculative_tokens=4, sampling=SamplingParams(1.0),
        random=RequestRandom([0] * batch_size, 4),
    )  # fmt: skip
    assert draft.probs is None and (draft.parents == torch.arange(4) - 1).all()
    rows = zip(draft.token_ids.tolist(), draft.lengths.tolist(), strict=True)
    return [token_ids[:length] for token_ids, length in rows]


@pytest.mark.parametrize("num_remembered", [0, 3])
def test_a_batch_proposes_what_a_search_finds(num_remembered: int, target: Target) -> None:
    """Ragged rows, the very first token, requests that leave; own text first; more is remembered on the way."""
    rng = random.Random(1)
    remembered = [[rng.randrange(5) for _ in range(12)] for _ in range(num_remembered)]
    drafter = build(target, max_continuations=5)
    drafter.count(remembered)
    texts: list[list[int]] = [[], [], []]
    state, lengths, others = drafter.new_state(3, 100), set(), 0
    for step in range(10):
        new = [rng.randint(1, 2) for _ in texts]
        for text, count in zip(texts, new, strict=True):
            text += [rng.randrange(5) for _ in range(count + (step == 0))]
        drafts = proposed(drafter, state, features(texts, new))
        assert drafts == [searched(text, remembered, 4) for text in texts]
        lengths |= {len(draft) for draft in drafts}
        others += drafts != [searched(text, [], 4) for text in texts]
        if step == 6:
            state.select([2, 0])
            texts = [texts[2], texts[0]]
            if remembered:
                remembered.append([4, 3, 2, 1, 0, 4, 3])
                drafter.remember(remembered[-1])
    assert (lengths == {4}) == bool(remembered) and {0, 4} <= lengths | ({0} if remembered else set())
    assert (others > 3) == bool(remembered)


def test_proposing_teaches_other_requests_nothing(target: Target) -> None:
    """What was answered is known to the next request only once it was remembered."""
    drafter, settings = build(target), DecodeSettings(20, 4, stop_token_ids=frozenset())
    start = prompts([5, 9, 4], 5)
    first = generate(target, start, settings, drafter)
    again = generate(target, start, settings, drafter)
    assert again.stats.accepted.tolist() == first.stats.accepted.tolist()
    assert drafter.export_arguments == {"num_entries": 0}
    alone = [generate(target, [prompt], settings, drafter).stats.accepted[0].tolist() for prompt in start]
    assert alone == first.stats.accepted.tolist()
    for prompt, answer in zip(start, first.token_ids, strict=True):
        drafter.remember(prompt + answer)
    known = generate(target, start, settings, drafter)
    assert known.token_ids == first.token_ids
    assert known.stats.acceptance_rate > first.stats.acceptance_rate


def test_the_engine_teaches_what_it_answered_and_the_export_keeps_it(target: Target, tmp_path: Path) -> None:
    """In the order of the prompts, whichever finished first; drafts of the same call know nothing of it."""
    settings = DecodeSettings(20, 4, stop_token_ids=frozenset({0}))
    start = prompts([5, 9, 4, 7], 5)
    drafter, taught = build(target, capacity=40), build(target, capacity=40)
    first = generate(target, start, settings, drafter)
    assert len({len(answer) for answer in first.token_ids}) > 1
    for prompt, answer in zip(start, first.token_ids, strict=True):
        taught.remember(prompt + answer)
    described = native.Export(
        "some", MODEL | {"capacity": 40}, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {"a": 1}
    )
    native.save(drafter, described, drafter.vocab, tmp_path / "export", "card")
    served = native.load(tmp_path / "export", target)
    made = generate(target, start, settings, served, remember=True)
    assert made.token_ids == first.token_ids and made.stats.accepted.tolist() == first.stats.accepted.tolist()
    native.update(served, tmp_path / "export")
    loaded = native.load(tmp_path / "export", target)
    held = [{name: tensor.tolist() for name, tensor in d.state_dict().items()} for d in (taught, served, loaded)]
    assert held[0] == held[1] == held[2] and held[0]
    again = native.read(tmp_path / "export")
    assert (again.name, again.provenance) == ("some", {"a": 1})
    assert (tmp_path / "export" / "README.md").read_text() == "card"
    known = generate(target, start, settings, loaded)
    assert known.token_ids == first.token_ids
    assert known.stats.acceptance_rate > first.stats.acceptance_rate


def test_a_drafter_that_cannot_remember_is_refused(target: Target) -> None:
    drafter = native.build({"_target_": "models.drafter.suffix.SuffixDrafter"}, target, DraftVocab(5))
    for current, name in ((drafter, "SuffixDrafter"), (None, "Plain decoding")):
        with pytest.raises(UserError, match=f"{name} does not learn from what is answered"):
            generate(target, [[1, 2]], DecodeSettings(4), current, remember=True)


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(0.8, top_k=4, top_p=0.85)])
def test_remembered_drafts_keep_the_law(sampling: SamplingParams, target: Target) -> None:
    drafter = build(target)
    drafter.count(generate(target, prompts([3] * 20, 5), DecodeSettings(12, sampling=SamplingParams(1.0))).token_ids)
    assert sampled_p_value(target, drafter, sampling) > LEAST_P_VALUE


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_loaded_memory_goes_on_as_the_saved_one(evict: str, target: Target, tmp_path: Path) -> None:
    """It is full: what goes next must be the same too. Saved twice, so that the second time is not the first again."""
    drafter = build(target, capacity=20, evict=evict, max_continuations=2)
    texts = prompts([40] * 6, 5, seed=2)
    for round_, saved in enumerate((texts[:2], texts[2:4])):
        drafter.count(saved)
        model = MODEL | {"capacity": 20, "evict": evict, "max_continuations": 2}
        described = native.Export("some", model, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})
        folder = tmp_path / f"export{round_}"
        native.save(drafter, described, drafter.vocab, folder, "card")
    loaded = native.load(folder, target)
    assert loaded.export_arguments == {"num_entries": 20}
    ours = copy.deepcopy(drafter)
    for text in [*texts[4:], []]:
        contexts = prompts([6] * 8, 5, seed=5)
        committed = features(contexts, [5] * 8)
        assert len({str(proposed(d, d.new_state(8, 40), committed)) for d in (ours, loaded)}) == 1
        ours.remember(text)
        loaded.remember(text)
    held = [{name: tensor.tolist() for name, tensor in d.state_dict().items()} for d in (ours, loaded, drafter)]
    assert held[0] == held[1] and held[0]["ngrams"] != held[2]["ngrams"]


def test_every_tensor_of_the_export_is_wanted(target: Target, tmp_path: Path) -> None:
    drafter = build(target)
    drafter.remember(prompts([30], 5)[0])
    described = native.Export("some", MODEL, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})
    native.save(drafter, described, drafter.vocab, tmp_path / "export", "card")
    path = tmp_path / "export" / "model.safetensors"
    saved = load_file(path)
    assert sorted(saved) == ["counts", "ngrams", "times", "tokens", "written"]
    for name, tensor in saved.items():
        others = {k: t for k, t in saved.items() if k != name}
        for tensors in (others, others | {name: torch.cat([tensor, tensor])}, others | {name: tensor.double()}):
            save_file(tensors, path)
            with pytest.raises(UserError, match=f"does not fit its drafter: .*{name}"):
                native.load(tmp_path / "export", target)


def test_it_proposes_any_token_and_has_no_weights(target: Target) -> None:
    drafter = native.build(MODEL, target, DraftVocab(5, torch.tensor([0, 3])))
    assert not list(drafter.parameters()) and not drafter.state_dict() and not drafter.vocab.reduced


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"ngrams": []}, r"ngrams is \[\]: give different lengths"),
        ({"ngrams": [2, 2]}, r"ngrams is \[2, 2\]"),
        ({"ngrams": [0, 2]}, r"ngrams is \[0, 2\]"),
        ({"capacity": 0}, "capacity is 0: it must be at least 1"),
        ({"max_continuations": 0}, "max_continuations is 0: it must be at least 1"),
        ({"evict": "fifo"}, "evict is 'fifo': choose lru or lfu"),
        ({"num_entries": 9, "capacity": 8}, "num_entries is 9, but capacity is 8"),
    ],
)
def test_senseless_options_are_refused(arguments: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        native.build(MODEL | arguments, target, DraftVocab(5))
