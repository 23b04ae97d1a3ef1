#!/usr/bin/env bash
# The main job from end to end, with the commands that a user would give: compile gpt.mw for 4 ranks, train it on the
# source text of Python's standard library, stop, go on from the checkpoint, and compare with one device.
#
#   make demo        or        PYTHON=python3 bash examples/demo.sh [FOLDER]
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
case "$python" in */*) python="$(cd "$(dirname "$python")" && pwd)/$(basename "$python")" ;; esac
folder="${1:-$here/build/demo}"

# so that it also works where meshwright is not installed
export PYTHONPATH="$here/../src${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

say() { printf '\n$ %s\n' "$*"; }
meshwright() {
    say meshwright "$@"
    "$python" -m meshwright.cli "$@"
}

rm -rf "$folder"
mkdir -p "$folder"
cd "$folder"

"$python" "$here/corpus.py" corpus.bin
cp "$here/gpt.mw" .

meshwright compile gpt.mw --plan fsdp=2,tp=2 -o gpt
meshwright inspect gpt
meshwright run gpt --ranks 4 --steps 50
meshwright run gpt --ranks 4 --resume

"$python" - gpt/metrics.jsonl <<'EOF'
import json, sys

losses = [json.loads(line)["loss"] for line in open(sys.argv[1])]
print(f"\nThe loss fell from {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps on 4 processes, which stopped")
print("after step 50 and went on from the checkpoint. How far is such a step from the same step on one device?")
sys.exit(0 if losses[-1] < 0.6 * losses[0] and len(losses) == 80 else 1)
EOF

meshwright verify gpt
