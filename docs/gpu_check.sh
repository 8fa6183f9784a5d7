#!/usr/bin/env bash
# What to measure on a new GPU: eight minutes on one card, every part capped. The same command again does what is missing.
#
#   bash docs/gpu_check.sh OUT         results in OUT: one .txt a part, and .json where the part writes numbers
#   DRY=1 bash docs/gpu_check.sh OUT   every command once on the CPU, at tiny sizes
#
# PEAK: the card's dense bf16 rate in TFLOP/s (989 of H100 and H200, 312 of A100). XL_BATCH: images of an XL/2 step, 64
# for 80 GB. PYTHON: the interpreter, with the project's dependencies.
set -u
OUT=$(realpath -m "${1:?usage: bash docs/gpu_check.sh OUT}")
cd "$(dirname "$0")/.." || exit
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PYTHON=${PYTHON:-python} PEAK=${PEAK:-989}
failed=""

# part NAME SECONDS COMMAND...: run a command once, at most that long.
part() {
  local name=$1 seconds=$2 code
  shift 2
  [ "${DRY:-0}" = 1 ] && seconds=300
  if [ -e "$OUT/$name.txt" ]; then echo "== $name: done"; return; fi
  echo "== $name ($(date +%T), at most $seconds s): $*"
  timeout -k 5 "$seconds" "$@" 2>&1 | tee "$OUT/$name.part"
  code=${PIPESTATUS[0]}
  if [ "$code" = 0 ]; then mv "$OUT/$name.part" "$OUT/$name.txt"; else failed+=" $name"; echo "== $name: FAILED, exit code $code"; fi
}
vcagen() { part "$1" "$2" "$PYTHON" -m vcagen "${@:3}"; }
bench() { vcagen "$1" "$2" bench "${@:3}" --json "$OUT/$1.json"; }
tests() { part "$1" "$2" "$PYTHON" -m pytest -q -p no:cacheprovider "${@:3}"; }

if [ "${DRY:-0}" = 1 ]; then
  export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  attention=(--tokens "[16]" --contrast_side 2 --batch_tokens 32 --seconds 0.01 --modes "[eager]" --parts "[attend]")
  s=(--sizes "[S/8]" --attentions "[vca]" --batch 1 --seconds 0.01) xl=("${s[@]}") compiled=eager
  sample=(--size S/8 --image_size 64 --batch 1 --num_steps 1 --repeats 1)
  vae=(--device cpu --image_size 64 --repeats 1 --items 16 --read_batch 4 --num_workers 0 --seconds 0.1)
  kernels=(--compile_only true --capabilities "[90]")
  digits=(--train.steps 2 --train.batch_size 4 --checkpoint.save_every 2 --log.preview_every 0)
  images=(--num_images 4 --num_steps 2 --batch 4)
  fused=("float32=one token") fast=(tests/test_attention.py -k grid)
else
  attention=(--device cuda --tokens "[256,1024,4096]" --precisions "[bfloat16]" --seconds 0.5 --modes "[compiled]")
  attention+=(--parts "[attend]")
  s=(--sizes "[S/2]" --precisions "[bf16]" --batch 256 --seconds 10 --peak_tflops "$PEAK") compiled=compiled
  xl=(--sizes "[XL/2]" --precisions "[bf16]" --batch "${XL_BATCH:-64}" --seconds 10 --peak_tflops "$PEAK")
  sample=(--size S/2 --attention vca --num_images 128 --batch 128 --repeats 1 --precision bf16)
  vae=(--device cuda --batch 16 --items 2000 --num_workers 0 --seconds 1)
  kernels=(--seconds 1) digits=() images=()
  export FUSED_DEVICE=cuda
  fused=("float32=S;XL;odd;class token;two blocks of columns" "half=S;XL" repeats zero_weights)
  fast=(--device cuda tests/test_attention.py tests/test_dit.py tests/test_diffusion.py tests/test_flow.py)
  fast+=(tests/test_samplers.py tests/test_trainer.py)
  part machine 10 nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit,memory.total --format=csv
fi

part correctness 40 "$PYTHON" tests/fused_kernels.py "${fused[@]}"
bench kernels_s 40 kernels "${kernels[@]}" --head_dims "[64]" --num_heads 6
bench kernels_b 40 kernels "${kernels[@]}" --head_dims "[64]" --num_heads 12
bench kernels_xl 40 kernels "${kernels[@]}" --head_dims "[72]" --num_heads 16
bench attention_s 30 attention "${attention[@]}" --widths "[384]"
bench attention_xl 30 attention "${attention[@]}" --widths "[1152]" --head_width 72
bench train_s 25 train "${s[@]}"
bench train_s_compiled 75 train "${s[@]}" --modes "[$compiled]"
bench train_xl 40 train "${xl[@]}"
bench sample 30 sample "${sample[@]}"
bench vae 20 vae "${vae[@]}"
vcagen digits 25 train --config configs/quickstart.yaml --run_dir "$OUT/digits" "${digits[@]}"
vcagen digits_images 15 sample --run_dir "$OUT/digits" "${images[@]}"
tests fast_tests 25 "${fast[@]}"

if [ -n "$failed" ]; then echo "== not done:$failed"; exit 1; fi
echo "== all done"
