"""EAGLE-3's training here and in the public trainer `speculators`, on the same states of the same answers, in turns.

    python scripts/peer_bench.py prepare --answers outputs/data/answers-HASH/answers.jsonl --data FOLDER
    python scripts/peer_bench.py run --data FOLDER --peer-python PEER_VENV/bin/python

`prepare` lets SmolLM2 compute its states once, and writes them with the drafter's first weights. `run` starts every way
as a process of its own, each in its own training loop (Lightning's; speculators' `Trainer.train_epoch`), and lets one
at a time make a block of optimizer steps on the same batches, in an order that turns around with every block. Prints
supervised tokens per second and ratios with bootstrap intervals over blocks, the parameters trained, and the losses: of
`ours` and `peer` they agree step by step, since these compute the same.

The peer's virtual environment is that of `make peer-env`. Its command line stops where there is no accelerator: its
`local_rank`, an index of one, is set to "cpu" here, and its step timer, which synchronizes one, is never on. Its
attention is `sdpa` (flex_attention has no backward pass on the CPU), its loss the eager one (the fused one is
Triton's). Its head is frozen as it ships, and trained in `peer`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# whose trainer, whether the head is trained, and the rest of its settings
WAYS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "ours": ("ours", True, {}),
    "peer": ("peer", True, {"attention": "sdpa"}),
    "peer_eager": ("peer", True, {"attention": "eager"}),
    "peer_flex": ("peer", True, {"attention": "simple_flex_attention"}),
    "ours_frozen_head": ("ours", False, {}),
    "peer_frozen_head": ("peer", False, {"attention": "sdpa"}),  # as it ships: its head is the target's
    "ours_default": ("ours", True, {"shipped": True}),  # with all settings of conf/drafter/eagle3.yaml
}
STEPS, DECAY, LR, CLIP, BETAS = 5, 0.8, 1e-3, 1.0, [0.9, 0.999]  # training-time test; the last two are the peer's
_MANY, _RESAMPLES = 10**6, 4000


def settings(shipped: bool = False) -> dict[str, Any]:
    """Our configuration of EAGLE-3 for SmolLM2: the peer's optimizer and loss, unless `shipped`."""
    from conf.compose import composed

    training = ["fit.max_steps=2400"]
    if not shipped:
        training = [
            f"fit.max_steps={_MANY}",
            f"drafter.training.num_steps={STEPS}",
            f"drafter.training.position_decay={DECAY}",
            f"drafter.training.lr={LR}",
            "drafter.training.skip_unproposable=false",
            f"drafter.training.betas={BETAS}",
            "drafter.training.warmup_fraction=0",
            f"trainer.gradient_clip_val={CLIP}",
        ]
    run = composed("train", ["+drafter=eagle3", "target=smollm2", "trainer=cpu", *training])
    if not shipped:
        run["drafter"]["training"]["losses"] = {"kl": 1.0}
    return run


def batches_of(data: Path, batch_size: int) -> Any:
    """Our batches of the prepared texts, which hold the prepared states."""
    import datasets
    from safetensors import safe_open

    from data.loader import StepBatches

    texts = json.loads((data / "texts.json").read_text())
    rows = datasets.Dataset.from_dict({key: [text[key] for text in texts] for key in ("token_ids", "loss_mask")})
    batches = StepBatches(rows, batch_size, 768, seed=0)
    assert len(batches.token_ids) == len(texts)
    with safe_open(data / "states.safetensors", "pt") as states:
        kept = [states.get_tensor(f"ours.{index}") for index in range(len(texts))]
    batches.cache = kept  # type: ignore[assignment]  # in memory for both
    return batches


