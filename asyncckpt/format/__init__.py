"""The formats of files and images: manifest, index, archive, segment layout. Imports no torch."""
