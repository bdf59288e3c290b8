#!/usr/bin/env bash
# Every measurement of README.md on one GPU, by phases, into a folder: benchmarks/gpu/everything.sh OUT COMMIT [PHASE...]
# Bessemer and its peers must be importable. A phase that fails does not stop the next; each line says when it was done.
# tests, losses and peaks may share the card, since they are not timed; everything else has it alone. Minutes on an H200
# behind each.
set -u
out=$1 commit=$2 began=$(date +%s)
shift 2
phases=${*:-tests loss125m loss1b speed fp8 small divided long largest first peaks}
here=$(dirname "$0")
say() { echo "[$(($(date +%s) - began)) s] $*"; }
compare() { python3 "$here/compare.py" --commit "$commit" --timeout 100 --out "$out/$1.json" "${@:2}"; }

tests() { # 2
    local logs files
    logs=$(mktemp -d)
    files=$(grep -rlE "mark\.gpu|^gpu = " tests --include="test_*.py")
    for file in $files; do
        echo "$file"
    done | xargs -P 6 -I{} bash -c \
        'log=$0/$(echo {} | tr / _).log; timeout 300 python3 -m pytest -rs -m gpu {} --no-header -p no:cacheprovider --show-capture=no >"$log" 2>&1; code=$?
         [ $code = 5 ] && rm "$log" || sed -i "1i == {} exit $code" "$log"' "$logs"
    cat "$logs"/*.log >"$out/gpu-tests.txt"
    grep -hE "^== |^FAILED|passed|failed" "$out/gpu-tests.txt"
}
text() { # a folder of real text: Python's own, as far as it is installed here
    local text=${TMPDIR:-/tmp}/bench-text
    [ -d "$text" ] || python3 - "$text" <<'PYTHON'
import pathlib, shutil, sys, torch
packages = pathlib.Path(torch.__file__).parent.parent
for name in ("torch", "transformers", "sympy", "scipy", "numpy"):
    for file in (packages / name).rglob("*.py"):
        if 500 < file.stat().st_size < 200_000:
            to = pathlib.Path(sys.argv[1]) / file.relative_to(packages)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, to)
PYTHON
    echo "$text"
}
loss() { # MODEL and more for loss_fp8.py
    local text
    text=$(text)
    python3 "$here/../loss_fp8.py" --model "$1" --text "$text" --format source --vocab 16K --device cuda --at-once \
        --folder "$text.$1" --write "$out/fp8-loss-${1,,}.json" "${@:2}" 2>&1 | grep -E '^{|rror|failed'
}
loss125m() { loss 125M --steps 2000 --context 1024 --rows 32 --micro 32 --precisions bf16,bf16,fp8; } # 7
loss1b() { loss 1B --steps 300 --context 2048 --rows 16 --micro 16 --precisions bf16,fp8; }          # 5
speed() { # 5
    compare speed-1b --models 1b --systems bessemer:guard.copies=off bessemer torchtitan liger bessemer:memory.activations=0.7,guard.copies=off
    compare speed-3b --models 3b --systems bessemer:guard.copies=off torchtitan --steps 12
}
fp8() { compare speed-fp8 --models 1b 3b --systems bessemer:guard.copies=off --precision fp8; }                            # 2
small() { compare speed-124m --models 124m --systems bessemer:guard.copies=off native --steps 100 --warmup 10; }           # 1
divided() { # 2
    compare divided --models 1b --systems bessemer:guard.copies=off,memory.weights=fp32 \
        bessemer:guard.copies=off,parallel.shard.alone=true bessemer:guard.copies=off
}
long() { # 2, and 6 or more for 8B: one step takes 262 s
    python3 "$here/long_context.py" --commit "$commit" --out "$out/long-context.json" --set guard.copies=off
    python3 "$here/long_context.py" --commit "$commit" --out "$out/long-context-8b.json" --contexts --search --timeout 500
}
largest() { python3 "$here/largest.py" --commit "$commit" --out "$out/largest.json"; } # 8
first() { python3 "$here/first_step.py" --commit "$commit" --out "$out/first-step.json"; }                                   # 2
peaks() { python3 "$here/memory_peaks.py" --commit "$commit" --out "$out/memory-peaks.json"; }                               # 6
deepspeed() { python3 "$here/deepspeed_zero.py" --commit "$commit" --out "$out/deepspeed-zero.json"; }                       # 5

mkdir -p "$out"
for phase in $phases; do
    "$phase"
    say "$phase"
done
