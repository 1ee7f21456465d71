"""The tests of local storage, run on ext4, XFS, Btrfs, overlayfs, tmpfs, and on FUSE with the quirks of others."""
