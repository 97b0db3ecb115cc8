"""Multi-token prediction under MiMo's names, for targets of Qwen2's shape: vLLM loads it, {"method": "mtp"}.

model.mtp_layers.0.{token_layernorm,hidden_layernorm,input_proj,final_layernorm} and the layer's own, with biases of
queries, keys and values, which are zeros here. The projection reads [state; emb], and the state is the target's as it
enters the final norm: vLLM's MiMo hands it over so.
"""

from __future__ import annotations

from models.checkpoint import mtp, snippets
from models.checkpoint.mtp import Spelling

_SPELLING = Spelling(
    name="mimo_mtp",
    prefix=lambda config: "model.mtp_layers.0.",
    parts={
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    },
    layer="",
    hides_first=True,
    before_norm=True,
    state_first=True,
    biased=True,
    model_types=("qwen2",),
    config={"architectures": ["MiMoForCausalLM"]},  # and the model type stays qwen2: transformers knows no mimo
)
TAKES = mtp.TAKES
USE = snippets.inside_the_target(snippets.VLLM_MTP)
WHOLE_VOCABULARY = True

save, read, load, recognises = mtp.functions(_SPELLING)
