"""The causes of low acceptance, one check for each, in the order in which one explains the next.

A check never says "fault" by a mean alone: what is compared is compared row by row, and must differ by four standard
errors and by more than a trifle.

R rows, K steps, V target and Vd draft vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.settings import DecodeSettings
from eval.drafted_rows import USUAL, Reading, Rows, Text, readings, remapped
from models.sampling import SamplingParams, probabilities
from models.target import Target
from models.types import feeds_back, max_depth

_SURE = 4.0  # standard errors
_GAIN = 0.05  # tokens of a draft, or chances: less does not explain a low acceptance
_NEAR_TIES = 0.02  # of proposals: so many may part by rounding
_LEAST_COMPARED = 10  # proposals at a position
_CHANCE = 3.2e-5  # of four standard errors or more, on one side
_OUTSIDE = 0.1  # of the target's law
_STEADY = 0.5  # of the first token's acceptance: a later one's that is lower is not for lack of skill alone
_OWN_TEXT = 0.8  # of a text's tokens are the target's first choice at least, where it is the target's own
_SURPRISE = 0.1  # nats a token: sampled text that is less likely than that is not the target's own
_LEAST_CHANCE = 1e-6  # of a token that top_p leaves out by rounding
_ANSWER_ANEW = "they were to be the target's and are not: let it answer the prompts itself (data.generator=engine)"
_FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)  # on draft logits


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw; `fault` is None where it could not look."""

    cause: str
    fault: bool | None
    evidence: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What is known: the drafter on the target's answers to the prompts in question, and on texts of its training.

    `manifest` is what the training answers were made from; None where the export does not tell. An adapted target is
    another than the one they were made by. `answer_settings` are those of the answers in `training`, and `no_training`
    says why there are none. `learning` is `drafter.training` of the run, empty where the export does not tell.
    """

    target: Target
    drafter: Any
    rows: Rows
    training: Rows | None
    manifest: dict[str, Any] | None
    adapted: bool
    settings: DecodeSettings
    temperature: float
    answer_settings: dict[str, Any] = field(default_factory=dict)
    no_training: str = "the answers that it was trained on are not here: training=FOLDER"
    learning: dict[str, Any] = field(default_factory=dict)


def find(case: Case) -> Iterator[Finding]:
    """Every check's finding, in order: the first fault is the cause, and later ones may follow from it."""
    for check in (
        another_target,
        another_template,
        engine_and_training,
        read_otherwise,
        vocabulary_map,
        vocabulary_ceiling,
        fed_back,
        training_text,
        distribution_shift,
        temperature_mismatch,
    ):
        yield from check(case)


def another_target(case: Case) -> Iterator[Finding]:
    """Are these the weights that gave the training answers?"""
    name = "another target"
    if case.adapted:
        told = (
            "the export holds the target that was trained with it, which is meant to differ from the one that answered"
        )
        yield Finding(name, None, told)
        return
    if case.manifest is None:
        yield Finding(name, None, "the export does not say which weights it was trained with")
        return
    now = {"weights": case.target.weights_fingerprint, "dtype": str(case.target.dtype)}
    other = [f"{key} {now[key]}, in training {case.manifest[key]}" for key in now if now[key] != case.manifest[key]]
    yield Finding(
        name,
        bool(other),
        "; ".join(other) or f"weights {now['weights']}, as in training",
        "measure with the target that it was trained for, or train for this one (init_from=EXPORT)",
    )


def another_template(case: Case) -> Iterator[Finding]:
    """Is a conversation put into the same words?"""
    name = "chat template"
    if case.manifest is None:
        yield Finding(name, None, "the export does not say which template it was trained with")
        return
    template = getattr(case.target.tokenizer, "chat_template", None) or ""
    now, then = hashlib.sha256(str(template).encode()).hexdigest()[:16], case.manifest["template"]
    yield Finding(
        name,
        now != then,
        f"template {now}" + ("" if now == then else f", in training {then}"),
        "use the tokenizer and template that the training answers were made with",
    )


def engine_and_training(case: Case) -> Iterator[Finding]:
    """Does the engine's drafter propose what training's way of computing it proposes?"""
    compared, other = case.rows.by_engine(case.settings)
    place = next((i for i, counts in enumerate(zip(other, compared, strict=True)) if _too_many(*counts)), None)
    told = ", ".join(f"{o} of {c}" for o, c in zip(other, compared, strict=True) if c)
    where = (
        "in what it reads of the committed text: its mask, positions or memory"
        if place == 0
        else "in what is fed back from one drafted token to the next"
    )
    yield Finding(
        "engine and training differ" + ("" if place is None else f" from position {place + 1} on"),
        place is not None,
        f"proposals that are not training's, by position: {told}",
        f"`propose` and `unroll` of {type(case.drafter).__name__} differ {where}: see test 3 of tests/contract",
    )


