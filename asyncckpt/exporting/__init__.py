"""Export a stored state to other files: safetensors, a file of ``torch.save``, or a checkpoint of DCP.

``stored.py`` has the types for stored values, ``batches.py`` the types for output files. The sources find the stored
values and their places; ``source_files.py`` opens their files. The targets lay out the output files. ``batches.py``
cuts an output file into batches, and ``copying.py`` reads the batches, compares their checksums, and writes them.
"""
