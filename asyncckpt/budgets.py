"""The budgets of time: the limits and the pauses of waits, in seconds.

A wait that needs another limit has a constant in its own module, with the reason.
"""

from __future__ import annotations

POLL_S = 0.02
"""The pause between two looks at something that reports no changes, such as a lock or a process that is no child."""
CHECK_S = 0.5
"""The pause between two looks at another process or host, between two signs of life, and before another attempt."""
TELL_S = 1.0
"""The time to tell another rank of a failure or of an end, while somebody waits."""
NOTICE_S = 5.0
"""The time for a process to notice the end of another one, to end after it is killed, to connect and prove who it is,
and to deliver what is left when it closes. A rank of a restarted job that is silent for so long counts as lost."""
ANSWER_S = 10.0
"""The time for a running process to answer, and for this host to see a file of another host."""
SILENCE_S = 30.0
"""The time after which a silent reader or holder of images on another host counts as lost, and a storage or a lock as
stalled."""
LONG_S = 300.0
"""The time for long work, such as taking the memory of an image or computing its checksums."""
