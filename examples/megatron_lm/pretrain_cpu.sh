#!/usr/bin/env bash
# The tiny GPT of tiny_cpu.args on two tensor-parallel ranks of the CPU, in fp32. Further arguments are Megatron-LM's.
#   MEGATRON_LM=<patched checkout> DATA=<prefix of an indexed data set> ./pretrain_cpu.sh --train-iters 100
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${MEGATRON_LM:?expected a checkout of Megatron-LM, patched by patches/apply.py}"
: "${DATA:?expected the prefix of an indexed data set, as tools/preprocess_data.py writes it}"

export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
export TORCHDYNAMO_DISABLE=1 # compiling takes longer than the whole run

# The file holds one argument and its value a line: word splitting is what is wanted.
# shellcheck disable=SC2046
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$here/run_on_cpu.py" "$MEGATRON_LM/pretrain_gpt.py" $(<"$here/tiny_cpu.args") \
    --data-path "$DATA" \
    --tensor-model-parallel-size 2 \
    --sequence-parallel \
    --entropy-aware-output-layer \
    --entropy-metrics varentropy max_prob \
    "$@"