def prepare(options: argparse.Namespace) -> None:
    """Write texts, their states, the vocabulary and the drafter's first weights."""
    import datasets
    import torch
    from safetensors.torch import save_file

    from data.loader import StepBatches
    from models.checkpoint import native
    from models.target.smollm2 import smollm2_folder
    from models.vocab import DraftVocab
    from train.settings import instantiate

    run = settings()
    target = instantiate(run["target"])
    lines = Path(options.answers).read_text().splitlines()
    answers = [row for line in lines for row in json.loads(line)["rows"]]
    keys = ("token_ids", "loss_mask")
    whole = StepBatches(datasets.Dataset.from_list([{k: a[k] for k in keys} for a in answers]), 1, 768, seed=0)
    vocab = DraftVocab.most_frequent(whole.token_counts(target.vocab_size), run["draft_vocab_size"])
    assert vocab.token_ids is not None
    chosen = torch.randperm(len(whole.token_ids), generator=torch.Generator().manual_seed(0))[: options.texts]
    texts = [{k: list(map(int, getattr(whole, k).array(int(i)))) for k in keys} for i in chosen]
    torch.manual_seed(0)
    drafter = native.build(run["drafter"]["model"], target, vocab)
    layers, states, before_norm = (*drafter.capture_layers, target.num_layers), {}, []
    target.model.base_model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.no_grad():
        for index, text in enumerate(texts):
            hidden = target(torch.tensor([text["token_ids"]]), capture_layers=layers).hidden
            states[f"ours.{index}"] = hidden[0].contiguous()
            states[f"last.{index}"] = before_norm.pop()[0].contiguous()  # the peer applies the final norm itself
    data = Path(options.data)
    data.mkdir(parents=True, exist_ok=True)
    save_file(states, data / "states.safetensors")
    save_file({k: v.contiguous() for k, v in drafter.state_dict().items()}, data / "start.safetensors")
    save_file({"token_ids": vocab.token_ids}, data / "vocab.safetensors")
    (data / "texts.json").write_text(json.dumps(texts))
    batches = batches_of(data, options.batch_size)
    order = [
        [batches._row(i * options.batch_size + j) for j in range(options.batch_size)] for i in range(options.steps)
    ]
    about = {"target": str(smollm2_folder()), "batch_size": options.batch_size, "order": order}
    (data / "about.json").write_text(json.dumps(about))
    tokens, told = (sum(len(t["token_ids"]) for t in texts), sum(sum(t["loss_mask"]) for t in texts))
    print(f"{len(texts)} texts, {tokens} tokens, {told} supervised; layers {layers}, draft vocabulary {vocab.size}")


class Blocks:
    """A worker's side: makes as many steps as a line of standard input says, and answers with what they took."""

    def __init__(self, answers: Any) -> None:
        self._answers, self._left = answers, 0

    def say(self, **found: Any) -> None:
        self._answers.write(json.dumps(found) + "\n")
        self._answers.flush()

    def wait(self) -> None:
        line = sys.stdin.readline()
        if not line.strip():
            os._exit(0)
        self._left, self._losses = int(line), list[float]()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step_done(self, loss: Any) -> None:
        self._losses.append(float(loss))
        self._left -= 1
        if self._left == 0:
            wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            self.say(wall=wall, cpu=cpu, losses=self._losses)
            self.wait()


def work_ours(data: Path, blocks: Blocks, train_head: bool, shipped: bool = False) -> None:
    """Train in Lightning, as train/run.py does."""
    import lightning
    from safetensors.torch import load_file

    from data.loader import step_loader
    from models.checkpoint import native
    from models.vocab import DraftVocab
    from train.callbacks import quiet_lightning
    from train.pipeline import _training_module
    from train.settings import instantiate
    from train.trainer import make_trainer

    quiet_lightning()
    run, about = settings(shipped), json.loads((data / "about.json").read_text())
    target = instantiate(run["target"])
    vocab = DraftVocab(target.vocab_size, load_file(data / "vocab.safetensors")["token_ids"])
    drafter = native.build(run["drafter"]["model"], target, vocab).train()
    drafter.load_state_dict(load_file(data / "start.safetensors"))
    drafter.lm_head.requires_grad_(train_head)
    module = _training_module(run, target, drafter)

    class Report(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            blocks.step_done(outputs["loss"])

    trainer = make_trainer(run, target, data, [Report()])
    blocks.say(trained=sum(p.numel() for p in module.parameters() if p.requires_grad))
    blocks.wait()
    trainer.fit(module, step_loader(batches_of(data, about["batch_size"]), 0, run["fit"]["max_steps"]))


def peer_model(folder: str, data: Path, attention: str) -> Any:
    """The peer's EAGLE-3 for the target in `folder`, as published (no norms of its own), with our first weights."""
    import torch
    from safetensors.torch import load_file
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    token_ids = load_file(data / "vocab.safetensors")["token_ids"]
    layer = create_transformer_layer_config(folder, 1, "llama", None, 2048, [0])
    model = Eagle3DraftModel.from_training_args(
        verifier_config=layer,
        t2d=torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True),
        d2t=token_ids - torch.arange(len(token_ids)),
        verifier_name_or_path=folder,
        draft_vocab_size=len(token_ids),
        norm_before_residual=False,
        ttt_steps=STEPS,
        draft_attn_impl=attention,
    )
    start = load_file(data / "start.safetensors")
    found = model.load_state_dict({name.removeprefix("stack."): value for name, value in start.items()}, strict=False)
    assert not found.unexpected_keys, found
    return model


