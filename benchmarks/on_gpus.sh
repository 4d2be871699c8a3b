#!/usr/bin/env bash
# The tests and benchmarks that need GPUs, in parts, for a machine with torch and transformers that reaches no registry.
#
#   benchmarks/on_gpus.sh wheels                where there is a registry: into .whl what that machine lacks
#   OUT=results benchmarks/on_gpus.sh PART...   there, in a copy of this checkout with .whl and ds_hf/engine/ops/_lib
#
# Parts, GPUs and minutes on H100 or H200:
#   prepare 0, 1    installs, and builds DeepSpeed's kernels (BUILD="CPUAdam" for some, BUILD= for none); other parts do
#                   the first too, but not twice at once
#   kernels 1, 3    tests of the CUDA kernels; optimizers at 1 M and 500 M elements
#   tests 1 or 2, 8 tests/gpu but for those of the kernels and of four GPUs
#   suite 1, 3      the tests for CPUs with that machine's torch, 2.11, and its CPU, of other products of bf16; those
#                   that ask for TRL, datasets, scikit-build-core or ruff, which it lacks, fail
#   slow 1, 20      the slow ones for CPUs, in the same way; names are printed as they end
#   four 4, 8       the latter; beside others on the same GPUs they run into their time limits
#   training 2, 9   benchmarks/training.py, the rows of docs/measurements.md; ROWS="3 7" for some of them
#   captured 2, 5   small steps, with blocks in CUDA graphs and without, and with batches of many lengths
#   data 1, 1       fewer tokens in the middle blocks, fewer blocks
#   offload 1, 8    2.7 B with its states in host memory
#   offload2 2, 4   1.35 B on two GPUs
#   memory 1, 3     predicted and measured
#   long 1 or 2, 12 long sequences: activations in host memory, tiles, chunked losses; on two GPUs shared sequences
#   tensor 2, 8     layers shared by two GPUs, 1.35 B and 6.7 B, against AutoTP and transformers' plan
#   host 1, 3       microseconds a module and pass
#   profile 2, 1    where the time of a step goes
#   masters 2, 2    6.7 B with split masters and whole ones, in turns, and where the time of both goes
#   autotune 2, 8   a search and its result, against the user's file and real DeepSpeed
#   many 4 or 8, 20 8 B, in fp8, LoRA; experts; two hosts; the scaling curve; layers, sequences, pipelines on all GPUs.
#                   Rows whose file lies in $OUT or DONE are passed over; ONLY=8b for those whose name begins so
#
# Each part says how it ended; a part that fails does not keep the others from running. Figures: $OUT/*.json.
set -uo pipefail
cd "$(dirname "$0")/.."

OWN="optuna colorlog alembic Mako SQLAlchemy greenlet jsonschema jsonschema-specifications referencing rpds-py attrs
  typer annotated-doc rich plotly narwhals wrapt click shellingham Pygments markdown-it-py mdurl psutil peft
  hypothesis sortedcontainers pytest-xdist pytest-timeout execnet liger-kernel"
DEEPSPEED="deepspeed hjson pydantic pydantic-core annotated-types typing-inspection py-cpuinfo msgpack einops ninja"
BESIDE=/tmp/ds_hf-deepspeed # real DeepSpeed, put in front of PYTHONPATH only where it is a contender
WITH=(--deepspeed-path "$BESIDE")

wheels() {
  local pip=".venv/bin/python -m pip -q"
  mkdir -p .whl
  # shellcheck disable=SC2086
  $pip download -d .whl --python-version 3.12 --only-binary=:all: --no-deps $OWN hjson msgpack einops py-cpuinfo ninja &&
    $pip download -d .whl --python-version 3.12 --only-binary=:all: pydantic &&
    DS_BUILD_OPS=0 $pip wheel -w .whl --no-deps --no-build-isolation deepspeed==0.19.8 &&
    rm -f .whl/ds_hf* && $pip wheel -w .whl --no-deps --no-build-isolation . && ls .whl
}

prepare() {
  local pip="python3 -m pip -q install --no-index --find-links .whl --no-deps"
  # shellcheck disable=SC2086
  [[ -d $BESIDE ]] || { $pip $OWN ds_hf && $pip --target "$BESIDE" $DEEPSPEED; } || exit 1
  export PYTHONPATH="$PWD:$PWD/ds_hf/compat" TORCH_CUDA_ARCH_LIST=9.0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
  mkdir -p "${OUT:=results}"
}

