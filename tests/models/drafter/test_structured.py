"""Structured drafts: which tokens a forced text becomes, what goes on behind them, and how many are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loop import Generation, generate
from engine.settings import DecodeSettings
from models.cache import KVCache
from models.checkpoint import native
from models.drafter.structured import StructuredDrafter, StructuredRequest, forced_tokens
from models.errors import UserError
from models.sampling import SamplingParams
from models.structured_text import Forced, JsonText, PythonText
from models.target import Target
from models.target.target import TargetOutput
from models.vocab import DraftVocab
from tests.helpers.characters import character_tokenizer, with_characters
from tests.helpers.drafters import (
    LEAST_P_VALUE,
    Observed,
    Proposal,
    check_draft,
    check_fresh,
    five_token_target,
    sampled_p_value,
    shaken,
    tiny_target,
)
from tests.models.test_structured_text import SCHEMA

EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}
LM = {"_target_": "models.drafter.draft_lm.DraftLM", "num_layers": 1}
DOCUMENT = json.dumps(
    {"name": "ab c", "kind": "pet", "age": 7, "alive": True, "tags": ["x", "yy"],
     "home": {"street": "b", "number": 31}, "none": None, "version": "v1"}
)  # fmt: skip


class WritingTarget(Target):
    """Writes the same text in every row, whatever its input: the token at a position follows from the position."""

    def __init__(self, model: Any, tokenizer: Any, text: str) -> None:
        super().__init__(model, tokenizer, "writing")
        self.model.lm_head.weight.data = torch.eye(self.vocab_size, dtype=self.dtype)
        self.script = torch.tensor([*self.encode(text), *[self.vocab_size - 1] * 99])

    def step(self, token_ids: Tensor, cache: KVCache, *, parents: Tensor | None = None, **options: Any) -> TargetOutput:
        out = super().step(token_ids, cache, parents=parents, **options)
        places = cache.lengths[:, None] + torch.arange(token_ids.shape[1])
        return TargetOutput(9 * torch.eye(self.vocab_size, dtype=self.dtype)[self.script[places + 1]], out.hidden)


def writing(text: str, pairs: tuple[str, ...] = ()) -> WritingTarget:
    model = tiny_target(torch.float64, max_position_embeddings=400).model
    return WritingTarget(model, character_tokenizer(64, pairs), text)


def written(target: WritingTarget, drafter: Any, text: str, num_tokens: int = 6, **options: Any) -> Generation:
    """The answer to the first character of the text."""
    tokens = target.encode(text)
    settings = DecodeSettings(len(tokens) - 1, num_tokens, stop_token_ids=frozenset(), **options)
    made = generate(target, [tokens[:1]], settings, drafter)
    assert target.decode(made.token_ids[0]) == text[1:]
    return made


def build(target: Target, *, vocab: Tensor | None = None, **options: Any) -> StructuredDrafter:
    torch.manual_seed(0)
    return shaken(StructuredDrafter(target, DraftVocab(target.vocab_size, vocab), **options))


@pytest.mark.parametrize("pairs", [(), ('":', ", "), (' "', "la", '",')], ids=str)
@pytest.mark.parametrize("neural", [None, EAGLE, LM], ids=["alone", "eagle", "draft_lm"])
def test_what_is_forced_is_accepted(neural: Any, pairs: tuple[str, ...]) -> None:
    """However the target cuts its text, all forced tokens are right, but those that guess white space anew."""
    target = writing(DOCUMENT, pairs)
    made = written(target, build(target, schema=SCHEMA, neural=neural), DOCUMENT)
    if neural is None:
        assert made.stats.accepted.sum() == made.stats.drafted.sum()
    assert made.stats.block_efficiency > 2.2
    alone = (
        written(target, None, DOCUMENT) if neural is None else written(target, build_neural(target, neural), DOCUMENT)
    )
    assert made.stats.accepted.sum() > 3 * alone.stats.accepted.sum()


def build_neural(target: Target, neural: dict[str, Any]) -> Any:
    return build(target, neural=neural).neural


def test_a_grammar_without_a_schema_helps_less() -> None:
    target = writing(DOCUMENT)
    accepted = [
        written(target, build(target, schema=schema), DOCUMENT).stats.accepted.sum() for schema in (None, SCHEMA)
    ]
    assert 0 < accepted[0] < 0.5 * accepted[1]


def test_indentation_is_accepted() -> None:
    text = "if a:\n    for a in b:\n        a()\n        b()\n"
    target = writing(text)
    made = written(target, build(target, grammar="python"), text)
    extra = 2  # tokens in mid-draft that came behind a whole one
    assert made.stats.accepted.sum() == made.stats.drafted.sum() == 5 + 3 + 9 + 8 - extra


def test_tokens_that_may_merge_with_what_follows_are_left_out() -> None:
    target = with_characters(tiny_target())
    target.tokenizer = character_tokenizer(64, ('":', ", ", ": ", ' "'))
    last = target.encode('{"a')
    assert target.decode(forced_tokens(target, last, Forced('": "', ("a", "b")))) == '": "'
    assert target.decode(forced_tokens(target, last, Forced('": ', ('"', "1")))) == '":'
    assert target.decode(forced_tokens(target, last, Forced('":', ("1",)))) == '":'
    assert forced_tokens(target, last, Forced('"', (":", ","))) == []
    assert target.decode(forced_tokens(target, last, Forced('"', (",", "")))) == '"'
    # behind a quote that the target wrote alone, the rest is cut as it would be by itself
    alone = [*last, *target.encode('"')]
    assert target.decode(forced_tokens(target, alone, Forced(": ", ("1",)))) == ": "


@pytest.mark.parametrize(
    "text", ["def f(x):\n    if x:\n        return {'a': [1, 2]}\n", DOCUMENT, 'é 🙂 {"naïve": "🙂']
)
def test_tokens_of_a_real_tokenizer_are_beginnings_of_the_forced_text(tiny: Target, text: str) -> None:
    """At every place of a text, forced tokens add to it nothing but a part of what the grammar forces there."""
    tokens, found = tiny.encode(text), 0
    for grammar in (JsonText(SCHEMA), PythonText()):
        request, plain = (
            StructuredRequest(tiny, grammar),
            type(grammar)(*([SCHEMA] if type(grammar) is JsonText else [])),
        )
        read = ""
        for count in range(1, len(tokens) + 1):
            request.append(tokens[count - 1 : count])
            more = request.continuation(9)
            whole = tiny.decode(tokens[:count])
            if whole.endswith("\ufffd"):
                assert more == []
                continue
            plain.feed(whole[len(read) :])
            read = whole
            added = tiny.decode([*tokens[:count], *more])
            assert added.startswith(whole) and plain.forced().text.startswith(added[len(whole) :])
            found += len(more)
    assert found > 3


def check_forced(drafter: Any, proposal: Proposal) -> None:
    """Forced tokens come first, with certainty; then what the neural drafter says behind them, by its `unroll`."""
    history, draft = proposal.history, proposal.draft
    features, last = history.features(draft.token_ids)
    rows = torch.arange(len(last))
    steps = list(drafter.neural.unroll(features, draft.token_ids.shape[1]))
    (target,) = drafter._target
    for row in range(len(last)):
        request = StructuredRequest(target, JsonText(drafter._schema))
        request.append([*history.token_ids[row], history.pending[row]])
        forced = request.continuation(draft.token_ids.shape[1])
        assert draft.token_ids[row, : len(forced)].tolist() == forced
        for step, hidden in enumerate(steps):
            told = proposal.logits[row, step].exp()
            if step < len(forced):
                assert told.nonzero().flatten().tolist() == [forced[step]] and told.sum() == 1
            else:
                law = drafter.neural.logits(hidden[rows, last])[row].softmax(-1)
                torch.testing.assert_close(told, drafter.vocab.widen(law))


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("vocab", [None, torch.tensor([0, 2, 3])], ids=["full", "reduced"])
def test_the_neural_drafter_goes_on_behind_forced_tokens(vocab: Tensor | None, sampling: SamplingParams) -> None:
    target = with_characters(five_token_target())
    drafter = build(target, vocab=vocab, neural=EAGLE)
    observed = Observed(drafter, [check_forced, check_fresh, *([check_draft] if vocab is None else [])])
    start = [[0], [0, 1, 2, 1], [3, 0, 1], [4, 4]]  # { {"a" :{" }}
    made = generate(target, start, DecodeSettings(24, 3, sampling, frozenset()), observed)
    assert observed.proposals > 5 and made.stats.accepted.sum() > 0


def test_grammars_keep_the_law() -> None:
    target = with_characters(five_token_target())
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    drafter = build(target, neural=EAGLE, schema=schema)
    assert sampled_p_value(target, drafter, SamplingParams(0.8, top_k=4, top_p=0.85)) > LEAST_P_VALUE


@pytest.mark.parametrize("neural", [None, EAGLE, LM], ids=["alone", "eagle", "draft_lm"])
def test_an_export_holds_the_schema_and_the_neural_drafter(neural: Any, tmp_path: Path) -> None:
    target = writing(DOCUMENT)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    model = {"_target_": "models.drafter.structured.StructuredDrafter", "schema": str(tmp_path / "schema.json")}
    if neural is not None:
        inner = build(target, neural=neural).neural
        native.save(inner, described(target, neural), inner.vocab, tmp_path / "inner", "card")
        model["export"] = str(tmp_path / "inner")
    drafter = native.build(model, target, DraftVocab(64))
    assert drafter.pretrained == (neural is not None)
    native.save(drafter, described(target, model), drafter.vocab, tmp_path / "outer", "card")
    for file in [tmp_path / "schema.json", *(tmp_path / "inner").glob("*")]:
        file.unlink()
    torch.manual_seed(9)
    loaded = native.load(tmp_path / "outer", target)
    ours, theirs = (written(target, d, DOCUMENT).stats for d in (drafter, loaded))
    assert ours.accepted.tolist() == theirs.accepted.tolist() and ours.accepted.sum() > 30


def described(target: Target, model: dict[str, Any]) -> native.Export:
    return native.Export("some", model, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"grammar": "xml"}, "grammar is 'xml': choose json or python"),
        ({"grammar": "python", "schema": {}}, "schema is for grammar=json"),
        ({"schema": "nowhere.json"}, "schema=nowhere.json: cannot read a JSON schema"),
        ({"schema": [1]}, r"schema is \[1\]: it must be a JSON schema"),
        ({"schema": {"minItems": "1"}}, "schema: minItems is '1', but it must be a whole number"),
        ({"schema": {"items": {"enum": None}}}, r"schema\.items: enum is None, but it must be a list"),
        ({"neural": {"_target_": "models.drafter.suffix.SuffixDrafter"}}, "SuffixDrafter cannot go on"),
        ({"export": "nowhere"}, "'nowhere' is not an export"),
    ],
)
def test_senseless_options_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        StructuredDrafter(with_characters(tiny_target()), DraftVocab(64), **arguments)


def test_a_target_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match="Structured drafts need text, but target 'tiny-random' has no tokenizer"):
        StructuredDrafter(tiny_target(), DraftVocab(64))
