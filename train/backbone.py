"""Training of the target together with its drafter: how it is adapted, when, and what holds it in place.

The loss is L_base + λ0 · L_drafter (Medusa-2, 2401.10774, §2.2.2). L_base keeps the target what it is: it compares the
adapted law with the original's on the answers, or teaches it the answers themselves. At first the drafter alone is
trained, as beside a frozen target; then both, λ0 rising from nothing, so that a drafter that knows little does not
spoil the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.checkpoint.native import INSIDE
from models.errors import UserError
from models.target import Target
from train.divergences import Divergence

KINDS = ("frozen", "lora", "full")


@dataclass(frozen=True)
class Backbone:
    """`drafter.training.backbone`; its yaml says what each setting means. Raises UserError for senseless ones."""

    by: str = "frozen"
    rank: int = 32
    alpha: float = 16
    dropout: float = 0.0
    target_modules: Any = "all-linear"
    export: str = "merged"
    base: Mapping[str, float] = field(default_factory=lambda: {"kl": 1.0})
    drafter_only: float = 0.0
    drafter_weight: float = 1.0
    ramp: float = 0.0
    drafter_lr_multiple: float = 1.0

    def __post_init__(self) -> None:
        for name, known in {"by": KINDS, "export": tuple(INSIDE)}.items():
            if getattr(self, name) not in known:
                raise _refused(name, getattr(self, name), f"choose {', '.join(known)}")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise _refused("rank", self.rank, "it must be a whole number")
        if not isinstance(self.base, Mapping):
            raise _refused("base", self.base, "give losses with their weights, as {kl: 1.0}")
        for name in ("rank", "alpha", "drafter_weight", "drafter_lr_multiple"):
            if not getattr(self, name) > 0:
                raise _refused(name, getattr(self, name), "it must be above 0")
        for name in ("dropout", "drafter_only", "ramp"):
            if not 0 <= getattr(self, name) < 1:
                raise _refused(name, getattr(self, name), "it must be at least 0 and below 1")
        if self.by == "full" and self.export == "separate":
            raise _refused("export", "separate", "a target that is trained whole has no adapter to stand alone")
        if self.by != "frozen":
            self.divergence()

    @property
    def frozen(self) -> bool:
        """Whether the target is never trained."""
        return self.by == "frozen"

    def divergence(self) -> Divergence:
        """What holds the target in place."""
        return Divergence(self.base, where="drafter.training.backbone.base")

    def adapt(self, target: Target, seed: int) -> Target:
        """The target that is trained beside `target`, equal to it so far; that itself where none is."""
        if self.frozen:
            return target
        from models.target.adapted import AdaptedTarget, Lora  # needs peft

        modules = self.target_modules if isinstance(self.target_modules, str) else tuple(self.target_modules)
        lora = Lora(self.rank, self.alpha, self.dropout, modules) if self.by == "lora" else None
        return AdaptedTarget(target, lora, seed)

    def first_joint_step(self, max_steps: int) -> int:
        """The optimizer step, counted from 0, from which the target is trained as well; `max_steps`: never."""
        return max_steps if self.frozen else min(max_steps - 1, round(self.drafter_only * max_steps))

    def weight(self, step: int, max_steps: int) -> float | None:
        """λ0 at an optimizer step; None while the drafter alone is trained.

        It rises evenly over `ramp` · max_steps steps, to `drafter_weight`.
        """
        passed = step - self.first_joint_step(max_steps)
        if self.frozen or passed < 0:
            return None
        rise = round(self.ramp * max_steps)
        return self.drafter_weight * min(1.0, (passed + 1) / rise) if rise else self.drafter_weight

    def describe(self) -> dict[str, Any]:
        """What an export tells of how its target was adapted."""
        lora = {"rank": self.rank, "alpha": self.alpha} if self.by == "lora" else {}
        return {"export": self.export, "by": self.by, **lora, "base": {k: v for k, v in self.base.items() if v}}


def backbone_of(training: Mapping[str, Any] | None) -> Backbone:
    """What `drafter.training` says of the target's own training. Raises UserError for settings that there are not."""
    given = dict((training or {}).get("backbone") or {})
    try:
        return Backbone(**given)
    except TypeError as error:
        raise UserError(f"drafter.training.backbone: {str(error).split('__init__() ')[-1]}.") from error


def _refused(name: str, value: Any, why: str) -> UserError:
    return UserError(f"drafter.training.backbone.{name} is {value!r}: {why}.")
