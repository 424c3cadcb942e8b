#!/bin/sh
# Installs the browser for the UI's tests if that needs no password; otherwise prints how to install it.
# Never fails: without a browser those tests are skipped with a warning.
set -u
exec >&2
for name in chromium chromium-browser google-chrome; do
    if command -v $name >/dev/null; then
        exit 0
    fi
done
for app in "Google Chrome" Chromium; do
    if [ -x "/Applications/$app.app/Contents/MacOS/$app" ]; then
        exit 0
    fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing chromium for the tests of the UI (only the first time) ..."
    export DEBIAN_FRONTEND=noninteractive
    if apt-get -qq update >/dev/null &&
        apt-get -qq install -y --no-install-recommends chromium fonts-liberation >/dev/null; then
        exit 0
    fi
fi
echo "The tests of the UI need a browser: 'sudo apt install chromium', or on a Mac 'brew install --cask chromium'."
