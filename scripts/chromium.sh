#!/usr/bin/env bash
# See that there is a Chromium for the tests of the live page: $TOKENWIRE_CHROMIUM, or the
# system's, which is installed from Debian where this may be done.
set -euo pipefail

browser=${TOKENWIRE_CHROMIUM:-chromium}
command -v "$browser" >/dev/null && exit 0
if [[ -n ${TOKENWIRE_CHROMIUM:-} ]] || ((EUID)) || ! command -v apt-get >/dev/null; then
    echo "there is no $browser: install Debian's package chromium, or set TOKENWIRE_CHROMIUM" >&2
    exit 1
fi
echo "installing chromium from Debian" >&2
log=$(mktemp)
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } \
    >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
rm -f "$log"
