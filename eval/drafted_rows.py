"""What a drafter would propose behind every token of a text, computed as in training and as in the engine.

Row t of step s is about token t + 2 + s: so many tokens of a draft that begins behind x_{t+1}.

S tokens of a text, R rows that are looked at, K steps, L captured layers, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.settings import DecodeSettings
from eval.rounds import trace
from models.layers import DecoderStack
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids, the first `start` of which are a prompt."""

    token_ids: list[int]
    start: int

    def rows(self, num_steps: int) -> slice:
        """The rows that are about `num_steps` tokens of the answer, the first of them just behind the prompt."""
        first = max(0, self.start - 2)
        return slice(first, max(first, len(self.token_ids) - 1 - num_steps))


@dataclass(frozen=True, slots=True)
class Reading:
    """How a drafter is told of a text: `usual` is the contract's way, and others are what may have gone wrong.

    `states` is how many rows earlier the states are taken, `tokens` how many rows later the tokens; `about` is how many
    tokens further on the proposals are meant to be. `within` puts the drafter itself into another state meanwhile.
    """

    name: str
    states: int = 0
    tokens: int = 0
    about: int = 0
    layers: tuple[int, ...] | None = None
    within: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)


USUAL = Reading("as it is")


class Rows:
    """A drafter beside its target on some texts."""

    def __init__(self, target: Target, drafter: Any, texts: Sequence[Text], num_steps: int) -> None:
        self.target, self.drafter, self.texts, self.num_steps = target, drafter, texts, num_steps

    def right(self, reading: Reading = USUAL) -> Tensor:
        """Which first choices are the text's tokens, in training's way: (R, K) bool."""
        choices = torch.cat([self._choices(text, reading)[0] for text in self.texts])
        return choices == torch.cat([self._wanted(text, reading.about) for text in self.texts])

    def accepted(self, reading: Reading = USUAL) -> Tensor:
        """How many tokens of a draft behind each row would be accepted at temperature 0: (R,)."""
        return self.right(reading).long().cumprod(1).sum(1)

    def first_choices(self) -> tuple[Tensor, Tensor]:
        """The draft ids that are the first choice at step 0, and the text's tokens there: (R,) each."""
        ids = torch.cat([self._choices(text, USUAL)[1] for text in self.texts])
        return ids, torch.cat([self._wanted(text, 0)[:, 0] for text in self.texts])

    @torch.inference_mode()
    def laws(self, text: Text) -> tuple[Tensor, Tensor]:
        """Logits of the target (R, V), and of the drafter at step 0 (R, Vd)."""
        states = self.target(torch.tensor([text.token_ids], device=self.target.device)).last[0, 1:]
        rows = text.rows(self.num_steps)
        hidden = next(iter(self.drafter.unroll(self._features(text, USUAL), 1)))[0, rows]
        return self.target.head(states[rows]).float(), self.drafter.logits(hidden, 0).float()

    def _wanted(self, text: Text, about: int) -> Tensor:
        """The tokens that rows are about (R, K): −1 behind the end, which is never right."""
        ids, rows = torch.tensor([*text.token_ids, -1]), text.rows(self.num_steps)
        first = torch.arange(rows.start, rows.stop)
        return ids[first[:, None] + 2 + about + torch.arange(self.num_steps)]

    @torch.inference_mode()
    def _choices(self, text: Text, reading: Reading) -> tuple[Tensor, Tensor]:
        """First choices in target ids (R, K), and those of step 0 in draft ids (R,)."""
        rows, vocab = text.rows(self.num_steps), self.drafter.vocab
        found = []
        with reading.within():
            for step, hidden in enumerate(self.drafter.unroll(self._features(text, reading), self.num_steps)):
                found.append(self.drafter.logits(hidden[0, rows], step).argmax(-1).cpu())
        return vocab.to_target(torch.stack(found, dim=1)), found[0]

    def _features(self, text: Text, reading: Reading) -> TargetFeatures:
        token_ids = torch.tensor([text.token_ids], device=self.target.device)
        layers = self.drafter.capture_layers if reading.layers is None else reading.layers
        hidden = self.target.states(token_ids, layers) if layers else None
        if hidden is not None and reading.states:
            hidden = moved(hidden, reading.states)
        following = moved(token_ids[..., None], -1 - reading.tokens)[..., 0]
        return TargetFeatures(token_ids, following, hidden, torch.tensor([token_ids.shape[1]]))

    def by_engine(self, settings: DecodeSettings) -> tuple[list[int], list[int]]:
        """Of drafts that the engine made of the prompts: how many first choices there were at each step, and how many
        of them are not those of training's way. A step is compared where the text before it is the same.
        """
        compared, other = [0] * self.num_steps, [0] * self.num_steps
        for text in self.texts:
            made = trace(self.target, self.drafter, text.token_ids[: text.start], settings)
            whole = Text(text.token_ids[: text.start] + made.token_ids, text.start)
            expected, begin = self._choices(whole, USUAL)[0], 1
            for done in made.rounds:
                row = begin + min(0, text.start - 2)  # token start + begin is behind row start + begin − 2
                for step in range(min(done.accepted + 1, len(done.draft))):
                    if 0 <= row < len(expected):
                        compared[step] += 1
                        other[step] += int(expected[row, step]) != done.draft[step]
                begin += done.accepted + 1
        return compared, other


