"""Benchmarks that check before they time; run as ``mslmn bench``."""
