"""Passes over prepared functions, and what they share."""