def _too_many(other: int, compared: int) -> bool:
    """Whether so many of the proposals that were compared cannot have parted by near ties."""
    return compared >= _LEAST_COMPARED and at_least(other, compared, _NEAR_TIES) < _CHANCE


def at_least(count: int, trials: int, rate: float) -> float:
    """The chance that `count` or more of `trials` happen, each at `rate`."""
    law = torch.distributions.Binomial(trials, torch.tensor(rate, dtype=torch.float64))
    return float(law.log_prob(torch.arange(count, trials + 1, dtype=torch.float64)).logsumexp(0).exp())


def read_otherwise(case: Case) -> Iterator[Finding]:
    """Would more be accepted if the drafter were told of the same text in another way?"""
    usual = case.rows.accepted(USUAL).double()
    tried = {
        cause: [(r, *_gain(case.rows, r, usual)) for r in rs]
        for cause, rs in readings(case.target, case.drafter).items()
    }
    best = max((gain for found in tried.values() for _, gain, sure in found if sure), default=0.0)
    remedies = {
        "shifted by one": "train it anew with rows as `models.types.TargetFeatures` has them",
        "captured layers": "capture_layers in the export's config.json are not those of training",
        "RoPE": "the export's rope_parameters are not those of training",
        "norms": "the export's switches are not those of training",
    }
    for cause, found in tried.items():
        if not found:
            yield Finding(cause, None, "the drafter has none")
            continue
        reading, gain, sure = max(found, key=lambda entry: entry[1])
        yield Finding(
            cause,
            sure and gain == best,
            f"{usual.mean():.2f} of {case.rows.num_steps} tokens right; with {reading.name} {usual.mean() + gain:.2f}",
            remedies[cause],
        )


def _gain(rows: Rows, reading: Reading, usual: Tensor) -> tuple[float, bool]:
    """Tokens more that would be accepted per draft, and whether that is sure."""
    difference = rows.accepted(reading).double() - usual
    return float(difference.mean()), is_sure(difference, _GAIN)


def is_sure(differences: Tensor, least: float) -> bool:
    """Whether the mean of paired differences (R,) is at least `least`, and four standard errors above 0."""
    mean, spread = float(differences.mean()), float(differences.std()) if len(differences) > 1 else float("inf")
    return mean >= least and mean > _SURE * spread / len(differences) ** 0.5


def vocabulary_map(case: Case) -> Iterator[Finding]:
    """Does every draft id stand for the token that it was trained for?"""
    name = "vocabulary map"
    if not case.drafter.vocab.reduced:
        yield Finding(name, None, "it proposes all tokens")
        return
    before, after = remapped(case.drafter.vocab, *case.rows.first_choices())
    gain = after.double() - before.double()
    yield Finding(
        name,
        is_sure(gain, 0.2) and float(after.double().mean()) > 2 * float(before.double().mean()),
        f"first choices right {before.double().mean():.2f}; where each draft id is the token that it met most often in "
        f"half of the rows {after.double().mean():.2f}",
        "d2t is another drafter's: export it again with the vocabulary that it was trained with",
    )


def vocabulary_ceiling(case: Case) -> Iterator[Finding]:
    """How much of what the target says can be proposed at all?"""
    vocab, name = case.drafter.vocab, "vocabulary ceiling"
    if not vocab.reduced:
        yield Finding(name, None, "it proposes all tokens")
        return
    inside = vocab.to_draft(torch.arange(vocab.vocab_size)) >= 0
    said = torch.tensor([token for text in case.rows.texts for token in text.token_ids[text.start :]])
    share = float(inside[said].double().mean())
    yield Finding(
        name,
        share < 1 - _OUTSIDE,
        f"{share:.1%} of the target's tokens are among the {vocab.size:,} that can be proposed",
        "train with a larger draft_vocab_size, or on answers to prompts like these",
    )


def fed_back(case: Case) -> Iterator[Finding]:
    """Are later tokens told as well as the first in training's way, where a drafter may read its own outputs?"""
    right = case.rows.right().double().cumprod(1)
    reached = torch.cat([torch.ones(len(right), 1), right], dim=1).sum(0)
    rates = (right.sum(0) / reached[:-1]).tolist()
    sizes = reached[:-1].tolist()
    place = next((i for i in range(1, len(rates)) if sizes[i] >= 20 and rates[i] < _STEADY * rates[0]), None)
    name = "own outputs" if feeds_back(case.drafter) else "tokens further ahead"
    yield Finding(
        name + ("" if place is None else f" from position {place + 1} on"),
        place is not None,
        "right by position, where those before are: " + ", ".join(f"{r:.2f}" for r in rates if r == r),
        f"{_further(case)}, or draft fewer tokens",
    )


