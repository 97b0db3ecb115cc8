"""Each fault that makes a well-trained drafter's acceptance low, planted by itself, is called by its name."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from conf.compose import ROOT, plain
from data.answers import AnswerSettings, build_answers, describe
from data.prompts import Prompt
from engine.loop import generate
from engine.settings import DecodeSettings
from eval.causes import Case, Finding, another_target, at_least, engine_and_training, fed_back, find, training_text
from eval.diagnose import check_learnt, verdict, with_training
from eval.drafted_rows import Reading, Rows, Text, flipped, moved, other_layers, remapped, with_rope
from models import tree
from models.checkpoint import native
from models.errors import UserError
from models.sampling import SamplingParams
from models.state_feedback import TreeRows
from models.target import Target, load_target
from models.vocab import DraftVocab
from tests.helpers.characters import with_characters
from tests.helpers.drafters import prompts, tiny_target
from tests.helpers.memorising import NEW_TOKENS, answered, memorise

K = 3
SETTINGS = DecodeSettings(16, K)
LAYERS = (0, 2, 3)


@pytest.fixture(scope="module")
def target() -> Target:
    return with_characters(tiny_target(max_position_embeddings=64))


@pytest.fixture(scope="module")
def vocab(target: Target) -> DraftVocab:
    counts = answered(target).batches.token_counts(target.vocab_size)
    return DraftVocab.most_frequent(counts, int((counts > 0).sum()))


def learnt(target: Target, vocab: DraftVocab, folder: Path, shift: int = 0, max_steps: int = 400) -> Any:
    """An EAGLE-3 drafter that knows the answers of `texts` by heart, read with states `shift` rows earlier."""
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        options = plain(hydra.compose("train", overrides=["+drafter=eagle3", "trainer=cpu"]))
    torch.manual_seed(0)
    drafter = native.build({**options["drafter"]["model"], "capture_layers": list(LAYERS)}, target, vocab)
    if shift:
        condense = type(drafter).condense
        drafter.condense = lambda hidden: condense(drafter, moved(hidden, shift))
    trained = memorise(drafter, target, answered(target), options, folder, max_steps).drafter
    vars(trained).pop("condense", None)
    return trained


@pytest.fixture(scope="module")
def knows(target: Target, vocab: DraftVocab, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return learnt(target, vocab, tmp_path_factory.mktemp("right"))


@pytest.fixture
def drafter(knows: Any) -> Any:
    return copy.deepcopy(knows)


def texts_of(target: Target, seed: int = 0) -> list[Text]:
    """The memorised texts, or with another seed the target's answers to other prompts."""
    start = prompts([3, 7, 5, 4], target.vocab_size, seed)
    answers = generate(target, start, DecodeSettings(NEW_TOKENS)).token_ids
    return [Text(p + a, len(p)) for p, a in zip(start, answers, strict=True)]


def case_of(target: Target, drafter: Any, texts: list[Text], training: list[Text] | None = None) -> Case:
    known = None if training is None else Rows(target, drafter, training, K)
    return Case(target, drafter, Rows(target, drafter, texts, K), known, None, False, SETTINGS, 1.0)


def causes(case: Case) -> list[Finding]:
    return [finding for finding in find(case) if finding.fault]


def test_nothing_is_found_where_nothing_is_wrong(target: Target, drafter: Any) -> None:
    texts = texts_of(target)
    case = replace(case_of(target, drafter, texts, texts), manifest=describe(target, [], AnswerSettings()))
    findings = list(find(case))
    assert [f for f in findings if f.fault] == []
    assert {f.cause for f in findings if f.fault is None} == set()
    assert float(case.rows.accepted().double().mean()) > 0.9 * K
    assert verdict(findings, case.rows, case.training).startswith("no fault found: ")


def test_a_drafter_that_learnt_nothing_is_not_said_to_be_faulty(target: Target, vocab: DraftVocab) -> None:
    torch.manual_seed(1)
    fresh = native.build({"_target_": "models.drafter.eagle3.Eagle3Drafter", "head": "random"}, target, vocab)
    assert causes(case_of(target, fresh.eval(), texts_of(target))) == []


def test_another_target_and_another_template(target: Target, drafter: Any) -> None:
    manifest = describe(target, [], AnswerSettings())
    case = replace(case_of(target, drafter, texts_of(target)), manifest=manifest)
    for key, name in (("weights", "another target"), ("dtype", "another target"), ("template", "chat template")):
        (found,) = causes(replace(case, manifest={**manifest, key: "0" * 16}))
        assert found.cause == name and "0" * 16 in found.evidence


