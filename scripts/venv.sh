#!/bin/sh
# Creates .venv with a suitable Python, and installs this project into it: scripts/venv.sh [EXTRA[,EXTRA]]
# PYTHON=/path/to/python3 in the environment chooses the Python. Run from the project's root; make does.
set -eu
exec >&2 # standard output is reserved for the chat's answers
extras=${1:-}
log=.venv/install.log

# MLX's wheels for macOS are for Apple silicon only, and an Intel Python runs there under Rosetta without notice.
suitable() {
    "$1" -c 'import sys, platform, venv, ensurepip
sys.exit(sys.version_info < (3, 11) or (sys.platform == "darwin" and platform.machine() != "arm64"))' >/dev/null 2>&1
}

find_python() {
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if suitable "$python"; then
            return
        fi
    done
    echo "error: no suitable Python (${PYTHON:-python3, python3.11 to python3.14}): mlx-llama3 needs Python 3.11 or" \
        "newer with its venv module, on a Mac one for Apple silicon (arm64)."
    echo "macOS: 'brew install python', or the installer from python.org. Debian, Ubuntu:" \
        "'apt install python3 python3-venv'. One that is elsewhere: 'make chat PYTHON=/path/to/python3'."
    exit 2
}

# Prints one line per file while pip works: pip's progress bars need a terminal, and its full output is too long.
show_progress() {
    while IFS= read -r line; do
        echo "$line" >>"$log"
        case $line in
            *.metadata*) ;;
            *"Downloading "* | *"Using cached "*)
                # "  Using cached numpy-2.4.6-cp311-….whl (16.9 MB)" is shown as "numpy (16.9 MB)".
                file=${line#*ing } file=${file#*cached }
                echo "  ${file%%-*} (${file##*(}"
                ;;
            "Installing collected"*) echo "  installing ..." ;;
            "pip ended with 0") return 0 ;;
            "pip ended with"*) return 1 ;;
        esac
    done
}

# A .venv whose Python is missing, or whose creation was interrupted, is created again.
if ! { suitable .venv/bin/python && .venv/bin/python -m pip --version; } >/dev/null 2>&1; then
    find_python
    echo "Making .venv with $("$python" --version) ..."
    rm -rf .venv
    "$python" -m venv .venv
fi

echo "Installing mlx-llama3${extras:+ with what $extras needs} into .venv (only the first time) ..."
: >"$log"
pip="-m pip --no-input --disable-pip-version-check install --progress-bar off"
if ! { .venv/bin/python $pip -e ".${extras:+[$extras]}" 2>&1; echo "pip ended with $?"; } | show_progress; then
    if grep -q 'Retrying (' "$log"; then
        echo "error: the package index cannot be reached: connect to the network and run make again."
    else
        grep 'ERROR: ' "$log" | tail -n 2 || true
        echo "error: the installation failed; all of pip's words are in $log."
    fi
    exit 2
fi
