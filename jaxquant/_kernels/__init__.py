"""Arithmetic on plain arrays in the forms that each backend runs fast, and that no rewriting by XLA changes."""