build_deepspeed() {
  PYTHONPATH="$BESIDE:$PYTHONPATH" python3 -c "
from deepspeed.ops import op_builder as ops
for name in '${BUILD-FusedAdam FusedLamb FusedLion CPUAdam}'.split():
    getattr(ops, name + 'Builder')().load(verbose=False)" > /dev/null
}

two() { OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 "$@"; }

kernels() {
  python3 -m pytest -q -n 8 -m "" --timeout 300 tests/gpu/test_ops_cuda.py
  python3 benchmarks/optimizers.py --device cuda --numel 1000000 --json "$OUT/optimizers-1m.json"
  python3 benchmarks/optimizers.py --device cuda --numel 500000000 --rounds 5 --deepspeed "$(command -v python3)" "${WITH[@]}" --json "$OUT/optimizers-500m.json"
  python3 benchmarks/cuda_tunings.py lamb_stream --vary held=3,4 --numel 1000000 --json "$OUT/tunings.json"
}

tests() {
  # What measures times runs alone; long sequences fill a GPU. Names are printed as they end, for a part that is cut off.
  local test=(python3 -m pytest -v -W ignore -m "" --timeout 150 -ra --tb short -p no:benchmark)
  local timed="test_report or test_blocks or beside_computation or the_link_is or copies_of_others or does_not_wait"
  local large=(tests/gpu/test_long_context.py tests/gpu/test_memory.py tests/gpu/test_offload_ways.py)
  "${test[@]}" -n 14 -k "not ($timed)" tests/gpu --ignore tests/gpu/test_ops_cuda.py --ignore tests/gpu/test_four.py \
    "${large[@]/#/--ignore=}" &
  "${test[@]}" -n 3 -k "not ($timed)" "${large[@]}"
  wait $!
  "${test[@]}" -k "$timed" tests/gpu
}

suite() {
  python3 -m pytest -q -W ignore -m "not slow and not gpu" --timeout 200 -rfE --tb short -p no:benchmark -n logical \
    --continue-on-collection-errors --ignore tests/gpu tests
}

slow() {
  python3 -m pytest -v -W ignore -m "slow and not gpu" --timeout 300 -rfE --tb short -p no:benchmark -n logical \
    --continue-on-collection-errors --ignore tests/gpu tests
}

four() { python3 -m pytest -v -W ignore -m "" --timeout 150 -ra --tb short -p no:benchmark -n 3 tests/gpu/test_four.py; }