def work_peer(data: Path, blocks: Blocks, train_head: bool, attention: str) -> None:
    """Train in speculators' `Trainer`, each batch a packed row without padding."""
    import torch
    from safetensors.torch import load_file
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import distributed
    from speculators.train.data import BaseDataset, CollateFn
    from speculators.train.trainer import Trainer, TrainerConfig
    from torch.utils.data import DataLoader

    distributed._local_rank = "cpu"
    about, texts = (json.loads((data / name).read_text()) for name in ("about.json", "texts.json"))
    states = load_file(data / "states.safetensors")
    size = states["last.0"].shape[-1]

    class Texts(BaseDataset):
        def _compute_approx_lengths(self) -> list[int]:
            return [len(text["token_ids"]) for text in texts]

        def _get_raw_data(self, index: int) -> dict[str, Any]:
            # The peer learns at a row whose own token is supervised; one token earlier, as here, what is said there.
            mask = torch.tensor([*texts[index]["loss_mask"][1:], 0], dtype=torch.bool)
            return {
                "hidden_states": states[f"ours.{index}"][:, :-size],
                "input_ids": torch.tensor(texts[index]["token_ids"]),
                "verifier_last_hidden_states": states[f"last.{index}"],
                "loss_mask": mask,
            }

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        length = sum(len(row["input_ids"]) - 1 for row in rows)
        return CollateFn(length, size, dtype=torch.float32, preprocess=shift_batch)(rows)

    model = peer_model(about["target"], data, attention)
    model.lm_head.weight.requires_grad_(train_head)
    asked = {"loss_fn": "kl_div", "loss_implementation": "eager", "ttt_steps": STEPS, "ttt_step_loss_decay": DECAY}
    config = TrainerConfig(
        lr=LR,
        num_epochs=1,
        save_path=str(data / "unused"),
        train_call_kwargs=Eagle3DraftModel.get_trainer_kwargs(**asked)[0],
        weight_decay=0.0,
        scheduler_type="none",
        hidden_states_dtype=torch.float32,
        log_freq=_MANY,
    )
    loader: Any = DataLoader(Texts(768, torch.float32), batch_sampler=about["order"], collate_fn=collate)
    trainer = Trainer(model, config, loader)
    trainer.global_step = 1  # step 0 is always logged, by a timer that synchronizes an accelerator
    losses: list[Any] = []
    model.register_forward_hook(lambda _, args, output: losses.append(output[1].detach()))
    blocks.say(trained=sum(p.numel() for p in model.parameters() if p.requires_grad))
    blocks.wait()
    trainer.train_epoch(0, step_callback=lambda: blocks.step_done(losses.pop()))


