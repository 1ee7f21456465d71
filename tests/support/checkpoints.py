"""Stored checkpoints as tests see them: the steps of a root, manifests, and the check of all bytes.

Tests import these names from here. If a name moves to another module, only this file changes.
"""

from __future__ import annotations

from asyncckpt.format.manifest import Manifest as Manifest
from asyncckpt.format.manifest import checksum as checksum
from asyncckpt.loading.source import read_manifest as read_manifest
from asyncckpt.loading.source import verify as verify
from asyncckpt.shm.segment import PAGE as PAGE
from asyncckpt.storage import complete_steps as complete_steps
from asyncckpt.storage import step_folder as step_folder
