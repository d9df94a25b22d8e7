#!/usr/bin/env bash
# Bring the virtual environment up to date: setup.sh [cpu | gpu] [model] [dev] [browser]
# [otel], or setup.sh clients
#
#   base     (always) tokenwire, with all that the simulated engine needs; no torch
#   cpu      the vLLM engine for CPUs, pinned
#   gpu      the vLLM engine for CUDA, as pip resolves it
#   model    what makes the demo model
#   dev      tests and checks
#   browser  what drives a browser, for the tests of the live page
#   otel     traces, without an engine that brings them
#   clients  other people's clients, alone in their environment: they want other versions
#
# VENV    the environment (.venv)
# PYTHON  the interpreter it is made of (python3.11, else python3)
#
# A part that is up to date costs nothing: its stamp holds the digest of the files it came
# from. Two runs at once are one run: the second waits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=${VENV:-.venv}
readonly UV=uv==0.13.9 # installs the locks in 10 s, where pip takes 90 s
readonly TORCH_INDEX=https://download.pytorch.org/whl/cpu
# As pip does: an own authority, such as a company's proxy has, is known to the system.
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS-1}
# An unreachable index must not hold up the fallback to pip for minutes.
readonly UV_TIMEOUT_S=240

say() { printf 'setup: %3d s  %s\n' "$SECONDS" "$*" >&2; }

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later with venv: set PYTHON to one"
}

digest() { # of what the part $1 is made from
    local files=(scripts/setup.sh)
    case $1 in
        base) files+=(pyproject.toml requirements/base.lock) ;;
        gpu) files+=(pyproject.toml) ;;
        model) files+=(requirements/dev.lock) ;;
        *) files+=("requirements/$1.lock") ;;
    esac
    { pwd && cat "${files[@]}"; } | sha256sum | cut -d' ' -f1
}

is_done() { [[ $(cat "$VENV/.setup-$1" 2>/dev/null) == $(digest "$1") ]]; }

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# uv reads no configuration of pip's: whoever set an index for pip wants that one.
has_own_index() { [[ $(pip config list 2>/dev/null) == *[.]index-url=* ]]; }

install_lock() { # the packages of the lock file $1
    if [[ -x $VENV/bin/uv ]] && timeout "$UV_TIMEOUT_S" "$VENV/bin/uv" pip install \
        --quiet --python "$VENV/bin/python" --no-deps -r "$1"; then
        return
    fi
    say "with pip, which takes longer"
    pip install --quiet --no-compile --no-deps -r "$1"
}

make_venv() {
    "$VENV/bin/pip" --version >/dev/null 2>&1 && return # fails where it was moved
    local python
    python=$(find_python)
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
}

fetch_uv() {
    if [[ ! -x $VENV/bin/uv ]] && ! has_own_index; then
        say "fetching uv"
        pip install --quiet --no-compile "$UV" || say "no uv"
    fi
}

install_base() {
    make_venv
    fetch_uv
    say "installing tokenwire and what it needs"
    install_lock requirements/base.lock
    pip install --quiet --no-deps --no-build-isolation --no-compile --editable .
}

install_torch() { # the one that the lock file $1 names
    local torch log
    torch=$(grep '^torch==' "$1")
    "$VENV/bin/python" -c '
import sys
from importlib.metadata import version
sys.exit("torch==" + version("torch") != sys.argv[1])
' "$torch" 2>/dev/null && return
    say "installing $torch (200 MB)"
    log=$(mktemp)
    if ! pip install --quiet --no-compile --no-deps "$torch" 2>"$log"; then
        if ! grep -Eq 'No matching distribution|ResolutionImpossible' "$log"; then
            cat "$log" >&2
            rm -f "$log"
            fail "pip could not install $torch"
        fi
        say "from PyTorch's index of CPU builds"
        pip install --quiet --no-compile --no-deps --index-url "$TORCH_INDEX" "$torch"
    fi
    rm -f "$log"
}

install_lock_with_torch() { # torch first, since it may have to come from elsewhere
    local rest
    install_torch "$1"
    rest=$(mktemp)
    grep -v '^torch==' "$1" >"$rest"
    install_lock "$rest"
    rm -f "$rest"
}

install_cpu() {
    say "installing vLLM for CPUs (500 MB)"
    install_lock_with_torch requirements/cpu.lock
    # Without this, every process of the first start compiles the same 5,000 modules.
    say "compiling vLLM's modules"
    PYTHONDONTWRITEBYTECODE='' "$VENV/bin/python" -c '
import vllm.model_executor.models.llama
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker
' >/dev/null 2>&1 || say "vLLM cannot be imported"
}

install_gpu() {
    say "installing vLLM for CUDA, which takes minutes"
    pip install --quiet --editable '.[gpu]'
}

install_model() {
    "$VENV/bin/python" -c 'import numpy' 2>/dev/null && return # an engine brings its own
    say "installing what makes the demo model"
    pip install --quiet --no-compile --no-deps "$(grep '^numpy==' requirements/dev.lock)"
}

install_dev() {
    say "installing the tools of tests and checks"
    install_lock requirements/dev.lock
}

install_browser() {
    say "installing what drives a browser"
    install_lock requirements/browser.lock
}

install_otel() {
    say "installing OpenTelemetry"
    install_lock requirements/otel.lock
}

install_clients() {
    make_venv
    fetch_uv
    say "installing other people's clients"
    install_lock_with_torch requirements/clients.lock
}

parts=(base)
missing=()
for part; do
    case $part in
        base) ;;
        cpu | gpu | model | dev | browser | otel) parts+=("$part") ;;
        clients) parts=(clients) ;;
        *) fail "no part is called $part: base, cpu, gpu, model, dev, browser, otel, clients" ;;
    esac
done
[[ ${parts[0]} == base || $# == 1 ]] || fail "clients have an environment of their own"
for part in "${parts[@]}"; do
    is_done "$part" || missing+=("$part")
done
((${#missing[@]})) || exit 0

exec {lock}<scripts/setup.sh
flock -n "$lock" || {
    say "waiting for another set-up to end"
    flock "$lock"
}
for part in "${parts[@]}"; do
    is_done "$part" && continue
    case $part in
        cpu) other=gpu ;;
        gpu) other=cpu ;;
        *) other= ;;
    esac
    [[ -z $other || ! -e $VENV/.setup-$other ]] ||
        fail "$VENV has the $other build of vLLM: choose another VENV"
    rm -f "$VENV/.setup-$part" # absent until the part is whole
    "install_$part"
    digest "$part" >"$VENV/.setup-$part"
done
say "done: ${missing[*]}"
