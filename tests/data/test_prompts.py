import json
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import datasets
import pytest

from data import prompts as sources
from data.prompts import (
    BUILTIN,
    HubDataset,
    Mixture,
    Prompt,
    PromptFile,
    SplitSizes,
    StandardLibrary,
    apportion,
    deal,
    parse_row,
    read_prompts,
    split_prompts,
)
from data.stdlib import SPLITS, documents, split_of
from models.errors import UserError
from models.target import Target


def test_every_known_layout_gives_the_same_prompt() -> None:
    expected = Prompt(("Hello?", "And then?"), category="chat")
    rows = [
        {"turns": ["Hello?", "And then?"], "category": "chat", "question_id": 1, "reference": ["x"]},
        {
            "messages": [
                {"role": "user", "content": "Hello?"},
                {"role": "assistant", "content": "Hi."},
                {"role": "user", "content": "And then?"},
            ],
            "category": "chat",
        },
        {
            "conversations": [
                {"from": "human", "value": "Hello?"},
                {"from": "gpt", "value": "Hi."},
                {"from": "human", "value": "And then?"},
            ],
            "category": "chat",
        },
    ]
    parsed = [parse_row(row, "here") for row in rows]
    assert [p.turns for p in parsed] == [expected.turns] * 3
    assert {p.id for p in parsed} == {expected.id}
    assert [p.answers for p in parsed] == [(), ("Hi.",), ("Hi.",)]
    assert {p.category for p in parsed} == {"chat"}


