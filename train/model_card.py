"""The model card of an export: what it is, what it learnt from, and what was measured."""

from __future__ import annotations

import json
from typing import Any

from eval.adapted import report
from eval.measure import Measurement
from models.checkpoint.native import Export

_DEFINITIONS = """Acceptance rate: accepted over tested tokens. τ: tokens emitted per target pass, the extra token
included. Speed-up: seconds per token, plain over speculative, in turns on one machine. In brackets: 95% bootstrap
intervals over prompts."""


_INT8 = "- Weights: int8 with a scale for each row of a matrix; loading turns them back into floating point.\n"


def model_card(export: Export, measured: list[tuple[str, Measurement]]) -> str:
    """Markdown for the export's README.md; `measured` is empty before the measurement."""
    p = export.provenance
    weights = _INT8 if export.int8 else ""
    versions = ", ".join(f"{name} {version}" for name, version in p["versions"].items() if version)
    return f"""# {export.name} drafter for {export.target["name"]}

A draft component for speculative decoding: it proposes tokens, the target checks them, and what comes out is what the
target alone would have said.

- Target: `{export.target["name"]}` (fingerprint `{export.target["fingerprint"]}`; loading against another one refuses).
  The target's licence governs what may be done with both together.
{_adapted(export)}- Trained on: {_learnt_from(p["data"])}.{_tree(export)}
{weights}- Made by: `{p["command"]}`, revision {p["git_revision"]}, {versions}. The whole configuration is in
  `config.json`.

## Measured

{_figures(measured)}

## Use

    python eval/acceptance.py export=FOLDER

```python
from pathlib import Path
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.target import load_target

target = load_target(**native.read(Path("FOLDER")).target["load"])
drafter = native.load(Path("FOLDER"), target)
ids = target.encode("def main(")
print(target.decode(generate(target, [ids], DecodeSettings(), drafter).token_ids[0]))
```
"""


def _adapted(export: Export) -> str:
    found, place = report(export.target), "`target/`, as a Hugging Face folder"
    if found is None:
        return ""
    if export.target["adapted"]["export"] == "separate":
        place = "`adapter/`, as a peft adapter that loading merges into the original"
    return f"- {found}\n  The adapted target is in {place}.\n"


def _tree(export: Export) -> str:
    if export.tree is None:
        return ""
    nodes, tokens = len(export.tree["parents"]), export.tree["expected_tokens"]
    return (
        f"\n- Draft tree: {nodes} nodes, the best for what was accepted of {len(export.tree['prompt_ids'])} validation "
        f"prompts;\n  {tokens:.2f} tokens expected per target pass. `decode.tree=calibrated` drafts it in place of a "
        "chain."
    )


def _learnt_from(data: dict[str, Any] | None) -> str:
    if data is None:
        return "nothing in this run; the drafter is measured as it came"
    whose = "the target's own" if data["settings"]["answers"] == "target" else "their given"
    settings = json.dumps(data["settings"])
    return f"{data['num_prompts']} prompts with {whose} answers (prompts `{data['prompts']}`, settings\n  `{settings}`)"


def _figures(measured: list[tuple[str, Measurement]]) -> str:
    if not measured:
        return "Not measured yet."
    lines = [
        "| temperature | draft tokens | acceptance rate | block efficiency τ | speed-up | prompts |",
        "|---|---|---|---|---|---|",
    ]
    for _, m in measured:
        s = m.summary()
        cells = [f"{s['temperature']:g}", str(s["num_speculative_tokens"])]
        for key in ("acceptance_rate", "block_efficiency", "speedup"):
            low, high = s[f"{key}_interval"]
            cells.append(f"{s[key]:.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {' | '.join(cells)} | {s['prompts']} |")
    return "\n".join([*lines, "", _DEFINITIONS])
