"""Export a stored state, read with checksums and piece by piece, to other files: safetensors, torch's, DCP's.

``stored.py`` has the types for stored values, ``batches.py`` the types for output files. The sources find the stored
values and their places; ``source_files.py`` opens their files. The targets lay out the output files. ``batches.py``
cuts an output file into batches, and ``copying.py`` reads and writes them.
"""
