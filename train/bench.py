"""Where a training step's time goes, and how near it comes to what its matrix products alone take.

    python train/bench.py
    python train/bench.py drafters=[eagle,medusa] targets=[tiny] hidden_states=[cached,online]

Every part of a step is timed in turns with the step's products alone and with the machine's fastest product. Prints a
table for each target, and writes bench.json with provenance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from omegaconf import DictConfig

from conf.compose import choices, composed, main, plain
from models.errors import UserError

if TYPE_CHECKING:
    from data.loader import StepBatches
    from models.target import Target
    from train.products import Products
    from train.regime import Regime

PARTS = ("data", "target", "forward", "loss", "backward", "optimizer")
_STEP = ("forward", "loss", "backward", "optimizer")  # the drafter's own
_WARM_UP, _RESAMPLES, _PROMPTS = 2, 2000, 4


def job(config: DictConfig) -> None:
    """Measure all drafters of all targets, print and write."""
    options = plain(config)
    wanted = {key: _as_list(options[key]) for key in ("drafters", "targets", "hidden_states")}
    _check(options, wanted)
    from eval.provenance import provenance
    from models.files import write_json

    output = Path(options["output"])
    write_json(output / "config.json", options)  # before the long work: can it be written?
    found: list[dict[str, Any]] = []
    for source in wanted["targets"]:
        for states in wanted["hidden_states"]:
            for name in wanted["drafters"]:
                found.append(measure(options, name, source, states))
                print(_line(found[-1]), flush=True)
                write_json(output / "bench.json", {"config": options, "steps": found, "provenance": provenance()})
    print_report(found)
    print(f"wrote {output / 'bench.json'}")


def _check(options: dict[str, Any], wanted: dict[str, list[str]]) -> None:
    for group, key in (("drafter", "drafters"), ("target", "targets")):
        for name in wanted[key]:
            if name not in choices(group):
                raise UserError(f"{key} has {name!r}: choose of {', '.join(choices(group))}.")
    for name in wanted["hidden_states"]:
        if name not in ("cached", "online"):
            raise UserError(f"hidden_states is {name!r}: choose cached or online.")
    for key, least in {"tokens": 8, "repeats": 2, "trainer_steps": 0, "peak_size": 1}.items():
        if options[key] < least:
            raise UserError(f"{key} is {options[key]}: it must be at least {least}.")


def measure(options: dict[str, Any], name: str, source: str, states: str) -> dict[str, Any]:
    """The timed parts of one drafter's step for one target, in seconds, and what they mean."""
    import torch

    from models.allocator import keep_freed_memory
    from train import pipeline

    run = composed("train", [f"+drafter={name}", f"target={source}", f"seed={options['seed']}", *options["settings"]])
    if run["drafter"]["training"] is None:
        raise UserError(f"drafters has {name!r}, which is not trained.")
    original = pipeline.open_target(run)
    target = pipeline.adapt(run, original)
    batches = _batches(run, original, options["tokens"])
    drafter = pipeline.build_drafter(run, target, batches).train()
    module = pipeline._training_module(run, target, drafter)
    if hasattr(module, "learn"):
        raise UserError(f"drafters has {name!r}, which does not learn by steps.")
    module.to(target.device)
    keep_freed_memory()
    if states == "cached":
        module.cache_states(batches, Path(options["output"]) / "features")
    step = Step(module, batches, run["trainer"])
    for number in range(_WARM_UP):
        step(number)
    products = _products(step)
    peak = _peak(options["peak_size"], target.device)
    evaluation = _evaluation(run, target, module, batches)
    times: dict[str, list[float]] = {key: [] for key in (*PARTS, "products", "peak")}
    for number in range(options["repeats"]):
        parts = step(_WARM_UP)  # the same batch each time: the products were noted of it
        parts |= {"products": step.timed(products["step"].run), "peak": step.timed(peak)}
        for key, value in parts.items():
            times[key].append(value)
        if number % 4 == 0:
            times.setdefault("evaluation", []).append(step.timed(evaluation) / run["fit"]["evaluate_every"])
    flops = {key: noted.flops for key, noted in products.items()}
    return {
        "drafter": name,
        "target": source,
        "hidden_states": states,
        "batch_size": batches.batch_size,
        "draft_vocab_size": drafter.vocab.size,
        "parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "threads": torch.get_num_threads(),
        "tokens": step.tokens,
        "flops": flops,
        "seconds": times,
        "trainer_s": _in_trainer(run, target, module, batches, options["trainer_steps"]),
        **summary(times, step.tokens, flops, 2 * options["peak_size"] ** 3),
    }


