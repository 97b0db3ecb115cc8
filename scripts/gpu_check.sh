#!/usr/bin/env bash
# What only a GPU can show, in less than eight minutes on one: EAGLE-3 for the bundled target, trained with DeepSpeed and
# with FSDP in bf16, exported, and decoded with CUDA, every answer compared with plain decoding.
#   scripts/gpu_check.sh [FOLDER]      outputs/gpu_check by default; a finished part is not run again
# Ends with 3 where there is no CUDA device, so that nothing was checked.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-outputs/gpu_check}
if ! python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "gpu_check: torch finds no CUDA device: nothing was checked."
    exit 3
fi
small=(+drafter=eagle3 draft_vocab_size=512 trainer.devices=1 "output_root=$folder"
    data.sizes.train=128 data.sizes.validation=8 data.sizes.test=8
    fit.max_steps=100 fit.evaluate_every=50 fit.validation_prompts=8 measure.num_prompts=8 'measure.temperatures=[0]')
for trainer in deepspeed fsdp; do
    echo "== trainer=$trainer, bf16, CUDA"
    timeout 180 python train/run.py "${small[@]}" trainer="$trainer" run_name="$trainer"
done
echo "== the exports, decoded with CUDA"
timeout 100 python eval/acceptance.py "export=[$folder/deepspeed/export,$folder/fsdp/export]" "output=$folder/measured" \
    target.device=cuda num_prompts=8
echo "gpu_check: done, see $folder"