def _further(case: Case) -> str:
    """What in its training would make later tokens better."""
    steps, wanted = case.learning.get("num_steps"), case.rows.num_steps
    if feeds_back(case.drafter):
        if steps is None:
            return "train it on as many steps of its own outputs as tokens are drafted"
        if steps < wanted:
            return f"drafter.training.num_steps was {steps}: train it on more steps of its own outputs, up to {wanted}"
        return f"it was trained on {steps} steps of its own outputs: train for longer"
    if steps is not None and steps < wanted and max_depth(case.drafter) is not None:
        return f"drafter.training.num_steps was {steps}: what tells the tokens behind was not trained"
    weights = [f"drafter.training.{key}" for key in ("position_decay", "weights") if key in case.learning]
    heavier = f"let later tokens weigh more ({' or '.join(weights)})" if weights else "train for longer"
    return f"it reads no output of its own, so more steps would not help: {heavier}"


def training_text(case: Case) -> Iterator[Finding]:
    """Did the training answers come from the target?"""
    name = "training text"
    if case.training is None:
        yield Finding(name, None, case.no_training)
        return
    settings = case.answer_settings
    by_target = settings.get("answers") == "target"
    if by_target and settings["temperature"] > 0:
        yield _sampled_text(case.training, SamplingParams(settings["temperature"], top_p=settings["top_p"]))
        return
    own = torch.cat([_own(case.training, text) for text in case.training.texts]).double()
    yield Finding(
        name,
        float(own.mean()) < _OWN_TEXT,
        f"{own.mean():.0%} of the training answers' tokens are the target's first choice",
        _ANSWER_ANEW if by_target else "let the target answer the prompts itself (data.answers.answers=target)",
    )


def _own(rows: Rows, text: Text) -> Tensor:
    logits, _ = rows.laws(text)
    return logits.argmax(-1).cpu() == _said(rows, text)


def _said(rows: Rows, text: Text) -> Tensor:
    """The tokens (R,) that the target's laws at the rows are of."""
    about = text.rows(rows.num_steps)
    return torch.tensor(text.token_ids[about.start + 2 : about.stop + 2])


def _sampled_text(rows: Rows, sampling: SamplingParams) -> Finding:
    """Is the text as likely as what the target samples?"""
    found = [_surprise(rows, text, sampling) for text in rows.texts]
    surprise, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Finding(
        "training text",
        is_sure(surprise - entropy, _SURPRISE),
        f"the training answers' tokens have {surprise.mean():.2f} nats each by the target at "
        f"T = {sampling.temperature:g}, and what it samples has {entropy.mean():.2f}",
        _ANSWER_ANEW,
    )


def _surprise(rows: Rows, text: Text, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """−log p of each token that was said, and its mean over what p would say, the entropy: (R,) each, float64, nats."""
    p = probabilities(rows.laws(text)[0].double(), sampling).cpu()
    said = p.gather(1, _said(rows, text)[:, None])[:, 0]
    return -said.clamp(min=_LEAST_CHANCE).log(), torch.special.entr(p).sum(-1)


def distribution_shift(case: Case) -> Iterator[Finding]:
    """Is it better on what it was trained on?"""
    name = "unlike its training"
    if case.training is None:
        yield Finding(name, None, case.no_training)
        return
    there, here = case.training.accepted().double(), case.rows.accepted().double()
    error = float((there.var() / len(there) + here.var() / len(here)) ** 0.5)
    gap = float(there.mean() - here.mean())
    yield Finding(
        name,
        gap > _SURE * error and gap > max(_GAIN, 0.25 * float(there.mean())),
        f"{there.mean():.2f} tokens of a draft right on training answers, {here.mean():.2f} on these",
        "train on prompts like these, or on more of them: what was learnt does not carry over",
    )


def temperature_mismatch(case: Case) -> Iterator[Finding]:
    """Is the draft's law too flat, or too sharp, for the target's at this temperature?"""
    name = "temperature"
    if case.temperature == 0:
        yield Finding(name, None, "temperature 0 compares first choices alone")
        return
    chances = torch.cat([_chances(case, text) for text in case.rows.texts])  # (R, factors)
    usual = chances[:, _FACTORS.index(1.0)]
    best = int(chances.mean(0).argmax())
    yield Finding(
        name,
        is_sure(chances[:, best] - usual, _GAIN),
        f"acceptance of the first token at T = {case.temperature:g} {usual.mean():.2f}; with draft logits times "
        f"{_FACTORS[best]:g} {chances[:, best].mean():.2f}",
        "its law is " + ("too flat" if _FACTORS[best] > 1 else "too sharp") + " for that temperature: train on the "
        "target's laws (soft labels) at temperature 1",
    )


def _chances(case: Case, text: Text) -> Tensor:
    """Σ min(p, q) at each row, by factor on the draft logits: (R, factors), float64."""
    p_logits, q_logits = case.rows.laws(text)
    p = (p_logits.double() / case.temperature).softmax(-1)
    laws: list[Callable[[], Tensor]] = [
        lambda f=f: case.drafter.vocab.widen((f * q_logits.double() / case.temperature).softmax(-1))  # type: ignore[misc]
        for f in _FACTORS
    ]
    return torch.stack([torch.minimum(p, law()).sum(-1).cpu() for law in laws], dim=1)
