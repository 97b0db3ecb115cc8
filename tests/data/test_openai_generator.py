"""Answers of a real server process: the engine's own, whatever fails on the way, and with what differs counted."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from data import completions
from data.answers import AnswerSettings, build_answers
from data.completions import Client
from data.openai_generator import OpenAIGenerator
from data.prompts import Prompt
from models.errors import UserError
from models.target import Target, load_target
from tests.data.test_template import PLAIN, with_template
from tests.helpers.completions_server import ROOT, Served, completions_server

PROMPTS = [
    Prompt((text,), continuation=True)
    for text in ("import os\n", "def main(", "class A:\n    def", "for i in", "return self.", "try:\n    x")
]
SETTINGS = AnswerSettings(max_new_tokens=12, chunk_size=4, seed=3)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with completions_server(free_port()) as served:
        yield served


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("tiny", dtype="float64", device="cpu")


@pytest.fixture
def how(server: Served) -> OpenAIGenerator:
    server.fail()
    return OpenAIGenerator(
        server.url, concurrency=3, timeout_s=20.0, first_wait_s=0.02, longest_wait_s=0.1, check_prompts=0
    )


def rows_of(dataset) -> list[dict]:
    return dataset.to_list()


def report_of(root: Path) -> dict[str, int]:
    (manifest,) = root.glob("answers-*/manifest.json")
    return json.loads(manifest.read_text())["report"]


def test_greedy_answers_are_the_engines_own(
    target: Target, how: OpenAIGenerator, server: Served, tmp_path: Path
) -> None:
    chat = with_template(target, PLAIN)
    prompts = [*PROMPTS, Prompt(("import what?", "and then?"), system="code")]
    ours = rows_of(build_answers(chat, prompts, SETTINGS, tmp_path / "engine"))
    checked = replace(how, check_prompts=2)
    theirs = rows_of(build_answers(chat, prompts, SETTINGS, tmp_path / "server", checked))
    assert theirs == ours and len(ours) == 8
    assert 1 < server.asked()["at_once"] <= 3
    report = report_of(tmp_path / "server")
    assert report == {
        "answers": 8,
        "prompt_tokens": sum(row["loss_mask"].count(0) for row in ours),
        "answer_tokens": sum(row["loss_mask"].count(1) for row in ours),
        "retokenised": report["retokenised"],
        "prompt": 0,
        "answer": 0,
        "empty": 0,
        "dropped": 0,
    }
    asked = server.asked()["asked"]
    assert asked == 8 + 2
    assert rows_of(build_answers(chat, prompts, SETTINGS, tmp_path / "server", checked)) == ours
    assert server.asked()["asked"] == asked


def test_sampled_answers_are_seeded_by_prompt(target: Target, how: OpenAIGenerator, tmp_path: Path) -> None:
    """The server is our engine, so that equal seeds give equal answers whatever the order of requests."""
    sampled = replace(SETTINGS, temperature=1.0, top_p=0.9)
    ours = rows_of(build_answers(target, PROMPTS, sampled, tmp_path / "engine"))
    assert rows_of(build_answers(target, PROMPTS, sampled, tmp_path / "server", how)) == ours
    greedy = rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "engine"))
    assert greedy != ours


@pytest.mark.parametrize(
    "failures",
    [
        [{"status": 500}, {"status": 503}, {"cut": True}, {"status": 429, "retry_after": 0.05}] * 2,
        [{}, {}, {"die_s": 0.3}],
    ],
    ids=["errors", "dies and comes back"],
)
def test_what_fails_for_a_while_is_asked_again(
    target: Target, how: OpenAIGenerator, server: Served, tmp_path: Path, failures: list[dict]
) -> None:
    server.fail(*failures)
    ours = rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "engine"))
    assert rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "server", how)) == ours
    if "die_s" not in failures[-1]:
        assert server.asked()["asked"] == len(PROMPTS) + len(failures)


def test_a_server_that_stays_away_costs_nothing_finished(
    target: Target, how: OpenAIGenerator, server: Served, tmp_path: Path
) -> None:
    one = replace(how, concurrency=1, retries=2)
    server.fail({}, {}, *[{"status": 502}] * 3)
    with pytest.raises(UserError, match=r"failed 3 times in a row, at last so: 502 told to fail: 502.*is kept"):
        build_answers(target, PROMPTS, SETTINGS, tmp_path / "server", one)
    ours = rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "engine"))
    server.fail()
    assert rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "server", one)) == ours
    assert server.asked()["asked"] == len(PROMPTS) - 2


def test_a_refusal_is_said_at_once_in_the_servers_words(
    target: Target, how: OpenAIGenerator, server: Served, tmp_path: Path
) -> None:
    server.fail({"status": 400})
    with pytest.raises(UserError, match=r"refuses completions: 400 told to fail: 400"):
        build_answers(target, PROMPTS[:1], SETTINGS, tmp_path, how)
    assert server.asked()["asked"] == 1
    with pytest.raises(UserError, match=r"serves tiny-float64: no model 'other'"):
        build_answers(target, PROMPTS[:1], SETTINGS, tmp_path, replace(how, model="other"))


def test_tokens_that_differ_from_ours_are_counted_and_dropped_or_kept(
    target: Target, how: OpenAIGenerator, server: Served, tmp_path: Path
) -> None:
    ours = rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "engine"))
    one = replace(how, concurrency=1)  # shortest prompts first
    order = sorted(ours, key=lambda row: (row["loss_mask"].index(1), row["prompt_id"]))
    lies = [{"lie": {"prompt_tokens": 99}}, {}, {"lie": {"completion_tokens": 1}}]
    for differing, left in (("drop", ours_without(ours, order[0], order[2])), ("keep", ours)):
        server.fail(*lies)
        root = tmp_path / differing
        assert rows_of(build_answers(target, PROMPTS, SETTINGS, root, replace(one, differing=differing))) == left
        report = report_of(root)
        assert (report["prompt"], report["answer"], report["dropped"]) == (1, 1, len(ours) - len(left))
    assert "dropped" in json.dumps(report)


def ours_without(rows: list[dict], *others: dict) -> list[dict]:
    return [row for row in rows if row not in others]


def test_without_token_ids_the_text_is_tokenised_again_and_its_length_compared(
    target: Target, how: OpenAIGenerator, server: Served, tmp_path: Path
) -> None:
    """An answer that our tokeniser cuts otherwise than the target wrote it is found by the server's count."""
    ours = rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "engine"))
    plain = replace(how, extensions=False, prompts="text", differing="keep")
    theirs = rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "server", plain))
    told = {"same": 0, "other": 0}
    for row, true in zip(theirs, ours, strict=True):
        start = true["loss_mask"].index(1)
        answer = true["token_ids"][start:]
        ended = answer[-1] in target.stop_token_ids
        again = target.encode(target.decode(answer)) + answer[-1:] * ended
        assert row["token_ids"] == true["token_ids"][:start] + again
        told["same" if len(again) == len(answer) else "other"] += 1
    report = report_of(tmp_path / "server")
    assert report["answer"] == told["other"] and report["retokenised"] == report["prompt"] == 0


