#!/usr/bin/env bash
# Train under SLURM, one task for each GPU:
#   sbatch scripts/slurm.sh +drafter=eagle3 trainer=ddp run_name=NAME
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 scripts/slurm.sh ...
# Submit it from the project's folder, which all nodes see, like output_root and data.folder. Shortly before its time is
# over the job puts itself back into the queue, and then goes on where its last checkpoint is (fit.checkpoint_every).
#SBATCH --job-name=draftsmith
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
srun --kill-on-bad-exit=1 python train/run.py "$@" \
    trainer.devices="$SLURM_NTASKS_PER_NODE" trainer.num_nodes="$SLURM_NNODES" &
wait $!
