#!/usr/bin/env python3
"""Draw the pictures of the documentation: python scripts/docs_pictures.py writes docs/pictures/*.svg.

Each picture is 520 units wide, so that a telephone shows its text in a readable size. Its colours follow the light or
dark scheme of the reader, and it has a background of its own, because a page may have the other scheme.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
WIDTH = 520
# For each kind of box: fill and line in the light scheme, then in the dark scheme.
_KINDS = {
    "train": ("#dbe7ff", "#4a6fd0", "#24355f", "#7d9cf0"),
    "copy": ("#ffe3c2", "#c8741a", "#5a3a14", "#eda454"),
    "memory": ("#eadcff", "#8250c8", "#40295f", "#b48cf2"),
    "worker": ("#d3f0db", "#2f8a4c", "#1d4429", "#6cc287"),
    "storage": ("#e4e7eb", "#69737e", "#333a42", "#a4aeb8"),
    "wait": ("none", "#c0392b", "none", "#ff8f80"),
    "host": ("none", "#a0a7b0", "none", "#68727d"),
}


class Picture:
    """One picture, drawn from the top."""

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height = title, height
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """Write one line. ``style``: "name" for bold, "small" for notes, or both."""
        kind = f' class="{style}"' if style else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """Draw a box with centred lines of text."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>')
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 17 * (number - (len(lines) - 1) / 2), line, anchor="middle")

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draw a line through ``points`` with a head at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="{path}" class="{"arrow dashed" if dashed else "arrow"}"/>')

    def rule(self, x: float, top: float, bottom: float) -> None:
        """Draw a dashed vertical line, a moment in time."""
        self._parts.append(f'<path d="M{x:g} {top:g} V{bottom:g}" class="moment"/>')

    def cross(self, x: float, y: float) -> None:
        """Draw a cross, the death of a process or a host."""
        self._parts.append(f'<path d="M{x - 8:g} {y - 8:g} l16 16 m0 -16 l-16 16" class="cross"/>')

    def svg(self) -> str:
        """Return the file."""
        light = "".join(f".{kind}{{fill:{fill};stroke:{line}}}" for kind, (fill, line, _, _) in _KINDS.items())
        dark = "".join(f".{kind}{{fill:{fill};stroke:{line}}}" for kind, (_, _, fill, line) in _KINDS.items())
        style = (
            "text{font:14px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#1f2328}"
            ".name{font-weight:600}.small{font-size:12.5px;fill:#57606a}"
            ".card{fill:#fff;stroke:#d0d7de}.arrow{fill:none;stroke:#1f2328;stroke-width:1.5;marker-end:url(#head)}"
            ".dashed{stroke-dasharray:5 4}.head{fill:#1f2328}.moment{stroke:#8c959f;stroke-dasharray:3 3}"
            ".cross{fill:none;stroke:#c0392b;stroke-width:3}.wait{stroke-dasharray:4 3}" + light + "@media"
            "(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9aa4af}.card{fill:#161b22;stroke:#3a424c}"
            ".arrow{stroke:#e6edf3}.head{fill:#e6edf3}.cross{stroke:#ff7b6b}" + dark + "}"
        )
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}"'
            f' height="{self._height}" role="img"><title>{escape(self._title)}</title>\n<style>{style}</style>\n'
            f'<defs>{head}<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
            f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{self._height - 1}" rx="8"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def overview() -> Picture:
    """A save, a crash, and a resume from memory."""
    picture = Picture("A save copies into shared memory; after a crash the next trainer loads from it", 322)
    rows = {"Trainer": 34, "Shared memory": 110, "Worker process": 186, "Storage": 262}
    for name, y in rows.items():
        picture.text(14, y - 8, name, "name")
    trainer, memory, worker, storage = rows.values()
    picture.rule(300, trainer - 20, 310)
    picture.box(14, trainer, 106, 34, "train", "train")
    picture.box(124, trainer, 60, 34, "copy", "save")
    picture.box(188, trainer, 104, 34, "train", "train on")
    picture.text(308, trainer - 8, "trainer killed", "small")
    picture.cross(300, trainer + 17)
    picture.box(352, trainer, 62, 34, "copy", "load")
    picture.box(418, trainer, 88, 34, "train", "train")
    picture.box(144, memory, 362, 34, "memory", "copy of step 100")
    picture.arrow((154, trainer + 34), (154, memory))
    picture.text(162, memory - 16, "1 copy", "small")
    picture.arrow((383, memory), (383, trainer + 34))
    picture.text(390, memory - 16, "from memory", "small")
    picture.box(164, worker, 186, 34, "worker", "write, checksum, fsync")
    picture.box(354, worker, 152, 34, "worker", "holds the memory")
    picture.arrow((185, memory + 34), (185, worker))
    picture.text(193, worker - 16, "2 read", "small")
    picture.arrow((346, worker + 34), (346, storage))
    picture.text(354, storage - 16, "3 write, rename", "small")
    picture.box(346, storage, 160, 34, "storage", "step-00000100")
    picture.text(14, 314, "time →", "small")
    return picture


