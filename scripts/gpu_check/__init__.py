"""One command that measures asyncckpt on a real device in eight minutes, beside the machine's limits and beside peers.

``cli`` prepares the machine, runs the parts one after the other, each in a process of its own, and prints a table.
``PARTS`` in ``parts`` names them, in order, with their seconds. A part is a generator of figures: each is written
immediately. A part looks at its ``Budget`` before it begins anything long, and says what it has left out.
"""
