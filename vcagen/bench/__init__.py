"""Benchmarks, one file each: python -m vcagen bench NAME."""
