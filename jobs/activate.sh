# shellcheck shell=bash
# Sourced by the other scripts in the folder of the checkout: reads the settings, activates the environment of
# Python, and checks that it has PyTorch.

source jobs/env.sh
set +u # the scripts of modules and conda use unset variables
if [[ -n $ACTIVATE_FILE ]]; then
    # shellcheck source=/dev/null
    source "$ACTIVATE_FILE"
elif [[ -d .venv ]]; then
    source tools/activate
fi
set -u
if [[ $ACTIVATE_FILE != /dev/null ]] && # the value of jobs in containers
    ! python -c 'import importlib.util as i; raise SystemExit(i.find_spec("torch") is None)' 2>/dev/null; then
    echo "error: $(command -v python || echo python) has no PyTorch: set ACTIVATE_FILE in jobs/env.sh" >&2
    exit 2
fi
