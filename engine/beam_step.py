"""One step of beam search, as transformers' `generate(num_beams=K, do_sample=False)` takes it; no model in sight.

Scores are float32 whatever the target's dtype, since transformers' are: then both keep the same beams, and end at the
same step. Its quirks are kept: the best (1 + number of stop tokens)·K candidates are looked at, so that K of them go
on; only those among the first K may end an answer; and what is out of the question gets −10⁹.

P prompts, K beams, C candidates, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from models.errors import UserError

_NEVER = -1.0e9


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """How wide the search is and when it ends.

    A finished beam's score is its log-probability over length^`length_penalty`. `early_stopping` True ends the search
    once K beams have finished; False where the best running beam, as long as it is now, has fallen behind the worst
    finished one; "never" where it cannot get ahead of that at any length. Raises UserError for senseless values.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        if not isinstance(self.num_beams, int) or isinstance(self.num_beams, bool) or self.num_beams < 2:
            raise UserError(f"beams is {self.num_beams!r}: beam search needs a whole number of at least 2.")
        if self.early_stopping not in (True, False, "never"):
            raise UserError(f"early_stopping is {self.early_stopping!r}: choose true, false or never.")


@dataclass(slots=True)
class Beams:
    """Running and finished beams of P prompts, best first, without their tokens."""

    running: Tensor  # (P, K) log-probabilities
    finished: Tensor  # (P, K) scores
    is_finished: Tensor  # (P, K) bool; False where `finished` holds no beam yet
    improvable: Tensor  # (P,) bool: a running beam may still beat a finished one

    @classmethod
    def start(cls, num_prompts: int, num_beams: int, device: torch.device | str = "cpu") -> Beams:
        """All beams are the prompt; only the first counts, or all would go on alike."""
        running = torch.zeros(num_prompts, num_beams, device=device)
        running[:, 1:] = _NEVER
        nothing = torch.zeros(num_prompts, num_beams, dtype=torch.bool, device=device)
        return cls(running, torch.full_like(running, _NEVER), nothing, ~nothing[:, 0])

    def select(self, rows: Tensor) -> Beams:
        """Those of some prompts."""
        return Beams(*(getattr(self, f.name)[rows] for f in fields(self)))

    def put(self, rows: Tensor, others: Beams) -> None:
        """Replace those of some prompts."""
        for f in fields(self):
            getattr(self, f.name)[rows] = getattr(others, f.name)


@dataclass(frozen=True, slots=True)
class Step:
    """What became of the beams of P prompts.

    Running beam i goes on from beam `parents[i]` by `tokens[i]`. Finished beam i is the former finished beam `kept[i]`
    or, from K on, the candidate kept[i] − K: a beam `candidate_parents` and the token behind it.
    """

    parents: Tensor  # (P, K)
    tokens: Tensor  # (P, K)
    kept: Tensor  # (P, K)
    candidate_parents: Tensor  # (P, C)
    candidate_tokens: Tensor  # (P, C)
    ended: Tensor  # (P,) bool: the search is over


def advance(
    beams: Beams, logits: Tensor, lengths: list[int], rooms: list[int], stop: frozenset[int], settings: BeamSettings
) -> Step:
    """Move `beams` one token on, in place, by the target's logits (P, K, V) behind each of them.

    `lengths` says how many tokens each prompt's beams hold behind the prompt, and `rooms` how many they may.
    """
    num_beams, vocab_size = settings.num_beams, logits.shape[-1]
    log_probs = logits.to(torch.float32).log_softmax(-1) + beams.running[..., None]
    wanted = max(2, 1 + len(stop)) * num_beams
    best, index = log_probs.flatten(1).topk(wanted)  # (P, C)
    parents, tokens = index // vocab_size, index % vocab_size
    stops = torch.isin(tokens, torch.tensor(sorted(stop), dtype=tokens.dtype, device=tokens.device))
    stops |= torch.tensor([n + 1 >= room for n, room in zip(lengths, rooms, strict=True)], device=tokens.device)[
        :, None
    ]
    going_on = best + stops * _NEVER
    running = going_on.topk(num_beams).indices
    beams.running = going_on.gather(1, running)

    divisor = _powers([n + 1 for n in lengths], settings.length_penalty, best)
    scores = best / divisor
    scores = scores + (beams.is_finished.all(1, keepdim=True) & (settings.early_stopping is True)) * _NEVER
    scores = scores + ~beams.improvable[:, None] * _NEVER
    ends = stops & (torch.arange(wanted, device=stops.device) < num_beams)
    scores = scores + ~ends * _NEVER
    merged = torch.cat([beams.finished, scores], dim=1)
    kept = merged.topk(num_beams).indices
    beams.finished = merged.gather(1, kept)
    beams.is_finished = torch.cat([beams.is_finished, ends], dim=1).gather(1, kept)

    far = settings.early_stopping == "never" and settings.length_penalty > 0
    divisor = _powers(rooms if far else [n + 1 for n in lengths], settings.length_penalty, best)
    worst = torch.where(beams.is_finished, beams.finished.amin(1, keepdim=True), _NEVER)
    beams.improvable = beams.improvable & (beams.running[:, :1] / divisor > worst).any(1)
    full = beams.is_finished.all(1) & (settings.early_stopping is True)
    ended = ~beams.improvable | full | stops.all(1)
    return Step(parents.gather(1, running), tokens.gather(1, running), kept, parents, tokens, ended)


def _powers(lengths: list[int], exponent: float, like: Tensor) -> Tensor:
    """lengths^exponent (P, 1)."""
    return like.new_tensor([float(n**exponent) for n in lengths])[:, None]