def test_ids_that_the_server_told_are_kept_where_their_text_has_others(
    target: Target, how: OpenAIGenerator, server: Served, tmp_path: Path
) -> None:
    """A prompt that ends within a word makes answers which are never tokenised so again."""
    prompts = [Prompt((text,), continuation=True) for text in ("impor", "retur", "sel", "clas", "excep", "lambd")]
    settings = replace(SETTINGS, temperature=1.5, max_new_tokens=24)
    ours = rows_of(build_answers(target, prompts, settings, tmp_path / "engine"))
    again = sum(
        target.encode(target.decode(answer)) != (answer[:-1] if answer[-1] in target.stop_token_ids else answer)
        for row in ours
        for answer in [row["token_ids"][row["loss_mask"].index(1) :]]
    )
    assert again > 0
    assert rows_of(build_answers(target, prompts, settings, tmp_path / "server", how)) == ours
    report = report_of(tmp_path / "server")
    assert (report["retokenised"], report["dropped"]) == (again, 0)


def test_a_server_of_another_model_is_found_before_the_long_work(
    how: OpenAIGenerator, server: Served, tmp_path: Path
) -> None:
    other = load_target("tiny", dtype="float64", device="cpu")
    other.head.linear.weight.data = other.head.linear.weight.data.roll(7, 0)
    with pytest.raises(UserError, match=r"says other things than the target 'tiny': \d+ of 64 greedy tokens"):
        build_answers(other, PROMPTS, SETTINGS, tmp_path, replace(how, check_prompts=4))
    assert server.asked()["asked"] == 4
    assert not list(tmp_path.glob("*/dataset"))