def test_an_adapted_target_is_said_to_be_in_the_export(target: Target, drafter: Any) -> None:
    manifest = {**describe(target, [], AnswerSettings()), "weights": "the original's"}
    case = replace(case_of(target, drafter, texts_of(target)), manifest=manifest, adapted=True)
    (found,) = another_target(case)
    assert found.fault is None and found.evidence.startswith("the export holds the target that was trained with it")
    assert "does not say" in next(another_target(replace(case, manifest=None, adapted=False))).evidence


def test_the_chance_of_so_many_is_the_binomial_tail() -> None:
    assert at_least(0, 5, 0.02) == pytest.approx(1.0)
    assert at_least(1, 10, 0.02) == pytest.approx(1 - 0.98**10)
    assert at_least(3, 3, 0.02) == pytest.approx(8e-6)
    assert at_least(4000, 4000, 0.02) == 0.0


@pytest.mark.parametrize(
    ("compared", "other", "place"),
    [
        ([400, 100, 30, 10], [0, 1, 1, 1], None),  # near ties, few of them
        ([400, 100, 30, 9], [8, 2, 2, 9], None),  # too few to say at the last
        ([400, 100, 30, 10], [0, 0, 0, 10], 4),
        ([400, 100, 30, 10], [0, 20, 30, 10], 2),
        ([400, 100, 30, 10], [21, 0, 0, 0], None),  # 5.3% of 400: P(X >= 21) is 7e-5
        ([400, 100, 30, 10], [22, 0, 0, 0], 1),  # 2e-5
        ([4000, 0, 0, 0], [90, 0, 0, 0], None),  # 2.3%
    ],
)
def test_a_near_tie_among_few_proposals_is_no_difference(
    compared: list[int], other: list[int], place: int | None, target: Target, drafter: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Rows, "by_engine", lambda self, settings: (compared, other))
    (found,) = engine_and_training(case_of(target, drafter, []))
    assert found.fault == (place is not None)
    assert found.cause == "engine and training differ" + ("" if place is None else f" from position {place} on")


