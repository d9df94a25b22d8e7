#!/usr/bin/env bash
# Installs the stacks that scripts/survive.py compares with, each in its own environment
# below build/peers. The engine behind vllm-router is that of .venv (make setup).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.11}
export PIP_DISABLE_PIP_VERSION_CHECK=1

make_venv() {
    [[ -x build/peers/$1/bin/python ]] || "$python" -m venv "build/peers/$1"
}

make_venv router
build/peers/router/bin/pip install --quiet vllm-router==0.1.17

# Its workers here are the mocker, which needs no engine: what those ask for is left out.
make_venv dynamo
build/peers/dynamo/bin/pip install --quiet \
    ai-dynamo-runtime==1.6.1 'aiohttp<4' 'kubernetes<33' 'redis<9' 'msgspec>=0.19' \
    'prometheus-client>=0.23.1,<1' 'pyzmq>=26' 'transformers>=4.56' 'zstandard<1' uvloop
build/peers/dynamo/bin/pip install --quiet --no-deps ai-dynamo==1.6.1
build/peers/dynamo/bin/pip install --quiet --no-deps aisimulate==0.13.0
