"""Runs vLLM on prompts of token ids, in the interpreter of its own virtual environment.

    .venv-vllm/bin/python eval/vllm_worker.py REQUEST.json ANSWER.json

The request names a model's folder, vLLM's speculative_config, and the answers that are wanted, all of which are asked
for at once. Each answer comes with its own counts of drafts; their sums are what the engine's counters grew by. See
`eval.engines.vllm_runner`, which writes the request.

It imports nothing of ours, but for a custom proposer: then the request's `packages` says where that is found.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says, on whichever core is free
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
os.environ |= SETTINGS | {key: os.environ[key] for key in SETTINGS if key in os.environ}
PREFIX = "vllm:spec_decode_num_"


def main(request_path: str, answer_path: str) -> None:
    with open(request_path) as file:
        request = json.load(file)
    import torch
    import transformers
    import vllm

    if request["packages"] is not None:
        sys.path.append(request["packages"])
    if request["sampling_fix"]:
        repair_sampling()
    llm = vllm.LLM(
        request["model"],
        dtype="float32",
        max_model_len=request["max_model_len"],
        max_num_seqs=request["batch_size"],
        max_num_batched_tokens=max(2048, request["max_model_len"]),
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config=request["speculative_config"],
        additional_config=request["additional_config"],
    )
    params = [
        vllm.SamplingParams(
            temperature=wanted["temperature"],
            seed=wanted["seed"],
            max_tokens=request["max_new_tokens"],
            stop_token_ids=request["stop_token_ids"],
            ignore_eos=True,
            detokenize=False,
        )
        for wanted in request["answers"]
    ]
    prompts = [{"prompt_token_ids": wanted["prompt"]} for wanted in request["answers"]]
    before = counters(llm)
    outputs = llm.generate(prompts, params, use_tqdm=True)
    after = counters(llm)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    answer = {
        "versions": versions,
        "answers": [counted(output.outputs[0]) for output in outputs],
        "counters": {name: after[name] - before[name] for name in after},
    }
    with open(answer_path, "w") as file:
        json.dump(answer, file)


def counted(completion: Any) -> dict[str, Any]:
    """An answer's tokens, how many drafts had 0, 1, .. tokens accepted, and how many were drafted.

    Accepted tokens by round are for whoever looks into a difference.
    """
    metrics = completion.spec_decode_metrics
    return {
        "token_ids": list(completion.token_ids),
        "histogram": list(metrics.histogram),
        "drafted": metrics.num_draft_tokens,
        "accepted_by_round": list(metrics.per_step_accepted),
    }


def counters(llm: Any) -> dict[str, int]:
    """Drafts, drafted and accepted tokens since the engine started."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith(PREFIX)}
    names = {"drafts": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens"}
    return {key: int(found[PREFIX + name].value) if PREFIX + name in found else 0 for key, name in names.items()}


def repair_sampling() -> None:
    """Put what a CPU build of 0.32 leaves out in place: each request's value, once for each of its drafted tokens.

    Its `expand_batch_to_tokens` throws the result of an expand away (vllm#55005), so that drafts are checked against
    laws of other rows. At temperature 0 nothing is expanded.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        values = x.where(x != replace_from, x.new_tensor(replace_to)) if replace_from != replace_to else x
        return values.repeat_interleave(counts)

    rejection_sampler.expand_batch_to_tokens = expand


if __name__ == "__main__":
    main(*sys.argv[1:])
