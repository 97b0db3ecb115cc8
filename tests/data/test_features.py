"""Cached hidden states: what is stored, told, found damaged, deleted for the budget, and read again after a restart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.features import CacheSettings, FeatureCache
from data.loader import Batch, StepBatches, step_loader
from data.shards import StateLayout
from models.errors import UserError
from models.target import Target
from tests.helpers.drafters import tiny_target
from tests.helpers.models import layer_calls

ROWS = [[(11 * i + j * (i % 5 + 1)) % 64 for j in range(4 + i % 7)] for i in range(40)]
LAYERS = (2, -1)
DTYPES = ["same", "bfloat16", "int8"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def build(target: Target, root: Path, rows: Any = ROWS, layers: tuple[int, ...] = LAYERS, **settings: Any) -> Any:
    return FeatureCache.build(target, rows, layers, root, CacheSettings(**{"rows_per_shard": 8, **settings}))


def shards(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def all_of(cache: FeatureCache) -> list[Tensor]:
    return [cache[row] for row in range(len(ROWS))]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("dtype", "near"), [("same", 1e-4), ("bfloat16", 0.01), ("int8", 0.05)])
def test_cached_states_are_the_targets_own(dtype: str, near: float, target: Target, tmp_path: Path) -> None:
    cache = build(target, tmp_path, dtype=dtype)
    for index in (0, 17, 39):
        with torch.no_grad():
            expected = target(torch.tensor([ROWS[index]]), capture_layers=LAYERS).hidden
        assert expected is not None and cache[index].dtype == target.dtype
        torch.testing.assert_close(cache[index], expected[0], rtol=near, atol=near)


def test_an_unfinished_cache_is_finished_and_a_finished_one_runs_no_layer(target: Target, tmp_path: Path) -> None:
    with layer_calls(target) as calls:
        before = all_of(build(target, tmp_path))
    assert calls == [0, 1, 2, 3] * 5
    shards(tmp_path)[1].unlink()  # as if killed before it was written
    with layer_calls(target) as calls:
        again = build(target, tmp_path)
        assert calls == [0, 1, 2, 3]
        assert same(before, all_of(again)) and calls == [0, 1, 2, 3]
        assert same(before, all_of(build(target, tmp_path))) and calls == [0, 1, 2, 3]
    assert again.summary == ""


def test_layers_behind_the_last_one_captured_are_not_run(target: Target, tmp_path: Path) -> None:
    with layer_calls(target) as calls:
        build(target, tmp_path, layers=(2, 1))
    assert calls == [0, 1] * 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_size_is_told_before_and_is_that_of_the_files(
    dtype: str, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = build(target, tmp_path, dtype=dtype)
    tokens, size = sum(map(len, ROWS)), {"same": 4 * 64, "bfloat16": 2 * 64, "int8": 64 + 4}[dtype] * len(LAYERS)
    scales = 5 * len(LAYERS) * 64 * 4 if dtype == "int8" else 0
    assert cache.layout.bytes_per_token == size
    written = sum(t.nbytes for file in shards(tmp_path) for t in load_file(file).values())
    assert written == tokens * size + scales == cache.layout.size_bytes(tokens, 5)
    headers = sum(file.stat().st_size for file in shards(tmp_path)) - written
    assert 0 < headers < 5 * 600
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"hidden states: {tokens} tokens of {size} bytes take {written / 1e6:.1f} MB, of which")
    assert len(told) == (1 if dtype == "same" else 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_error_told_is_that_of_what_is_read(
    dtype: str, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, found = (torch.cat(all_of(build(target, tmp_path, dtype=d))).double() for d in ("same", dtype))
    error = float(((found - wanted).square().sum() / wanted.square().sum()).sqrt())
    assert f"in {dtype}: off by {error:.2%} of their root mean square" in capsys.readouterr().out
    assert 1e-4 < error < {"bfloat16": 0.004, "int8": 0.02}[dtype]


def test_int8_steps_are_as_its_formula_says() -> None:
    """Against loops over layers, tokens and channels."""
    states = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    layout = StateLayout(2, 3, "int8", torch.float32)
    found = layout.decode(layout.encode(states), slice(None))
    for layer in range(2):
        part = states[:, 3 * layer : 3 * layer + 3]
        alike = part / part.square().mean(1, keepdim=True).sqrt()
        scale = [float((alike[:, c] ** 2).mean() ** 0.5) for c in range(3)]
        for t in range(5):
            step = max(abs(float(part[t, c])) / scale[c] for c in range(3)) / 127
            for c in range(3):
                expected = round(float(part[t, c]) / scale[c] / step) * step * scale[c]
                assert found[t, 3 * layer + c] == pytest.approx(expected, abs=1e-5)


def test_int8_keeps_the_rest_beside_channels_and_tokens_that_are_far_larger() -> None:
    states = torch.randn(64, 2 * 128, generator=torch.Generator().manual_seed(0))
    states[:, [7, 200]] *= 300.0
    states[0] *= 300.0
    layout = StateLayout(2, 128, "int8", torch.float32)
    found = layout.decode(layout.encode(states), slice(None))
    usual = torch.ones_like(states, dtype=torch.bool)
    usual[0] = usual[:, 7] = usual[:, 200] = False
    error = (found - states)[usual].square().mean().sqrt() / states[usual].square().mean().sqrt()
    assert error < 0.03
    assert torch.equal(layout.decode(layout.encode(torch.zeros(3, 256)), slice(None)), torch.zeros(3, 256))


@pytest.mark.parametrize("dtype", ["same", "int8"])
def test_files_do_not_depend_on_how_many_threads_write(dtype: str, target: Target, tmp_path: Path) -> None:
    for writers in (1, 4):
        build(target, tmp_path / str(writers), dtype=dtype, writers=writers)
    one, four = ([file.read_bytes() for file in shards(tmp_path / name)] for name in ("1", "4"))
    assert one == four and len(one) == 5


def test_a_writer_that_fails_ends_the_work_with_its_message(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path, metadata: Any = None) -> None:
        if path.name.startswith(".000002"):
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr("models.files.save_file", full)
    with pytest.raises(UserError, match="the disk is full; what was finished before is kept"):
        build(target, tmp_path, writers=2)
    assert {file.name for file in shards(tmp_path)} >= {"000000.safetensors", "000001.safetensors"}
    monkeypatch.undo()
    assert same(all_of(build(target, tmp_path)), all_of(build(target, tmp_path / "other")))


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def with_others_states(file: Path) -> None:
    tensors = load_file(file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, metadata={"shard": '{"key": "another/1"}'})


DAMAGES = {
    "one bit": (flipped, "its checksum is another"),
    "half of it": (lambda file: os.truncate(file, file.stat().st_size // 2), "no whole safetensors file"),
    "all of it": (lambda file: file.write_bytes(b""), "no whole safetensors file"),
    "no header": (lambda file: file.write_bytes(b"\xff" * 64), "no whole safetensors file"),
    "another shard": (lambda file: file.write_bytes((file.parent / "000003.safetensors").read_bytes()), "other states"),
    "other states": (with_others_states, "other states"),
}


@pytest.mark.parametrize("dtype", ["same", "int8"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_computed_again(
    damage: str, dtype: str, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, (spoil, reason) = all_of(build(target, tmp_path, dtype=dtype)), DAMAGES[damage]
    spoil(file := shards(tmp_path)[1])
    cache = build(target, tmp_path, dtype=dtype)
    capsys.readouterr()
    assert same(before, all_of(cache))
    (told,) = capsys.readouterr().out.splitlines()
    assert str(file) in told and reason in told and "computed again" in told
    assert cache.damaged == cache.recomputed == 1 and "1 were damaged" in cache.summary
    whole = build(target, tmp_path, dtype=dtype)
    assert same(before, all_of(whole)) and whole.damaged == 0


def test_another_target_or_text_or_dtype_has_a_folder_of_its_own(target: Target, tmp_path: Path) -> None:
    folders = [build(target, tmp_path).folder, build(target, tmp_path).folder]
    assert folders[0] == folders[1]
    other = tiny_target()
    with torch.no_grad():
        other.layers[0].mlp.down_proj.weight[0, 0] += 1.0  # type: ignore[union-attr, index]
    folders += [build(other, tmp_path).folder, build(target, tmp_path, [*ROWS[:-1], [1, 2]]).folder]
    folders += [build(target, tmp_path, dtype="int8").folder, build(target, tmp_path, rows_per_shard=4).folder]
    folders += [build(target, tmp_path, layers=(1, -1)).folder]
    assert len(set(folders)) == len(folders) - 1
    for file in folders[0].glob("*.safetensors"):  # the other target's states under this one's name
        file.write_bytes((folders[2] / file.name).read_bytes())
    cache = build(target, tmp_path)
    assert same(all_of(cache), all_of(build(target, tmp_path / "new"))) and cache.damaged == 5


def test_the_index_says_what_the_shards_hold(target: Target, tmp_path: Path) -> None:
    cache = build(target, tmp_path)
    index = json.loads((cache.folder / "index.json").read_text())
    assert index["layers"] == [2, 4] and index["hidden_size"] == 64 and index["dtype"] == "same"
    assert index["target"]["weights_fingerprint"] == target.weights_fingerprint
    assert index["num_rows"] == 40 and index["num_tokens"] == sum(map(len, ROWS))
    assert sorted(row for shard in index["shards"] for row in shard["rows"]) == list(range(40))
    for shard in index["shards"]:
        states = load_file(cache.folder / shard["file"])["states"]
        assert states.shape == (shard["tokens"], 2 * 64) == (sum(len(ROWS[row]) for row in shard["rows"]), 2 * 64)
        first = len(ROWS[shard["rows"][0]])
        assert torch.equal(states[:first], cache[shard["rows"][0]])


def budget_of(cache: FeatureCache, shards_kept: float) -> float:
    """A budget in GB for the `shards_kept` largest shards of an undisturbed cache."""
    return shards_kept * max(file.stat().st_size for file in cache.folder.glob("*.safetensors")) / 1e9


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_budget_is_kept_and_changes_nothing(dtype: str, target: Target, tmp_path: Path) -> None:
    whole = build(target, tmp_path / "whole", dtype=dtype)
    budget = budget_of(whole, 2.0)
    cache = build(target, tmp_path / "part", dtype=dtype, budget_gb=budget)
    generator = torch.Generator().manual_seed(0)
    for row in torch.randint(40, (60,), generator=generator).tolist():
        assert torch.equal(cache[row], whole[row])
        assert sum(t.nbytes for file in shards(tmp_path / "part") for t in load_file(file).values()) <= budget * 1e9
    assert cache.recomputed > 10 and cache.evicted > 10 and f"{cache.recomputed} of 5 shards" in cache.summary
    assert same(all_of(build(target, tmp_path / "part", dtype=dtype)), all_of(whole))  # and without a budget again


def test_the_shard_least_recently_used_is_deleted_also_after_a_restart(target: Target, tmp_path: Path) -> None:
    rows = [[(11 * i + j) % 64 for j in range(8)] for i in range(40)]  # shard s holds rows 8·s and up
    budget = budget_of(build(target, tmp_path / "whole", rows), 3.0)

    def there() -> list[int]:
        return [int(file.stem) for file in shards(tmp_path / "part")]

    cache = build(target, tmp_path / "part", rows, budget_gb=budget)
    assert there() == [0, 1, 2]
    for shard in (0, 1, 2, 3, 1, 4):
        cache[8 * shard]
    assert there() == [1, 3, 4]
    for age, shard in enumerate((4, 1, 3)):
        os.utime(cache.folder / f"{shard:06d}.safetensors", ns=(0, 10**9 * (1 + age)))
    build(target, tmp_path / "part", rows, budget_gb=budget)[8 * 2]
    assert there() == [1, 2, 3]
    build(target, tmp_path / "part", rows, budget_gb=budget / 2)  # a smaller budget later
    assert there() == [2]


def test_without_a_target_at_hand_damage_is_told_and_mended_by_the_next_start(target: Target, tmp_path: Path) -> None:
    whole = build(target, tmp_path / "whole")
    cache = build(target, tmp_path / "part")
    cache.target_divided = True
    damaged = cache._file(2)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    lost = next(row for row in range(len(ROWS)) if cache._place[row][0] == 2)
    for why in ("its checksum is another", "it was deleted"):
        with pytest.raises(UserError, match=rf"000002.safetensors': {why}. Start the same command again"):
            cache[lost]
    assert same(all_of(build(target, tmp_path / "part")), all_of(whole))


def test_processes_that_read_one_folder_keep_to_the_budget_together(target: Target, tmp_path: Path) -> None:
    whole = build(target, tmp_path / "whole")
    budget = budget_of(whole, 2.0)
    both = [build(target, tmp_path / "part", budget_gb=budget) for _ in range(2)]
    for row in range(len(ROWS)):
        for cache, which in zip(both, (row, len(ROWS) - 1 - row), strict=True):
            assert torch.equal(cache[which], whole[which])
            assert sum(t.nbytes for file in shards(tmp_path / "part") for t in load_file(file).values()) <= budget * 1e9
    assert all(cache.recomputed for cache in both)


def test_budgets_and_disks_that_are_too_small_are_told_before_anything_is_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"budget_gb is 1e-06, but a shard of 8 texts takes .* GB"):
        build(target, tmp_path, budget_gb=1e-6)

    class Usage:
        free = 60_000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(UserError, match="hidden_states=online"):
        build(target, tmp_path)
    assert not shards(tmp_path)
    build(target, tmp_path, budget_gb=5e-5)  # what the budget keeps has room
    assert shards(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int4"}, "fit.cache.dtype is 'int4': choose same, bfloat16, int8"),
        ({"writers": 0}, "fit.cache.writers is 0"),
        ({"rows_per_shard": True}, "fit.cache.rows_per_shard is True"),
        ({"budget_gb": -1}, "fit.cache.budget_gb is -1"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CacheSettings(**settings)


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_reader_gives_the_same_batches(dtype: str, packed: bool, target: Target, tmp_path: Path) -> None:
    """In another process, with shards deleted at other times: which rows, in which order, and what is read of them."""
    data = datasets.Dataset.from_dict({"token_ids": ROWS, "loss_mask": [[0, 0] + [1] * (len(row) - 2) for row in ROWS]})

    def batches(**settings: Any) -> StepBatches:
        made = StepBatches(data, batch_size=4, max_tokens=24 if packed else 8, seed=3)
        if packed:
            made.pack(2)
        made.cache = build(target, tmp_path, made.token_ids, dtype=dtype, **settings)
        return made

    def equal(ours: list[Batch], theirs: list[Batch]) -> bool:
        pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)]
        return all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)

    whole = list(step_loader(batches(), 0, 25))
    budget = budget_of(batches().cache, 2.5)  # type: ignore[arg-type]
    limited = batches(budget_gb=budget)
    assert equal(list(step_loader(limited, 0, 25)), whole)
    assert limited.cache is not None and limited.cache.recomputed > 5
    resumed = list(step_loader(batches(budget_gb=budget), 11, 25))
    assert equal(resumed, whole[11:])


def test_the_page_tells_what_the_layout_says() -> None:
    """Its table is about EAGLE-3, and EAGLE-1, for Llama-3.1-8B on 100,000 texts of 2,048 tokens."""
    texts, rows, hidden, vocab = 100_000, 2048, 4096, 128_256
    told = (Path(__file__).parents[2] / "docs" / "hidden_states.md").read_text()
    table = {
        cells[0].strip(): [cell.strip() for cell in cells[1:3]]
        for line in told.splitlines()
        if line.startswith("|") and len(cells := line.strip("|").split("|")) == 3
    }
    for what, (num_layers, dtype, original, top_k) in {
        "EAGLE-3, float32": (4, "same", torch.float32, None),
        "EAGLE-3, bfloat16": (4, "bfloat16", torch.float32, None),
        "EAGLE-3, int8": (4, "int8", torch.bfloat16, None),
        "EAGLE-3, int8, laws of 64 tokens": (3, "int8", torch.bfloat16, 64),
        "EAGLE-1, Medusa, MTP, bfloat16": (1, "same", torch.bfloat16, None),
        "EAGLE-1, Medusa, MTP, int8": (1, "int8", torch.bfloat16, None),
        "a draft model, bfloat16": (1, "same", torch.bfloat16, None),
        "a draft model, laws of 64 tokens": (0, "same", torch.bfloat16, 64),
    }.items():
        layout = StateLayout(num_layers, hidden, dtype, original, top_k)
        size = layout.size_bytes(texts * rows, texts // CacheSettings().rows_per_shard)
        assert table[what] == [f"{layout.bytes_per_token:,}", f"{size / 1e12:.2f} TB"]
    logits = 2 * (3 * hidden + vocab)
    size = logits * texts * rows
    assert table["three layers and the whole logits, bfloat16"] == [f"{logits:,}", f"{size / 1e12:.2f} TB"]