def work(options: argparse.Namespace) -> None:
    """A worker: its standard output is for answers alone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(options.threads)
    whose, train_head, others = WAYS[options.way]
    trainers: dict[str, Callable[..., None]] = {"ours": work_ours, "peer": work_peer}
    trainers[whose](Path(options.data), Blocks(answers), train_head, **others)


class Worker:
    """A way's process."""

    def __init__(self, way: str, options: argparse.Namespace) -> None:
        python = sys.executable if WAYS[way][0] == "ours" else options.peer_python
        threads = str(options.threads)
        kept = {k: v for k, v in os.environ.items() if WAYS[way][0] == "ours" or k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment = kept | {"OMP_NUM_THREADS": threads, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        command = [python, str(Path(__file__).resolve()), "work", way, "--data", options.data, "--threads", threads]
        self.log = Path(options.data) / f"{way}.log"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=environment,
        )
        self.trained = int(self.answer()["trained"])
        self.wall, self.cpu, self.losses = list[float](), list[float](), list[float]()

    def answer(self) -> dict[str, Any]:
        """The next line of what it says; the end of its log where it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.log.stem} ended:\n" + "\n".join(self.log.read_text().splitlines()[-12:]))
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def steps(self, count: int, timed: bool = True) -> None:
        """Let it make `count` steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        found = self.answer()
        self.losses += found["losses"]
        if timed:
            self.wall.append(found["wall"])
            self.cpu.append(found["cpu"])


def run(options: argparse.Namespace) -> None:
    """Let all ways make blocks of steps in turns, and print what is found."""
    data, began = Path(options.data), time.monotonic()
    ways = options.ways.split(",")
    workers = {way: Worker(way, options) for way in ways}
    for worker in workers.values():
        worker.steps(options.warm_up, timed=False)
    blocks = 0
    while blocks < options.blocks and (blocks < 2 or time.monotonic() - began < options.seconds):
        for way in ways if blocks % 2 else ways[::-1]:
            workers[way].steps(options.steps)
        blocks += 1
    for worker in workers.values():
        worker.end()
    print_report(data, options, workers, blocks)


def print_report(data: Path, options: argparse.Namespace, workers: dict[str, Worker], blocks: int) -> None:
    """Rates and ratios by the wall's clock and by the processor's, and what was trained to which losses."""
    import numpy as np

    about, texts = (json.loads((data / name).read_text()) for name in ("about.json", "texts.json"))
    steps = about["order"][options.warm_up : options.warm_up + options.steps * blocks]
    counts = np.array([[(len(t["loss_mask"]), sum(t["loss_mask"])) for t in map(texts.__getitem__, s)] for s in steps])
    whole, tokens = counts.sum(1).reshape(blocks, -1, 2).sum(1).T  # (blocks,) both
    samples = np.random.default_rng(0).integers(blocks, size=(_RESAMPLES, blocks))

    def with_interval(over: Any, under: Any) -> str:
        low, high = np.percentile(over[samples].sum(1) / under[samples].sum(1), [2.5, 97.5])
        return f"{over.sum() / under.sum():.3g} [{low:.3g}, {high:.3g}]"

    print(
        f"{blocks} blocks of {options.steps} steps on {about['batch_size']} texts: {tokens.sum()} supervised tokens of "
        f"{whole.sum()}, {options.threads} threads [95% bootstrap interval over blocks]"
    )
    for clock in ("wall", "cpu"):
        spent = {way: np.array(getattr(worker, clock)) for way, worker in workers.items()}
        for way, seconds in spent.items():
            a_step = seconds.sum() / blocks / options.steps
            print(f"{clock:4} {way:17} {with_interval(tokens, seconds)} supervised tokens/s, {a_step:.3f} s a step")
        for one, other in (pair.split("/") for pair in options.ratios.split(",")):
            if one in spent and other in spent:
                print(f"{clock:4} {one} / {other}: {with_interval(spent[other], spent[one])}")
    for way, worker in workers.items():
        shown = ", ".join(f"{loss:.5f}" for loss in worker.losses[:5])
        print(f"{way:17} {worker.trained:,} trained; losses {shown} … last four {np.mean(worker.losses[-4:]):.4f}")
    for one, other in (("ours", "peer"), ("ours_frozen_head", "peer_frozen_head")):
        if one in workers and other in workers:
            ours, peers = np.array(workers[one].losses), np.array(workers[other].losses)
            print(f"losses of {one} and {other} differ by at most {(abs(ours / peers - 1)).max():.1e} of themselves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(required=True)
    one = jobs.add_parser("prepare")
    one.add_argument("--answers", required=True)
    one.add_argument("--data", required=True)
    one.add_argument("--texts", type=int, default=64)
    one.add_argument("--batch-size", type=int, default=4)
    one.add_argument("--steps", type=int, default=600)
    one.set_defaults(job=prepare)
    two = jobs.add_parser("run")
    two.add_argument("--data", required=True)
    two.add_argument("--peer-python", required=True)
    two.add_argument("--ways", default="ours,peer,ours_default,peer_frozen_head")
    ratios = "ours/peer,ours_frozen_head/peer_frozen_head,ours_default/peer,ours_default/peer_frozen_head"
    two.add_argument("--ratios", default=ratios)
    two.add_argument("--blocks", type=int, default=40)
    two.add_argument("--steps", type=int, default=1)
    two.add_argument("--warm-up", type=int, default=2)
    two.add_argument("--seconds", type=float, default=210, help="no block is begun after so many")
    two.add_argument("--threads", type=int, default=1)
    two.set_defaults(job=run)
    three = jobs.add_parser("work")
    three.add_argument("way", choices=list(WAYS))
    three.add_argument("--data", required=True)
    three.add_argument("--threads", type=int, default=1)
    three.set_defaults(job=work)
    options = parser.parse_args()
    options.job(options)


if __name__ == "__main__":
    main()
