#!/usr/bin/env bash
# A GPT of about 85 million parameters in bf16, tensor parallel over GPUS (2) GPUs. Further arguments are Megatron-LM's.
#   MEGATRON_LM=<patched checkout> DATA=<prefix of an indexed data set> ./pretrain_gpu.sh --save checkpoints
set -euo pipefail
: "${MEGATRON_LM:?expected a checkout of Megatron-LM, patched by patches/apply.py}"
: "${DATA:?expected the prefix of an indexed data set, as tools/preprocess_data.py writes it}"

export CUDA_DEVICE_MAX_CONNECTIONS=1

exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "${GPUS:=2}" "$MEGATRON_LM/pretrain_gpt.py" \
    --num-layers 12 \
    --hidden-size 768 \
    --num-attention-heads 12 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --position-embedding-type rope \
    --micro-batch-size 8 \
    --global-batch-size 64 \
    --train-iters 1000 \
    --lr 3e-4 \
    --min-lr 3e-5 \
    --lr-warmup-iters 50 \
    --bf16 \
    --data-path "$DATA" \
    --split 90,10,0 \
    --tokenizer-type NullTokenizer \
    --vocab-size 256 \
    --log-interval 10 \
    --eval-interval 500 \
    --eval-iters 10 \
    --tensor-model-parallel-size "$GPUS" \
    --sequence-parallel \
    --entropy-aware-output-layer \
    --entropy-metrics varentropy max_prob \
    "$@"
