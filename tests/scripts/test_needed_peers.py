"""Test which peers ``scripts/test`` unpacks for the tests that it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needed_peers
import pytest
from support.peers import MEGATRON, NVRX, VERL, VLLM, peer

ROOT = Path(__file__).parents[2]
ALL = tuple(sorted(needed_peers.declared()))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), ALL),
        (("-k", "tests/shm"), ALL),
        (("--deselect", "tests/shm/test_huge.py"), ALL),
        (("tests/shm", "tests/scripts/test_bench.py"), ALL),
        (("-n", "0", "tests/shm", "tests/engine", "tests/test_docs.py"), ()),
        (("tests/integrations/test_verl.py::test_any[1]", "-k", "one"), VERL),
        (("tests/integrations/test_huggingface_ranks.py",), ("torchdata-0.11.0",)),  # its support has the name, too
        (("tests/integrations/nvrx/test_inprocess.py",), ("defusedxml-0.7.1", "nvrx-0.7.0")),  # its support alone has
    ],
)
def test_tests_need_the_peers_that_their_files_name(arguments: tuple[str, ...], names: tuple[str, ...]) -> None:
    command = [sys.executable, str(ROOT / "scripts/needed_peers.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert tuple(done.stdout.split()) == names


def test_a_wrong_option_is_refused_as_pytest_does() -> None:
    command = [sys.executable, str(ROOT / "scripts/needed_peers.py"), "--bogus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "--bogus" in done.stderr


@pytest.mark.parametrize("wanted", [{"WANTED_PEERS": "tyro-1.0.17"}, {"WANTED_PEERS": ""}, {}])
def test_no_other_peer_is_unpacked(wanted: dict[str, str], tmp_path: Path) -> None:
    # There is no Python in this environment, so each peer that it tries to unpack is left out.
    environment = {"PATH": os.environ["PATH"], "VENV": str(tmp_path), **wanted}
    command = ["bash", "-c", "touch $VENV/asyncckpt.stamp; source scripts/peers.sh"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment)
    tried = {line.split(f"into {tmp_path}/peers/")[1] for line in done.stderr.splitlines() if "into" in line}
    assert tried == set(wanted.get("WANTED_PEERS", " ".join({*ALL} - {VLLM})).split())


def test_each_group_is_of_peers_that_can_be_unpacked() -> None:
    groups = needed_peers.groups()
    del groups["FOLDER"]
    assert groups["NVRX"] == {*NVRX} and all(names and names <= {*ALL} for names in groups.values())


def test_a_test_whose_peer_was_left_out_by_mistake_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("support.peers.FOLDER", tmp_path)
    monkeypatch.setenv("WANTED_PEERS", VLLM)
    with pytest.raises(pytest.skip.Exception, match=VLLM):
        peer(VLLM)
    with pytest.raises(pytest.fail.Exception, match=f"needed_peers.py did not see that this test uses {MEGATRON}"):
        peer(MEGATRON)
