#!/usr/bin/env bash
# Installs the stacks that scripts/survive.py and scripts/bench_peers.py compare with, each in its
# own environment below build/peers, once. The engine behind vllm-router is that of .venv
# (make setup).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.11}
export PIP_DISABLE_PIP_VERSION_CHECK=1

# peer NAME VERSION: does its environment have to be filled? Its stamp says that it was.
peer() {
    [[ -e build/peers/$1/.installed-$2 ]] && return 1
    [[ -x build/peers/$1/bin/python ]] || "$python" -m venv "build/peers/$1"
}

if peer router 0.1.17; then
    build/peers/router/bin/pip install --quiet vllm-router==0.1.17
    touch build/peers/router/.installed-0.1.17
fi

if peer sglang 0.3.2; then
    build/peers/sglang/bin/pip install --quiet sglang-router==0.3.2
    touch build/peers/sglang/.installed-0.3.2
fi

# Its workers here are the mocker, which needs no engine: what those ask for is left out.
if peer dynamo 1.6.1; then
    build/peers/dynamo/bin/pip install --quiet \
        ai-dynamo-runtime==1.6.1 'aiohttp<4' 'kubernetes<33' 'redis<9' 'msgspec>=0.19' \
        'prometheus-client>=0.23.1,<1' 'pyzmq>=26' 'transformers>=4.56' 'zstandard<1' uvloop
    build/peers/dynamo/bin/pip install --quiet --no-deps ai-dynamo==1.6.1
    touch build/peers/dynamo/.installed-1.6.1
fi