def test_a_system_message_is_kept_and_makes_another_prompt() -> None:
    plain = parse_row({"messages": [{"role": "user", "content": "a"}]}, "here")
    told = parse_row({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, "here")
    assert (plain.system, told.system) == (None, "s")
    assert plain.id != told.id


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{not json", "not valid JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        ('{"text": "x"}', "no 'prompt', 'turns', 'messages' or 'conversations' (found: text)"),
        ('{"prompt": 3}', "'prompt' must hold text"),
        ('{"prompt": "  "}', "not be empty"),
        ('{"turns": []}', "'turns' must hold text"),
        ('{"messages": [{"role": "user"}]}', "messages[0] needs 'role' and 'content'"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "unknown role 'robot'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "do not take turns"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "holds no user turn"),
        ('{"conversations": [{"from": "human", "value": "a"}, {"from": "human", "value": "b"}]}', "do not take turns"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(UserError) as error:
        list(read_prompts(path))
    assert f"{path}, line 3" in str(error.value)
    assert what in str(error.value)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read .*nowhere\.jsonl"):
        list(read_prompts(tmp_path / "nowhere.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no prompts"):
        list(read_prompts(tmp_path / "empty.jsonl"))


def test_splits_are_disjoint_deduplicated_and_filled_in_order() -> None:
    prompts = [Prompt((f"question {i // 2}",)) for i in range(40)]  # each twice
    prompts += [Prompt((f"  question   {i} ",)) for i in range(20)]  # and once more, spaced differently
    splits = split_prompts(prompts, SplitSizes(train=12, validation=3, test=5))
    ids = [p.id for split in splits.values() for p in split]
    assert {name: len(split) for name, split in splits.items()} == {"train": 12, "validation": 3, "test": 5}
    assert len(set(ids)) == len(ids) == 20


def test_a_split_set_by_the_source_is_kept() -> None:
    prompts = [Prompt((str(i),), split=("train", "test", "validation")[i % 3]) for i in range(30)]
    splits = split_prompts(prompts, SplitSizes(10, 10, 10))
    assert all(p.split == name for name, split in splits.items() for p in split)
    with pytest.raises(UserError, match=r"10 are left for the split 'train', which wants 11"):
        split_prompts(prompts, SplitSizes(11, 1, 1))


def test_the_builtin_set_has_ten_prompts_in_each_of_seven_categories() -> None:
    prompts = list(read_prompts(BUILTIN))
    assert Counter(p.category for p in prompts) == dict.fromkeys(
        ("chat", "code", "math", "summary", "translation", "question_answering", "retrieval"), 10
    )
    assert len({p.id for p in prompts}) == 70
    assert sum(len(p.turns) > 1 for p in prompts) >= 3


def test_documents_are_split_by_name_and_read_the_same_twice() -> None:
    names = [(d.name, d.split) for d in documents()]
    assert names == [(d.name, d.split) for d in documents()]
    assert all(split == split_of(name) for name, split in names)
    counts = Counter(split for _, split in names)
    assert 0.8 < counts["train"] / len(names) < 0.97
    assert min(counts["test"], counts["validation"]) > 10
    assert {name for name, _ in names} >= {"argparse.py", "topics/for"}
    assert not any("/test/" in name or name.startswith("test/") for name, _ in names)
    assert [d.name for d in documents("test")] == [name for name, split in names if split == "test"]
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        next(documents("dev"))


def test_standard_library_prompts_are_seeded_openings_of_their_documents(tiny: Target) -> None:
    source = StandardLibrary(min_tokens=8, max_tokens=24)
    prompts = source.prompts(tiny, 100, seed=1)
    assert prompts == source.prompts(tiny, 100, seed=1)
    assert prompts != source.prompts(tiny, 100, seed=2)
    texts = {split: "\0".join(d.text for d in documents(split)) for split in SPLITS}
    for prompt in prompts[:200]:
        assert prompt.continuation
        (rest,) = prompt.answers
        text = prompt.turns[0] + rest.removesuffix("\n")  # the document may end with the prompt
        assert prompt.split is not None and text in texts[prompt.split]
    assert {p.category for p in prompts} == {"code", "docs"}
    lengths = sorted(len(tiny.encode(p.answers[0])) for p in prompts[:200])
    assert lengths[20] > 24


def test_prompt_file_keeps_the_order_of_its_rows(tmp_path: Path, tiny: Target) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(5)))
    assert [p.turns[0] for p in PromptFile(str(path)).prompts(tiny, 5, 0)] == [f"number {i}" for i in range(5)]


@dataclass(frozen=True)
class _Given:
    made: tuple[Prompt, ...]

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        return list(self.made)


def test_a_mixture_deals_every_source_to_every_split(tiny: Target) -> None:
    undecided = tuple(Prompt((f"a{i}",), "a") for i in range(60))
    decided = tuple(Prompt((f"b{i}",), "b", split=SPLITS[i % 3]) for i in range(120))
    mixed = Mixture((_Given(undecided), _Given(decided))).prompts(tiny, 60, 0)
    assert len({p.id for p in mixed}) == 180
    assert [p.category for p in mixed[:6]] == ["a", "b"] * 3
    dealt = split_prompts(mixed, SplitSizes(train=60, validation=6, test=6))
    assert Counter(p.category for p in dealt["train"]) == {"a": 43, "b": 17}  # of the first 48 or 49 of each
    assert Counter(p.category for p in dealt["test"]) == {"a": 1, "b": 5}  # every twentieth, every third
    assert {p.split for p in dealt["validation"]} == {"validation"}
    with pytest.raises(UserError, match="name at least one source"):
        Mixture(()).prompts(tiny, 1, 0)


@pytest.mark.parametrize(
    ("count", "weights", "parts"),
    [(10, (1, 1), [5, 5]), (10, (3, 1), [8, 2]), (7, (1, 1, 1), [3, 2, 2]), (0, (2, 1), [0, 0]), (1, (1, 9), [0, 1])],
)
def test_whole_parts_are_the_nearest_to_the_weights(count: int, weights: tuple[float, ...], parts: list[int]) -> None:
    assert apportion(count, weights) == parts
    assert sum(parts) == count


@pytest.mark.parametrize("weights", [(3.0, 1.0), (0.2, 0.5, 0.3), (5.0, 1.0, 1.0)])
def test_weights_hold_in_every_split_and_at_every_place(tiny: Target, weights: tuple[float, ...]) -> None:
    given = [
        _Given(tuple(Prompt((f"{name}{i}",), name, split=SPLITS[i % 3] if name == "b" else None) for i in range(400)))
        for name in "abc"[: len(weights)]
    ]
    sizes = SplitSizes(train=100, validation=10, test=20)
    mixture = Mixture(tuple(given), weights)
    dealt = deal(mixture, tiny, sizes, 0)
    shares = [weight / sum(weights) for weight in weights]
    for split, prompts in dealt.items():
        size = getattr(sizes, split)
        assert len(prompts) == len({p.id for p in prompts}) == size
        for name, share in zip("abc", shares, strict=False):
            so_far = accumulate(int(p.category == name) for p in prompts)
            assert all(abs(found - share * (i + 1)) < 1 for i, found in enumerate(so_far))
            assert abs(sum(p.category == name for p in prompts) - share * size) < 1
    assert {p.source for p in dealt["train"]} == {f"{i} (_Given)" for i in range(len(weights))}
    assert deal(mixture, tiny, sizes, 0) == dealt
    untrained = deal(mixture, tiny, sizes, 0, SplitSizes(0, 0, 20))
    assert untrained == {"train": [], "validation": [], "test": dealt["test"]}
    assert mixture.prompts(tiny, 40, 0) == deal(mixture, tiny, SplitSizes(40, 0, 0), 0)["train"]


def test_a_prompt_of_two_sources_is_the_first_ones(tiny: Target) -> None:
    shared = tuple(Prompt((f"{i}",)) for i in range(10))
    mixture = Mixture((_Given(shared), _Given(shared[:5] + tuple(Prompt((f"b{i}",)) for i in range(5)))), (1, 1))
    dealt = deal(mixture, tiny, SplitSizes(10, 0, 0), 0)["train"]
    assert len({p.id for p in dealt}) == 10
    assert [p.turns[0] for p in dealt if p.source.startswith("1")] == [f"b{i}" for i in range(5)]


def test_a_mixture_names_the_source_that_has_too_few(tiny: Target) -> None:
    few = _Given(tuple(Prompt((f"{i}",)) for i in range(9)))
    many = _Given(tuple(Prompt((f"m{i}",)) for i in range(90)))
    with pytest.raises(UserError, match=r"sources\[1\] \(_Given\): The source gave 9 .*'train', which wants 10"):
        deal(Mixture((many, few), (3, 1)), tiny, SplitSizes(40, 0, 0), 0)
    with pytest.raises(UserError, match=r"weights has 1 numbers for 2 sources"):
        Mixture((many, few), (3,))
    with pytest.raises(UserError, match=r"weights is \[1, 0\]: each must be above 0"):
        Mixture((many, few), (1, 0))


def shards(folder: Path, rows: int) -> str:
    """Prompts in JSONL files of a hundred."""
    folder.mkdir()
    for first in range(0, rows, 100):
        lines = [json.dumps({"prompt": f"number {i // 2}"}) for i in range(first, min(rows, first + 100))]
        (folder / f"{first:04d}.jsonl").write_text("\n".join(lines))
    return str(folder)


@pytest.mark.parametrize("saved", [False, True], ids=["files", "saved by datasets"])
def test_a_stream_is_read_only_as_far_as_prompts_are_needed(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    name = shards(tmp_path / "rows", 600)
    if saved:
        datasets.load_dataset(name, split="train", cache_dir=str(tmp_path / "cache")).save_to_disk(tmp_path / "saved")
        name = str(tmp_path / "saved")
    read = []

    def counted(row, where):
        read.append(where)
        return parse_row(row, where)

    monkeypatch.setattr(sources, "parse_row", counted)
    source = HubDataset(name, streaming=True, shuffle_buffer=50)
    found = source.prompts(tiny, 40, seed=1)
    assert len({p.id for p in found}) == 40 and 40 <= len(found) == len(read) <= 80
    assert [p.turns for p in found] != sorted(p.turns for p in found)
    assert source.prompts(tiny, 40, seed=1) == found
    assert source.prompts(tiny, 40, seed=2) != found
    everything = HubDataset(name, streaming=True, shuffle_buffer=50).prompts(tiny, 1000, seed=1)
    assert len(everything) == 600 and len({p.id for p in everything}) == 300


def test_a_stream_that_is_not_there_is_said(tiny: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot load the data set"):
        HubDataset(str(tmp_path), streaming=True).prompts(tiny, 4, 0)
    with pytest.raises(UserError, match=r"shuffle_buffer is 0: it must be at least 1"):
        HubDataset("x", streaming=True, shuffle_buffer=0)
