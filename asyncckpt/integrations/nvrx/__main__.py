"""``python -m asyncckpt.integrations.nvrx FD``: the helper process, started by ``helper.py``; ``FD`` is its socket."""

import sys

from asyncckpt.integrations.nvrx.helper import serve

if __name__ == "__main__":
    serve(int(sys.argv[1]))