def test_waits_double_up_to_the_longest_and_heed_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    monkeypatch.setattr("random.uniform", lambda low, high: high)
    client = Client("http://127.0.0.1:9/v1", retries=5, first_wait_s=1.0, longest_wait_s=6.0, stopping=Stopping())
    failures = iter([0.0, 7.0, 0.0, 0.0, 0.0, 0.0])

    def once(self: Client, method: str, path: str, body: bytes | None) -> dict:
        raise completions._Passing("told to", next(failures))

    monkeypatch.setattr(Client, "_once", once)
    with pytest.raises(UserError, match="failed 6 times"):
        client.get("models")
    assert waited == [1.5, 7.0, 6.0, 9.0, 9.0]


@pytest.mark.parametrize(
    ("told", "wait_s"),
    [(None, 0.0), ("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("inf", 0.0), ("soon", 0.0)],
)
def test_retry_after_is_seconds(told: str | None, wait_s: float) -> None:
    assert completions._retry_after_s(told) == wait_s


def test_retry_after_may_be_a_date() -> None:
    in_a_minute = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))
    assert 55 < completions._retry_after_s(in_a_minute) <= 60


def test_a_silent_server_is_given_up_on_in_time(how: OpenAIGenerator, server: Served) -> None:
    server.fail({"silent_s": 3.0})
    started = time.monotonic()
    with pytest.raises(UserError, match=r"no answer in 0\.3 s"):
        Client(server.url, timeout_s=0.3, retries=0).post("completions", {})
    assert time.monotonic() - started < 2.5


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"base_url": "localhost:8000"}, "no address of a server"),
        ({"prompts": "words"}, "data.generator.prompts is 'words': choose token_ids or text"),
        ({"differing": "mend"}, "data.generator.differing is 'mend': choose drop or keep"),
        ({"concurrency": 0}, "data.generator.concurrency is 0: it must be at least 1"),
        ({"timeout_s": 0.0}, r"data.generator.timeout_s is 0.0: it must be above 0"),
    ],
)
def test_senseless_settings_are_refused(wrong: dict, what: str) -> None:
    with pytest.raises(UserError, match=what):
        OpenAIGenerator(**{"base_url": "http://127.0.0.1:8000/v1", **wrong})


@pytest.mark.slow
def test_vllm_says_what_the_engine_says(tmp_path: Path) -> None:
    """Set DRAFTSMITH_VLLM_PYTHON to the interpreter of vLLM's own environment (make vllm-env)."""
    python = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    if not python:
        pytest.skip("DRAFTSMITH_VLLM_PYTHON is not set")
    port, folder = free_port(), ROOT / "models" / "target" / "tiny"
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | settings
    target = load_target("tiny", device="cpu")
    ours = rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "engine"))
    how = OpenAIGenerator(f"http://127.0.0.1:{port}/v1", concurrency=4, retries=60, first_wait_s=1.0, longest_wait_s=5)
    with (
        (tmp_path / "vllm.log").open("w") as log,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            theirs = rows_of(build_answers(target, PROMPTS, SETTINGS, tmp_path / "server", how))
        finally:
            process.terminate()
    assert theirs == ours
    report = report_of(tmp_path / "server")
    assert (report["prompt"], report["answer"], report["empty"], report["dropped"]) == (0, 0, 0, 0)
