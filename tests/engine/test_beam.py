"""Beam search with and without drafts against transformers' `generate(num_beams=K)`: the same beams, scores and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine.beam import BeamSearch, beam_search
from engine.beam_step import BeamSettings
from engine.draft_length import Window
from engine.settings import DecodeSettings
from models.drafter.draft_lm import DraftLM
from models.drafter.eagle import EagleDrafter
from models.drafter.prompt_lookup import PromptLookupDrafter
from models.drafter.suffix import SuffixDrafter
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.tree import DynamicTree, StaticTree
from models.tree_drafting import grow
from models.types import Draft
from models.vocab import DraftVocab
from tests.helpers.drafters import Observed, check_draft, check_fresh, check_unroll, prompts, shaken, tiny_target
from tests.helpers.models import random_target
from tests.helpers.scripted import ScriptedDrafter, ScriptedState

TREE = DynamicTree(depth=4, top_k=4, num_nodes=20)


@dataclass(frozen=True)
class Reference:
    """What transformers finds for one prompt, and how often it ran the model."""

    token_ids: list[list[int]]
    scores: list[float]
    passes: int


def reference(target: Target, prompt: list[int], settings: DecodeSettings, beams: BeamSettings) -> Reference:
    stop = sorted(settings.stop_token_ids or ())
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = target.model.register_forward_pre_hook(count)
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=beams.num_beams,
        num_return_sequences=beams.num_beams,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        max_new_tokens=min(settings.max_new_tokens, target.max_positions - len(prompt)),
        eos_token_id=stop or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    hook.remove()
    found = []
    for sequence in out.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(sequence) if token in stop), len(sequence))
        found.append(sequence[:end])
    return Reference(found, out.sequences_scores.tolist(), passes)


def check_same(found: BeamSearch, expected: list[Reference]) -> None:
    assert found.token_ids == [e.token_ids for e in expected]
    for scores, e in zip(found.scores, expected, strict=True):
        assert scores == pytest.approx(e.scores, abs=1e-6, rel=1e-6)  # both are float32
    assert found.plain_passes == max(e.passes for e in expected)


class Knowing(ScriptedDrafter):
    """Drafts from the target's own logits, computed anew for every node."""

    def __init__(self, target: Target) -> None:
        self.target, self.vocab = target, DraftVocab(target.vocab_size)
        super().__init__(lambda text: int(self.logits(text).argmax()))

    def logits(self, text: list[int]) -> torch.Tensor:
        return self.target.head(self.target(torch.tensor([text])).last[0, -1])

    def propose_tree(self, state: ScriptedState, committed: Any, **options: Any) -> Draft:
        self.propose(state, committed, num_speculative_tokens=1, sampling=options["sampling"], random=None)
        return grow(KnowingExpander(self, state.texts), vocab=self.vocab, **options)


class KnowingExpander:
    room = None

    def __init__(self, drafter: Knowing, texts: list[list[int]]) -> None:
        self.drafter, self.level = drafter, [[text] for text in texts]

    def root(self) -> torch.Tensor:
        return torch.stack([torch.stack([self.drafter.logits(text) for text in row]) for row in self.level])

    def below(self, token_ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.level, token_ids.tolist(), parents.tolist(), strict=True)
        self.level = [[[*row[p], t] for t, p in zip(ts, ps, strict=True)] for row, ts, ps in pairs]
        return self.root()


class Gibberish(ScriptedDrafter):
    """Chains and trees that have nothing to do with the target."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(lambda text: (7 * text[-1] + len(text)) % vocab_size)


DRAFTERS: dict[str, Callable[[Target], tuple[Any, Any]]] = {  # a drafter, and the tree that it drafts
    "plain": lambda target: (None, None),
    "right": lambda target: (Knowing(target), None),
    "right in a tree": lambda target: (Knowing(target), TREE),
    "wrong": lambda target: (Gibberish(target.vocab_size), None),
}
CASES = [
    BeamSettings(2),
    BeamSettings(4),
    BeamSettings(3, length_penalty=0.3, early_stopping=True),
    BeamSettings(4, length_penalty=-0.5, early_stopping=True),
    BeamSettings(3, length_penalty=2.0, early_stopping="never"),
    BeamSettings(4, length_penalty=0.0, early_stopping="never"),
]
STOP = frozenset({2, 11, 30})


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, max_position_embeddings=48)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("beams", CASES, ids=str)
@pytest.mark.parametrize("stop", [frozenset(), frozenset({2}), STOP], ids=["endless", "stop", "stops"])
def test_beams_are_those_of_transformers(target: Target, name: str, beams: BeamSettings, stop: Any) -> None:
    drafter, tree = DRAFTERS[name](target)
    settings = DecodeSettings(12, 4, stop_token_ids=stop, tree=tree)
    start = prompts([6, 1, 9], target.vocab_size, seed=3)
    found = beam_search(target, start, settings, beams, drafter)
    check_same(found, [reference(target, prompt, settings, beams) for prompt in start])
    if name == "right in a tree":
        assert found.passes <= 6 < found.plain_passes
    elif name == "right":
        assert found.passes < found.plain_passes
    elif name == "plain":
        assert found.passes == found.plain_passes


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2_mixed", "mistral", "gemma3", "gpt2", "gpt_neox", "opt", "gpt_bigcode"]
)
def test_beams_of_other_architectures(architecture: str) -> None:
    target = random_target(architecture)
    settings = DecodeSettings(14, 4, stop_token_ids=STOP, tree=TREE)
    start = prompts([7, 3], target.vocab_size, seed=5)
    for beams in (BeamSettings(3), BeamSettings(4, early_stopping=True)):
        expected = [reference(target, prompt, settings, beams) for prompt in start]
        found = beam_search(target, start, settings, beams, Knowing(target))
        check_same(found, expected)
        assert found.passes < found.plain_passes
        check_same(beam_search(target, start, replace(settings, tree=None), beams, Gibberish(61)), expected)


def build(name: str, target: Target) -> Any:
    torch.manual_seed(0)
    vocab = DraftVocab(target.vocab_size)
    made: dict[str, Callable[[], Any]] = {
        "eagle": lambda: EagleDrafter(target, vocab),
        "draft_lm": lambda: DraftLM(target, vocab, num_layers=1),
        "prompt_lookup": lambda: PromptLookupDrafter(target, vocab),
        "suffix": lambda: SuffixDrafter(target, vocab),
    }
    return shaken(made[name]())


@pytest.mark.parametrize("name", ["eagle", "draft_lm", "prompt_lookup", "suffix"])
def test_drafters_follow_the_beams(target: Target, name: str) -> None:
    """Behind every beam, whatever it went through, a drafter drafts what a fresh one does; up to the context's end."""
    checks = [check_fresh, check_draft, check_unroll] if name == "eagle" else [check_fresh]
    observed = Observed(build(name, target), checks)
    settings = DecodeSettings(100, 3, stop_token_ids=frozenset({11}))
    start = prompts([6, 1, 20], target.vocab_size, seed=4)
    beams = BeamSettings(3, early_stopping="never")
    found = beam_search(target, start, settings, beams, observed)
    check_same(found, [reference(target, prompt, settings, beams) for prompt in start])
    assert max(len(tokens) for answer in found.token_ids for tokens in answer) == target.max_positions - 1
    assert observed.proposals > 5


