"""Foundations of all other packages: dtypes, checks of arguments, granularity, shardings, recording of operations."""
