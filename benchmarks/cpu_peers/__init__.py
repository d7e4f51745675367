"""Parts of ``benchmarks/compare_cpu.py``: the peers, what is measured, and how it is reported."""
