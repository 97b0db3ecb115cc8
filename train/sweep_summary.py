"""What a sweep found: its Optuna study, a table and a picture."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.comparison import markdown
from eval.provenance import provenance
from models.files import replacing, write_json, write_text
from train.search_space import trial_name

_INTERRUPTED = "interrupted"  # marks a trial that was taken up again as another one
_QUEUED = "fixed_params"  # where Optuna keeps the settings of a queued trial


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial: its settings, and the val/block_efficiency it reached, or why there is none."""

    number: int
    folder: str
    settings: dict[str, Any]
    block_efficiency: float | None
    seconds: float
    failed: str | None


class Study:
    """The Optuna study in `study.db` of a sweep's folder."""

    name = "sweep"

    def __init__(self, folder: Path) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.storage = folder, f"sqlite:///{(folder / 'study.db').resolve()}"
        self._states = optuna.trial.TrialState
        self._study = optuna.create_study(
            study_name=self.name, storage=self.storage, direction="maximize", load_if_exists=True
        )

    @property
    def finished(self) -> int:
        """How many trials have ended, well or not."""
        return len(self._ended())

    def take_up(self, names: list[str]) -> None:
        """Queue the settings of trials that an interruption left unfinished: the next ones resume their runs.

        A trial that had not yet been given all settings, which `names` are, had not begun, and is dropped.
        """
        queued = self._queued()
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state == self._states.RUNNING:
                self._study._storage.set_trial_user_attr(trial._trial_id, _INTERRUPTED, True)
                self._study.tell(trial.number, state=self._states.FAIL)
                settings = {**trial.system_attrs.get(_QUEUED, {}), **trial.params}
                if settings.keys() == set(names) and settings not in queued:
                    self.enqueue(settings)
                    queued.append(settings)

    def queue(self, points: list[dict[str, Any]], trials: int) -> int:
        """Queue as many of the points as it takes until so many of them are tried, in order, each once.

        Returns how many are still to be tried, those counted that were queued before.
        """
        tried, queued = [trial.params for trial in self._ended()], self._queued()
        left = [point for point in points if point not in tried]
        lacking = trials - (len(points) - len(left))
        new = [point for point in left if point not in queued]
        for point in new[: max(0, lacking - (len(left) - len(new)))]:
            self.enqueue(point)
        return lacking

    def trials(self) -> list[Trial]:
        """All that have ended, the best first, and those that failed last."""
        found = []
        for trial in self._ended():
            name = trial_name(trial.params)
            why, seconds = None, trial.duration.total_seconds() if trial.duration else 0.0
            if trial.state != self._states.COMPLETE:
                path = self.folder / "trials" / name / "failed.txt"
                why = path.read_text().strip() if path.exists() else "ended without a word"
            found.append(Trial(trial.number, name, trial.params, trial.value, seconds, why))
        return sorted(found, key=lambda t: (t.block_efficiency is None, -(t.block_efficiency or 0), t.number))

    def enqueue(self, settings: dict[str, Any]) -> None:
        """Let one of the next trials have these settings."""
        from optuna.exceptions import ExperimentalWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self._study.enqueue_trial(settings)

    def _queued(self) -> list[dict[str, Any]]:
        """The settings of trials that are queued and have not begun."""
        waiting = self._study.get_trials(deepcopy=False, states=(self._states.WAITING,))
        return [trial.system_attrs.get(_QUEUED, {}) for trial in waiting]

    def _ended(self) -> list[Any]:
        trials = self._study.get_trials(deepcopy=False)
        return [t for t in trials if t.state.is_finished() and _INTERRUPTED not in t.user_attrs]


def rows(trials: list[Trial]) -> list[dict[str, str]]:
    """The table: a row per trial, with the last part of each setting's name."""
    return [
        {
            "trial": f"{t.number} ({t.folder})",
            "val τ": "failed" if t.block_efficiency is None else f"{t.block_efficiency:.3f}",
            "minutes": f"{t.seconds / 60:.1f}",
            **{_short(name): _shown(value) for name, value in t.settings.items()},
        }
        for t in trials
    ]


def write(trials: list[Trial], about: dict[str, Any], folder: Path) -> None:
    """Print the table, and write it as sweep.md, the numbers as trials.json and the picture as sweep.png."""
    console = Console(width=200 if not Console().is_terminal else None)
    table, lines = Table(title=f"Sweep {about['sweep']}"), rows(trials)
    for column in lines[0]:
        table.add_column(column)
    for line in lines:
        table.add_row(*line.values())
    console.print(table)
    failed = [f"trial {t.number} ({t.folder}) failed: {t.failed}" for t in trials if t.failed is not None]
    print("\n".join(failed) if failed else "no trial failed")
    write_text(
        folder / "sweep.md", f"## Sweep {about['sweep']}\n\n{markdown(lines)}\n" + "".join(f"{f}\n" for f in failed)
    )
    write_json(folder / "trials.json", {**about, "trials": [asdict(t) for t in trials], "provenance": provenance()})
    if (best := trials[0]).block_efficiency is not None:
        draw(trials, folder / "sweep.png")
        chosen = " ".join(f"{name}={value}" for name, value in best.settings.items())
        print(f"best: τ {best.block_efficiency:.3f} with {chosen}")
        print(f"its export: {folder / 'trials' / best.folder / 'export'}")


def draw(trials: list[Trial], path: Path) -> None:
    """τ by trial with the best so far, and τ over each setting, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = sorted((t for t in trials if t.block_efficiency is not None), key=lambda t: t.number)
    scores: list[float] = [t.block_efficiency for t in done if t.block_efficiency is not None]
    names = list(done[0].settings)
    columns = min(4, len(names) + 1)
    size = -(-(len(names) + 1) // columns)
    figure, grid = pyplot.subplots(
        size, columns, figsize=(4 * columns, 3.2 * size), sharey=True, squeeze=False, layout="constrained"
    )
    first, *others = grid.flat
    first.plot([t.number for t in done], scores, "o")
    first.step([t.number for t in done], [max(scores[: i + 1]) for i in range(len(scores))], where="post", label="best")
    first.set(xlabel="trial", ylabel="val τ")
    first.legend()
    for axis, name in zip(others, names, strict=False):
        values = _axis([t.settings[name] for t in done])
        order = sorted(range(len(values)), key=lambda i: values[i])
        axis.plot([values[i] for i in order], [scores[i] for i in order], "o", alpha=0.7)
        if isinstance(values[0], float) and min(values) > 0 and max(values) > 5 * min(values):
            axis.set_xscale("log")
        axis.set_xlabel(_short(name))
    for axis in grid.flat:
        axis.grid(alpha=0.3)
    for axis in others[len(names) :]:
        axis.set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)


def _axis(values: list[Any]) -> list[Any]:
    """Numbers, also where a choice keeps them as text; words where one of the values is no number."""
    try:
        return [float(str(value)) for value in values]
    except ValueError:
        return [str(value) for value in values]


def _short(name: str) -> str:
    return name.removeprefix("drafter.").removeprefix("training.").removeprefix("model.")


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
