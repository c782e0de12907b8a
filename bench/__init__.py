"""Benches: one module per op or system, run with ``python -m bench.NAME``; nothing imports them."""
