"""S3 for the scripts: moto in a process of its own (``server``), and a proxy that injects faults (``proxy``)."""
