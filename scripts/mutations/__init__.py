"""What staging must not lack: each wait, hold and check removed by itself, to see that a device test fails."""
