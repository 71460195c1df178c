#!/usr/bin/env bash
# Write the constraints file from pyproject.toml and constraints/base.in: pin.sh VENV_BIN OUTPUT
set -euo pipefail
bin=$1 output=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# pip-compile keeps the pins of an existing output, so a rerun changes only what must change.
if [[ -s $output ]]; then cp "$output" "$work/pins.txt"; fi
# vLLM pins a torch of its own; `make vllm-test` makes an environment for it.
"$bin/python" -m piptools compile --quiet --extra cpu --extra dev --extra docs --extra metrics --extra plot \
    --extra transformers --strip-extras --allow-unsafe --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
    --constraint constraints/base.in --output-file "$work/pins.txt" pyproject.toml
{
    echo "# Versions the tests are run with, for Python 3.11 and 3.12. Written by \`make constraints\`; do not edit."
    # Triton is left out: a GPU build of torch insists on its own.
    # A build label such as +cpu would tie the file to one machine.
    sed -n 's/^\([A-Za-z0-9._-]*==[A-Za-z0-9.]*\)\(+[a-z0-9.]*\)\{0,1\}\(.*\)/\1\3/p' "$work/pins.txt" |
        grep -v -e '^pip==' -e '^triton==' | sort
} >"$output"