def test_a_mask_that_hides_the_past_in_the_engine_alone(
    target: Target, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tree.attention_mask

    def blind(lengths: torch.Tensor, num_rows: int, **others: Any) -> torch.Tensor:
        mask = usual(lengths, num_rows, **others)
        own = torch.eye(num_rows, dtype=torch.bool)
        return torch.cat([torch.zeros_like(mask[..., :-num_rows]), own.expand_as(mask[..., -num_rows:])], dim=-1)

    monkeypatch.setattr("models.state_feedback.tree.attention_mask", blind)
    found = causes(case_of(target, drafter, texts_of(target)))[0]
    assert found.cause == "engine and training differ from position 1 on" and "its mask" in found.remedy


def test_positions_that_do_not_go_on_in_the_engines_draft(
    target: Target, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = TreeRows.begin

    def displaced(self: TreeRows, passed: torch.Tensor) -> Any:
        positions, mask = begin(self, passed)
        return positions + 20, mask

    monkeypatch.setattr(TreeRows, "begin", displaced)
    case = replace(case_of(target, drafter, texts_of(target)), settings=DecodeSettings(NEW_TOKENS, K))
    found = causes(case)[0]
    assert found.cause == "engine and training differ from position 2 on" and "fed back" in found.remedy


def test_rows_that_training_had_shifted(target: Target, vocab: DraftVocab, tmp_path: Path) -> None:
    found = causes(case_of(target, learnt(target, vocab, tmp_path, 1, max_steps=150), texts_of(target)))[0]
    assert found.cause == "shifted by one" and "states one row earlier" in found.evidence


def test_other_captured_layers(target: Target, drafter: Any) -> None:
    drafter.capture_layers = LAYERS[::-1]
    found = causes(case_of(target, drafter, texts_of(target)))[0]
    assert found.cause == "captured layers" and "states entering layers 0, 2, 3" in found.evidence


def test_another_rope(target: Target, drafter: Any) -> None:
    case = case_of(target, drafter, texts_of(target))
    case.rows.accepted()  # its angles are made when they are first needed
    with with_rope(drafter, 2.0):
        found = causes(case)[0]
    assert found.cause == "RoPE" and "rope_theta 10000 " in found.evidence


def test_another_norm(target: Target, drafter: Any) -> None:
    with flipped(drafter, "norm_output"):
        found = causes(case_of(target, drafter, texts_of(target)))[0]
    assert found.cause == "norms" and "norm_output False" in found.evidence


def test_a_stale_vocabulary_map(target: Target, drafter: Any, vocab: DraftVocab) -> None:
    """Of as many tokens, but from the lowest on: nearly all draft ids stand for others than they did."""
    drafter.vocab = DraftVocab(target.vocab_size, torch.arange(vocab.size))
    assert causes(case_of(target, drafter, texts_of(target)))[0].cause == "vocabulary map"


def test_a_vocabulary_that_holds_too_little(target: Target, drafter: Any, vocab: DraftVocab) -> None:
    assert vocab.token_ids is not None
    kept = torch.arange(0, vocab.size, 2)
    drafter.vocab = DraftVocab(target.vocab_size, vocab.token_ids[kept])
    drafter.lm_head.weight = torch.nn.Parameter(drafter.lm_head.weight[kept])
    found = causes(case_of(target, drafter, texts_of(target)))[0]
    assert found.cause == "vocabulary ceiling" and f"among the {len(kept)} " in found.evidence


def test_outputs_that_are_lost_where_they_are_fed_back(
    target: Target, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training and in the engine alike."""
    monkeypatch.setattr(type(drafter), "feed_back", lambda self, hidden: torch.zeros_like(hidden) + 3.0)
    case = case_of(target, drafter, texts_of(target))
    found = causes(case)[0]
    assert found.cause == "own outputs from position 2 on"
    assert found.remedy.startswith("train it on as many steps of its own outputs as tokens are drafted")
    (found,) = fed_back(replace(case, learning={"num_steps": 1}))
    assert "drafter.training.num_steps was 1" in found.remedy and "up to 3" in found.remedy
    (found,) = fed_back(replace(case, learning={"num_steps": K}))
    assert found.remedy.startswith("it was trained on 3 steps of its own outputs: train for longer")


READS_ITS_OUTPUT = {"eagle", "hass", "eagle_window", "eagle3", "conv", "experts", "linear_attention", "mtp",
                    "mtp_hierarchical"}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*sorted(READS_ITS_OUTPUT), "medusa", "dflash", "mtp_parallel", "mtp_cascaded", "distilled_lm"]
)
def test_later_tokens_are_helped_by_what_the_training_has(
    name: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        options = plain(hydra.compose("train", overrides=[f"+drafter={name}", "trainer=cpu"]))["drafter"]
    drafter, learning = native.build(options["model"], target, DraftVocab(target.vocab_size)), options["training"]
    poor = torch.tensor([[True, False, False]]).repeat(40, 1)
    monkeypatch.setattr(Rows, "right", lambda self: poor)
    case = replace(case_of(target, drafter, []), learning=learning)
    (found,) = fed_back(case)
    assert found.fault
    if name in READS_ITS_OUTPUT:
        assert found.cause == "own outputs from position 2 on" and " of its own outputs" in found.remedy
    else:
        assert found.cause == "tokens further ahead from position 2 on" and "num_steps" not in found.remedy
        (key,) = {"position_decay", "weights"} & set(learning)
        assert f"let later tokens weigh more (drafter.training.{key})" in found.remedy


def test_heads_that_were_not_trained_are_called_so(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = native.build({"_target_": "models.drafter.medusa.MedusaDrafter"}, target, DraftVocab(target.vocab_size))
    monkeypatch.setattr(Rows, "right", lambda self: torch.tensor([[True, False, False]]).repeat(40, 1))
    (found,) = fed_back(replace(case_of(target, drafter, []), learning={"num_steps": 2, "position_decay": 0.8}))
    assert found.remedy.startswith("drafter.training.num_steps was 2: what tells the tokens behind was not trained")


def test_training_text_that_the_target_would_not_say(target: Target, drafter: Any) -> None:
    other = [Text(ids, 4) for ids in prompts([28] * 4, target.vocab_size, seed=5)]
    found = causes(case_of(target, drafter, texts_of(target), other))[0]
    assert found.cause == "training text" and "of the training answers' tokens" in found.evidence
    assert "data.answers.answers=target" in found.remedy


def sampled(target: Target, sampling: SamplingParams, count: int = 12) -> list[Text]:
    start = prompts([4] * count, target.vocab_size, seed=9)
    made = generate(target, start, DecodeSettings(50, sampling=sampling)).token_ids
    return [Text(p + a, len(p)) for p, a in zip(start, made, strict=True)]


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(0.7), SamplingParams(1.5, top_p=0.9)])
def test_text_that_the_target_sampled_is_its_own(sampling: SamplingParams, target: Target, drafter: Any) -> None:
    """Though much less than 80% of it is its first choice: it is as likely as the entropy of the laws says."""
    case = case_of(target, drafter, [], sampled(target, sampling))
    (greedy,) = training_text(case)
    assert greedy.fault  # by the measure of first choices
    settings = {"answers": "target", "temperature": sampling.temperature, "top_p": sampling.top_p}
    (found,) = training_text(replace(case, answer_settings=settings))
    assert found.fault is False and f"T = {sampling.temperature:g}" in found.evidence


def test_sampled_text_of_another_is_not_the_targets(target: Target, drafter: Any) -> None:
    """Of a hotter sampling, and of random tokens."""
    settings = {"answers": "target", "temperature": 1.0, "top_p": 1.0}
    other = [Text(ids, 4) for ids in prompts([28] * 12, target.vocab_size, seed=5)]
    for texts in (sampled(target, SamplingParams(1.5)), other):
        (found,) = training_text(replace(case_of(target, drafter, [], texts), answer_settings=settings))
        assert found.fault and "data.generator=engine" in found.remedy


def test_the_likelihood_and_entropy_are_those_of_a_loop(target: Target, drafter: Any) -> None:
    (text,) = sampled(target, SamplingParams(1.0), 1)
    settings = {"answers": "target", "temperature": 1.0, "top_p": 1.0}
    (found,) = training_text(replace(case_of(target, drafter, [], [text]), answer_settings=settings))
    logits = target.model(input_ids=torch.tensor([text.token_ids])).logits[0].detach().double()
    surprise, entropy = [], []
    for place in range(text.start, len(text.token_ids) - K + 1):
        law = logits[place - 1].softmax(-1)
        surprise.append(-float(law[text.token_ids[place]].log()))
        entropy.append(-float((law * law.log()).sum()))
    told = f"have {sum(surprise) / len(surprise):.2f} nats each by the target at T = 1, and what it samples has "
    assert found.evidence == f"the training answers' tokens {told}{sum(entropy) / len(entropy):.2f}"


def test_the_answers_own_manifest_says_how_they_were_made(target: Target, drafter: Any, tmp_path: Path) -> None:
    asked = [Prompt(turns=(text,), continuation=True) for text in ("abcd", "bcda", "cdab", "dabc")]
    case = case_of(target, drafter, texts_of(target))
    build_answers(target, asked, AnswerSettings(temperature=1.5, max_new_tokens=40), tmp_path)
    (folder,) = tmp_path.iterdir()
    known = with_training(case, folder)
    assert known.answer_settings["temperature"] == 1.5 and known.training is not None
    assert len(known.training.texts) == 4
    (found,) = training_text(known)
    assert found.fault is False and "T = 1.5" in found.evidence


def test_answers_that_are_shorter_than_a_draft_are_no_training_text(
    target: Target, drafter: Any, tmp_path: Path
) -> None:
    asked = [Prompt(turns=("abcd",), continuation=True)]
    build_answers(target, asked, AnswerSettings(max_new_tokens=K - 1), tmp_path)
    (folder,) = tmp_path.iterdir()
    case = with_training(case_of(target, drafter, texts_of(target)), folder)
    assert case.training is None
    told = [f for f in find(case) if f.cause in ("training text", "unlike its training")]
    assert [f.fault for f in told] == [None, None]
    assert all(f"none of the answers in {folder} is long enough for a draft of 3 tokens" in f.evidence for f in told)


def test_of_a_drafter_around_others_the_inner_exports_are_named(target: Target) -> None:
    vocab, neural = DraftVocab(target.vocab_size), {"_target_": "models.drafter.eagle.EagleDrafter"}
    lookup = {"_target_": "models.drafter.prompt_lookup.PromptLookupDrafter"}
    home = "models.drafter."
    cascade = native.build(
        {"_target_": home + "cascade.CascadeDrafter", "first": lookup, "second": neural}, target, vocab
    )
    config = {"drafter": {"model": {"first_export": None, "second_export": "outputs/mine/export"}}}
    with pytest.raises(UserError, match=r"holds what was: EagleDrafter \(second\).*export=outputs/mine/export\.$"):
        check_learnt(cascade, {"config": config})
    hybrid = {"_target_": home + "hybrid.HybridDrafter", "neural": neural}
    lengths = {"_target_": home + "draft_length.DraftLengthDrafter", "neural": neural}
    structured = {"_target_": home + "structured.StructuredDrafter", "grammar": "json", "neural": neural}
    for model in (hybrid, lengths, structured):
        with pytest.raises(UserError, match=r"EagleDrafter \(neural\).*a run that trained it by itself"):
            check_learnt(native.build(model, target, vocab), {})
    with pytest.raises(UserError, match="in the text or it is not"):
        check_learnt(native.build(lookup, target, vocab), {})
    check_learnt(native.build(neural, target, vocab), {})


def test_prompts_unlike_those_of_the_training(target: Target, tmp_path: Path) -> None:
    drafter = learnt(target, DraftVocab(target.vocab_size), tmp_path, max_steps=150)
    found = causes(case_of(target, drafter, texts_of(target, seed=3), texts_of(target)))[0]
    assert found.cause == "unlike its training"


@pytest.mark.parametrize(("factor", "word"), [(0.25, "too flat"), (12.0, "too sharp")])
def test_a_law_of_another_temperature(factor: float, word: str, target: Target, drafter: Any) -> None:
    """Where first choices stay as they were; a sharp law is one only where the target is not sure."""
    with torch.no_grad():
        drafter.lm_head.weight *= factor
    case = replace(case_of(target, drafter, texts_of(target)), temperature=1.0 if factor < 1 else 4.0)
    found = causes(case)[0]
    assert found.cause == "temperature" and word in found.remedy


def test_what_is_tried_beside_the_layers() -> None:
    assert other_layers((0, 3), 4) == [(1, 4), (1, 3), (0, 2), (0, 4), (3, 0), (4, 4)]
    assert other_layers((4,), 4) == [(3,)]


def test_rows_move_with_zeros_before_and_the_last_repeated() -> None:
    rows = torch.arange(1.0, 4.0)[None, :, None]
    assert moved(rows, 1).flatten().tolist() == [0, 1, 2]
    assert moved(rows, -2).flatten().tolist() == [3, 3, 3]
    assert moved(rows, 0) is rows


def test_a_map_is_learnt_from_even_rows_and_tried_on_odd_ones() -> None:
    vocab = DraftVocab(9, torch.tensor([2, 5]))
    drafted, wanted = torch.tensor([0, 0, 1, 1, 0, 1]), torch.tensor([7, 7, 5, 5, 7, 8])
    before, after = remapped(vocab, drafted, wanted)
    assert before.tolist() == [False, True, False] and after.tolist() == [True, True, False]


def test_a_switch_and_an_angle_are_put_back_after_an_error(target: Target, drafter: Any) -> None:
    rows = Rows(target, drafter, texts_of(target), K)
    before = rows.accepted()

    @contextmanager
    def failing() -> Iterator[None]:
        with with_rope(drafter, 3.0), flipped(drafter, "norm_output"):
            yield

    with pytest.raises(RuntimeError, match="stop"), failing():
        raise RuntimeError("stop")
    assert (rows.accepted() == before).all()
    assert not torch.equal(rows.accepted(Reading("x", within=failing)), before)


def test_the_command_reads_an_export_and_says_what_it_found(tmp_path: Path) -> None:
    tiny = load_target("tiny", device="cpu")
    model = {"_target_": "models.drafter.eagle.EagleDrafter"}
    torch.manual_seed(0)
    made = native.build(model, tiny, DraftVocab(tiny.vocab_size))
    place = {"name": "tiny", "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    manifest = {**describe(tiny, [], AnswerSettings()), "weights": "another"}
    told = native.Export("eagle", model, place, 2, {"data": manifest})
    native.save(made, told, made.vocab, tmp_path / "export", "card")
    small = ["num_prompts=2", "max_new_tokens=12", "prompts=stdlib", f"training={tmp_path}"]
    command = [sys.executable, "eval/diagnose.py", f"export={tmp_path / 'export'}", *small]
    refused = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2 and "holds no answers" in refused.stderr
    done = subprocess.run(command[:-1], cwd=ROOT.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "cause: another target" in done.stdout
    written = json.loads((tmp_path / "diagnosis.json").read_text())
    assert written["cause"] == "another target" and len(written["findings"]) == 13
