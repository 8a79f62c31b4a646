"""What every other part builds on: dtypes, checks of arguments, granularity, exact arithmetic. No public type."""
