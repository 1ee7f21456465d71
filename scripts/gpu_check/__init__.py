"""What has to be seen on a real device, in parts of at most nine minutes: figures, and what each must reach.

Where to look: ``cli`` runs the parts, each in a process of its own, and writes what they find. The parts: ``env``, what
the machine is and whether our memory is pinned; ``tests``, those of the mark "device"; ``limits``, how fast the link is
and how near saves come to it; ``train``, what saves cost a real training step; ``peers``, the bench beside others.
"""