training() {
  local rows=(
    "1b3 4 2048 2" "1b3 4 2048 3" "1b3 4 2048 2 --accumulation 4" "1b3 4 2048 3 --accumulation 4"
    "1b3 4 2048 2 --compile" "1b3 4 2048 3 --compile" "0b37 1 512 2" "0b37 1 512 3" "6b7 2 2048 3 --checkpointing"
    "1b3 4 2048 1"
  )
  local number model batch length stage more
  for number in ${ROWS:-$(seq ${#rows[@]})}; do
    read -r model batch length stage more <<<"${rows[number - 1]}"
    # DeepSpeed last: destroyed, it keeps memory that would be counted as the next one's.
    # shellcheck disable=SC2086
    two benchmarks/training.py --model "$model" --micro-batch "$batch" --seq "$length" --stage "$stage" $more \
      --engines ds_hf,fsdp2,floor,deepspeed "${WITH[@]}" --rounds 1 --json "$OUT/training-$number.json"
  done
}

captured() {
  local row
  for row in "0b37 2" "0b37 3" "1b3 2 --lora 16"; do
    read -r model stage more <<<"$row"
    # shellcheck disable=SC2086
    two benchmarks/training.py --model "$model" --micro-batch 1 --seq 512 --stage "$stage" $more --rounds 2 --steps 32 \
      --engines ds_hf,ds_hf-captured,fsdp2,floor --json "$OUT/captured-$model-$stage.json"
  done
  two benchmarks/training.py --model 0b37 --micro-batch 1 --seq 512 --shortest 64 --stage 2 --rounds 1 --steps 48 --warmup 64 \
    --side-by-side --engines ds_hf,ds_hf-padded,floor --json "$OUT/captured-lengths.json"
}

data() {
  python3 benchmarks/data.py --json "$OUT/data.json"
}

offload() {
  local common=(--model 2b7 --stage 2 --micro-batch 4 --seq 2048 --checkpointing --rounds 1)
  python3 benchmarks/offload.py "${common[@]}" --json "$OUT/offload.json" \
    --engines ds_hf+none,ds_hf+auto,ds_hf,ds_hf+stream=auto,torchao,fsdp2,floor
  python3 benchmarks/offload.py "${common[@]}" "${WITH[@]}" --engines deepspeed --json "$OUT/offload-deepspeed.json"
  python3 benchmarks/step_profile.py "${common[@]}" --engines ds_hf+stream=auto |
    tee "$OUT/offload-profile.txt"
}

offload2() {
  two benchmarks/offload.py --model 1b3 --stage 2 --micro-batch 4 --seq 2048 --rounds 1 "${WITH[@]}" \
    --engines ds_hf+none,ds_hf+auto,ds_hf,ds_hf+stream=auto,fsdp2,deepspeed --json "$OUT/offload2.json"
  two benchmarks/step_profile.py --model 1b3 --stage 2 --micro-batch 4 --seq 2048 --engines ds_hf+stream=auto |
    tee "$OUT/offload2-profile.txt"
}

memory() { python3 benchmarks/memory_prediction.py --budget 150 --json "$OUT/memory.json"; }

long() {
  local script=benchmarks/long_context.py
  if [[ $(nvidia-smi -L | wc -l) -gt 1 ]]; then two $script --parts sp --json "$OUT/long-sp.json"; return; fi
  python3 $script --parts peak,budget,offload "${WITH[@]}" --json "$OUT/long.json"
  python3 $script --parts longest --lengths "${LENGTHS:-32768,65536,131072,262144}" "${WITH[@]}" --json "$OUT/longest.json"
}

tensor() {
  local script=benchmarks/tensor_parallel.py all=ds_hf,deepspeed,transformers,half
  two $script --part step --model 1b3 --micro-batch 8 --seq 2048 --engines $all "${WITH[@]}" --json "$OUT/tensor-1b3.json"
  # DeepSpeed needs nearly all of 80 GB for 6.7 B, in one piece.
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True two $script --part step --model 6b7 --micro-batch 2 --seq 2048 \
    --checkpointing --engines ds_hf,transformers,deepspeed "${WITH[@]}" --json "$OUT/tensor-6b7.json"
  two $script --part step --tied --model 1b3 --micro-batch 8 --seq 2048 --engines ds_hf,divided,deepspeed "${WITH[@]}" \
    --json "$OUT/tensor-tied.json"
}

profile() {
  for stage in 2 3; do
    two benchmarks/step_profile.py --model 1b3 --micro-batch 4 --seq 2048 --stage "$stage" --engines ds_hf |
      tee -a "$OUT/profile.txt"
  done
}

masters() {
  local common=(--model 6b7 --micro-batch 2 --seq 2048 --stage 3 --checkpointing --engines ds_hf-whole,ds_hf)
  two benchmarks/training.py "${common[@]}" --rounds 2 --json "$OUT/masters.json"
  two benchmarks/step_profile.py "${common[@]}" | tee "$OUT/masters-profile.txt"
}

host() { OMP_NUM_THREADS=1 python3 benchmarks/host_cost.py --json "$OUT/host.json"; }

many() {
  local gpus name; gpus=$(nvidia-smi -L | wc -l)
  timed() { # name, seconds and a command that is given --json
    name=${gpus}xh100-$1
    [[ $1 == ${ONLY-}* && ! -e $OUT/$name.json && ! -e ${DONE:-/nowhere}/$name.json ]] || return 0
    OMP_NUM_THREADS=1 timeout -k 5 "$2" "${@:3}" --json "$OUT/$name.json" 2> "$OUT/$name.err"
    echo "-- $name ended with $? after $SECONDS s"
  }
  row() { timed "$1" "$2" torchrun --standalone --nproc-per-node "$gpus" "${@:3}"; }
  local train=(benchmarks/training.py --rounds 1 "${WITH[@]}") eight=(--model 8b --micro-batch 1 --seq 8192 --stage 3)
  local small=(--model 1b3 --micro-batch 4 --seq 2048) all=ds_hf,fsdp2,floor,deepspeed
  local shared=(benchmarks/long_context.py --parts sp --stage 3)
  local lora=(benchmarks/lora.py --model 8b --micro-batch 2 --seq 4096 --checkpointing --rounds 1 --steps 8)
  local moe=(benchmarks/experts.py --model qwen3 --stage 3 --checkpointing --rounds 1)
  local pipes=(python3 benchmarks/pipeline.py --device cuda --width 4096 --batch 1 --length 2048 --repeats 3 --rounds 1
    --timeout 60 --deepspeed "$BESIDE")
  row fp8-8b 110 "${train[@]}" "${eight[@]}" --checkpointing --compile --steps 8 --engines ds_hf,ds_hf-fp8
  row lora-8b 70 "${lora[@]}" --stage 1 --engines ds_hf,peft-16
  row lora-8b-stage3 50 "${lora[@]}" --stage 3 --engines ds_hf
  row experts-deep 140 "${moe[@]}" --layers $((6 * gpus)) --micro-batch 1 --seq 4096 --divided --steps 6 --warmup 4 \
    --engines "ds_hf+ep,ds_hf+ep$((gpus / 2)),ds_hf+local"
  row experts-peers 120 "${moe[@]}" --layers $((8 + gpus)) --micro-batch 1 --seq 4096 --steps 8 \
    --engines ds_hf+local,ds_hf+ep,fsdp2,deepspeed-leaf "${WITH[@]}"
  timed hosts 120 python3 benchmarks/hosts.py -- --model 0b37 --micro-batch 4 --seq 2048 --stage 3 --steps 5 --warmup 4 \
    --rounds 1 --engines ds_hf,ds_hf+hpz,ds_hf+qwz,ds_hf+qgz,ds_hf+zero++,ds_hf+mics,ds_hf2,ds_hf+1bit,fsdp2
  timed hosts-experts 60 python3 benchmarks/hosts.py --experts -- --model qwen3 --layers 4 --stage 2 --micro-batch 2 \
    --seq 2048 --steps 5 --warmup 4 --rounds 1 --engines ds_hf+local,ds_hf+inside,ds_hf+ep
  row 8b-compile 130 "${train[@]}" "${eight[@]}" --checkpointing --compile --engines ds_hf,fsdp2,floor
  row 8b 230 "${train[@]}" "${eight[@]}" --checkpointing --engines $all
  row 1b3-stage2 90 "${train[@]}" "${small[@]}" --stage 2 --engines $all
  row 1b3-stage3 90 "${train[@]}" "${small[@]}" --stage 3 --engines $all
  row tensor-1b3 120 benchmarks/tensor_parallel.py --part step --model 1b3 --micro-batch 8 --seq 2048 \
    --engines ds_hf,transformers,half,deepspeed "${WITH[@]}"
  row sequence-1b3 100 "${shared[@]}" --row 1b3 "$gpus" 8192 ds_hf+whole,ds_hf+sp
  row sequence-8b 240 "${shared[@]}" --steps 2 --row 8b 1 32768 ds_hf+sp+loss+tiles
  row sequence-8b-offload 240 "${shared[@]}" --steps 2 --row 8b 1 32768 ds_hf+sp+offload+loss+tiles
  timed pipeline-mesh 130 "${pipes[@]}" --stages 2 --tensor 2 --data $((gpus / 4)) --layers 16 --batch 2 --micro-batches 8 \
    --ways ds_hf
  timed pipeline 200 "${pipes[@]}" --stages "$gpus" --layers $((2 * gpus)) --micro-batches 4,8,16
}

autotune() {
  python3 benchmarks/autotune.py --model 1b --folder /tmp/ds_hf-tuning "${WITH[@]}" --micros 4:4 --budget 4m \
    --parts own,deepspeed,search,tuned --json "$OUT/autotune.json"
}

(($#)) || { sed -n '2,30s/^# \{0,1\}//p' "$0"; exit 2; }
for part in "$@"; do
  case $part in
    wheels) wheels || exit 1 ;;
    prepare) prepare && build_deepspeed ;;
    kernels | tests | suite | slow | four | training | captured | data | offload | offload2 | memory | long | tensor | \
      host | profile | masters | autotune | many)
      [[ -v PREPARED ]] || { prepare; PREPARED=1; }
      SECONDS=0
      "$part"
      echo "== $part ended with $? after $SECONDS s"
      ;;
    *) echo "no part '$part'; benchmarks/on_gpus.sh lists them" >&2; exit 2 ;;
  esac
done
