"""Benchmarks of asyncckpt, next to the limits of the machine and to its peers: ``python scripts/bench --help``.

The measurements are ``saves`` (how long the call blocks, and when the checkpoint is durable), ``unchanged`` and
``unchanged_ranks`` (saves of a state that mostly stays the same), ``loop`` (the cost of a save to the training loop),
``loads``, ``exports``, ``store`` (saves and loads on S3, served by moto), ``scale`` (by bytes and by number of
tensors), ``memory``, ``ranks`` and ``simulation``. For weights they are ``publications`` (readers on the same host),
``hosts`` (readers on other hosts) and ``vllm_updates``.

``states`` makes the states to save, some with the shapes of published ``models``. ``contestants`` has one file for each
peer, and ``limits`` has the limits of memory, disk and device. All of them take ``turns``. ``results`` are JSON files.
``figures`` computes medians and ratios, ``tables`` and ``pictures`` draw them, and ``report`` writes the page.
"""
