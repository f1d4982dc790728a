#!/usr/bin/env bash
# A run on several machines under Slurm that continues after a time limit, a preemption or a node failure:
#   sbatch examples/slurm.sh owt                                   a preset, options of "bellmask train" after it
#   RUN=/shared/owt sbatch --nodes 4 examples/slurm.sh owt --train.microbatch-size 16
# The run folder and $BELLMASK_CACHE must be on a file system that all machines share.
#SBATCH --job-name=bellmask
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
# ^ this script gets SIGTERM 300 seconds before the end: enough for a step and a save
set -euo pipefail

PRESET=${1:?usage: sbatch examples/slurm.sh PRESET [options of bellmask train]}
shift
RUN=${RUN:-runs/$PRESET}
PROCESSES=${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}   # per machine
RESTARTS=${RESTARTS:-3}                             # of dead workers, before the job itself is requeued
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)

newest() { cat "$RUN/checkpoints/latest" 2> /dev/null || true; }
BEFORE=$(newest)

# each restart gets a new store: agents on several machines count restarts separately, so a prefix by
# that number (as bellmask uses on one machine) would differ between machines
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$PROCESSES" --max-restarts "$RESTARTS" \
    --shutdown-timeout 240 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -m bellmask train "$PRESET" --out "$RUN" --resume auto --checkpoint.every "30 minutes" "$@" &
STEP=$!
# to the tasks, not to srun, which would end them at once
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM INT
code=0
wait $STEP || code=$?
while kill -0 $STEP 2> /dev/null; do   # a trap interrupts wait: let the save end
    code=0
    wait $STEP || code=$?
done

# torchrun exits with 1 whatever ended the run early; the run folder says what is to be done
if [ -e "$RUN/FAILED" ]; then
    echo "failed, and would fail again:" && cat "$RUN/FAILED"
    exit 1
elif [ -e "$RUN/RESUME_ME" ]; then
    cat "$RUN/RESUME_ME"
    if [ "$(newest)" = "$BEFORE" ] && [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ]; then
        echo "requeued before, and still no new checkpoint: giving up" && exit 1
    fi
    scontrol requeue "$SLURM_JOB_ID"
else
    exit "$code"
fi
