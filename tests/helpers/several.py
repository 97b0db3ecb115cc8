"""Short trainings of the bundled target's drafters, in this process or in several: what the pipeline's `fit` leaves.

    python -m tests.helpers.several CASES.json

is one process, or as many as the cases' trainer asks for, of which the first writes what `train` gives.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import lightning
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.compose import composed
from data.loader import StepBatches
from data.prompts import Prompt
from data.stdlib import documents
from eval.run_folder import read_metrics
from models.target import Target, load_target
from train import pipeline, processes
from train.callbacks import LastCheckpoint, quiet_lightning

SHORT = [
    "fit.max_steps=20", "fit.batch_size=4", "fit.evaluate_every=10", "fit.checkpoint_every=10",
    "fit.validation_prompts=2", "decode.max_new_tokens=8", "data.max_tokens=64",
]  # fmt: skip


def rows_of(target: Target, number: int) -> datasets.Dataset:
    """Texts of 24 to 56 tokens, of which the first eight and some later ones were not the target's."""
    rows = []
    for index, document in zip(range(number), documents(), strict=False):
        ids = target.encode(document.text[:600])[: 24 + 7 * index % 33]
        rows.append({"token_ids": ids, "loss_mask": [int(i >= 8 and i % 11 != index % 5) for i in range(len(ids))]})
    return datasets.Dataset.from_list(rows)


def _ending_behind(step: int) -> type[LastCheckpoint]:
    class Ending(LastCheckpoint):
        def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
            super().on_train_batch_end(trainer, *args, **kwargs)
            trainer.should_stop = trainer.global_step == step

    return Ending


def train(overrides: list[str], run: Path, stop: int | None = None) -> dict[str, Any]:
    """What a training in the folder `run` leaves, all of it or up to step `stop`: weights, metrics and score."""
    options = composed("train", [*SHORT, *overrides, f"data.folder={run.parent / 'data'}"])
    target = load_target("tiny", dtype=options["target"]["dtype"], device="cpu")
    adapted = pipeline.adapt(options, target)
    batches = StepBatches(rows_of(target, 24), options["fit"]["batch_size"], 64, options["seed"])
    prompts = [Prompt((text,), continuation=True) for text in ("import os\n", "def main():\n")]
    drafter = pipeline.build_drafter(options, adapted, batches)
    data = pipeline.Prepared(batches, prompts, prompts, None)
    with pytest.MonkeyPatch.context() as patch:
        if stop is not None:
            patch.setattr(pipeline, "LastCheckpoint", _ending_behind(stop))
        score = pipeline.fit(options, adapted, drafter, data, run, pipeline.open_logger(options, run))
    weights = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    weights |= {f"target.{i}": p.detach().clone() for i, p in enumerate(adapted.trained)}
    return {"weights": weights, "metrics": read_metrics(run), "score": score}


def written(folder: Path) -> dict[str, Any]:
    """What another process wrote of a training."""
    told = json.loads((folder / "told.json").read_text())
    return {**told, "weights": load_file(folder / "weights.safetensors")}


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Between tensors of the same names."""
    assert ours.keys() == theirs.keys()
    return max(float((a.double() - theirs[name].double()).abs().max()) for name, a in ours.items())


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """The weights and the optimizer's states in the last checkpoint."""
    stored = torch.load(checkpoint, weights_only=True)
    state = stored["optimizer_states"][0]["state"]
    kept = {f"{index}.{key}": torch.as_tensor(value) for index, of in state.items() for key, value in of.items()}
    return {**stored["state_dict"], **kept, "step": torch.tensor(stored["global_step"])}


def main() -> None:
    """Do the cases of a file, one after the other."""
    quiet_lightning()
    cases: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    processes.launch(composed("train", cases[0]["overrides"])["trainer"])
    for case in cases:
        folder = Path(case["folder"])
        found = train(case["overrides"], folder, case["stop"])
        if processes.rank() == 0:
            weights = {name: tensor.contiguous().clone() for name, tensor in found.pop("weights").items()}
            save_file(weights, folder / "weights.safetensors")
            (folder / "told.json").write_text(json.dumps(found))
    processes.dismiss_others()


if __name__ == "__main__":
    main()
