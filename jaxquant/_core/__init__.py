"""Private foundations of all other packages: dtypes, checks of arguments, granularity and exact arithmetic."""
