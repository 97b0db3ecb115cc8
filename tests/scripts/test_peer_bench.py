"""The comparison with another trainer, on our side of it: both ways of ours start alike, and print what they learn."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conf.compose import ROOT
from models.errors import UserError
from models.target.smollm2 import smollm2_folder

SCRIPT = str(ROOT.parent / "scripts" / "peer_bench.py")


def _run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_ways_take_the_same_batches_from_the_same_start(tmp_path: Path) -> None:
    try:
        smollm2_folder()
    except UserError as error:  # the package that carries it cannot be had
        pytest.skip(str(error))
    draw = random.Random(0)
    rows = [
        {"token_ids": [draw.randrange(1000) for _ in range(24)], "loss_mask": [0] * 8 + [1] * 16} for _ in range(600)
    ]
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"rows": rows}) + "\n")
    data = str(tmp_path / "data")
    told = _run("prepare", "--answers", str(answers), "--data", data, "--texts", "4", "--batch-size", "2")
    assert "4 texts, 96 tokens, 64 supervised" in told
    found = _run(
        "run", "--data", data, "--peer-python", "unused", "--ways", "ours,ours_frozen_head",
        "--ratios", "ours/ours_frozen_head", "--blocks", "2", "--warm-up", "1",
    )  # fmt: skip
    assert "2 blocks of 1 steps on 2 texts: 64 supervised tokens of 96" in found
    trained, losses = {}, {}
    for way, count, shown in re.findall(r"(?m)^(ours\w*) +([\d,]+) trained; losses ([\d., ]+)…", found):
        trained[way], losses[way] = int(count.replace(",", "")), [float(loss) for loss in shown.split(",")]
    head = trained["ours"] - trained["ours_frozen_head"]
    assert head == 576 * json.loads(re.search(r"draft vocabulary (\d+)", told)[1])
    assert losses["ours"][0] == losses["ours_frozen_head"][0] > 0
    assert losses["ours"] != losses["ours_frozen_head"]
    assert re.search(r"wall ours / ours_frozen_head: [\d.]+ \[[\d.]+, [\d.]+\]", found)
