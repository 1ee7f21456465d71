"""Exporting: a stored state, read checked and piece by piece, and written as other files: safetensors, torch's, DCP's.

``stored.py`` has the words for what is read, ``batches.py`` those for what is written. The sources find out what is
stored and where (``source_files.py`` opens the files), the targets lay out
files for it, ``batches.py`` cuts such a file into what is read and written at once, and ``copying.py`` does it.
"""
