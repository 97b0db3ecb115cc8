"""Search spaces: the sweep files of Weights and Biases, read for other sweepers as well."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from models.errors import UserError

_SAMPLERS = {"bayes": "tpe", "random": "random", "grid": "grid"}
_KNOWN = {"program", "method", "metric", "early_terminate", "command", "parameters"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A setting and what it may be: one of `values`, or a number from `low` to `high`, evenly or by its logarithm."""

    name: str
    values: tuple[Any, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @property
    def examples(self) -> tuple[Any, ...]:
        """All values, or both ends."""
        return (self.low, self.high) if self.values is None else self.values

    def override(self, value: Any) -> str:
        """The setting with this value, written as W&B's agent writes it."""
        return f"{self.name}={value}"

    def swept(self) -> str:
        """The setting as Hydra's sweepers read it."""
        if self.values is not None:
            return f"{self.name}=choice({','.join(map(str, self.values))})"
        span = f"interval({self.low}, {self.high})"
        return f"{self.name}={f'tag(log, {span})' if self.log else span}"

    def choices(self) -> list[Any]:
        """The values as Hydra's Optuna sweeper keeps them; none where they are an interval's."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.core.override_parser.types import Transformer

        if self.values is None:
            return []
        return list(OverridesParser.create().parse_override(self.swept()).sweep_iterator(Transformer.encode))


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """A sweep file: what every trial is given, `settings`, and what differs between trials."""

    settings: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    sampler: str

    def grid(self) -> list[dict[str, Any]]:
        """Every combination of choices, by the settings' names; none where a setting has an interval."""
        return [
            dict(zip((p.name for p in self.parameters), point, strict=True))
            for point in product(*(p.choices() for p in self.parameters))
        ]


def read(path: Path) -> SearchSpace:
    """Read a sweep file. Raises UserError, naming the file, for what only W&B could make of it."""
    content = yaml.safe_load(path.read_text())
    if unknown := set(content) - _KNOWN:
        raise UserError(f"{path.name}: {', '.join(sorted(unknown))} is not understood.")
    if content["method"] not in _SAMPLERS:
        raise UserError(f"{path.name}: method is {content['method']!r}: choose one of {', '.join(_SAMPLERS)}.")
    parameters = tuple(_parameter(path.name, name, given) for name, given in content["parameters"].items())
    settings = tuple(word for word in content["command"] if not word.startswith("${"))
    return SearchSpace(settings, parameters, _SAMPLERS[content["method"]])


def _parameter(where: str, name: str, given: dict[str, Any]) -> Parameter:
    if given.keys() == {"values"}:
        if any(value is None for value in given["values"]):
            raise UserError(f"{where}: {name} may be null, which W&B's agent would write as the word None.")
        return Parameter(name, tuple(given["values"]))
    kind = given.get("distribution")
    if kind not in ("uniform", "log_uniform_values") or given.keys() != {"distribution", "min", "max"}:
        raise UserError(
            f"{where}: {name}: give values, or min and max of a uniform or log_uniform_values distribution."
        )
    low, high = float(given["min"]), float(given["max"])
    if not low < high or (kind != "uniform" and low <= 0):
        raise UserError(f"{where}: {name} goes from {low:g} to {high:g}.")
    return Parameter(name, None, low, high, kind != "uniform")


def trial_name(values: dict[str, Any]) -> str:
    """The folder of the trial with these settings: the same ones always have the same folder, and so are resumed."""
    text = "\n".join(sorted(f"{name}={value}" for name, value in values.items()))
    return f"trial-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