def phases() -> Picture:
    """The phases of one save."""
    picture = Picture("The phases of a save: the call waits for a slot and copies; the worker writes and commits", 240)
    trainer, worker = 36, 122
    picture.text(14, trainer - 10, "Trainer", "name")
    picture.box(14, trainer, 60, 34, "train", "train")
    picture.box(78, trainer, 44, 34, "copy", "plan")
    picture.box(126, trainer, 44, 34, "copy", "slot")
    picture.box(174, trainer, 76, 34, "copy", "copy")
    picture.box(254, trainer, 252, 34, "train", "train on")
    picture.text(14, worker - 10, "Worker process", "name")
    picture.box(190, worker, 190, 34, "worker", "write and checksum")
    picture.box(384, worker, 70, 34, "worker", "commit")
    picture.box(458, worker, 48, 34, "memory", "hold")
    picture.arrow((200, trainer + 34), (200, worker))
    picture.text(208, worker - 16, "the write begins during the copy", "small")
    for y, begin, end, text in (
        (180, 78, 252, "stall_s: the call"),
        (208, 78, 454, "durable_s: from the call until the checkpoint is safe"),
    ):
        picture.arrow((end - 2, y), (begin, y))
        picture.arrow((begin + 2, y), (end, y))
        picture.text(begin, y + 16, text, "small")
    return picture


def backpressure() -> Picture:
    """Two saves that overlap, with one slot and with two."""
    picture = Picture("With one slot the second save waits for the first write; with two slots it does not", 316)
    top = 34
    for title, waits in (
        ("One slot: save 2 waits until write 1 is committed", True),
        ("Two slots: save 2 copies at once", False),
    ):
        picture.text(14, top - 10, title, "name")
        picture.text(14, top + 22, "Trainer", "small")
        picture.box(80, top, 50, 32, "copy", "save 1")
        picture.box(134, top, 80, 32, "train", "train")
        if waits:
            picture.box(218, top, 100, 32, "wait", "waits")
            picture.box(322, top, 50, 32, "copy", "save 2")
            picture.box(376, top, 130, 32, "train", "train")
        else:
            picture.box(218, top, 50, 32, "copy", "save 2")
            picture.box(272, top, 234, 32, "train", "train")
        picture.text(14, top + 64, "Slot 0", "small")
        picture.box(134, top + 42, 184, 32, "worker", "write 1")
        if waits:
            picture.box(376, top + 42, 130, 32, "worker", "write 2")
        else:
            picture.text(14, top + 106, "Slot 1", "small")
            picture.box(268, top + 84, 50, 32, "memory", "ready")
            picture.box(322, top + 84, 184, 32, "worker", "write 2")
        top += 122
    picture.text(14, 304, "A slot is shared memory for one copy of the state.", "small")
    return picture


def restart() -> Picture:
    """A restart from memory."""
    picture = Picture("A worker outlives its trainer, finishes the write, and gives the next trainer the state", 262)
    trainer, worker, storage = 34, 118, 204
    picture.text(14, trainer - 8, "Trainer, process 1", "name")
    picture.box(14, trainer, 86, 34, "train", "train")
    picture.box(104, trainer, 78, 34, "copy", "save 200")
    picture.box(186, trainer, 30, 34, "train")
    picture.cross(222, trainer + 17)
    picture.rule(222, trainer - 18, 246)
    picture.text(330, trainer - 8, "Trainer, process 2", "name")
    picture.box(330, trainer, 74, 34, "copy", "load 200")
    picture.box(408, trainer, 98, 34, "train", "train")
    picture.text(14, worker - 8, "Worker process", "name")
    picture.box(140, worker, 146, 34, "worker", "write step 200")
    picture.box(290, worker, 216, 34, "worker", "holds step 200 (linger)")
    picture.arrow((160, trainer + 34), (160, worker))
    picture.arrow((366, worker), (366, trainer + 34))
    picture.text(374, worker - 16, "from memory", "small")
    picture.arrow((282, worker + 34), (282, storage))
    picture.text(290, storage - 16, "committed after the kill", "small")
    picture.text(14, storage + 22, "Storage", "name")
    picture.box(110, storage, 104, 34, "storage", "step 100")
    picture.box(236, storage, 104, 34, "storage", "step 200")
    return picture


