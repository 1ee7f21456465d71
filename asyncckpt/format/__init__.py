"""The formats of files and images: manifest, index, archive, segment layout. This package does not import torch."""
