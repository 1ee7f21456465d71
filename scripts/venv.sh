# Sourced by the scripts beside it: makes the virtual environment $VENV (by default .venv in the checkout) with torch,
# this package and the extras $EXTRAS ("test,lint"), unless it is there already. $PYTHON picks the interpreter.
# shellcheck shell=bash

ROOT=${ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
VENV=${VENV:-$ROOT/.venv}
# Pinned, and installed before anything that asks for torch: what pip would take by itself is gigabytes of CUDA.
TORCH=${TORCH:-torch==2.13.0}

asyncckpt_venv() {
    local wanted stamp="$VENV/asyncckpt.stamp" pip=("$VENV/bin/python" -m pip install --disable-pip-version-check)
    # The extras already there stay: scripts with other needs share the environment.
    EXTRAS=$(printf '%s\n' "${EXTRAS:-}" "$(sed -n 's/^extras //p' "$stamp" 2>/dev/null)" | tr ',' '\n' | sed '/^$/d' | sort -u | paste -sd, -)
    wanted=$(printf 'torch %s\nextras %s\nroot %s\n%s\n' "$TORCH" "$EXTRAS" "$ROOT" "$(cksum "$ROOT"/{setup.cfg,pyproject.toml,shm/_copies.c,asyncckpt/planning/_forms.c})")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$VENV/bin/python" ] && ! "${PYTHON:-python3}" -m venv "$VENV"; then
        echo "No virtual environment could be made. On Debian: apt-get install python3-venv" >&2
        rm -rf "$VENV"
        return 1
    fi
    echo "Installing $TORCH and asyncckpt${EXTRAS:+[$EXTRAS]} into $VENV" >&2
    # Who watches sees how far it is; a log needs no progress.
    [ -t 2 ] || pip+=(--quiet)
    "${pip[@]}" "$TORCH" >&2
    "${pip[@]}" --editable "$ROOT${EXTRAS:+[$EXTRAS]}" >&2
    printf '%s\n' "$wanted" >"$stamp"
}
asyncckpt_venv
