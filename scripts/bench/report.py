"""Write the page in ``docs/benchmarks``: a picture and a table for each result, and explanations of the figures."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from bench.contestants import title
from bench.results import KINDS, Result, read
from bench.tables import REMARKS, TABLES, size

WIDTH = 120
HEADINGS = {
    "save": "What a save blocks, and when it is durable",
    "unchanged": "Where most of the state does not change",
    "loop": "What a save costs the training loop",
    "load": "What a load costs",
    "store": "What an object store costs",
    "export": "What an export costs",
    "telemetry": "What it costs to be told of events",
    "frameworks": "What a save costs in a framework's trainer",
    "scale": "How a save grows",
    "cost": "What a save costs the machine",
    "memory": "What memory it takes",
    "ranks": "Many ranks on this machine",
    "simulation": "The first rank of a large job, simulated",
    "publish": "Weights for readers of this host",
    "hosts": "Weights on other hosts",
    "sparse": "Weights on other hosts, few changes",
    "vllm": "Weights for an engine of vLLM",
}
EXPLANATIONS = {
    "save": (
        "*Blocked* is the time that the trainer stands still: in the call, and for its own work when all is written "
        "(medians of warm saves). *Free* is the time until the tensors may change again; if it is longer than the "
        "call, a copy goes on beside the training. *Durable* is the time until data and metadata are on storage. "
        "torch_checkpointing and torchsnapshot do not sync their files, so the suite does, and the sync counts. The "
        "first save, with its planning and allocation, has a column of its own; asyncckpt's `prepare` and similar "
        "calls of its peers were made before. *memcpy* uses one thread; the limit for all cores is shown too."
    ),
    "unchanged": (
        "The state has a frozen base and a changing part; each byte of the changing part changes before each save. "
        "asyncckpt copies both in each call, and links the file of the frozen base, which "
        "`Config(assume_unchanged=...)` names; *all is written* is the same with `link_unchanged=False`. The figures "
        "are medians of the saves after the second; the first two have a table of their own. *Written* are the bytes "
        "of files that no other checkpoint has, *on disk* their space there. *Memory* is the shared memory of the "
        "workers, *images* the number of states that would fit into it. *CPU* is the time of all threads from the "
        "call until all is durable. With several ranks, the slowest rank gives call and durable; the other figures "
        "are sums."
    ),
    "loop": (
        "The time of a block of training steps with a save at its beginning, less that of as many steps without, in "
        "pairs that take turns; the block is long enough for the save to be durable in it. So this counts the whole "
        "cost of a save for the training: the call, copies in threads, the interpreter's lock, cores and memory "
        "bandwidth taken by other processes, waiting for a copy before the optimizer's step. The step is forward, "
        "backward and AdamW of a small model, and a change to every tensor of the state. With one training thread a "
        "core is left free, as in training on a GPU; with all of them none is free. The quartiles show the noise of "
        "the machine."
    ),
    "load": (
        "Loads into an existing state; the files are not in the page cache. asyncckpt checks every byte, its peers "
        "none. The files of torch_checkpointing have no checksums for either; its manager reads them by offsets. "
        "*Memory* loads from the worker of a killed trainer. Under FSDP2 each rank fills its shards; the "
        "slowest rank counts, and the limits are measured on all ranks at once."
    ),
    "store": (
        "S3 as moto serves it, in a process of its own on this machine, over loopback without TLS. moto is written in "
        "Python, is slow, reads a whole object to hand out a range, and shares the cores with the contestants: so the "
        "figures show how the ways compare, and what they have beside the store, not what a store does. *Blocked* and "
        "*durable* are as above. *Upload* is the faster of two ways to send the same bytes from memory by obstore in "
        "the same turns: one PUT, and parts of 16 MiB, eight at a time. The peers are DCP through fsspec and s3fs, "
        "and through the S3StorageWriter of s3torchconnector, at their defaults; their `async_save` keeps its stager "
        "and caches its plans. Older steps are removed between the turns. The ranged read is of 8 MiB at a time, by "
        "four threads, into memory of its own; asyncckpt checks every byte that it loads. The suite compares all "
        "loaded tensors."
    ),
    "export": (
        "The time to write a checkpoint in another form, until it is on storage; nothing is in the page cache before. "
        "The limit reads and writes the bytes once, past the page cache, by four threads. asyncckpt checks the bytes "
        "of its own checkpoints, and takes checksums of the bytes that it writes; torch's own way is "
        "`dcp_to_torch_save`. The suite compares the results."
    ),
    "telemetry": (
        "Calls of `save` with nobody listening, and with all adapters (Prometheus, OpenTelemetry, TensorBoard, "
        "Weights & Biases offline) and the worker's file of metrics, in turns. *Longer by* is the median of the "
        "differences of turns that follow each other."
    ),
    "frameworks": (
        "Short trainings of a stack of linear layers by AdamW, with one save in the middle, in turns. *Blocked* is "
        "the call that saves. *Lost* is what the steps from the save on took more than as many before it, until well "
        "after the checkpoint was there. *Durable* is from the call until it is on storage; the suite syncs what the "
        "framework leaves in the page cache, after the training, and that counts."
    ),
    "scale": ("In each cell the call, and until when it is durable."),
    "cost": (
        "Costs of the trainer and all processes that it has started, from before a save until it is durable and all "
        "processes rest. On a loaded machine the CPU time grows, because cores wait for memory: look at the ratios. "
        "*CPU* is the time of all threads. Beside it stand the time of one copy and one direct write of the bytes, "
        "which every save needs, and of these with a checksum (medians); *user* and *system* are means. *Page faults* "
        "are newly touched pages. *Calls* are calls that read and write, *written* the bytes sent to storage. Each "
        "contestant runs alone, after three saves that do not count."
    ),
    "memory": (
        "Memory of all processes of a contestant, without the state itself and without the trainer's memory before "
        "its first save. *Steady* is a second after the last save. Shared memory counts once, whatever number of "
        "processes map it; private memory is anonymous memory. The last column is the page cache with files of the "
        "last checkpoint."
    ),
    "ranks": ("Real jobs, joined by gloo, of one state that is sharded over their ranks."),
    "simulation": (
        "The first rank's real code, on what so many ranks would send it; DCP's coordinator on the same plans. For "
        "asyncckpt it is work of the worker, in the background."
    ),
    "publish": (
        "The time to publish weights for readers, and the time of a reader to have all tensors. asyncckpt publishes "
        "whole versions, and older versions stay. The alternatives are `copy_` into shared tensors (a reader may see "
        "a half-written state), new memory each time, as for verl's engine with a cache in the host's memory, or a "
        "file that is written and opened again. The save that was *just staged* is not counted."
    ),
    "hosts": (
        "Hosts are network namespaces of this machine, each with a link of a rate, and share its cores and memory. "
        "From the call that publishes, in which all bytes have changed, until readers on all hosts have the whole "
        "version; each byte is checked on each. A host is lost a second after that, with its readers and its worker, "
        "and others read from it."
    ),
    "sparse": (
        "Hosts as above. A share of the values has changed, scattered. Spans with few changes are sent as patches."
    ),
    "vllm": (
        "A real engine on the CPU, its worker in a process of its own. *Held* is how long the trainer is, *update* "
        "how long the engine takes from then until it has the weights. vLLM's transfers between processes want CUDA; "
        "on a CPU it has `reload_weights`, of a file that the trainer writes (and does not sync)."
    ),
}
PEERS = (
    "The peers are at the settings that make them fast: DCP's `async_save` keeps its stager and caches its "
    "plans; nvrx has a warm worker, cached structure and two threads; torch_checkpointing has its staging "
    "memory beforehand, its lock around the optimizer's step, and direct I/O if the file system takes it "
    "unaligned. They come with the extra `bench`, nvrx by `scripts/peers.sh`; one that is missing, or "
    "fails, is left out with a note. After a run the last checkpoint of each is loaded back and compared."
)
COMMANDS = """    python scripts/bench all                  # all of this page, but for the next six
    python scripts/bench store
    python scripts/bench export
    python scripts/bench telemetry
    python scripts/bench hosts                # and --sparse
    python scripts/bench load --ranks 2       # and --layers 2000, and --ranks 4 --replicas
    python scripts/bench unchanged            # and --ranks 4, for FSDP2
    python scripts/bench save --state 8000x50kB --values 5000 --changing 50
    python scripts/bench --help"""


def write(out: Path) -> Path:
    """Draw all pictures, and write ``README.md``, from the JSON files in ``out``. Return the path of the page."""
    from bench import pictures  # imported here, because measurements must not need matplotlib

    results = read(out)
    lines = [
        "# What it costs",
        "",
        fill(
            "Measured by `scripts/bench`, which also wrote this page: asyncckpt, its peers and the limits of the "
            "machine take turns in one run, so look at the ratios, and measure on yours:",
            WIDTH,
        ),
        "",
        COMMANDS,
        "",
        fill(
            "The JSON files beside this page have every single figure; `python scripts/bench report` draws it anew.",
            WIDTH,
        ),
    ]
    lines += ["", fill(PEERS, WIDTH)]
    machines = [dict(pairs) for pairs in dict.fromkeys(tuple(found["machine"].items()) for found in results)]
    for number, machine in enumerate(machines, start=1):
        lines += ["", f"Machine {number}:" if len(machines) > 1 else "The machine:", ""]
        lines += [f"- {name}: {value}" for name, value in machine.items()]
    for kind in KINDS:
        of_kind = [found for found in results if found["kind"] == kind]
        if of_kind:
            lines += ["", f"## {HEADINGS[kind]}", "", fill(EXPLANATIONS[kind], WIDTH)]
        for found in of_kind:
            picture = f"{kind}-{found['label']}.png"
            pictures.draw(found, out / picture)
            lines += ["", f"### {heading(found)}", ""]
            if len(machines) > 1:
                lines += [f"On machine {machines.index(found['machine']) + 1}.", ""]
            lines += [f"![{heading(found)}]({picture})", "", section(found)]
    path = out / "README.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def heading(found: Result) -> str:
    """Return the heading of a result within its kind."""
    if "title" in found:
        return str(found["title"])
    facts = found["state"]
    told, tensors = str(facts["description"]), f"{facts['tensors']:,} tensors"
    if not told.startswith(tensors):
        told += f": {tensors}"
    told += f", {size(facts['bytes'])}"
    if facts["device"] != "cpu":
        told += f", on {facts['device']}"
    if "train_threads" in found:
        told += f"; {found['train_threads']} training thread" + "s" * (found["train_threads"] != 1)
    return told


def section(found: Result) -> str:
    """Return the table of a result and the remarks below it."""
    parts = [TABLES[found["kind"]](found)]
    if found["kind"] in REMARKS:
        parts += [remark] if (remark := REMARKS[found["kind"]](found)) else []
    places = found.get("points", [found])
    for place in places:
        if place.get("sharing") == "file_system":
            parts.append(
                "Contestants that share each tensor by itself share it by name: this machine has too few descriptors."
            )
        for name, why in place.get("left_out", {}).items():
            where = f" ({place['state']['tensors']:,} tensors)" if len(places) > 1 else ""
            parts.append(f"Left out: {title(name)}{where}: `{why}`")
    return "\n\n".join(parts)
