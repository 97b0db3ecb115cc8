"""Multi-token prediction under DeepSeek's names, as layer L = num_hidden_layers of the target (2412.19437).

model.layers.{L}.{enorm,hnorm,eh_proj,shared_head.norm,shared_head.head} and the layer's own. Ours is of Llama's shape,
so that DeepSeek's own loaders, which make latent attention and experts of it, do not take it.
"""

from __future__ import annotations

from models.checkpoint import mtp, snippets
from models.checkpoint.mtp import Spelling

_SPELLING = Spelling(
    name="deepseek_mtp",
    prefix=lambda config: f"model.layers.{config['num_hidden_layers']}.",
    parts={
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "eh_proj.weight",
        "norm.weight": "shared_head.norm.weight",
    },
    layer="",
    hides_first=True,
    with_head="shared_head.head.weight",
)
TAKES = mtp.TAKES
USE = snippets.inside_the_target("No engine that we know runs a layer of Llama's shape under these names.")
WHOLE_VOCABULARY = True

save, read, load, recognises = mtp.functions(_SPELLING)
