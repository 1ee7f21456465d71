"""Run the tests of local storage on ext4, XFS, Btrfs, overlayfs, tmpfs, and on FUSE with quirks of other systems."""
