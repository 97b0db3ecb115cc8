"""Build the best static draft tree for a drafter, from what is accepted at each depth and rank.

    python eval/tree.py export=outputs/.../export
    python eval/acceptance.py export=outputs/.../export decode.tree=outputs/.../tree.json

The drafter drafts a comb: its likeliest path, and at every depth of it the next likeliest tokens. How often the target
goes on along the path, or by which of the others, makes a table of acceptance; the best tree for it is built
best-first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError
from models.tree import StaticTree

if TYPE_CHECKING:
    from data.prompts import Prompt
    from engine.settings import DecodeSettings
    from models.target import Target
    from models.types import Draft, TargetFeatures, TreeDrafter


def job(config: DictConfig) -> None:
    """Measure, build the tree, print and write it."""
    options = plain(config)
    for name in ("depth", "ranks", "max_nodes"):
        if not isinstance(options[name], int) or options[name] < 1:
            raise UserError(f"{name} is {options[name]!r}: it must be a whole number of at least 1.")
    from data.answers import context_ids
    from engine.options import decode_settings
    from eval.prompt_sets import prompt_set
    from models.checkpoint import native
    from models.drafter import accelerate_drafter
    from models.files import write_json
    from models.target import load_target
    from models.types import max_depth

    folder = Path(options["export"])
    export = native.read(folder)
    output = Path(options["output"] or folder.parent / "tree.json")
    target = load_target(**{**export.target["load"], **{k: v for k, v in options["target"].items() if v is not None}})
    target.accelerate()
    drafter = native.load(folder, target)
    accelerate_drafter(drafter)
    if not hasattr(drafter, "propose_tree"):
        raise UserError(f"{str(folder)!r} holds a drafter that drafts chains only: there is no tree to build.")
    settings = decode_settings(options["decode"], float(options["temperature"]), options["seed"])
    prompts = prompt_set(options["prompts"], target, options["num_prompts"], options["seed"])
    contexts = [context_ids(target, prompt) for prompt in prompts]
    depth = min(options["depth"], max_depth(drafter) or options["depth"])
    acceptance = measure_ranks(target, drafter, contexts, settings, depth, options["ranks"])
    if options["num_nodes"] is not None:
        tree = StaticTree.best_first(acceptance, options["num_nodes"])
    else:
        most = min(options["max_nodes"], len(acceptance) * len(acceptance[0]))
        seconds = round_seconds(target, drafter, contexts[0], settings, acceptance, most)
        tree = StaticTree.for_time(acceptance, seconds, most)
    print_tree(tree, acceptance)
    write_json(output, {**record_of(tree, acceptance, prompts), "config": options})
    print(f"wrote {output}\nuse it: python eval/acceptance.py export={folder} decode.tree={output}")


def record_of(tree: StaticTree, acceptance: list[list[float]], prompts: list[Prompt]) -> dict[str, Any]:
    """The tree as plain numbers, and what it was built from and on."""
    return {
        "parents": list(tree.parents),
        "ranks": list(tree.ranks),
        "expected_tokens": tree.expected_tokens(acceptance),
        "acceptance": acceptance,
        "prompt_ids": [prompt.id for prompt in prompts],
    }


def comb(depth: int, ranks: int) -> StaticTree:
    """The likeliest path of `depth` tokens, each with `ranks` − 1 siblings."""
    parents: list[int] = []
    for level in range(depth):
        parents += [(level - 1) * ranks if level else -1] * ranks
    return StaticTree(tuple(parents), tuple(range(ranks)) * depth)


def measure_ranks(
    target: Target, drafter: TreeDrafter, contexts: list[list[int]], settings: DecodeSettings, depth: int, ranks: int
) -> list[list[float]]:
    """acceptance[depth][rank]: how often the target takes that child, given that it took the likeliest path so far.

    Children stand as point masses, also where sampling.
    """
    from data.progress import Progress
    from engine.loop import generate

    recorder = _Recorder(drafter, depth, ranks)
    decode = replace(settings, tree=comb(depth, ranks), children="top")
    with Progress("measuring ranks", len(contexts)) as progress:
        for context in contexts:
            generate(target, [context], decode, recorder)
            progress.advance(1)
    if not recorder.tested[0]:
        raise UserError("The answers are too short to measure anything: raise decode.max_new_tokens or num_prompts.")
    return (recorder.taken / np.maximum(recorder.tested, 1)[:, None]).tolist()


@dataclass(slots=True)
class _RecordedState:
    inner: Any
    draft: list[list[int]] | None = None

    def select(self, rows: list[int]) -> None:
        self.inner.select(rows)
        self.draft = None if self.draft is None else [self.draft[row] for row in rows]


class _Recorder:
    """Hands a comb on, and sees from what is committed next which of its nodes the target took."""

    def __init__(self, drafter: TreeDrafter, depth: int, ranks: int) -> None:
        self.capture_layers, self.vocab = drafter.capture_layers, drafter.vocab
        self._drafter, self._ranks = drafter, ranks
        self.taken, self.tested = np.zeros((depth, ranks)), np.zeros(depth)

    def new_state(self, batch_size: int, max_len: int) -> _RecordedState:
        return _RecordedState(self._drafter.new_state(batch_size, max_len))

    def propose_tree(self, state: _RecordedState, committed: TargetFeatures, **options: Any) -> Draft:
        for row, nodes in enumerate(state.draft or []):
            length = int(committed.lengths[row])
            said = [*committed.token_ids[row, 1:length].tolist(), int(committed.next_token_ids[row, length - 1])]
            self._record(nodes, said)
        draft = self._drafter.propose_tree(state.inner, committed, **options)
        state.draft = draft.token_ids.tolist()
        return draft

    def propose(self, *args: Any, **kwargs: Any) -> Draft:
        raise NotImplementedError("a recorder drafts trees")

    def _record(self, nodes: list[int], said: list[int]) -> None:
        for depth, token in enumerate(said[: len(self.tested)]):
            children = nodes[depth * self._ranks : (depth + 1) * self._ranks]
            self.tested[depth] += 1
            if token in children:
                self.taken[depth, children.index(token)] += 1
            if token != children[0]:
                return


def round_seconds(
    target: Target,
    drafter: TreeDrafter,
    context: list[int],
    settings: DecodeSettings,
    acceptance: list[list[float]],
    most: int,
) -> list[float]:
    """Seconds of a round with n drafted nodes, for n from 0 to `most`: measured with trees of some sizes, and between
    them on a straight line."""
    from engine.loop import generate

    sizes = sorted({1, 2, 4, 8, 12, 16, 24, 32, 48, 64, most} & set(range(1, most + 1)))
    times = {size: float("inf") for size in sizes}
    for _ in range(3):  # in turns; the fastest counts
        for size in sizes:
            decode = replace(settings, tree=StaticTree.best_first(acceptance, size), max_new_tokens=24)
            started = time.perf_counter()
            made = generate(target, [context], decode, drafter)
            took = time.perf_counter() - started - made.seconds.prefill
            times[size] = min(times[size], took / max(1.0, float(made.stats.rounds.sum())))
    found: list[float] = np.interp(range(most + 1), sizes, [times[size] for size in sizes]).tolist()
    return found


def print_tree(tree: StaticTree, acceptance: list[list[float]]) -> None:
    """The acceptance table and how many nodes of each rank stand at each depth."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Accepted, by depth and rank, behind the likeliest path (nodes of the tree there)")
    table.add_column("depth", justify="right")
    for rank in range(len(acceptance[0])):
        table.add_column(f"rank {rank + 1}", justify="right")
    for depth, row in enumerate(acceptance):
        nodes = tree.levels[depth] if depth < tree.depth else []
        counts = [sum(tree.ranks[node] == rank for node in nodes) for rank in range(len(row))]
        cells = (
            f"{value:.3f} ({count})" if count else f"{value:.3f}" for value, count in zip(row, counts, strict=True)
        )
        table.add_row(str(depth + 1), *cells)
    console = Console(width=132 if not Console().is_terminal else None)
    console.print(table)
    chain = StaticTree.chain(len(acceptance))
    console.print(
        f"{tree.num_nodes} nodes to depth {tree.depth}: {tree.expected_tokens(acceptance):.2f} tokens expected per "
        f"target pass; a chain of {chain.num_nodes}: {chain.expected_tokens(acceptance):.2f}"
    )


if __name__ == "__main__":
    main("tree", job)
