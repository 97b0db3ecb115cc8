"""A run in Weights and Biases: one for each run folder, however often that is resumed."""

from __future__ import annotations

import json
import os
import secrets
import shlex
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger

from eval.provenance import provenance
from models.checkpoint import native
from models.files import write_json

Options = dict[str, Any]
_OF_A_PROMPT = (
    "drafter", "temperature", "prompt", "category", "rounds", "drafted", "tested", "accepted", "tokens",
    "block_efficiency", "acceptance_rate", "plain_s", "speculative_s", "speedup",
)  # fmt: skip
_OF_A_POSITION = ("drafter", "temperature", "position", "drafts", "tested", "accepted", "joint", "conditional")
_STARTS = ("export", "first_export", "second_export")  # settings of drafters that are made of other exports


class WandbRun(WandbLogger):
    """Lightning's logger, which also takes the run's configuration, tables, plots and export.

    The W&B run's name is kept in `wandb.json` of the folder `save_dir`, so that a resumed run goes on in it; an agent
    of a sweep names it instead. `WANDB_MODE=offline` writes to `save_dir`/wandb, for `wandb sync` later.
    """

    def __init__(
        self,
        save_dir: str,
        project: str,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        upload_export: bool = True,
    ) -> None:
        self.run, self.upload_export = Path(save_dir), upload_export
        self.run_id = os.environ.get("WANDB_RUN_ID") or self.known().get("id") or secrets.token_hex(4)
        super().__init__(
            name=self.run.name,
            save_dir=save_dir,
            id=self.run_id,
            project=project,
            entity=entity,
            group=group,
            tags=list(tags or ()),
        )

    def known(self) -> dict[str, Any]:
        """What the folder remembers of its W&B run: `id`, once it has all `finished`, and the export's `artifact`."""
        path = self.run / "wandb.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def begin(self, options: Options) -> None:
        """Open the W&B run, and tell it the configuration and what the run is made with."""
        write_json(self.run / "wandb.json", {**self.known(), "id": self.run_id})
        self.experiment.config.update({**options, "provenance": provenance()}, allow_val_change=True)

    def finish(self, options: Options, described: native.Export, score: float | None) -> None:
        """Tell the W&B run what acceptance.json has, hand it the export, and close it; wandb.json then says so.

        `score` is the best val/block_efficiency, which becomes the run's: a sweep compares runs by it.
        """
        import wandb

        results = self._results()
        self.experiment.log(
            {
                "test/prompts": wandb.Table(*_prompts(results)),
                "test/positions": wandb.Table(*_positions(results)),
                "test/acceptance": wandb.Image(str(self.run / "acceptance.png")),
            }
        )
        self.summarize(results, score)
        if self.upload_export:
            self._hand_over(options, described, results)
        self._close()
        write_json(self.run / "wandb.json", {**self.known(), "id": self.run_id, "finished": True})

    def again(self, options: Options, described: native.Export, score: float | None) -> None:
        """Of a run that was finished before: its figures go to a W&B run that is not this folder's, as a sweep's.

        This folder's own gets them where it was cut off before it had them all.
        """
        known = self.known()
        if self.run_id == known.get("id"):
            if not known.get("finished"):
                self.finish(options, described, score)
            return
        self.experiment.config.update({"finished_in": known.get("id")}, allow_val_change=True)
        self.summarize(self._results(), score)
        self._close()
        if not known:
            write_json(self.run / "wandb.json", {"id": self.run_id, "finished": True})

    def _results(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.run / "acceptance.json").read_text())["results"]
        return found

    def summarize(self, results: list[dict[str, Any]], score: float | None) -> None:
        """Set the numbers by which W&B lists and compares runs."""
        for r in results:
            for key in ("block_efficiency", "acceptance_rate", "speedup"):
                self.experiment.summary[f"test/{key}, T={r['temperature']:g}"] = r[key]
        if score is not None:
            self.experiment.summary["val/block_efficiency"] = score

    def _hand_over(self, options: Options, described: native.Export, results: list[dict[str, Any]]) -> None:
        """Log the export as an artifact, and what it was made of as the run's inputs.

        W&B takes no inputs while it is offline: then the artifact's metadata alone tells of them.
        """
        import wandb

        experiment, inputs = self.experiment, self._inputs(options)
        data = self.run / "data.json"
        if not experiment.offline:
            if data.exists():
                answers = wandb.Artifact(f"answers-{options['target']['source']}", "dataset")
                answers.add_file(str(data))
                experiment.use_artifact(answers)
            for artifact in inputs.values():
                if artifact is not None:
                    experiment.use_artifact(artifact)
        figures = [{k: r[k] for k in ("temperature", "block_efficiency", "acceptance_rate")} for r in results]
        export = wandb.Artifact(
            f"{described.name}-{self.run_id}",
            "drafter",
            metadata={
                "drafter": described.name,
                "target": {key: described.target[key] for key in ("name", "fingerprint")},
                "data": json.loads(data.read_text()) if data.exists() else None,
                "made_of": inputs,
                "measured": figures,
                **provenance(),
            },
        )
        export.add_dir(str(self.run / "export"))
        logged = experiment.log_artifact(export)
        if not experiment.offline:
            logged.wait()
            write_json(self.run / "wandb.json", {**self.known(), "artifact": logged.qualified_name})

    def _inputs(self, options: Options) -> dict[str, str | None]:
        """Folders of exports that the drafter was made of, each with its artifact where its run has logged one."""
        model = options["drafter"]["model"]
        folders = [options["init_from"], *(model.get(key) for key in _STARTS)]
        found = {}
        for folder in (Path(f) for f in folders if f):
            told = folder.expanduser().resolve().parent / "wandb.json"
            known = json.loads(told.read_text()) if told.exists() else {}
            found[f"{folder.resolve().parent.name}/{folder.name}"] = known.get("artifact")
        return found

    def _close(self) -> None:
        """Close the W&B run. Of one that is offline, name the folders to sync: each start has left one."""
        place = Path(self.experiment.dir).parents[1]
        offline = self.experiment.offline
        self.experiment.finish()
        if offline:
            folders = sorted(str(path.parent) for path in place.glob(f"offline-run-*/run-{self.run_id}.wandb"))
            print(f"W&B was offline: wandb sync {shlex.join(folders)}")


