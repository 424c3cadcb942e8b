#!/bin/sh
# Runs the tests with another MLX than the installed one: scripts/test_mlx.sh VERSION [PYTEST ARGUMENT ...]
# VERSION "newest" takes the newest on the index, release candidates included. It lies in .venv beside the installed one,
# which stays as it is.
set -eu
version=$1
shift
backend=mlx-cpu
[ "$(uname)" = Darwin ] && backend=mlx-metal
place=$PWD/.venv/mlx-$version
if [ "$version" = newest ]; then
    .venv/bin/python -m pip install --quiet --upgrade --pre --no-deps --target "$place" mlx "$backend"
else
    .venv/bin/python -m pip install --quiet --upgrade --no-deps --target "$place" "mlx==$version" "$backend==$version"
fi
export PYTHONPATH="$place${PYTHONPATH:+:$PYTHONPATH}"
.venv/bin/python -c 'import mlx.core; print("tests with MLX", mlx.core.__version__)'
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
