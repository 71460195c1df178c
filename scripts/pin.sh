#!/usr/bin/env bash
# Write a constraints file from pyproject.toml: pin.sh VENV_BIN OUTPUT [BASE]
# With BASE, pins chosen by hand and the pins of an existing OUTPUT are kept. Without, everything is the newest release.
set -euo pipefail
bin=$1 output=$2 base=${3:-}
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
options=(--upgrade)
if [[ -n $base ]]; then
    options=(--constraint "$base")
    # pip-compile keeps the pins of an existing output, so a rerun changes only what must change.
    if [[ -s $output ]]; then cp "$output" "$temporary/pins.txt"; fi
fi
# vLLM pins a torch of its own; `make vllm-test` makes an environment for it.
"$bin/python" -m piptools compile --quiet --extra cpu --extra dev --extra docs --extra metrics --extra plot \
    --extra transformers --strip-extras --allow-unsafe --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
    "${options[@]}" --output-file "$temporary/pins.txt" pyproject.toml
{
    echo "# Versions the tests are run with, for Python 3.11 and 3.12. Written by \`make constraints\`; do not edit."
    # Triton is left out: a GPU build of torch requires the release it was built with.
    # A build label such as +cpu would tie the file to one machine.
    sed -n 's/^\([A-Za-z0-9._-]*==[A-Za-z0-9.]*\)\(+[a-z0-9.]*\)\{0,1\}\(.*\)/\1\3/p' "$temporary/pins.txt" |
        grep -v -e '^pip==' -e '^triton==' | sort
} >"$output"
