#!/usr/bin/env bash
# What needs a GPU, in one go and in under ten minutes. CI has no GPU and never runs this.
#
#   .ci/gpu.sh              appends the records to nbs/results/kernels.jsonl and re-executes the
#                           notebooks that have cells for a GPU: look at both, then commit them
#   OUT=folder .ci/gpu.sh   the same, with copies of the records, the notebooks and the logs there
#
# Nothing else should run on the machine. A python3 that has what is needed is used as it is
# (for machines that reach no package index); else one is made in .venv.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-$(mktemp -d)}; mkdir -p "$out" nbs/results; failed=0
unset TRITON_INTERPRET PAGEDLM_BACKEND
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
py=python3
$py -c 'import torch, triton, transformers, pytest, hypothesis' 2>/dev/null || {
    [ -d .venv ] || python3 -m venv .venv; py=$PWD/.venv/bin/python; $py -m pip install -q -e '.[dev]' || exit; }
$py -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' || exit

timeout 150 $py -m pytest -q -m cuda tests 2>&1 | tee "$out/pytest.log" || failed=1
timeout 270 $py -m pagedlm bench kernels --out nbs/results/kernels.jsonl 2>&1 | tee "$out/kernels.log" || failed=1
cp nbs/results/kernels.jsonl "$out/"
# the scheduler's time on this host, to set beside a step on its GPU; not for nbs/results
timeout 60 $py -m pagedlm bench scheduler --contexts 512 8192 --turns 8 --rounds 1 \
    --out "$out/scheduler.jsonl" > "$out/scheduler.log" 2>&1 || failed=1
if $py -c 'import nbclient, ipykernel, matplotlib' 2>/dev/null; then
    for nb in nbs/12_benchmarks.ipynb $(grep -l '"#| cuda' nbs/*.ipynb | grep -v 12_); do
        timeout 60 $py .ci/execute.py "$nb" && cp "$nb" "$out/" || failed=1
    done
fi
echo "results: $out"; exit $failed
