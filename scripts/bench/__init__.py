"""What asyncckpt costs, beside the limits of the machine and beside its peers: ``python scripts/bench --help``.

What is measured: ``saves`` (how long the call blocks, and until when it is durable), ``unchanged`` and
``unchanged_ranks`` (the same, where most of the state does not change), ``loop`` (what a save costs the training loop),
``loads``, ``exports``, ``store`` (saves and loads, on S3 as moto serves it), ``scale`` (by bytes and by number of
tensors), ``memory``, ``ranks`` and ``simulation``; and of weights, ``publications`` for readers of the host, ``hosts``
for those of others and ``vllm_updates``.
On what: ``states``, some of which have the shapes of published ``models``. Who: ``contestants``, one file a peer, and
the ``limits`` of memory, disk and device. How: in ``turns``. What comes of it: ``results`` (JSON), from which
``figures`` takes the medians and ratios, ``tables`` and ``pictures`` draw them, and ``report`` writes the page.
"""