def moved(rows: Tensor, by: int) -> Tensor:
    """Rows (B, S, ·) `by` places later, zeros (or the last row, where they move earlier) in the gap."""
    if by == 0:
        return rows
    if by > 0:
        return torch.cat([torch.zeros_like(rows[:, :by]), rows[:, :-by]], dim=1)
    return torch.cat([rows[:, -by:], rows[:, -1:].expand(-1, -by, -1)], dim=1)


def readings(target: Target, drafter: Any) -> dict[str, list[Reading]]:
    """Other ways in which the drafter may have been meant to read, by the fault that each would show."""
    found = {
        "shifted by one": [
            Reading("proposals are about the token before", about=-1),
            Reading("proposals are about the token behind", about=1),
            Reading("tokens one row earlier", tokens=-1),
            Reading("tokens one row earlier, and proposals about the token before", tokens=-1, about=-1),
        ],
        "captured layers": [],
        "RoPE": [
            Reading(f"rope_theta {theta:g}", within=lambda theta=theta: with_rope(drafter, theta))  # type: ignore[misc]
            for theta in thetas(target, drafter)
        ],
        "norms": [
            Reading(f"{name} {not getattr(module, name)}", within=lambda m=module, n=name: flipped(m, n))  # type: ignore[misc]
            for module in drafter.modules()
            for name in ("norm_output", "norm_before_residual")
            if isinstance(getattr(module, name, None), bool)
        ],
    }
    if drafter.capture_layers:
        found["shifted by one"] += [
            Reading("states one row earlier", states=1), Reading("states one row later", states=-1)
        ]  # fmt: skip
        found["captured layers"] = [
            Reading(f"states entering layers {', '.join(map(str, layers))}", layers=layers)
            for layers in other_layers(tuple(map(target.layer_index, drafter.capture_layers)), target.num_layers)
        ]
    return found


def other_layers(layers: tuple[int, ...], last: int) -> list[tuple[int, ...]]:
    """Layers near `layers`: one of them, or all, one lower or higher, all in the opposite order, or the last alone."""
    found = [tuple(layer + by for layer in layers) for by in (-1, 1)]
    for place in range(len(layers)):
        found += [(*layers[:place], layers[place] + by, *layers[place + 1 :]) for by in (-1, 1)]
    found += [layers[::-1], tuple(last for _ in layers)]
    inside = [choice for choice in found if all(0 <= layer <= last for layer in choice) and choice != layers]
    return list(dict.fromkeys(inside))


def thetas(target: Target, drafter: Any) -> list[float]:
    """Bases of RoPE that are usual, or the target's, and not the drafter's."""
    own = next((_theta(module.inv_freq) for module in _rotaries(drafter)), None)
    if own is None:
        return []
    rope = getattr(target.config, "rope_parameters", None) or {}
    usual = {rope.get("full_attention", rope).get("rope_theta") or 1e4, 1e4, 1e5, 5e5, 1e6}
    return sorted(theta for theta in usual if abs(theta / own - 1) > 0.01)


def _theta(inv_freq: Tensor) -> float:
    """The base of plain RoPE with these frequencies base^(−2i/d)."""
    pairs = len(inv_freq)
    return float(inv_freq[1].double() ** -pairs) if pairs > 1 else 1e4


def _rotaries(drafter: nn.Module) -> Iterator[Any]:
    for module in drafter.modules():
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            yield module
        if isinstance(module, DecoderStack):
            yield from module._rotary


@contextmanager
def with_rope(drafter: Any, theta: float) -> Iterator[None]:
    """The drafter with plain RoPE of base `theta`."""
    rotaries = list(_rotaries(drafter))
    before = [module.inv_freq for module in rotaries]
    try:
        for module in rotaries:
            pairs = torch.arange(len(module.inv_freq), dtype=torch.float64, device=module.inv_freq.device)
            module.inv_freq = (theta ** (-pairs / len(pairs))).to(module.inv_freq)
        yield
    finally:
        for module, inv_freq in zip(rotaries, before, strict=True):
            module.inv_freq = inv_freq


@contextmanager
def flipped(module: Any, name: str) -> Iterator[None]:
    """The module with the other value of a switch."""
    setattr(module, name, not getattr(module, name))
    try:
        yield
    finally:
        setattr(module, name, not getattr(module, name))


def remapped(vocab: DraftVocab, drafted: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Which choices are right as they are, and where each draft id stood for the token that it met most often.

    `drafted` are draft ids and `wanted` target ids (R,). The second map is learnt from even rows and tried on odd ones;
    both answers are of the odd rows.
    """
    learnt, met = torch.full((vocab.size,), -1), torch.zeros(vocab.size, dtype=torch.int64)
    pairs, counts = torch.stack([drafted[::2], wanted[::2]]).unique(dim=1, return_counts=True)
    for (draft_id, token), count in zip(pairs.t().tolist(), counts.tolist(), strict=True):
        if count > met[draft_id]:
            learnt[draft_id], met[draft_id] = token, count
    return vocab.to_target(drafted[1::2]) == wanted[1::2], learnt[drafted[1::2]] == wanted[1::2]