def hosts() -> Picture:
    """Copies on other hosts."""
    picture = Picture("Each image is copied to another host; after the loss of a host its ranks load from there", 296)
    for number, (x, name) in enumerate(((14, "Host A"), (184, "Host B"), (354, "Host C (new)"))):
        picture.box(x, 34, 152, 176, "host")
        picture.text(x, 24, name, "name")
        if number < 2:
            picture.box(x + 10, 44, 132, 32, "train", f"trainer {number}")
            picture.box(x + 10, 104, 132, 34, "memory", f"image of rank {number}")
            picture.arrow((x + 76, 76), (x + 76, 104))
    picture.box(194, 162, 132, 34, "memory", "copy of rank 0")
    picture.box(24, 162, 132, 34, "memory", "copy of rank 1")
    picture.arrow((156, 121), (194, 172))
    picture.arrow((194, 128), (156, 172))
    picture.box(364, 44, 132, 32, "copy", "trainer 0 loads")
    picture.box(364, 162, 132, 34, "memory", "image of rank 0")
    picture.arrow((326, 186), (364, 186))
    picture.arrow((430, 162), (430, 76))
    picture.cross(90, 34)
    picture.box(14, 238, 492, 34, "storage", "storage: the workers write there meanwhile")
    picture.arrow((260, 210), (260, 238))
    picture.text(506, 288, "Config(replicas=1)", "small", "end")
    return picture


def tiers() -> Picture:
    """Memory, then a local disk, then the root."""
    picture = Picture("Every save goes to memory and to a local disk; some go on to the root", 236)
    for x, kind, name, what, when in (
        (14, "memory", "Shared memory", ("copied by", "the save"), "every save"),
        (190, "worker", "Local disk (NVMe)", ("written by", "the worker"), "every save: durable"),
        (366, "storage", "Root: S3, Lustre", ("uploaded", "in background"), "every upload_every"),
    ):
        picture.text(x, 26, name, "name")
        picture.box(x, 36, 140, 60, kind, *what)
        picture.text(x, 116, when, "small")
    picture.arrow((154, 66), (190, 66))
    picture.arrow((330, 66), (366, 66))
    picture.text(14, 156, "load takes the newest step of the three", "name")
    picture.box(14, 168, 140, 34, "copy", "trainer killed")
    picture.box(190, 168, 140, 34, "copy", "host restarted")
    picture.box(366, 168, 140, 34, "copy", "host lost")
    for x in (84, 260, 436):
        picture.arrow((x, 124), (x, 140), dashed=True)
    picture.text(14, 222, "the first place that has it answers; the next one is the fallback", "small")
    return picture


def weights() -> Picture:
    """Publication of weights."""
    picture = Picture("A trainer publishes weights once; each other host fetches the changes once", 268)
    picture.box(14, 34, 300, 214, "host")
    picture.text(14, 24, "Host of the trainer", "name")
    picture.box(24, 46, 120, 40, "train", "trainer")
    picture.box(24, 124, 280, 40, "memory", "version 7 in shared memory")
    picture.arrow((84, 86), (84, 124))
    picture.text(92, 110, "publish: 1 copy", "small")
    picture.box(24, 202, 134, 36, "copy", "rollout")
    picture.box(170, 202, 134, 36, "copy", "rollout")
    for x in (91, 237):
        picture.arrow((x, 164), (x, 202))
    picture.text(99, 188, "mapped, no copy", "small")
    picture.box(346, 34, 160, 214, "host")
    picture.text(346, 24, "Each other host", "name")
    picture.box(356, 46, 140, 40, "worker", "one worker")
    picture.box(356, 124, 140, 40, "memory", "version 7")
    picture.box(356, 202, 140, 36, "copy", "rollouts")
    picture.arrow((304, 136), (330, 136), (330, 66), (356, 66))
    picture.text(216, 72, "changed parts,", "small")
    picture.text(216, 88, "once per host", "small")
    picture.arrow((426, 86), (426, 124))
    picture.arrow((426, 164), (426, 202))
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    each.__name__: each for each in (overview, phases, backpressure, restart, hosts, tiers, weights)
}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