@pytest.mark.parametrize(
    "shape", [TREE, StaticTree((-1, -1, 0, 0, 1, 2), (0, 1, 0, 1, 0, 0))], ids=["dynamic", "static"]
)
def test_trees_follow_the_beams(target: Target, shape: Any) -> None:
    observed = Observed(build("eagle", target))
    settings = DecodeSettings(16, tree=shape, stop_token_ids=frozenset())
    start = prompts([6, 2], target.vocab_size, seed=4)
    found = beam_search(target, start, settings, BeamSettings(2), observed)
    check_same(found, [reference(target, prompt, settings, BeamSettings(2)) for prompt in start])
    assert observed.proposals > 3


class Short(Knowing):
    """Means fewer tokens than it drafts, a different number for each row."""

    def propose(self, *args: Any, **options: Any) -> Draft:
        draft = super().propose(*args, **options)
        lengths = (torch.arange(len(draft.token_ids)) + draft.token_ids[:, 0]) % (draft.token_ids.shape[1] + 1)
        return replace(draft, lengths=lengths)


def test_what_is_not_meant_is_not_used(target: Target) -> None:
    settings, beams = DecodeSettings(16, 4, stop_token_ids=frozenset()), BeamSettings(2)
    start = prompts([6, 2], target.vocab_size, seed=4)
    whole, short = (beam_search(target, start, settings, beams, made(target)) for made in (Knowing, Short))
    assert short.token_ids == whole.token_ids and short.scores == whole.scores
    assert whole.passes < short.passes < short.plain_passes


def test_a_text_that_repeats_needs_few_passes() -> None:
    """A target that copies: look-up knows how every beam goes on, once they have begun to repeat."""
    target = tiny_target(torch.float64, max_position_embeddings=200, vocab_size=8)
    settings, beams = DecodeSettings(120, 6, stop_token_ids=frozenset()), BeamSettings(2)
    found = beam_search(target, [[3, 4]], settings, beams, build("prompt_lookup", target))
    check_same(found, [reference(target, [3, 4], settings, beams)])
    assert found.passes < 0.75 * found.plain_passes


def test_prompts_do_not_depend_on_their_neighbours(target: Target) -> None:
    settings, beams = (
        DecodeSettings(12, 4, stop_token_ids=frozenset(range(0, 64, 6))),
        BeamSettings(3, early_stopping=True),
    )
    start = prompts([6, 1, 9, 3, 3], target.vocab_size, seed=6)
    together = beam_search(target, start, settings, beams, Knowing(target))
    alone = [beam_search(target, [prompt], settings, beams, Knowing(target)) for prompt in start]
    assert together.token_ids == [found.token_ids[0] for found in alone]
    assert len({found.plain_passes for found in alone}) > 2 and together.plain_passes == max(
        found.plain_passes for found in alone
    )
    assert beam_search(target, [], settings, beams).token_ids == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sampling": SamplingParams(0.5)}, "takes the target's own law"),
        ({"sampling": SamplingParams(repetition_penalty=1.1)}, "takes the target's own law"),
        ({"verification": "block"}, "leave decode.verification out"),
        ({"draft_length": Window()}, "leave decode.draft_length out"),
        ({"stop_token_ids": frozenset(range(64))}, "64 tokens, 64 of which end an answer, are too few"),
    ],
)
def test_settings_without_a_meaning_are_refused(target: Target, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        beam_search(target, [[1]], DecodeSettings(4, **changes), BeamSettings(2))


def test_senseless_beams_are_refused(target: Target) -> None:
    for number in (1, 0, 2.5, True):
        with pytest.raises(UserError, match="needs a whole number of at least 2"):
            BeamSettings(number)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="early_stopping is 'maybe': choose true, false or never"):
        BeamSettings(2, early_stopping="maybe")
    with pytest.raises(UserError, match="drafts chains only"):
        beam_search(target, [[1]], DecodeSettings(4, tree=TREE), BeamSettings(2), build("suffix", target))
