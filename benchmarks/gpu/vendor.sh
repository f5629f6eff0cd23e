#!/usr/bin/env bash
# Wheels of what jaxinfer's offline engine needs and a machine with JAX, Flax, transformers and PyTorch may lack, for
# benchmarks/gpu/run.py to take along: it imports from them where the machine has no version of its own.
#
#   benchmarks/gpu/vendor.sh            # into build/gpu-wheels, which git ignores; carry that folder with the checkout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=build/gpu-wheels
packages=(msgspec cbor2)
platforms=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
    manylinux_2_5_x86_64 manylinux1_x86_64)
rm -rf "$target"
mkdir -p "$target"
pinned=()
for package in "${packages[@]}"; do pinned+=("$(grep -E "^$package==" constraints.txt)"); done
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]/#/--platform=}" --dest "$target" "${pinned[@]}"
git rev-parse HEAD >"$target/commit"
du -h "$target"/*.whl