def _batches(run: dict[str, Any], target: Target, tokens: int) -> StepBatches:
    """Real text of equal lengths, of which the first quarter is a prompt: enough of it for a few batches."""
    import datasets

    from data.loader import StepBatches
    from data.stdlib import documents

    rows: list[list[int]] = []
    for document in documents("train"):
        ids = target.encode(document.text[: 16 * tokens])
        rows += [ids[:tokens]] if len(ids) >= tokens else []
        if len(rows) == 2 * run["fit"]["batch_size"]:
            break
    masks = [[0] * (tokens // 4) + [1] * (tokens - tokens // 4)] * len(rows)
    data = datasets.Dataset.from_dict({"token_ids": rows, "loss_mask": masks})
    return StepBatches(data, run["fit"]["batch_size"], tokens, run["seed"])


class Step:
    """One optimizer step of a regime, as the trainer makes it; each call gives the seconds of its parts."""

    def __init__(self, module: Regime, batches: StepBatches, trainer: dict[str, Any]) -> None:
        import torch

        self.module, self.batches, self.clip = module, batches, trainer["gradient_clip_val"]
        made = module.configure_optimizers()
        self.optimizer, self.schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
        self.device = module.target.device
        precision = str(trainer["precision"])
        dtype = torch.bfloat16 if "bf16" in precision else torch.float16
        self._autocast = lambda: torch.autocast(self.device.type, dtype, enabled="mixed" in precision)
        self.tokens = 0
        self._loss_s = 0.0

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds that `work` takes, on its device."""
        import torch

        def wait() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        wait()
        started = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - started

    def __call__(self, number: int, around: Callable[[str], Any] | None = None) -> dict[str, float]:
        """The step on batch `number`; `around` gives a context for what belongs to "target" or "step"."""
        import torch

        from data.loader import Batch

        held: dict[str, Any] = {}
        within = around or (lambda _: nullcontext())

        def load() -> None:
            found: Batch = self.batches[number]
            ids, mask, lengths = (t.to(self.device) for t in found[:3])
            held["batch"] = Batch(ids, mask, lengths, None if found.hidden is None else found.hidden.to(self.device))

        def forward() -> None:
            with self._autocast(), self._loss_clock():
                held["loss"] = self.module.joint_losses(held["batch"], number)["loss"]

        def states() -> None:
            held["batch"] = self.module.with_states(held["batch"])

        def update() -> None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

        found = {"data": self.timed(load)}
        with within("target"):
            found["target"] = self.timed(states)
        with within("step"):
            self._loss_s = 0.0
            found["forward"] = self.timed(forward)
            found["loss"] = self._loss_s
            found["forward"] -= self._loss_s
            found["backward"] = self.timed(held["loss"].backward)
            found["optimizer"] = self.timed(update)
        self.tokens = int(held["batch"].lengths.sum())
        return found

    @contextmanager
    def _loss_clock(self) -> Iterator[None]:
        """Within, the time of losses over the vocabulary adds up; their gradients are a part of it."""
        from train import losses

        inner, within = losses._Chunked.forward, False

        def forward(*args: Any) -> Any:
            nonlocal within
            if within:  # a loss within a loss
                return inner(*args)
            within, found = True, list[Any]()
            self._loss_s += self.timed(lambda: found.append(inner(*args)))
            within = False
            return found[0]

        with mock.patch.object(losses._Chunked, "forward", staticmethod(forward)):
            yield


def _products(step: Step) -> dict[str, Products]:
    """What the target's pass and the drafter's step multiply."""
    from train.products import Products

    found = {"target": Products(), "step": Products()}
    step(_WARM_UP, found.__getitem__)
    return found


def _peak(size: int, device: Any) -> Callable[[], Any]:
    """A product of square matrices, in the dtype that training has."""
    import torch

    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    return lambda: a @ b


def _evaluation(run: dict[str, Any], target: Target, module: Regime, batches: StepBatches) -> Callable[[], None]:
    """A measurement in the engine, as training makes it every `fit.evaluate_every` steps, scaled to as many prompts."""
    from engine.loop import generate
    from train.settings import measured_settings

    prompts = [ids[: mask.index(1)] for ids, mask in zip(batches.token_ids, batches.loss_mask, strict=True)][:_PROMPTS]
    repeats = max(1, run["fit"]["validation_prompts"] // len(prompts))

    def evaluate() -> None:
        with module.measurable():
            for _ in range(repeats):
                generate(target, prompts, measured_settings(run, 0.0), module.drafter)

    return evaluate


def _in_trainer(run: dict[str, Any], target: Target, module: Regime, batches: StepBatches, steps: int) -> list[float]:
    """Seconds from the start of one batch to that of the next in Lightning's own loop."""
    import lightning

    from data.loader import step_loader
    from train.callbacks import quiet_lightning
    from train.trainer import make_trainer

    class Starts(lightning.Callback):
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
            self.at.append(time.perf_counter())

    if steps == 0:
        return []
    quiet_lightning()
    starts, count = Starts(), steps + _WARM_UP + 1
    trainer = make_trainer({**run, "fit": {**run["fit"], "max_steps": count}}, target, Path("."), [starts])
    trainer.fit(module, step_loader(batches, 0, count * run["trainer"]["accumulate_grad_batches"]))
    return np.diff(starts.at[_WARM_UP:]).tolist()


def summary(times: dict[str, list[float]], tokens: int, flops: dict[str, int], peak_flops: int) -> dict[str, Any]:
    """Tokens per second, the share of the machine's peak, and the step's share of its own bound, with intervals.

    The peak is the fastest product of all repeats. The bound is what the step's products took alone: by it is divided
    the drafter's step, without the target's pass and the loading of data. Intervals are bootstrap ones over repeats.
    """
    seconds = {key: np.array(values) for key, values in times.items() if key != "evaluation"}
    peak = peak_flops / seconds["peak"].min()

    def rates(rows: np.ndarray) -> dict[str, float]:
        part = {key: values[rows].mean() for key, values in seconds.items()}
        step = sum(part[key] for key in _STEP)
        computed = step + part["target"]
        return {
            "tokens_per_s": tokens / (computed + part["data"]),
            "share_of_peak": sum(flops.values()) / computed / peak,
            "share_of_bound": part["products"] / step,
        }

    count = len(seconds["peak"])
    rng = np.random.default_rng(0)
    samples = [rates(rng.integers(count, size=count)) for _ in range(_RESAMPLES)]
    found: dict[str, Any] = {"peak_flops_per_s": peak}
    for key, value in rates(np.arange(count)).items():
        low, high = np.percentile([sample[key] for sample in samples], [2.5, 97.5])
        found |= {key: value, f"{key}_interval": (float(low), float(high))}
    return found


def print_report(found: list[dict[str, Any]]) -> None:
    """One table for each target."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=200 if not Console().is_terminal else None)
    for source in dict.fromkeys(f["target"] for f in found):
        rows = [f for f in found if f["target"] == source]
        table = Table(title=f"A training step for {source}: milliseconds of its parts")
        table.add_column("drafter")
        for column in ("states", *PARTS, "evaluation", "in trainer", "tokens/s", "of peak", "of bound"):
            table.add_column(column, justify="right", no_wrap=True)
        for f in rows:
            parts = [f"{1e3 * np.mean(f['seconds'][part]):.1f}" for part in (*PARTS, "evaluation")]
            trainer = f"{1e3 * np.mean(f['trainer_s']):.1f}" if f["trainer_s"] else "–"
            shares = [_with_interval(f, key, "{:.2f}") for key in ("share_of_peak", "share_of_bound")]
            rates = [_with_interval(f, "tokens_per_s", "{:.0f}"), *shares]
            table.add_row(f["drafter"], f["hidden_states"], *parts, trainer, *rates)
        console.print(table)
        first = rows[0]
        console.print(
            f"{first['batch_size']} texts of {first['tokens'] // first['batch_size']} tokens, {first['threads']} "
            f"threads, peak {first['peak_flops_per_s'] / 1e9:.0f} GFLOP/s (fastest square product). loss: over the "
            "vocabulary, with its gradients. evaluation: in the engine, its share of a step. of peak: all products of "
            "target and step. of bound: the step's products alone over forward, loss, backward and optimizer. [95% "
            "bootstrap interval over repeats]",
            style="dim",
        )


def _line(found: dict[str, Any]) -> str:
    return (
        f"{found['drafter']} for {found['target']}, states {found['hidden_states']}: "
        f"{found['tokens_per_s']:.0f} tokens/s, {found['share_of_bound']:.0%} of its bound"
    )


def _with_interval(found: dict[str, Any], key: str, form: str) -> str:
    low, high = found[f"{key}_interval"]
    return f"{form.format(found[key])} [{form.format(low)}, {form.format(high)}]"


def _as_list(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


if __name__ == "__main__":
    main("bench", job)
