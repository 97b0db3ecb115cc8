"""Folders of runs and comparisons, written out with known numbers, and a reader of the report on them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eval.comparison import Compared
from eval.comparison import write as write_comparison
from eval.report import html
from eval.run_folder import read_folders

LONG_NAME = "distilled_lm_with_a_very_long_name_" * 2
HOSTILE = "<script>alert('x')</script>&\"quoted\""
PROVENANCE = {"command": f"python train/run.py run_name={HOSTILE}", "git_revision": "0123456789ab",
              "versions": {"torch": "2.13.0"}, "cores": 2}  # fmt: skip
TREE = {"parents": [-1, -1, 0, 0, 2], "ranks": [0, 1, 0, 1, 0], "expected_tokens": 2.3456,
        "acceptance": [[0.611, 0.122], [0.533, 0.144], [0.455, 0.166]]}  # fmt: skip


def result(drafter: str = "eagle", temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    """100 rounds over two prompts: 60 of 100 tokens accepted at position 1, 30 of 60 at position 2, τ = 1.9.

    Per token, plain 10 ms while decoding; a round drafts 4 ms, checks 12 ms, and 3 ms go elsewhere.
    """
    counts = {
        "category": ["code", HOSTILE], "rounds": [60.0, 40.0], "emitted": [114.0, 76.0],
        "drafts": [[60.0, 60.0], [40.0, 40.0]], "drafted": [[60.0, 60.0], [40.0, 40.0]],
        "tested": [[60.0, 36.0], [40.0, 24.0]], "accepted": [[36.0, 18.0], [24.0, 12.0]],
        "plain_s": [1.34, 0.96], "plain_tokens": [115.0, 77.0], "plain_prefill_s": [0.2, 0.2],
        "speculative_s": [1.34, 0.96], "speculative_tokens": [115.0, 77.0], "speculative_prefill_s": [0.2, 0.2],
        "draft_s": [0.24, 0.16], "verify_s": [0.72, 0.48],
    }  # fmt: skip
    return {
        "drafter": drafter, "prompts": 2, "tokens": 192, "temperature": temperature, "num_speculative_tokens": 2,
        "num_nodes": 2, "tree": None, "draft_length": {"policy": "fixed"}, "lossless": True,
        "acceptance_rate": 0.5625, "acceptance_rate_interval": [0.51, 0.6125], "expected_acceptance_rate": 0.5678,
        "block_efficiency": 1.9, "block_efficiency_interval": [1.71, 2.13], "speedup": 1.23,
        "speedup_interval": [1.11, 1.37], "predicted_speedup": 1.29, "draft_utilization": 0.4567, "ceiling": 1.0,
        "acceptance_per_position": [0.6, 0.3], "conditional_acceptance": [0.6, 0.5], "identical_to_plain": 2,
        "by_category": {
            "code": {"prompts": 1, "acceptance_rate": 0.777, "block_efficiency": 2.34,
                     "block_efficiency_interval": [2.31, 2.37], "speedup": 1.41, "speedup_interval": [1.4, 1.42]},
            HOSTILE: {"prompts": 1, "acceptance_rate": 0.333, "block_efficiency": 1.56,
                      "block_efficiency_interval": [None, None], "speedup": None, "speedup_interval": [None, None]},
        },
        "counts": counts,
    } | changes  # fmt: skip


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def whole_run(folder: Path, *results: dict[str, Any]) -> Path:
    """A folder in which nothing is lacking."""
    config = {"run_name": folder.name, "fit": {"batch_size": 16}, "note": HOSTILE}
    told = list(results) or [result(), result(temperature=1.0)]
    write(folder / "acceptance.json", {"config": config, "results": told, "provenance": PROVENANCE})
    write(folder / "training.json", {"steps": 600, "seconds": 1430.4, "tokens": 1756578, "tokens_per_s": 1228.0,
                                     "peak_memory_bytes": 1129594880})  # fmt: skip
    write(folder / "data.json", {"weights": "bb40c4f55e245e03"})
    write(folder / "export/config.json", {"decoding": {"tree": TREE}})
    metrics = ["epoch,step,train/loss,train/acceptance,train/acceptance_1,val/block_efficiency"]
    metrics += [f"0,{step},{8 / (step + 1):.4f},{step / 200},{step / 400}," for step in range(0, 100, 10)]
    write(folder / "metrics/version_0/metrics.csv", "\n".join([*metrics, ",50,,,,1.4321", ",100,,,,1.8765"]))
    return folder


class Reader(HTMLParser):
    """Text and tags; a page that does not close what it opens is refused."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n" if "style" not in self.open else ""


def report(*folders: Path, **options: Any) -> str:
    return html("here", read_folders(list(folders)), **options)


def row(page: str, *starts: str) -> list[str]:
    """The cells of the one table row that begins so."""
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in re.findall(r"<tr>(.*?)</tr>", page)]
    (found,) = [cells for cells in rows if tuple(cells[: len(starts)]) == starts]
    return found


def two_runs(root: Path) -> list[Path]:
    """One with a long name and two temperatures."""
    return [whole_run(root / "a"), whole_run(root / "b", result(LONG_NAME), result(LONG_NAME, 1.0))]


def compared_runs(root: Path) -> list[Path]:
    """What train/compare.py leaves: its runs and data, with compare.json, .md and .png by its own writer."""
    compared = []
    for name, drafts_trees in (("eagle", True), (LONG_NAME, True), ("prompt_lookup", False)):
        chains = [result(name), result(name, 1.0)]
        trees = [result(name, t, tree={"depth": 3, "top_k": 4, "num_nodes": 8}, num_nodes=8) for t in (0.0, 1.0)]
        for tree in trees:
            tree.pop("by_category")
        folder = whole_run(root / "compare-tiny" / name, *chains)
        training = json.loads((folder / "training.json").read_text()) if drafts_trees else None
        ready = {"top1_agreement": 0.612, "top10_coverage": 0.914, "entropy_ratio": 1.07, "kl": 0.83}
        about = {"parameters": 1234567 if drafts_trees else 0, "memory_share": 0.125, "adapted": None,
                 "readiness": ready if drafts_trees else None, "training": training}  # fmt: skip
        trees = trees if drafts_trees else []
        write(folder / "compared.json", {"question": {}, "trees": trees, "drafter": about})
        compared.append(Compared(name, chains + trees, about))
    write(root / "compare-tiny" / "data" / "answers-0" / "answers.jsonl", "")
    target: Any = SimpleNamespace(name="tiny")
    write_comparison(compared, target, root / "compare-tiny", {"compare": {"drafters": [c.name for c in compared]}})
    return [root / "compare-tiny"]
