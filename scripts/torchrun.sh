#!/usr/bin/env bash
# Train in several processes that torchrun starts, on one node or on several: the same line on each.
#   scripts/torchrun.sh +drafter=eagle3 trainer=ddp
#   NODES=2 NODE=0 MAIN=10.0.0.1 scripts/torchrun.sh +drafter=eagle3 trainer=ddp     # and with NODE=1 on the other
# PROCESSES   of a node: one for each GPU, or 1 without any
# NODES NODE  how many nodes, and which this is, from 0
# MAIN PORT   address of node 0 and a free port there
# All nodes see the same output_root and data.folder. Started again, training goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
processes=${PROCESSES:-$((gpus > 0 ? gpus : 1))}
nodes=${NODES:-1}
meet=(--standalone)
if [ "$nodes" -gt 1 ]; then
    meet=(--nnodes "$nodes" --node-rank "${NODE:?which node is this, from 0?}" \
        --master-addr "${MAIN:?the address of node 0}" --master-port "${PORT:-29500}")
fi
exec python -m torch.distributed.run "${meet[@]}" --nproc-per-node "$processes" \
    train/run.py "$@" trainer.devices="$processes" trainer.num_nodes="$nodes"
