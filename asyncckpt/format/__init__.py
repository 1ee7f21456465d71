"""The formats of what stands on disk and in an image: manifest, index, archive, layout. Import no torch."""
