"""Everything that only a GPU can tell, in one command and within a time budget.

    python3 -m bench.gpu                     480 seconds, results in runs/gpu
    python3 -m bench.gpu --seconds 900 --out bench/results
    python3 -m bench.gpu --dry-run           the same code on the CPU, tiny shapes, interpreted

Each part runs in a process of its own, under a limit of its own: a part that fails, hangs or leaves
the device unusable is reported and the rest goes on. What a part has found is on disk at once.
"""
