"""Multi-token prediction under Qwen3-Next's names, whose norms multiply by 1 + weight.

mtp.{fc,norm,pre_fc_norm_hidden,pre_fc_norm_embedding} and mtp.layers.0. Ours is of Llama's shape, so that Qwen3-Next's
own loaders, which gate the attention and make experts, do not take it.
"""

from __future__ import annotations

from models.checkpoint import mtp, snippets
from models.checkpoint.mtp import Spelling

_SPELLING = Spelling(
    name="qwen3_next_mtp",
    prefix=lambda config: "mtp.",
    parts={
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "eh_proj.weight": "fc.weight",
        "norm.weight": "norm.weight",
    },
    layer="layers.0.",
    hides_first=False,
    centred_norms=True,
)
TAKES = mtp.TAKES
USE = snippets.inside_the_target("No engine that we know runs a layer of Llama's shape under these names.")
WHOLE_VOCABULARY = True

save, read, load, recognises = mtp.functions(_SPELLING)