def _prompts(results: list[dict[str, Any]]) -> tuple[list[str | int], list[list[Any]]]:
    """Columns and rows, one for each prompt and temperature."""
    rows = []
    for r in results:
        c = r["counts"]
        for i, category in enumerate(c["category"]):
            drafted, tested, accepted = (int(sum(c[key][i])) for key in ("drafted", "tested", "accepted"))
            plain, speculative = (c[f"{way}_s"][i] / c[f"{way}_tokens"][i] for way in ("plain", "speculative"))
            rows.append(
                [
                    r["drafter"], r["temperature"], i, category, int(c["rounds"][i]), drafted, tested, accepted,
                    int(c["speculative_tokens"][i]), _over(c["emitted"][i], c["rounds"][i]), _over(accepted, tested),
                    c["plain_s"][i], c["speculative_s"][i], plain / speculative,
                ]
            )  # fmt: skip
    return [*_OF_A_PROMPT], rows


def _positions(results: list[dict[str, Any]]) -> tuple[list[str | int], list[list[Any]]]:
    """Columns and rows, one for each position of a draft and temperature."""
    rows = []
    for r in results:
        sums = [[sum(column) for column in zip(*r["counts"][key], strict=True)] for key in _OF_A_POSITION[3:6]]
        for i, (drafts, tested, accepted) in enumerate(zip(*sums, strict=True)):
            rates = (r["acceptance_per_position"][i], r["conditional_acceptance"][i])
            rows.append([r["drafter"], r["temperature"], i + 1, drafts, tested, accepted, *rates])
    return [*_OF_A_POSITION], rows


def _over(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
